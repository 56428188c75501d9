"""What ``save`` writes: whole sequences, parts, several with shared cells, other types."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.errors import ClosedError, NotSupported, OptionError, SnapshotFileError
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.runtime.sequence import Sequence
from kvcellar.snapshot import container
from kvcellar.snapshot.container import read_description, read_file
from kvcellar.snapshot.native import from_arrays
from kvcellar.snapshot.snapshot import Snapshot
from kvcellar.testing.golden import nmse
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
from tests.snapshot.samples import assert_same

KINDS = ("llama-dense", "deepseek2-moe", "gemma3-dense", "jamba-dense", "mamba-dense")


@pytest.fixture(scope="module", params=KINDS)
def context(request: pytest.FixtureRequest, shared: Path) -> Iterator[Context]:
    with opened(shared, request.param, **F32) as made:
        yield made


@pytest.fixture(scope="module")
def plain(shared: Path) -> Iterator[Context]:
    with opened(shared, "llama-dense", **F32) as made:
        yield made


@pytest.fixture(autouse=True)
def closing(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("context", "plain"):
        if name in request.fixturenames:
            for sequence in request.getfixturevalue(name).sequences:
                sequence.close()
            assert request.getfixturevalue(name).cache.used == 0


def saved(path: Path) -> Snapshot:
    return from_arrays(read_file(path))


def n_decoded(context: Context) -> int:
    return context.timings.prefill_tokens + context.timings.decode_tokens


# -- whole sequences


@pytest.mark.parametrize("backend", ["ggml", "numpy"])
@pytest.mark.parametrize("arch", ARCHS)
def test_save_load_save_is_the_same(shared: Path, arch: str, backend: str, path: Path) -> None:
    with opened(shared, arch, backend, n_ctx=128) as context:
        sequence = context.sequence(text(1, 20)).append(text(2, 20))
        assert sequence.save(path) == path.stat().st_size
        first = saved(path)
        n_before = n_decoded(context)
        loaded = context.load(path)
        assert loaded.tokens == sequence.tokens
        assert np.array_equal(loaded.positions, sequence.positions)
        assert np.array_equal(loaded.logits, sequence.logits)
        loaded.save(path)
        assert_same(saved(path), first)
        assert n_decoded(context) == n_before
        assert loaded.inexact_from is None
        got, wanted = (s.append(text(3, 3)).logits for s in (loaded, sequence))
        assert nmse(got, wanted) < 1e-5  # cells stand elsewhere, rows of f16 may differ by a bit
        context.cache.check()


def test_what_waits_is_computed_first(context: Context, path: Path) -> None:
    sequence = context.sequence(text(1, 9))
    sequence.push(5)
    sequence.push(6)
    sequence.save(path)
    assert context.cache.seq_count(sequence.seq_id) == 11
    loaded = context.load(path)
    assert loaded.tokens == [*text(1, 9), 5, 6]
    check_logits(context, loaded.logits, loaded.tokens)


def test_what_was_sampled_is_saved(plain: Context, path: Path) -> None:
    sequence = plain.sequence(text(1, 9))
    for _ in range(4):
        sequence.push(int(sequence.logits.argmax()))
    tokens = sequence.tokens
    sequence.save(path)
    loaded = plain.load(path)
    assert loaded.tokens == tokens
    assert len(tokens) == 13
    check_logits(plain, loaded.logits, tokens)


def test_an_edit_that_left_no_logits(context: Context, path: Path) -> None:
    sequence = context.sequence(text(1, 20))
    sequence.trim(3)
    sequence.save(path)
    loaded = context.load(path)
    assert loaded.tokens == text(1, 20)[:17]
    check_logits(context, loaded.logits, loaded.tokens)


def test_an_empty_sequence(context: Context, path: Path) -> None:
    context.sequence().save(path)
    loaded = context.load(path)
    assert (loaded.tokens, context.cache.used) == ([], 0)
    with pytest.raises(OptionError, match="empty"):
        assert loaded.logits is not None
    loaded.append(text(1, 5))
    check_logits(context, loaded.logits, text(1, 5))


def test_a_shift_that_is_pending_is_applied(plain: Context, path: Path) -> None:
    sequence = plain.sequence(text(1, 20))
    sequence.remove(3, 6)
    sequence.save(path)
    loaded = plain.load(path)
    assert loaded.positions.tolist() == list(range(17))
    assert nmse(loaded.append([7]).logits, sequence.append([7]).logits) < SAME
    assert loaded.inexact_from == sequence.inexact_from == 3


def test_grouped_tokens_keep_their_order(plain: Context, path: Path) -> None:
    sequence = plain.sequence(text(1, 20)).self_extend(4, 8)
    sequence.save(path)
    loaded = plain.load(path)
    assert loaded.tokens == sequence.tokens
    assert np.array_equal(loaded.positions, sequence.positions)
    for one in (loaded, sequence):
        one.append(text(2, 8)).self_extend(4, 8)
    assert loaded.tokens == sequence.tokens
    assert np.array_equal(loaded.positions, sequence.positions)
    assert nmse(loaded.append([7]).logits, sequence.append([7]).logits) < SAME


def test_a_fork_is_saved_by_itself(context: Context, path: Path) -> None:
    sequence = context.sequence(text(1, 20))
    child = sequence.fork().append(text(2, 3))
    child.save(path)
    sequence.close()
    loaded = context.load(path)
    assert loaded.tokens == [*text(1, 20), *text(2, 3)]
    assert np.array_equal(loaded.logits, child.logits)


# -- parts


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (0, 20), (5, 12), (5, None), (20, 20), (0, 0)])
def test_a_part_of_a_plain_text(plain: Context, path: Path, start: int, stop: int | None) -> None:
    sequence = plain.sequence(text(1, 20))
    sequence.save(path, start=start, stop=stop)
    loaded = plain.load(path)
    assert loaded.tokens == text(1, 20)[start:stop]
    assert loaded.positions.tolist() == list(range(20))[start:stop]
    assert loaded.inexact_from == (0 if start and loaded.tokens else None)
    if start == 0 and loaded.tokens:
        check_logits(plain, loaded.logits, loaded.tokens)


@pytest.mark.parametrize("at", [0, 7, 20])
def test_a_part_of_no_tokens(context: Context, path: Path, at: int) -> None:
    sequence = context.sequence(text(1, 20))
    sequence.save(path, start=at, stop=at)
    loaded = context.load(path)
    assert (loaded.tokens, loaded.inexact_from, sequence.tokens) == ([], None, text(1, 20))
    loaded.append(text(2, 3))
    check_logits(context, loaded.logits, text(2, 3))


@pytest.mark.parametrize(
    "arguments",
    [{"start": -1}, {"start": 21}, {"stop": 21}, {"start": 7, "stop": 6}, {"stop": 2.5}],
)
def test_a_part_that_there_is_not(plain: Context, path: Path, arguments: dict[str, Any]) -> None:
    sequence = plain.sequence(text(1, 20))
    with pytest.raises(OptionError, match=r"start|stop"):
        sequence.save(path, **arguments)
    assert not path.exists()


@pytest.mark.parametrize("arguments", [{"start": 1}, {"stop": 2}, {"start": 4, "stop": 7}])
def test_tokens_of_one_position_are_not_parted(
    plain: Context, path: Path, arguments: dict[str, Any]
) -> None:
    sequence = plain.sequence(text(1, 20)).self_extend(4, 8)
    with pytest.raises(OptionError, match="share position"):
        sequence.save(path, **arguments)
    sequence.save(path)
    with pytest.raises(OptionError, match="share position"):
        plain.load(path, **arguments)
    sequence.save(path, start=4, stop=8)
    assert plain.load(path).tokens == sequence.tokens[4:8]


def test_part_of_a_grouped_text_can_be_extended_on(plain: Context, path: Path) -> None:
    sequence = plain.sequence(text(1, 20)).self_extend(4, 8)
    sequence.save(path)
    sequence.save(path.with_name("part"), stop=8)
    cuts = (plain.load(path, stop=8), plain.load(path.with_name("part")), sequence.trim(12))
    for cut in cuts:
        cut.append(text(2, 10)).self_extend(4, 8)
        assert cut.positions.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4, 5]
        cut.close()


@pytest.mark.slow
@pytest.mark.parametrize("arch", [*WINDOWED[:1], *HYBRID[:1], *RECURRENT[:1]])
def test_a_part_where_there_are_states_or_windows(shared: Path, arch: str, path: Path) -> None:
    with opened(shared, arch, n_ctx=1024, **F32) as context:
        sequence = context.sequence(text(1, 300)).append(text(2, 100))
        sequence.save(path, stop=300)  # there is something to go back to
        loaded = context.load(path)
        assert loaded.tokens == text(1, 300)
        check_logits(context, loaded.logits, loaded.tokens)
        assert len(sequence) == 400
        loaded.close()
        with pytest.raises(NotSupported):
            sequence.save(path, stop=101)
        assert context.load(path).tokens == text(1, 300)  # the file is as it was


# -- several


def test_shared_cells_are_saved_once(context: Context, path: Path) -> None:
    first = context.sequence(text(1, 30))
    second = first.fork().append(text(2, 5))
    empty = context.sequence()
    used, logits = context.cache.used, [first.logits, second.logits]
    tokens = [one.tokens for one in (first, second, empty)]
    context.save(path)
    n_bytes = path.stat().st_size
    for one in context.sequences:
        one.close()
    loaded = context.load_all(path)
    assert [one.tokens for one in loaded] == tokens
    assert context.cache.used == used
    for one, wanted in zip(loaded, logits, strict=False):
        assert np.array_equal(one.logits, wanted)
    context.save(path, loaded[:1])
    assert path.stat().st_size < n_bytes
    loaded[0].append([7])
    loaded[1].append([8])
    check_logits(context, loaded[0].logits, [*tokens[0], 7])
    check_logits(context, loaded[1].logits, [*tokens[1], 8])


def test_the_order_is_that_asked_for(plain: Context, path: Path) -> None:
    made = [plain.sequence(text(seed, 4 + seed)) for seed in range(3)]
    plain.save(path, [made[2], made[0]])
    wanted = [made[2].tokens, made[0].tokens]
    made[1].close()
    assert [one.tokens for one in plain.load_all(path)] == wanted


def test_none_at_all(context: Context, path: Path) -> None:
    context.save(path)
    assert context.load_all(path) == ()


def test_wrong_sequences(plain: Context, shared: Path, path: Path) -> None:
    first = plain.sequence(text(1, 5))
    with pytest.raises(OptionError, match="only once"):
        plain.save(path, [first, first])
    with (
        opened(shared, "llama-dense") as other,
        pytest.raises(OptionError, match="another context"),
    ):
        plain.save(path, [first, other.sequence()])
    first.close()
    with pytest.raises(ClosedError):
        plain.save(path, [first])
    with pytest.raises(ClosedError):
        first.save(path)
    assert not path.exists()


# -- types and compression


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_stored_as_another_type(plain: Context, path: Path, kind: str, compress: bool) -> None:
    sequence = plain.sequence(text(1, 20))
    sequence.save(path, type_k=kind, type_v=kind, compress=compress)
    loaded = plain.load(path, convert=True)
    error = nmse(loaded.append([7]).logits, sequence.append([7]).logits)
    assert error < {"f32": SAME, "f16": 1e-5, "q8_0": 1e-2}[kind]
    group = read_description(path)["fingerprint"]["groups"][0]
    assert (group["type_k"], group["type_v"]) == (kind, kind)


def test_a_wider_type_loses_nothing(shared: Path, path: Path) -> None:
    for types in ({}, {"type_k": "q8_0", "type_v": "q4_0"}):
        with opened(shared, "llama-dense", **types) as context:
            sequence = context.sequence(text(1, 20))
            sequence.save(path)
            plainly = saved(path)
            sequence.save(path, type_k="f32", type_v="f32")
            loaded = context.load(path, convert=True)
            assert np.array_equal(loaded.logits, sequence.logits)
            assert loaded.stored_as  # nobody can tell that f32 lost nothing
            loaded.stored_as = ""
            loaded.save(path)
            if not types:  # a block's scale may differ by a bit
                assert_same(saved(path), plainly)


def test_a_file_knows_that_its_rows_were_rounded_before(shared: Path, path: Path) -> None:
    with opened(shared, "llama-dense") as context:
        context.sequence(text(1, 20)).save(path, type_k="f32", type_v="f32")
    with opened(shared, "llama-dense", type_k="f32", type_v="f32") as context:
        loaded = context.load(path)  # stored as the context would, but computed as f16
        assert loaded.stored_as
        loaded.save(path)
        again = context.load(path)
        assert again.stored_as == loaded.stored_as
        fresh = context.sequence(text(1, 20))
        fresh.save(path)
        assert fresh.stored_as == context.load(path).stored_as == ""


@pytest.mark.parametrize("arguments", [{"type_k": "f17"}, {"type_v": "nonsense"}])
def test_no_such_type(context: Context, path: Path, arguments: dict[str, str]) -> None:
    sequence = context.sequence(text(1, 5))
    with pytest.raises(OptionError, match="unknown K/V type"):
        sequence.save(path, **arguments)  # type: ignore[arg-type]
    assert not path.exists()


def test_compressed_files_are_smaller(plain: Context, path: Path) -> None:
    sequence = plain.sequence(text(1, 100))
    n_plain = sequence.save(path)
    assert sequence.save(path, compress=True) < 0.95 * n_plain
    assert np.array_equal(plain.load(path).logits, sequence.logits)


# -- checkpoints


@pytest.mark.slow
@pytest.mark.parametrize("arch", [*WINDOWED, *HYBRID, *RECURRENT])
def test_checkpoints_are_carried(shared: Path, arch: str, path: Path) -> None:
    with opened(shared, arch, **F32) as context:
        context.sequence(text(1, 300)).append(text(2, 100)).save(path)
    with opened(shared, arch, **F32) as context:
        loaded = context.load(path).trim(100)
        assert loaded.tokens == text(1, 300)
        assert n_decoded(context) == 0
        loaded.append([7])
        assert n_decoded(context) <= 40
        check_logits(context, loaded.logits, [*text(1, 300), 7])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gemma3-dense", "jamba-dense", "mamba2-dense"])
def test_without_checkpoints(shared: Path, arch: str, path: Path) -> None:
    with opened(shared, arch, **F32) as context:
        sequence = context.sequence(text(1, 300)).append(text(2, 100))
        n_with = sequence.save(path)
        assert sequence.save(path, checkpoints=False) < n_with
    with opened(shared, arch, **F32) as context:
        loaded = context.load(path).trim(100).append([7])
        assert n_decoded(context) == 301
        check_logits(context, loaded.logits, [*text(1, 300), 7])


# -- failures


def test_a_file_that_cannot_be_written(
    context: Context, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = context.sequence(text(1, 5))
    sequence.save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(container, "save_file", fail)
    with pytest.raises(SnapshotFileError, match="No space left"):
        sequence.append([1]).save(path)
    assert path.read_bytes() == before
    with pytest.raises(SnapshotFileError, match="cannot write"):
        context.save(path.parent / "none" / "x")
    assert len(list(path.parent.iterdir())) == 1


def test_a_closed_context(shared: Path, path: Path) -> None:
    with opened(shared, "llama-dense") as context:
        sequence: Sequence = context.sequence(text(1, 5))
        sequence.save(path)
    for call in (
        lambda: sequence.save(path),
        lambda: sequence.load(path),
        lambda: context.save(path),
        lambda: context.load(path),
        lambda: context.load_all(path),
    ):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.alone
def test_two_threads_save_and_load(plain: Context, tmp_path: Path) -> None:
    made = [plain.sequence(text(seed, 30)) for seed in range(2)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(15):
                path = tmp_path / f"{number}.{i}"
                made[number].save(path)
                loaded = plain.load(path)
                assert loaded.tokens == text(number, 30)
                assert np.array_equal(loaded.logits, made[number].logits)
                loaded.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    plain.cache.check()


def test_wrong_arguments_are_found_before_weights_are_hashed(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashed(_: Model) -> str:
        raise AssertionError("the weights are hashed")

    monkeypatch.setattr(Model, "weights_hash", property(hashed))
    with opened(shared, "llama-dense") as context:
        sequence = context.sequence([1, 2, 3])
        with pytest.raises(OptionError, match="stop=4"):
            sequence.save(tmp_path / "text", stop=4)
        with pytest.raises(SnapshotFileError):
            sequence.load(tmp_path / "absent")
        with pytest.raises(SnapshotFileError):
            context.load(tmp_path / "absent")
        sequence.close()
        with pytest.raises(ClosedError, match="sequence 0 is closed"):
            sequence.save(tmp_path / "text")
