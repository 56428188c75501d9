"""Snapshots whose hashes are right and whose content is not: rows, and sizes.

What is not finite would reach other sequences, and a small file must not unfold into much memory;
so both are refused, from files, stores and exports, before a context is changed.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.errors import (
    CacheFull,
    KVCellarError,
    SnapshotError,
    SnapshotFileError,
    SnapshotMismatch,
)
from kvcellar.prompts.archive import check_export, export_blocks, import_blocks
from kvcellar.prompts.cache import PromptCache
from kvcellar.runtime.context import Context, save_llama_file
from kvcellar.snapshot.container import from_bytes, read_file, to_bytes, write_file
from kvcellar.snapshot.llama.layout import FileGeneration
from kvcellar.snapshot.native import SnapshotArrays
from kvcellar.stores.base import Store
from kvcellar.stores.disk import DiskStore
from kvcellar.stores.memory import MemoryStore
from kvcellar.types import AnyArray, ByteArray, KVType, finite_rows
from tests.runtime.archs import opened, text
from tests.runtime.loads import seen, unchanged

TEXT = text(1, 80)
BLOCK = 16
QUANTISED = [kind.label for kind in KVType if kind.is_quantized]
CASES = [
    *(("llama-dense", kind) for kind in ("f32", "f16", "bf16", *QUANTISED)),
    ("gemma3-dense", "f16"),
    ("gemma3-dense", "q8_0"),
    ("jamba-dense", "f16"),
    ("mamba-dense", "f16"),
    ("deepseek2-moe", "f32"),
]
Change = Callable[[dict[str, AnyArray], dict[str, Any]], None]


def poisoned(array: AnyArray, kind: KVType, value: float) -> AnyArray:
    """The array with one of the numbers of its last row, in the midst of it, not finite."""
    raw: ByteArray = np.ascontiguousarray(array).copy().view(np.uint8)
    wide = np.array([value], np.float32).view(np.uint8)
    narrow = np.array([value], np.float16).view(np.uint8)
    bits = {KVType.F32: wide, KVType.BF16: wide[2:]}.get(kind, narrow)
    at = raw.shape[1] // kind.block_bytes // 2 * kind.block_bytes
    raw[-1, at : at + len(bits)] = bits
    assert finite_rows(raw, kind).tolist() == [True] * (len(raw) - 1) + [False]
    made: AnyArray = raw.view(array.dtype)
    return made


def numbers_of(arrays: dict[str, AnyArray]) -> list[str]:
    """The names of K, V and states."""
    return [name for name in arrays if ".layer." in name or name == "states"]


def spoil(name: str, kind: KVType, value: float) -> Change:
    def change(arrays: dict[str, AnyArray], _: dict[str, Any]) -> None:
        arrays[name] = poisoned(arrays[name], KVType.F32 if name == "states" else kind, value)

    return change


def bend(path: Path, change: Change, *, compress: bool) -> Path:
    """Write a file again, changed and with right hashes, beside it."""
    arrays, about = read_file(path)
    change(arrays, about)
    write_file(path.with_name("bent"), SnapshotArrays(arrays, about), compress=compress)
    return path.with_name("bent")


# -- rows that are not finite


@pytest.mark.parametrize(("arch", "kind"), CASES)
def test_no_part_of_a_file_may_be_infinite(shared: Path, path: Path, arch: str, kind: str) -> None:
    with opened(shared, arch, type_k=kind, type_v=kind) as context:
        context.sequence(TEXT).append(text(2, 5))
        context.save(path)
        names = numbers_of(dict(read_file(path).arrays))
        assert any("checkpoint" in name for name in names) == (arch == "gemma3-dense")
        for i, name in enumerate(names):
            change = spoil(name, KVType.parse(kind), (np.nan, np.inf, -np.inf)[i % 3])
            bent = bend(path, change, compress=i % 2 == 1)
            unchanged(context, SnapshotFileError, where(name), partial(context.load, bent))
        assert context.load(bend(path, lambda _, __: None, compress=True)).tokens


def where(name: str) -> str:
    """What the message says of an array."""
    if name == "states":
        return r"state \d+ is not finite"
    *_, layer, part = name.split(".")
    return rf"{part.upper()} of layer {layer} .*in .*cell \d+ is not finite"


@pytest.mark.parametrize("stored", ["f32", "f16", "q4_0"])
def test_nor_if_it_would_be_converted(shared: Path, path: Path, stored: str) -> None:
    """Blocks of the new type would hide it."""
    with opened(shared, "llama-dense", type_k=stored, type_v=stored) as context:
        context.sequence(TEXT).save(path)
    bent = bend(path, spoil("group.0.layer.0.v", KVType.parse(stored), np.nan), compress=False)
    for kind in ("f16", "q8_0", "q5_1"):
        with opened(shared, "llama-dense", type_k=kind, type_v=kind) as context:
            load = lambda: context.load(bent, convert=True)  # noqa: E731
            unchanged(context, SnapshotFileError, "V of layer 0 .*is not finite", load)


def test_values_that_a_type_cannot_hold(shared: Path, path: Path) -> None:
    """Saved or loaded in another one; the message names those that hold them."""

    def widen(arrays: dict[str, AnyArray], _: dict[str, Any]) -> None:
        arrays["group.0.layer.1.k"] = arrays["group.0.layer.1.k"] * np.float32(1e7)

    with opened(shared, "llama-dense", type_k="f32", type_v="f32") as context:
        context.sequence(TEXT).save(path)
        bent = bend(path, widen, compress=False)
        loaded, before = context.load(bent), seen(context)
        for kind in ("f16", "q8_0"):
            with pytest.raises(SnapshotError, match=f"K of layer 1 overflows {kind}.*bf16 or f32"):
                loaded.save(path, type_k=kind)
        assert seen(context) == before
        loaded.save(path, type_k="bf16")
    with opened(shared, "llama-dense", type_k="f16", type_v="f32") as context:
        load = lambda: context.load(bent, convert=True)  # noqa: E731
        unchanged(context, SnapshotError, "K of layer 1 overflows f16", load)


@pytest.mark.parametrize("generation", ["2025-01", "2026-10"])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0", "q5_1"])
@pytest.mark.parametrize("is_session", [False, True])
def test_files_of_llama_cpp(
    shared: Path, path: Path, generation: FileGeneration, kind: str, is_session: bool
) -> None:
    with opened(shared, "llama-dense", type_k=kind, type_v=kind) as context:
        sequence = context.sequence(TEXT)
        source: Any = context if is_session else sequence
        if generation == "2025-01" and context.spec.hadamard_k(0):
            return
        save_llama_file(source, path, generation)
        sequence.close()
        data, size = bytearray(path.read_bytes()), KVType.parse(kind).block_bytes
        context.load_all(path)[0].close()
        # The file ends with the rows of V of the last layer, a block behind the other.
        at = len(data) - 3 * size
        data[at : at + size] = b"\xff" * size
        path.write_bytes(data)
        unchanged(
            context, SnapshotFileError, r"V of layer \d .*not finite", lambda: context.load(path)
        )


@pytest.mark.parametrize("arch", ["jamba-dense", "mamba-dense"])
def test_states_in_files_of_llama_cpp(shared: Path, path: Path, arch: str) -> None:
    with opened(shared, arch) as context:
        save_llama_file(context.sequence(TEXT), path)
        data = path.read_bytes()
        path.write_bytes(data[:-12] + b"\xff\xff\xff\x7f" + data[-8:])
        unchanged(context, SnapshotFileError, "state 0 is not finite", lambda: context.load(path))


# -- blocks of prompts


def stores(folder: Path) -> list[Store]:
    return [MemoryStore(), DiskStore(folder / "blocks")]


def replaced(store: Store, change: Change, *, compress: bool) -> int:
    """Put changed values in the place of all blocks; return how many."""
    entries = list(store.entries())
    for entry in entries:
        value = store.get(entry.key)
        assert value is not None
        arrays, about = from_bytes(value)
        change(arrays, about)
        store.delete(entry.key)
        store.put(
            entry.key, [to_bytes(SnapshotArrays(arrays, about), compress=compress)], entry.note
        )
    return len(entries)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(("arch", "kind"), CASES)
def test_blocks_that_are_not_finite(
    shared: Path, tmp_path: Path, arch: str, kind: str, compress: bool
) -> None:
    with opened(shared, arch, type_k=kind, type_v=kind) as context:
        for store in stores(tmp_path):
            prompts = PromptCache(store, block_size=BLOCK)
            with context.sequence() as sequence:
                prompts.append(sequence, TEXT)
                wanted = sequence.logits

            def change(arrays: dict[str, AnyArray], about: dict[str, Any]) -> None:
                name = numbers_of(arrays)[-1]
                spoil(name, KVType.parse(kind), np.nan)(arrays, about)

            assert replaced(store, change, compress=compress) == len(TEXT) // BLOCK
            with pytest.raises(SnapshotFileError, match="not finite"):
                exported(store, tmp_path / "export")
            with context.sequence() as sequence:
                hit = prompts.append(sequence, TEXT)
                assert hit.why is not None
                assert (hit.n_reused, hit.why.cause) == (0, "damaged")
                assert np.array_equal(sequence.logits, wanted)
            store.close()


def exported(store: Store, path: Path) -> None:
    first = [entry for entry in store.entries() if entry.note["start"] == 0]
    export_blocks(store, first, path)


def test_a_block_that_cannot_be_converted_costs_no_text(shared: Path, tmp_path: Path) -> None:
    """Stored as f32 it may have values that an f16 has not."""

    def widen(arrays: dict[str, AnyArray], _: dict[str, Any]) -> None:
        arrays["group.0.layer.1.k"] = arrays["group.0.layer.1.k"] * np.float32(1e7)

    with opened(shared, "llama-dense") as context:
        for store in stores(tmp_path):
            prompts = PromptCache(store, block_size=BLOCK, type_k="f32", type_v="f32")
            with context.sequence() as sequence:
                prompts.append(sequence, TEXT)
                wanted = sequence.logits
            n = replaced(store, widen, compress=False)
            for n_reused in (0, (n - 1) * BLOCK):
                with context.sequence() as sequence:
                    assert prompts.append(sequence, TEXT).n_reused == n_reused
                    assert np.allclose(sequence.logits, wanted, atol=1e-2)
            store.close()


def test_a_block_that_overflows_its_type_is_not_stored(shared: Path, path: Path) -> None:
    def widen(arrays: dict[str, AnyArray], _: dict[str, Any]) -> None:
        arrays["group.0.layer.1.k"] = arrays["group.0.layer.1.k"] * np.float32(1e7)

    with opened(shared, "llama-dense", type_k="f32", type_v="f32") as context:
        context.sequence(TEXT).save(path)
        loaded = context.load(bend(path, widen, compress=False))
        store = MemoryStore()
        assert PromptCache(store, block_size=BLOCK, type_k="f16").store(loaded) == 0
        assert list(store.entries()) == []
        assert PromptCache(store, block_size=BLOCK, type_k="bf16").store(loaded) == 5


# -- sizes


HUGE = 1 << 26
"""Bytes that nothing needs."""


def filler(n_bytes: int) -> AnyArray:
    """Bytes that become 500 times smaller."""
    data = np.zeros(n_bytes, np.uint8)
    data[: n_bytes // 500] = np.random.default_rng(0).integers(0, 256, n_bytes // 500)
    return data


@contextmanager
def within(n_bytes: int) -> Iterator[None]:
    """See that what happens meanwhile takes no more memory than that at any moment."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < n_bytes, peak


