"""Damaged models, loaded and decoded one after the other in a process of its own.

``python -m kvcellar.testing.fuzz MODE SCRATCH FIRST COUNT [MODEL]`` tries COUNT mutants whose seeds
begin at FIRST, written to SCRATCH. MODE "bits" flips bits in the header of MODEL; "parts" builds
small models with hyper-parameters and tensors that do not fit. Whatever is wrong with a model must
come out as a :class:`~kvcellar.errors.KVCellarError`; anything else ends the process.

Each seed is printed before it is tried, and at the end how many mutants gave what.
"""

from __future__ import annotations

import random
import resource
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.gguf import GgmlWeights, GgufFile
from kvcellar.backends.ggml.graph import GgmlExecutor
from kvcellar.backends.ggml.model_memory import GgmlMemory
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.errors import KVCellarError
from kvcellar.models.blocks import Decoder
from kvcellar.models.registry import load_architecture
from kvcellar.testing.gguf_writer import RawTensor, Tensor, gguf_bytes
from kvcellar.testing.plans import causal_plan
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.types import CacheSpec

ADDRESS_SPACE = 4 << 30
FLIPS = (1, 1, 2, 8, 64)
EXTREMES = (bytes(4), b"\xff" * 4, b"\x00\x00\xc0\x7f")  # zero, the largest integer, a NaN
OPTIONAL_KEYS = (
    "general.alignment",
    "llama.attention.key_length",
    "llama.attention.scale",
    "llama.attention.value_length",
    "llama.expert_count",
    "llama.expert_used_count",
    "llama.rope.dimension_count",
    "llama.rope.freq_base",
    "llama.rope.scaling.attn_factor",
    "llama.rope.scaling.factor",
    "llama.rope.scaling.original_context_length",
    "llama.rope.scaling.type",
    "llama.rope.scaling.yarn_beta_fast",
    "llama.rope.scaling.yarn_beta_slow",
    "llama.rope.scaling.yarn_ext_factor",
)
_INTEGERS = (0, 1, 2, 3, 7, 31, 32, 64, 2**31 - 1, 2**31, 2**32 - 1, 2**64 - 1, -1, -(2**31))
_FLOATS = (0.0, -1.0, 1.0, 1e30, float("nan"), float("inf"), 1e-45, np.float64(1e300))
_OTHERS = (True, False, "", "yarn", "linear", "x" * 1000, ["a"] * 2, list[str]())
_ARRAYS = (
    np.array([1, 1], np.int32),
    np.array([2, 0], np.uint32),
    np.array([-2, -1], np.int64),
    np.array([2**64 - 1] * 2, np.uint64),
    np.array([1.5, 2.5], np.float32),
    np.array([], np.int32),
)
_UNKNOWN = ("blk.0.attn_q_norm.weight", "blk.0.ffn_up.lora_a", "zz\n", "\x1b[2J", "")
VALUES: tuple[Any, ...] = (*_INTEGERS, *_FLOATS, *_OTHERS, *_ARRAYS)

Mutate = Callable[[random.Random], bytes]


def run(mutate: Mutate, scratch: Path, seeds: range) -> Counter[str]:
    """Try a mutant a seed; counts of the error classes, and of those that decoded.

    Mutants are the first bytes of the scratch file; what lies there behind them stays.
    """
    backend = GgmlBackend(1)
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        print("seed", seed, flush=True)
        with scratch.open("r+b") as file:
            file.write(mutate(random.Random(seed)))
        outcomes[attempt(scratch, backend)] += 1
    return outcomes


def attempt(path: Path, backend: GgmlBackend) -> str:
    """What loading a file and decoding with it comes to: "decoded", or an error's name."""
    weights = None
    try:
        file = GgufFile(path)
        weights = GgmlWeights(file)
        _decode(backend, load_architecture(file.metadata, weights))
    except KVCellarError as error:
        return type(error).__name__
    finally:
        if weights is not None:
            weights.close()
    return "decoded"


def _decode(backend: GgmlBackend, model: Decoder[int]) -> None:
    store = GgmlStore(CacheSpec(256, 1, model.spec.attention_layers))
    executor = GgmlExecutor(backend, GgmlMemory.single(store), model.forward)
    executor.run(causal_plan([0] * 3))
    executor.run(causal_plan([0], 3))
    executor.close()
    store.close()


def flip_bits(model: Path) -> Mutate:
    """Mutated headers of a file: bits flipped, or four bytes replaced by an extreme."""
    n_header = min(tensor.offset for tensor in GgufFile(model).tensors.values())
    sound = model.read_bytes()[:n_header]

    def mutate(rng: random.Random) -> bytes:
        data = bytearray(sound)
        for _ in range(rng.choice(FLIPS)):
            place = rng.randrange(4, n_header)
            if rng.random() < 0.8:
                data[place] ^= 1 << rng.randrange(8)
            else:
                data[place : place + 4] = rng.choice(EXTREMES)
        return bytes(data)

    return mutate


def bend_parts(rng: random.Random) -> bytes:
    """A small model with one or two parts that may not fit."""
    tiny = TinyLlama(
        n_embd=rng.choice((8, 32, 40, 64)),
        n_head=rng.choice((1, 2, 4)),
        n_layer=rng.choice((1, 2)),
        n_expert=rng.choice((0, 0, 4)),
    )
    metadata, tensors = tiny.metadata(), tiny.tensors()
    for _ in range(rng.choice((0, 1, 1, 2))):
        metadata[rng.choice((*metadata, *OPTIONAL_KEYS))] = rng.choice(VALUES)
    if rng.random() < 0.5:
        name = rng.choice(list(tensors))
        bent = _bend(tensors.pop(name), rng)
        if bent is not None:
            tensors[name] = bent
    if rng.random() < 0.2:
        factor = rng.choice((1.0, 0.0, -1.0, float("nan")))
        tensors["rope_freqs.weight"] = np.full(tiny.head_dim // 2, factor, np.float32)
    if rng.random() < 0.1:
        tensors[rng.choice(_UNKNOWN)] = np.ones(tiny.n_embd, np.float32)
    return gguf_bytes(metadata, tensors)


def _bend(tensor: Tensor, rng: random.Random) -> Tensor | None:
    """The tensor cut, turned, flattened, of another type, or gone."""
    assert not isinstance(tensor, RawTensor)
    ways: tuple[Tensor | None, ...] = (
        None,
        tensor[:0],
        tensor[:1],
        np.ascontiguousarray(tensor.T),
        tensor.reshape(-1),
        tensor.astype(np.float16),
        tensor.astype(np.float64),
        tensor.astype(np.int32),
        RawTensor(8, tensor.shape, rng.randbytes(tensor.size // 32 * 34)),
        RawTensor(rng.randrange(48), tensor.shape, rng.randbytes(tensor.size * 4)),
    )
    return rng.choice(ways)


def main(mode: str, scratch: str, first: str, count: str, *model: str) -> None:
    """See the module's docstring."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    mutate = flip_bits(Path(*model)) if mode == "bits" else bend_parts
    Path(scratch).write_bytes(Path(*model).read_bytes() if model else b"")
    outcomes = run(mutate, Path(scratch), range(int(first), int(first) + int(count)))
    print("outcomes", *(f"{name}={n}" for name, n in sorted(outcomes.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
