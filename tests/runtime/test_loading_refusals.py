"""What is refused when a snapshot is loaded, and that nothing has changed then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.errors import (
    CacheFull,
    NotSupported,
    PositionError,
    SequenceIdError,
    SnapshotFileError,
    SnapshotMismatch,
)
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.snapshot.container import read_file, write_file
from kvcellar.snapshot.native import from_arrays, to_arrays
from kvcellar.testing.gguf_writer import gguf_bytes
from kvcellar.testing.golden import nmse
from kvcellar.testing.tiny_llama import TinyLlama
from tests.runtime.archs import (
    F32,
    HYBRID,
    RECURRENT,
    check_logits,
    opened,
    text,
)
from tests.runtime.loads import TEXT, seen, unchanged, written

KINDS = ("llama-dense", "deepseek2-moe", "gemma3-dense", "jamba-dense", "mamba-dense")


# -- refusals


def test_a_missing_file(plain: Context, tmp_path: Path) -> None:
    plain.sequence(TEXT)
    none = tmp_path / "none"
    unchanged(plain, SnapshotFileError, "cannot read", lambda: plain.load(none))
    unchanged(plain, SnapshotFileError, "cannot read", lambda: plain.load_all(none))
    pending = plain.sequence([1, 2])
    pending.push(3)
    with pytest.raises(SnapshotFileError):
        pending.load(none)
    assert plain.cache.seq_count(pending.seq_id) == 2  # what waits still does


MISMATCHES: list[tuple[str, dict[str, Any], str]] = [
    ("llama-moe", {}, "architecture|weights|groups"),
    ("gemma3-dense", {}, "architecture"),
    ("mamba-dense", {}, "architecture"),
    ("llama-dense", {"type_k": "f16"}, r"groups\[0\].type_k f32, here it is f16.*convert=True"),
    ("llama-dense", {"type_v": "q8_0"}, r"groups\[0\].type_v f32, here it is q8_0.*convert=True"),
]


@pytest.mark.parametrize(("arch", "options", "match"), MISMATCHES)
def test_what_differs_is_named(
    shared: Path, arch: str, options: dict[str, Any], match: str, path: Path
) -> None:
    written(shared, "llama-dense", path)
    with opened(shared, arch, **{**F32, **options}) as context:
        context.sequence(text(2, 10))
        unchanged(context, SnapshotMismatch, match, lambda: context.load(path))
        unchanged(context, SnapshotMismatch, match, lambda: context.load_all(path))
        sequence = context.sequence()
        unchanged(context, SnapshotMismatch, match, lambda: sequence.load(path))


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("llama.rope.freq_base", 5000.0, "groups[0].layers[0].rope.freq_base"),
        ("llama.attention.layer_norm_rms_epsilon", 1e-6, "weights"),
        ("general.name", "the same by another name", None),
    ],
)
def test_other_settings_of_the_same_weights(
    tmp_path: Path, path: Path, key: str, value: Any, field: str | None
) -> None:
    tiny, files = TinyLlama(n_layer=1), []
    for number, metadata in enumerate(({}, {key: value})):
        files.append(tmp_path / f"{number}.gguf")
        data = gguf_bytes({**tiny.metadata(), **metadata}, TinyLlama(n_layer=1).tensors())
        files[-1].write_bytes(data)
    with Model.from_gguf(files[0], n_threads=1) as model:
        model.context(n_ctx=64).sequence([1, 2, 3]).save(path)
    with Model.from_gguf(files[1], n_threads=1) as model:
        context = model.context(n_ctx=64)
        if field is None:
            assert context.load(path).tokens == [1, 2, 3]
            return
        with pytest.raises(SnapshotMismatch) as caught:
            context.load(path)
        assert caught.value.field == field
        assert "by another model" in str(caught.value)


def test_converted_types(shared: Path, path: Path) -> None:
    written(shared, "llama-dense", path)
    for types, limit in (({"type_k": "f16"}, 1e-5), ({"type_k": "q8_0", "type_v": "q4_0"}, 0.05)):
        with opened(shared, "llama-dense", **{**F32, **types}) as context:
            loaded, wanted = context.load(path, convert=True), context.sequence(TEXT)
            got = loaded.append([7]).logits
            assert nmse(got, wanted.append([7]).logits) < limit
    with opened(shared, "llama-dense", **F32) as context:
        exact = context.load(path, convert=True)
        exact.save(path.with_name("again"))
        one, again = (to_arrays(from_arrays(read_file(p))) for p in (path, path.with_name("again")))
        assert all(np.array_equal(again.arrays[name], one.arrays[name]) for name in one.arrays)


def test_several_and_one(plain: Context, path: Path) -> None:
    both = plain.sequence(TEXT), plain.sequence(text(2, 5))
    plain.save(path)
    sequence = plain.sequence()
    unchanged(
        plain, SnapshotMismatch, "sequences 2, here it is 1.*load_all", lambda: plain.load(path)
    )
    unchanged(plain, SnapshotMismatch, "sequences 2", lambda: sequence.load(path, positions=90))
    unchanged(plain, SequenceIdError, "taken", lambda: plain.load_all(path))
    assert [len(one) for one in both] == [len(TEXT), 5]


@pytest.mark.parametrize("arch", KINDS[:4])
def test_no_room(shared: Path, arch: str, path: Path) -> None:
    written(shared, arch, path)
    with opened(shared, arch, n_ctx=64, **F32) as context:
        held = context.sequence(text(2, 30))
        unchanged(context, CacheFull, "40 cells needed, 34 free", lambda: context.load(path))
        sequence = context.sequence()
        unchanged(context, CacheFull, "40 cells needed", lambda: sequence.load(path))
        assert context.load(path, stop=30).tokens == TEXT[:30] if arch == KINDS[0] else True
        assert held.tokens == text(2, 30)


@pytest.mark.parametrize("arch", KINDS)
def test_no_sequence_left(shared: Path, arch: str, path: Path) -> None:
    written(shared, arch, path)
    with opened(shared, arch, n_seq_max=1, **F32) as context:
        sequence = context.sequence(text(2, 30))
        unchanged(context, SequenceIdError, "taken", lambda: context.load(path))
        sequence.close()
        assert context.load(path).tokens == TEXT


def bent(path: Path, change: Callable[[dict[str, Any], Any], None]) -> None:
    """Write a file again with other arrays or another description, its hashes right."""
    arrays, about = read_file(path)
    arrays = dict(arrays)
    change(arrays, about)
    write_file(
        path,
        to_arrays(from_arrays(read_file(path)))._replace(arrays=arrays, description=about),
        compress=False,
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a, _: a.update({"group.0.tokens": a["group.0.tokens"] + 128}), "vocabulary of 128"),
        (
            lambda a, _: a.update({"sequence.0.logits": a["sequence.0.logits"][:5]}),
            "logits of shape",
        ),
        (
            lambda a, _: a.update({"sequence.0.logits": a["sequence.0.logits"] * np.nan}),
            "not finite",
        ),
        (lambda _, d: d["texts"][0].update(grouped_end=-1), "grouped_end of -1"),
        (lambda _, d: d["texts"][0].update(tainted=2**40), "tainted of"),
        (lambda a, _: a.update({"group.0.owners": a["group.0.owners"] + 1}), "owner of cell"),
        (lambda a, _: a.update({"group.0.positions": a["group.0.positions"][1:]}), "is needed"),
    ],
)
def test_what_cannot_be_true_is_refused(
    plain: Context, shared: Path, path: Path, change: Any, match: str
) -> None:
    written(shared, "llama-dense", path)
    bent(path, change)
    plain.sequence(text(2, 5))
    for more in ({}, {"start": 3}, {"positions": 9}, {"convert": True}):
        unchanged(plain, SnapshotFileError, match, lambda m=more: plain.load(path, **m))  # type: ignore[misc]


# -- transactions


@pytest.mark.parametrize("arch", KINDS)
def test_what_is_rolled_back_was_never_loaded(shared: Path, arch: str, path: Path) -> None:
    written(shared, arch, path)
    with opened(shared, arch, **F32) as context:
        first, empty = context.sequence(text(2, 10)), context.sequence()
        before = seen(context)
        with context.cache.transaction() as transaction:
            loaded = context.load(path)
            empty.load(path)
            assert loaded.tokens == empty.tokens == TEXT
            transaction.rollback()
        assert seen(context) == before
        assert loaded.is_closed
        assert empty.tokens == []
        check_logits(context, first.append([7]).logits, [*text(2, 10), 7])
        check_logits(context, context.load(path).append([7]).logits, [*TEXT, 7])


@pytest.mark.parametrize("arch", [*HYBRID, *RECURRENT])
def test_embeddings_that_would_have_to_be_computed_again(
    shared: Path, arch: str, path: Path
) -> None:
    with opened(shared, arch, **F32) as context:
        sequence = context.sequence([1])
        values = np.ones((3, context.model.spec.n_embd), np.float32)
        context.decode(Batch.of_embeddings(values, sequence.seq_id))
        sequence.append([2]).save(path)
        assert context.load(path).tokens == [1, -1, -1, -1, 2]
        empty = context.sequence()
        before = seen(context)
        with pytest.raises(NotSupported, match="embedding"):
            context.load(path, stop=3)
        assert seen(context) == before
        with pytest.raises(NotSupported, match="embedding"):
            empty.load(path, stop=3)
        assert seen(context) == before
        context.cache.check()


def test_a_failed_load_inside_a_transaction(plain: Context, shared: Path, path: Path) -> None:
    written(shared, "llama-dense", path)
    plain.sequence(text(2, 10))
    with plain.cache.transaction():
        other = plain.sequence(text(3, 5))
        unchanged(plain, PositionError, "largest", lambda: plain.load(path, positions=2**31 - 20))
        plain.load(path)
    assert [len(s) for s in plain.sequences] == [10, 5, 40]
    assert other.tokens == text(3, 5)
