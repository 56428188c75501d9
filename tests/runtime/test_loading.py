"""What ``load`` does: into other contexts, behind other text, at other positions, in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.errors import (
    NotSupported,
    OptionError,
    PositionError,
    ShiftUnsupported,
)
from kvcellar.runtime.context import Context
from kvcellar.testing.golden import nmse
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
from tests.runtime.loads import TEXT, seen, unchanged, written

KINDS = ("llama-dense", "deepseek2-moe", "gemma3-dense", "jamba-dense", "mamba-dense")


# -- into other contexts


@pytest.mark.parametrize("arch", KINDS)
@pytest.mark.parametrize("sizes", [{"n_ctx": 96, "n_seq_max": 2}, {"n_ctx": 2048, "n_seq_max": 70}])
def test_other_sizes(shared: Path, arch: str, sizes: dict[str, Any], path: Path) -> None:
    written(shared, arch, path)
    with opened(shared, arch, n_ubatch=7, flash_attn=True, **sizes, **F32) as context:
        other = context.sequence(text(2, 30))  # so it gets another id, and other cells
        loaded = context.load(path)
        assert loaded.seq_id == 1
        loaded.append([7])
        check_logits(context, loaded.logits, [*TEXT, 7])
        other.append([8])
        check_logits(context, other.logits, [*text(2, 30), 8])


@pytest.mark.slow
@pytest.mark.parametrize("arch", WINDOWED)
@pytest.mark.parametrize("full", [False, True])
def test_windows_that_slide_and_those_that_do_not(
    shared: Path, arch: str, full: bool, path: Path
) -> None:
    tokens = text(1, 400)
    written(shared, arch, path, tokens, swa_full=full)
    with opened(shared, arch, swa_full=full, **F32) as context:
        loaded = context.load(path)
        assert loaded.tokens == tokens
        loaded.append([7])
        check_logits(context, loaded.logits, [*tokens, 7])
        loaded.trim(1).append([9])
        check_logits(context, loaded.logits, [*tokens, 9])


def test_v_the_other_way(shared: Path, path: Path) -> None:
    for way in (True, False):
        written(shared, "llama-dense", path, flash_attn=way, kernel=False)
        with opened(shared, "llama-dense", flash_attn=not way, kernel=False, **F32) as context:
            loaded = context.load(path).append([7])
            check_logits(context, loaded.logits, [*TEXT, 7])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_the_other_backend(shared: Path, arch: str, path: Path) -> None:
    logits: list[Float32Array] = []
    for first, second in (("ggml", "numpy"), ("numpy", "ggml")):
        with opened(shared, arch, first, n_ctx=64, **F32) as context:
            sequence = context.sequence(TEXT)
            sequence.save(path)
            logits.append(sequence.append([7]).logits)
        with opened(shared, arch, second, n_ctx=64, **F32) as context:
            logits.append(context.load(path).append([7]).logits)
    # Without any snapshot they differ by as much, most of all after norms with a bias.
    assert max(nmse(one, logits[0]) for one in logits) < 1e-6


# -- behind other text


def test_into_a_sequence(plain: Context, shared: Path, path: Path) -> None:
    written(shared, "llama-dense", path)
    sequence = plain.sequence()
    assert sequence.load(path) is sequence
    assert sequence.inexact_from is None
    check_logits(plain, sequence.logits, TEXT)


def test_behind_the_text_of_a_sequence(plain: Context, shared: Path, path: Path) -> None:
    written(shared, "llama-dense", path)
    sequence = plain.sequence(text(2, 10))
    unchanged(plain, PositionError, "load it behind", lambda: sequence.load(path))
    sequence.push(3)
    sequence.load(path, positions=11)
    assert sequence.tokens == [*text(2, 10), 3, *TEXT]
    assert sequence.positions.tolist() == list(range(51))
    assert sequence.inexact_from == 11
    sequence.append([5])
    known = sequence.trim(41).inexact_from
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
def test_states_and_windows_only_into_what_is_empty(shared: Path, arch: str, path: Path) -> None:
    written(shared, arch, path)
    with opened(shared, arch, **F32) as context:
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
    assert sequence.inexact_from is None
    assert np.array_equal(sequence.logits, logits)


# -- at other positions


@pytest.mark.parametrize("where", [0, 1, 17, 300])
def test_positions_move_and_k_is_rotated(
    plain: Context, shared: Path, path: Path, where: int
) -> None:
    written(shared, "llama-dense", path)
    loaded = plain.load(path, positions=where)
    assert loaded.positions.tolist() == list(range(where, where + 40))
    assert loaded.inexact_from == (0 if where else None)
    assert (loaded.saved_text().logits is None) == (where > 0)  # they are those of another position
    other = plain.sequence()
    batch = Batch.of(TEXT, other.seq_id, range(where, where + 40), logits="last")
    wanted = [plain.decode(batch)[-1], other.append([7]).logits]
    assert nmse(loaded.logits, wanted[0]) < SAME
    assert nmse(loaded.append([7]).logits, wanted[1]) < SAME


@pytest.mark.parametrize("where", [-1, 2**31, 1.5, True])
def test_positions_that_there_are_not(plain: Context, shared: Path, path: Path, where: Any) -> None:
    written(shared, "llama-dense", path)
    unchanged(plain, OptionError, "positions", lambda: plain.load(path, positions=where))
    unchanged(plain, PositionError, "largest", lambda: plain.load(path, positions=2**31 - 20))


def test_what_cannot_be_rotated(
    plain: Context, shared: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(shared, "llama-dense", path)
    plain.sequence(TEXT)
    monkeypatch.setattr(type(plain.cache), "can_shift", property(lambda _: False))
    unchanged(plain, ShiftUnsupported, "rotated", lambda: plain.load(path, positions=3))
    assert plain.load(path, positions=0).tokens == TEXT


@pytest.mark.parametrize("arch", ["gemma3-dense", "jamba-dense", "mamba-dense"])
def test_positions_where_there_are_states_or_windows(shared: Path, arch: str, path: Path) -> None:
    written(shared, arch, path)
    with opened(shared, arch, **F32) as context:
        loaded = context.load(path, positions=5)
        assert loaded.positions.tolist() == list(range(5, 45))
        other = context.sequence()
        batch = Batch.of(TEXT, other.seq_id, range(5, 45), logits="last")
        wanted = [context.decode(batch)[-1], other.append([7]).logits]
        assert nmse(loaded.append([7]).logits, wanted[1]) < SAME
        assert loaded.inexact_from == 0


# -- parts


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 7), (0, None), (5, 12), (5, None), (40, 40), (0, 0)]
)
def test_a_part(plain: Context, shared: Path, path: Path, start: int, stop: int | None) -> None:
    written(shared, "llama-dense", path)
    loaded = plain.load(path, start=start, stop=stop)
    assert loaded.tokens == TEXT[start:stop]
    assert loaded.positions.tolist() == list(range(40))[start:stop]
    assert loaded.inexact_from == (0 if start and loaded.tokens else None)
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


@pytest.mark.slow
@pytest.mark.parametrize("arch", [*WINDOWED, *HYBRID, *RECURRENT])
@pytest.mark.parametrize("n", [40, 400])
def test_the_beginning_of_states_and_windows(shared: Path, arch: str, n: int, path: Path) -> None:
    tokens = text(1, n)
    written(shared, arch, path, tokens)
    with opened(shared, arch, **F32) as context:
        loaded = context.load(path, stop=n - 10)
        assert loaded.tokens == tokens[: n - 10]
        loaded.append([7])
        check_logits(context, loaded.logits, [*tokens[: n - 10], 7])
        assert loaded.inexact_from is None
        before = seen(context)
        for start, stop in ((5, None), (5, 12), (n - 1, None)):
            with pytest.raises(NotSupported):
                context.load(path, start=start, stop=stop)
            assert seen(context) == before


@pytest.mark.parametrize(
    "arguments",
    [{"start": -1}, {"start": 41}, {"stop": 41}, {"start": 7, "stop": 6}, {"stop": "x"}],
)
def test_a_part_that_there_is_not(
    plain: Context, shared: Path, path: Path, arguments: dict[str, Any]
) -> None:
    written(shared, "llama-dense", path)
    unchanged(plain, OptionError, "start|stop", lambda: plain.load(path, **arguments))
