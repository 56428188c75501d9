"""What ``load`` does: into other contexts, at other positions, in part; and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.errors import (
    CacheFull,
    KVCellarError,
    NotSupported,
    OptionError,
    PositionError,
    SequenceIdError,
    ShiftUnsupported,
    SnapshotFileError,
    SnapshotMismatch,
)
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.snapshot.container import read_file, write_file
from kvcellar.snapshot.native import describe, understand
from kvcellar.testing.gguf_writer import gguf_bytes
from kvcellar.testing.golden import nmse
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.types import Float32Array
from tests.runtime.archs import (
    ARCHS,
    F32,
    HYBRID,
    RECURRENT,
    SAME,
    WINDOWED,
    check_logits,
    opened,
    text,
)

KINDS = ("llama-dense", "deepseek2-moe", "gemma3-dense", "jamba-dense", "mamba-dense")
TEXT = text(1, 40)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "text.safetensors"


@pytest.fixture(scope="module")
def plain(models: Path) -> Iterator[Context]:
    with opened(models, "llama-dense", **F32) as made:
        yield made


@pytest.fixture(autouse=True)
def closing(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "plain" in request.fixturenames:
        context = request.getfixturevalue("plain")
        for sequence in context.sequences:
            sequence.close()
        assert context.cache.used == 0


def written(models: Path, arch: str, path: Path, tokens: list[int] = TEXT, **options: Any) -> Path:
    """Save a text by a context of its own."""
    with opened(models, arch, **{**F32, **options}) as context:
        context.sequence(tokens).save(path)
    return path


def seen(context: Context) -> tuple[Any, ...]:
    """What is known of a context, its K and V by the logits that they give."""
    texts = [(s.seq_id, s.tokens, s.positions.tolist(), s.tainted) for s in context.sequences]
    return context.cache.used, context.cache.view().to_json(), texts


def unchanged(
    context: Context, error: type[KVCellarError], match: str, call: Callable[[], object]
) -> None:
    """See that a call is refused, and that nothing has changed."""
    before, logits = seen(context), [s.logits for s in context.sequences if len(s)]
    with pytest.raises(error, match=match):
        call()
    assert seen(context) == before
    context.cache.check()
    for sequence, row in zip([s for s in context.sequences if len(s)], logits, strict=True):
        assert np.array_equal(sequence.logits, row)
        sequence._logits = None
        assert nmse(sequence.logits, row) < SAME  # computed again, from K and V


# -- into other contexts


@pytest.mark.parametrize("arch", KINDS)
@pytest.mark.parametrize("sizes", [{"n_ctx": 96, "n_seq_max": 2}, {"n_ctx": 2048, "n_seq_max": 70}])
def test_other_sizes(models: Path, arch: str, sizes: dict[str, Any], path: Path) -> None:
    written(models, arch, path)
    with opened(models, arch, n_ubatch=7, flash_attn=True, **sizes, **F32) as context:
        other = context.sequence(text(2, 30))  # so it gets another id, and other cells
        loaded = context.load(path)
        assert loaded.seq_id == 1
        loaded.append([7])
        check_logits(context, loaded.logits, [*TEXT, 7])
        other.append([8])
        check_logits(context, other.logits, [*text(2, 30), 8])


@pytest.mark.parametrize("arch", WINDOWED)
@pytest.mark.parametrize("full", [False, True])
def test_windows_that_slide_and_those_that_do_not(
    models: Path, arch: str, full: bool, path: Path
) -> None:
    tokens = text(1, 400)
    written(models, arch, path, tokens, swa_full=full)
    with opened(models, arch, swa_full=full, **F32) as context:
        loaded = context.load(path)
        assert loaded.tokens == tokens
        loaded.append([7])
        check_logits(context, loaded.logits, [*tokens, 7])
        loaded.trim(1).append([9])
        check_logits(context, loaded.logits, [*tokens, 9])


def test_v_the_other_way(models: Path, path: Path) -> None:
    for way in (True, False):
        written(models, "llama-dense", path, flash_attn=way, kernel=False)
        with opened(models, "llama-dense", flash_attn=not way, kernel=False, **F32) as context:
            loaded = context.load(path).append([7])
            check_logits(context, loaded.logits, [*TEXT, 7])


@pytest.mark.parametrize("arch", ARCHS)
def test_the_other_backend(models: Path, arch: str, path: Path) -> None:
    logits: list[Float32Array] = []
    for first, second in (("ggml", "numpy"), ("numpy", "ggml")):
        with opened(models, arch, first, n_ctx=64, **F32) as context:
            sequence = context.sequence(TEXT)
            sequence.save(path)
            logits.append(sequence.append([7]).logits)
        with opened(models, arch, second, n_ctx=64, **F32) as context:
            logits.append(context.load(path).append([7]).logits)
    # Without any snapshot they differ by as much, most of all after norms with a bias.
    assert max(nmse(one, logits[0]) for one in logits) < 1e-6


# -- behind other text


def test_into_a_sequence(plain: Context, models: Path, path: Path) -> None:
    written(models, "llama-dense", path)
    sequence = plain.sequence()
    assert sequence.load(path) is sequence
    assert sequence.tainted is None
    check_logits(plain, sequence.logits, TEXT)


def test_behind_the_text_of_a_sequence(plain: Context, models: Path, path: Path) -> None:
    written(models, "llama-dense", path)
    sequence = plain.sequence(text(2, 10))
    unchanged(plain, PositionError, "load it behind", lambda: sequence.load(path))
    sequence.push(3)
    sequence.load(path, positions=11)
    assert sequence.tokens == [*text(2, 10), 3, *TEXT]
    assert sequence.positions.tolist() == list(range(51))
    assert sequence.tainted == 11
    sequence.append([5])
    known = sequence.trim(41).tainted
    assert known is None
    check_logits(plain, sequence.logits, [*text(2, 10), 3])


def test_a_text_in_pieces_is_the_text(plain: Context, path: Path, tmp_path: Path) -> None:
    whole = plain.sequence(TEXT)
    whole.save(path, stop=25)
    whole.save(tmp_path / "rest", start=25)
    pieces = plain.load(path).load(tmp_path / "rest")
    assert pieces.tokens == TEXT
    assert nmse(pieces.append([7]).logits, whole.append([7]).logits) < SAME


@pytest.mark.parametrize("arch", [WINDOWED[0], HYBRID[0], RECURRENT[0]])
def test_states_and_windows_only_into_what_is_empty(models: Path, arch: str, path: Path) -> None:
    written(models, arch, path)
    with opened(models, arch, **F32) as context:
        sequence = context.sequence(text(2, 10))
        unchanged(context, NotSupported, "not empty", lambda: sequence.load(path, positions=10))
        empty = context.sequence().load(path)
        check_logits(context, empty.append([7]).logits, [*TEXT, 7])


def test_nothing_is_added_by_an_empty_file(plain: Context, path: Path) -> None:
    plain.sequence().save(path)
    sequence = plain.sequence(TEXT)
    logits = sequence.logits
    sequence.load(path)
    assert sequence.tokens == TEXT
    assert sequence.tainted is None
    assert np.array_equal(sequence.logits, logits)


# -- at other positions


@pytest.mark.parametrize("where", [0, 1, 17, 300])
def test_positions_move_and_k_is_rotated(
    plain: Context, models: Path, path: Path, where: int
) -> None:
    written(models, "llama-dense", path)
    loaded = plain.load(path, positions=where)
    assert loaded.positions.tolist() == list(range(where, where + 40))
    assert loaded.tainted == (0 if where else None)
    assert (loaded._logits is None) == (where > 0)  # they are those of another position
    other = plain.sequence()
    batch = Batch.of(TEXT, other.seq_id, range(where, where + 40), logits="last")
    wanted = [plain.decode(batch)[-1], other.append([7]).logits]
    assert nmse(loaded.logits, wanted[0]) < SAME
    assert nmse(loaded.append([7]).logits, wanted[1]) < SAME


@pytest.mark.parametrize("where", [-1, 2**31, 1.5, True])
def test_positions_that_there_are_not(plain: Context, models: Path, path: Path, where: Any) -> None:
    written(models, "llama-dense", path)
    unchanged(plain, OptionError, "positions", lambda: plain.load(path, positions=where))
    unchanged(plain, PositionError, "largest", lambda: plain.load(path, positions=2**31 - 20))


def test_what_cannot_be_rotated(
    plain: Context, models: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(models, "llama-dense", path)
    plain.sequence(TEXT)
    monkeypatch.setattr(type(plain.cache), "can_shift", property(lambda _: False))
    unchanged(plain, ShiftUnsupported, "rotated", lambda: plain.load(path, positions=3))
    assert plain.load(path, positions=0).tokens == TEXT


@pytest.mark.parametrize("arch", ["gemma3-dense", "jamba-dense", "mamba-dense"])
def test_positions_where_there_are_states_or_windows(models: Path, arch: str, path: Path) -> None:
    written(models, arch, path)
    with opened(models, arch, **F32) as context:
        loaded = context.load(path, positions=5)
        assert loaded.positions.tolist() == list(range(5, 45))
        other = context.sequence()
        batch = Batch.of(TEXT, other.seq_id, range(5, 45), logits="last")
        wanted = [context.decode(batch)[-1], other.append([7]).logits]
        assert nmse(loaded.append([7]).logits, wanted[1]) < SAME
        assert loaded.tainted == 0


# -- parts


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 7), (0, None), (5, 12), (5, None), (40, 40), (0, 0)]
)
def test_a_part(plain: Context, models: Path, path: Path, start: int, stop: int | None) -> None:
    written(models, "llama-dense", path)
    loaded = plain.load(path, start=start, stop=stop)
    assert loaded.tokens == TEXT[start:stop]
    assert loaded.positions.tolist() == list(range(40))[start:stop]
    assert loaded.tainted == (0 if start and loaded.tokens else None)
    assert plain.cache.used == len(loaded)
    if start == 0 and loaded.tokens:
        check_logits(plain, loaded.logits, loaded.tokens)


def test_a_part_at_another_position(plain: Context, path: Path) -> None:
    sequence = plain.sequence(TEXT)
    sequence.save(path)
    loaded = plain.load(path, start=10, stop=30, positions=0)
    assert loaded.positions.tolist() == list(range(20))
    same = sequence.fork().remove(30, 40).remove(0, 10)
    assert nmse(loaded.append([7]).logits, same.append([7]).logits) < SAME


@pytest.mark.parametrize("arch", [*WINDOWED, *HYBRID, *RECURRENT])
@pytest.mark.parametrize("n", [40, 400])
def test_the_beginning_of_states_and_windows(models: Path, arch: str, n: int, path: Path) -> None:
    tokens = text(1, n)
    written(models, arch, path, tokens)
    with opened(models, arch, **F32) as context:
        loaded = context.load(path, stop=n - 10)
        assert loaded.tokens == tokens[: n - 10]
        loaded.append([7])
        check_logits(context, loaded.logits, [*tokens[: n - 10], 7])
        assert loaded.tainted is None
        if n == 400 or arch not in WINDOWED:
            before = seen(context)
            with pytest.raises(NotSupported):
                context.load(path, start=5)
            assert seen(context) == before


@pytest.mark.parametrize(
    "arguments",
    [{"start": -1}, {"start": 41}, {"stop": 41}, {"start": 7, "stop": 6}, {"stop": "x"}],
)
def test_a_part_that_there_is_not(
    plain: Context, models: Path, path: Path, arguments: dict[str, Any]
) -> None:
    written(models, "llama-dense", path)
    unchanged(plain, OptionError, "start|stop", lambda: plain.load(path, **arguments))


# -- refusals


def test_a_missing_file(plain: Context, tmp_path: Path) -> None:
    plain.sequence(TEXT)
    none = tmp_path / "none"
    unchanged(plain, SnapshotFileError, "cannot read", lambda: plain.load(none))
    unchanged(plain, SnapshotFileError, "cannot read", lambda: plain.load_all(none))
    waiting = plain.sequence([1, 2])
    waiting.push(3)
    with pytest.raises(SnapshotFileError):
        waiting.load(none)
    assert plain.cache.seq_count(waiting.seq_id) == 2  # what waits still does


MISMATCHES: list[tuple[str, dict[str, Any], str]] = [
    ("llama-moe", {}, "architecture|weights|groups"),
    ("gemma3-dense", {}, "architecture"),
    ("mamba-dense", {}, "architecture"),
    ("llama-dense", {"type_k": "f16"}, r"groups\[0\].type_k f32, here it is f16.*convert=True"),
    ("llama-dense", {"type_v": "q8_0"}, r"groups\[0\].type_v f32, here it is q8_0.*convert=True"),
]


@pytest.mark.parametrize(("arch", "options", "match"), MISMATCHES)
def test_what_differs_is_named(
    models: Path, arch: str, options: dict[str, Any], match: str, path: Path
) -> None:
    written(models, "llama-dense", path)
    with opened(models, arch, **{**F32, **options}) as context:
        context.sequence(text(2, 10))
        unchanged(context, SnapshotMismatch, match, lambda: context.load(path))
        unchanged(context, SnapshotMismatch, match, lambda: context.load_all(path))
        sequence = context.sequence()
        unchanged(context, SnapshotMismatch, match, lambda: sequence.load(path))


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("llama.rope.freq_base", 5000.0, "weights"),
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


def test_converted_types(models: Path, path: Path) -> None:
    written(models, "llama-dense", path)
    for types, limit in (({"type_k": "f16"}, 1e-5), ({"type_k": "q8_0", "type_v": "q4_0"}, 0.05)):
        with opened(models, "llama-dense", **{**F32, **types}) as context:
            loaded, wanted = context.load(path, convert=True), context.sequence(TEXT)
            got = loaded.append([7]).logits
            assert nmse(got, wanted.append([7]).logits) < limit
    with opened(models, "llama-dense", **F32) as context:
        exact = context.load(path, convert=True)
        exact.save(path.with_name("again"))
        one, again = (describe(understand(read_file(p))) for p in (path, path.with_name("again")))
        assert all(np.array_equal(again.arrays[name], one.arrays[name]) for name in one.arrays)


def test_several_and_one(plain: Context, path: Path) -> None:
    plain.sequence(TEXT)
    plain.sequence(text(2, 5))
    plain.save(path)
    sequence = plain.sequence()
    unchanged(
        plain, SnapshotMismatch, "sequences 2, here it is 1.*load_all", lambda: plain.load(path)
    )
    unchanged(plain, SnapshotMismatch, "sequences 2", lambda: sequence.load(path, positions=90))
    unchanged(plain, SequenceIdError, "taken", lambda: plain.load_all(path))


@pytest.mark.parametrize("arch", KINDS[:4])
def test_no_room(models: Path, arch: str, path: Path) -> None:
    written(models, arch, path)
    with opened(models, arch, n_ctx=64, **F32) as context:
        context.sequence(text(2, 30))
        unchanged(context, CacheFull, "40 cells needed, 34 free", lambda: context.load(path))
        sequence = context.sequence()
        unchanged(context, CacheFull, "40 cells needed", lambda: sequence.load(path))
        assert context.load(path, stop=30).tokens == TEXT[:30] if arch == KINDS[0] else True


@pytest.mark.parametrize("arch", KINDS)
def test_no_sequence_left(models: Path, arch: str, path: Path) -> None:
    written(models, arch, path)
    with opened(models, arch, n_seq_max=1, **F32) as context:
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
        describe(understand(read_file(path)))._replace(arrays=arrays, description=about),
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
        (lambda a, _: a.update({"group.0.positions": a["group.0.positions"][1:]}), "contradicts"),
    ],
)
def test_what_cannot_be_true_is_refused(
    plain: Context, models: Path, path: Path, change: Any, match: str
) -> None:
    written(models, "llama-dense", path)
    bent(path, change)
    plain.sequence(text(2, 5))
    for more in ({}, {"start": 3}, {"positions": 9}, {"convert": True}):
        unchanged(plain, SnapshotFileError, match, lambda m=more: plain.load(path, **m))  # type: ignore[misc]


# -- transactions


@pytest.mark.parametrize("arch", KINDS)
def test_what_is_rolled_back_was_never_loaded(models: Path, arch: str, path: Path) -> None:
    written(models, arch, path)
    with opened(models, arch, **F32) as context:
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
    models: Path, arch: str, path: Path
) -> None:
    with opened(models, arch, **F32) as context:
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


def test_a_failed_load_inside_a_transaction(plain: Context, models: Path, path: Path) -> None:
    written(models, "llama-dense", path)
    plain.sequence(text(2, 10))
    with plain.cache.transaction():
        other = plain.sequence(text(3, 5))
        unchanged(plain, PositionError, "largest", lambda: plain.load(path, positions=2**31 - 20))
        plain.load(path)
    assert [len(s) for s in plain.sequences] == [10, 5, 40]
    assert other.tokens == text(3, 5)
