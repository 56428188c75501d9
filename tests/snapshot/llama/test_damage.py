"""Damaged files, thousands of them: refused by a name, or exactly what their bytes say.

A file of llama.cpp has no checksum, so a changed byte of K or V cannot be told from a right one.
What is proved is that nothing else happens: whatever is accepted is written back as the same bytes,
so nothing was overlooked or made up, and a cache takes it in or stays as it was.
"""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.cache import AttentionCache
from kvcellar.cache.transfer import state_set
from kvcellar.errors import KVCellarError, NotSupported, SnapshotError
from kvcellar.snapshot.llama.layout import FileGeneration, Kind
from kvcellar.snapshot.llama.reader import read_llama_file
from kvcellar.snapshot.llama.to_content import to_content
from kvcellar.types import MemorySpec
from tests.snapshot.llama.shapes import ARCH, N_VOCAB, SPECS, bytes_of, content_of, file_of

CASES: list[tuple[str, Kind, FileGeneration, bool]] = [
    ("plain", "sequence", "2025-01", False),
    ("plain", "session", "2025-01", True),
    ("plain", "session", "2026-10", False),
    ("latent", "sequence", "2026-10", False),
    ("windows", "session", "2026-10", True),
    ("hybrid", "session", "2026-10", False),
    ("recurrent", "sequence", "2026-10", False),
]
EXTREMES = [n.to_bytes(4, "little") for n in (0, 1, 2**16, 2**30, 2**31 - 1, 2**31, 2**32 - 1)]


@pytest.fixture(params=CASES, ids=lambda case: " ".join(map(str, case)))
def case(request: pytest.FixtureRequest) -> tuple[bytes, MemorySpec]:
    """A small file and the memory it is for."""
    name, kind, generation, v_trans = request.param
    spec = SPECS[name]
    content = content_of(spec, 2, [1, 2] if kind == "session" else [1])
    return bytes_of(file_of(content, spec, kind, generation, v_trans), spec), spec


def outcome(data: bytes, spec: MemorySpec) -> str:
    """What loading comes to: "taken", or the name of the error; any other error ends the test."""
    try:
        file = read_llama_file(data, spec)
        assert bytes_of(file, spec) == data
        restored = to_content(file, spec, ARCH, N_VOCAB)
        if len(spec.groups) == 1 and spec.states is None:
            _put(restored.content, spec, range(len(restored.seq_ids)))
    except (SnapshotError, NotSupported) as error:
        return type(error).__name__
    return "taken"


def _put(content: object, spec: MemorySpec, seq_ids: range) -> None:
    cache = AttentionCache(spec.groups[0], NumpyStore(spec.groups[0]))
    try:
        state_set(cache, content, list(seq_ids))  # type: ignore[arg-type]
    except KVCellarError:
        assert cache.used == 0
        raise SnapshotError("refused by the cache") from None
    finally:
        cache.check()


def mutants(sound: bytes, rng: random.Random, n: int) -> Iterator[bytes]:
    """Flipped bits, numbers replaced by extremes, spans that changed places, ends cut off."""
    for _ in range(n):
        data = bytearray(sound)
        way = rng.randrange(4)
        if way == 0:
            for _ in range(rng.choice((1, 1, 2, 8))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif way == 1:
            at = rng.randrange(len(data) // 4) * 4
            data[at : at + 4] = rng.choice(EXTREMES)
        elif way == 2:
            n_bytes = rng.choice((4, 8, 16))
            a, b = sorted(rng.randrange(len(data) - n_bytes) for _ in range(2))
            data[a : a + n_bytes], data[b : b + n_bytes] = (
                data[b : b + n_bytes],
                data[a : a + n_bytes],
            )
        else:
            del data[rng.randrange(len(data)) :]
        yield bytes(data)


@pytest.mark.slow
def test_random_damage(case: tuple[bytes, MemorySpec]) -> None:
    sound, spec = case
    outcomes: Counter[str] = Counter()
    for data in mutants(sound, random.Random(1), 600):
        outcomes[outcome(data, spec)] += 1
    assert outcome(sound, spec) == "taken"
    assert outcomes["SnapshotFileError"] > 100, outcomes
    assert outcomes["taken"] > 0, outcomes


def test_every_end(case: tuple[bytes, MemorySpec]) -> None:
    sound, spec = case
    for n in range(0, len(sound), 2):
        assert outcome(sound[:n], spec) != "taken", n


@pytest.mark.slow
def test_no_number_makes_us_allocate(case: tuple[bytes, MemorySpec]) -> None:
    """A count, wherever it stands, as large as can be."""
    sound, spec = case
    tracemalloc.start()
    try:
        for at in range(0, len(sound) - 3, 2):
            for extreme in EXTREMES[-3::2]:
                outcome(sound[:at] + extreme + sound[at + 4 :], spec)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_flipped_rows_change_nothing_else() -> None:
    """The last bytes of a plain file are V: what is loaded differs there and nowhere else."""
    spec = SPECS["plain"]
    sound = bytes_of(file_of(content_of(spec, 0, [3]), spec), spec)
    damaged = bytearray(sound)
    damaged[-1] ^= 0x01
    a, b = (
        to_content(read_llama_file(bytes(data), spec), spec, ARCH, N_VOCAB).content.groups[0]
        for data in (sound, damaged)
    )
    np.testing.assert_array_equal(a.positions, b.positions)
    np.testing.assert_array_equal(a.rows.k, b.rows.k)
    assert np.argwhere(a.rows.v[1] != b.rows.v[1]).tolist() == [[2, 3]]
    np.testing.assert_array_equal(a.rows.v[0], b.rows.v[0])