def add_array(arrays: dict[str, AnyArray], _: dict[str, Any]) -> None:
    arrays["more"] = filler(HUGE)


def more_rows(arrays: dict[str, AnyArray], _: dict[str, Any]) -> None:
    rows = arrays["group.0.layer.0.k"]
    arrays["group.0.layer.0.k"] = filler(HUGE).view(rows.dtype).reshape(-1, rows.shape[1])


def wider_rows(arrays: dict[str, AnyArray], _: dict[str, Any]) -> None:
    rows = arrays["group.0.layer.1.v"]
    width = HUGE // rows.itemsize // len(rows)
    whole = filler(len(rows) * width * rows.itemsize)
    arrays["group.0.layer.1.v"] = whole.view(rows.dtype).reshape(len(rows), width)


def more_owners(arrays: dict[str, AnyArray], _: dict[str, Any]) -> None:
    arrays["group.0.owners"] = filler(HUGE).view(np.int64).reshape(2, -1)


def more_logits(arrays: dict[str, AnyArray], _: dict[str, Any]) -> None:
    arrays["sequence.0.logits"] = filler(HUGE).view(np.float32)


def more_cells(arrays: dict[str, AnyArray], about: dict[str, Any]) -> None:
    """All of them agree with each other; only no cache of this size has so many."""
    n = 100_000
    for name, array in arrays.items():
        if name.startswith("group."):
            shape = (2, n) if name.endswith("owners") else (n, *array.shape[1:])
            whole = filler(int(np.prod(shape)) * array.itemsize)
            arrays[name] = whole.view(array.dtype).reshape(shape)
    assert about["n_seqs"] == 1


