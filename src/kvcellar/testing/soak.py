"""A long random walk: a cache against its oracle, for as many steps as wanted.

::

    python -m kvcellar.testing.soak --steps 200000

Each walk is a small cache over one of the stores, with as many steps as fit before it grows dull;
then comes the next one. What fails is reported with the seed of its walk, and the command that
repeats it; the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from time import perf_counter
from typing import TypeAlias

from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.cache.base import OnShared
from kvcellar.testing.duel import Duel
from kvcellar.testing.signs import MIXED, WIDE, Setup
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import CacheSpec, KVType

STEPS_A_WALK = 400
MAX_DEPTH = 3
_SEEDS = 1_000_000  # apart lie those of different stores

Step: TypeAlias = Callable[[Duel, Random], None]


def _seq(rng: Random) -> int:
    return rng.randrange(4)


def _range(rng: Random) -> tuple[int, int]:
    return rng.randint(-1, 9), rng.randint(-1, 9)


def _owners(rng: Random) -> frozenset[int]:
    return frozenset(rng.sample(range(4), 1 if rng.random() < 0.8 else 2))


def _decode(duel: Duel, rng: Random) -> None:
    owners = [_owners(rng) for _ in range(rng.randint(1, 5))]
    gaps = [int(rng.random() < 0.2) for _ in owners]
    fail_at = rng.randrange(4) if rng.random() < 0.2 else None
    duel.decode(owners, gaps, rng.randint(1, 4), fail_at)


def _begin(duel: Duel, _: Random) -> None:
    if duel.depth < MAX_DEPTH:
        duel.begin()


def _commit(duel: Duel, _: Random) -> None:
    if duel.depth:
        duel.commit()


def _rollback(duel: Duel, rng: Random) -> None:
    if duel.depth:
        duel.rollback(rng.randrange(duel.depth))


def _break(duel: Duel, rng: Random) -> None:
    duel.broken = rng.choice([None, "copy", "rotate", "resize", "read_raw"])


STEPS: dict[str, tuple[int, Step]] = {
    "decode": (30, _decode),
    "refused position": (
        2,
        lambda duel, rng: duel.decode_at_a_position_that_is_taken(_owners(rng), rng.randrange(3)),
    ),
    "refused owners": (
        2,
        lambda duel, rng: duel.decode_a_token_of_sequences_that_differ(_owners(rng)),
    ),
    "refused id": (1, lambda duel, rng: duel.unknown_sequence(rng.choice([-2, 4, 64]))),
    "seq_rm": (8, lambda duel, rng: duel.seq_rm(rng.randint(-1, 3), *_range(rng))),
    "seq_cp": (10, lambda duel, rng: duel.seq_cp(_seq(rng), _seq(rng), *_range(rng))),
    "seq_keep": (1, lambda duel, rng: duel.seq_keep(_seq(rng))),
    "seq_add": (12, lambda duel, rng: duel.seq_add(_seq(rng), *_range(rng), rng.randint(-4, 4))),
    "seq_div": (5, lambda duel, rng: duel.seq_div(_seq(rng), *_range(rng), rng.randint(1, 4))),
    "clear": (1, lambda duel, rng: duel.clear(rng.random() < 0.5)),
    "update": (12, lambda duel, _: duel.update()),
    "defrag": (6, lambda duel, rng: duel.defrag(rng.randint(1, 3))),
    "resize": (4, lambda duel, rng: duel.resize(rng.randint(1, 12))),
    "begin": (6, _begin),
    "commit": (2, _commit),
    "rollback": (3, _rollback),
    "break": (2, _break),
}
"""The weight of each kind of step, and what it does."""


def walk(setup: Setup, seed: int, n_steps: int) -> Counter[str]:
    """So many random steps of one cache; returns how often each kind was taken.

    Raises:
        AssertionError, InvariantError: cache and oracle part.
    """
    rng = Random(seed)
    on_shared: OnShared = "copy" if rng.random() < 0.7 else "move"
    duel = Duel(setup, rng.randint(3, 10), rng.randint(1, 4), on_shared)
    weights = [weight for weight, _ in STEPS.values()]
    taken = rng.choices([*STEPS], weights, k=n_steps)
    try:
        for name in taken:
            STEPS[name][1](duel, rng)
            duel.check()
    finally:
        duel.close()
    return Counter(taken)


def setups() -> dict[str, Setup]:
    """The stores and types that are walked over, by name."""
    backend = GgmlBackend(1)

    def ggml(spec: CacheSpec) -> GgmlStore:
        return GgmlStore(spec, backend)

    f16, f32, q8_0 = KVType.F16, KVType.F32, KVType.Q8_0
    return {
        "signatures": Setup(SignatureStore),
        "numpy-f32": Setup(NumpyStore, MIXED, f32, f32),
        "numpy-f16": Setup(NumpyStore, MIXED, f16, f16),
        "ggml-f32": Setup(ggml, MIXED, f32, f32),
        "ggml-f16-across": Setup(ggml, WIDE[1:], f16, f16, flash_attn=False),
        "ggml-q8_0": Setup(ggml, WIDE, q8_0, q8_0),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(description="A cache against its oracle, step by step.")
    parser.add_argument("--steps", type=int, default=200_000, help="steps in all")
    parser.add_argument("--seed", type=int, default=0, help="of the first walk")
    known = setups()
    parser.add_argument("--store", choices=[*known], help="one store only; default: all")
    options = parser.parse_args(arguments)
    chosen = {options.store: known[options.store]} if options.store else known
    share = -(-options.steps // len(chosen))
    runs = enumerate(chosen.items())
    return max(_run(name, setup, options.seed + i * _SEEDS, share) for i, (name, setup) in runs)


def _run(name: str, setup: Setup, seed: int, n_steps: int) -> int:
    start, taken = perf_counter(), Counter[str]()
    while (left := n_steps - taken.total()) > 0:
        try:
            taken += walk(setup, seed, min(left, STEPS_A_WALK))
        except Exception as error:
            command = f"--store {name} --seed {seed} --steps {STEPS_A_WALK}"
            print(f"{name}: {type(error).__name__}: {error}")
            print(f"repeat with: python -m kvcellar.testing.soak {command}")
            return 1
        seed += 1
    print(f"{name}: {taken.total()} steps in {perf_counter() - start:.1f} s")
    print("  " + ", ".join(f"{kind} {n}" for kind, n in sorted(taken.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