SIZES: list[tuple[Change, str]] = [
    (add_array, "arrays that no snapshot has: more"),
    (more_rows, r"group.0.layer.0.k is .* is needed"),
    (wider_rows, r"group.0.layer.1.v is .* is needed"),
    (more_owners, "owners of"),
]


@pytest.fixture
def llama16(shared: Path) -> Iterator[Context]:
    with opened(shared, "llama-dense") as context:
        yield context


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        *((change, SnapshotFileError, match) for change, match in SIZES),
        (more_logits, SnapshotFileError, "logits of shape"),
        (more_cells, CacheFull, "100000 cells needed, 512 free: use a larger n_ctx"),
    ],
)
def test_a_small_file_does_not_become_large(
    llama16: Context, path: Path, change: Change, error: type[KVCellarError], match: str
) -> None:
    llama16.sequence(TEXT).append([1]).save(path)
    bent = bend(path, change, compress=True)
    assert bent.stat().st_size < HUGE // 50
    other = llama16.sequence([1, 2])
    for load in (llama16.load, llama16.load_all, other.load):
        with within(HUGE // 16):
            unchanged(llama16, error, match, partial(load, bent))


def test_of_another_model_nothing_is_read(shared: Path, llama16: Context, path: Path) -> None:
    llama16.sequence(TEXT).save(path)
    bent = bend(path, more_cells, compress=True)
    with opened(shared, "qwen2-dense") as context, within(HUGE // 16):
        unchanged(context, SnapshotMismatch, "architecture", lambda: context.load(bent))


@pytest.mark.parametrize(
    ("change", "match"),
    [*SIZES, (more_cells, "more than a block of 16 tokens"), (more_logits, "more than a block")],
)
def test_a_small_block_does_not_become_large(
    llama16: Context, tmp_path: Path, change: Change, match: str
) -> None:
    for store in stores(tmp_path):
        prompts = PromptCache(store, block_size=BLOCK)
        prompts.append(llama16.sequence(), TEXT)
        replaced(store, change, compress=True)
        with within(HUGE // 16):
            with pytest.raises(SnapshotFileError, match=match):
                exported(store, tmp_path / "export")
            with llama16.sequence() as sequence:
                assert prompts.restore(sequence, TEXT).n_reused == 0
        store.close()


def test_an_export_with_such_a_block_is_refused(
    llama16: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path = MemoryStore(), tmp_path / "export"
    PromptCache(store, block_size=BLOCK).append(llama16.sequence(), TEXT)
    for change, match in [*SIZES, (more_cells, "more than a block")]:
        other = MemoryStore()
        for entry in store.entries():
            other.put(entry.key, [store.get(entry.key) or b""], entry.note)
        replaced(other, change, compress=True)
        with monkeypatch.context() as patch:
            patch.setattr("kvcellar.prompts.archive.check_block", lambda *_: None)
            exported(other, path)
        for read in (check_export, lambda p: import_blocks(MemoryStore(), p)):
            with within(HUGE // 16), pytest.raises(SnapshotFileError, match=match):
                read(path)
