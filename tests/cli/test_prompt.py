"""Where a prompt comes from; reading it in pieces is reading it at once."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import typer

from kvcellar.cli import prompt as prompts
from kvcellar.cli.interrupt import Interrupt
from kvcellar.cli.prompt import read_prompt, read_tokens
from kvcellar.errors import BatchError, CacheFull
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.runtime.sequence import Sequence

N_UBATCH = 16


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_prompt_comes_from_the_argument_or_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped\n\n"))
    assert read_prompt("given") == "given"
    assert read_prompt("") == ""
    assert read_prompt("-") == "piped\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    assert read_prompt(None) == "piped"


def test_nobody_waits_at_a_terminal_for_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(typer.BadParameter, match="pipe one in"):
        read_prompt(None)


@pytest.fixture
def context(talker: Path) -> Iterator[Context]:
    with Model.from_gguf(talker, n_threads=1) as model:
        yield model.context(n_ctx=64, n_seq_max=2, n_ubatch=N_UBATCH)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 32, 45])
def test_pieces_give_the_logits_of_one_call(context: Context, n: int) -> None:
    ids = [i % 100 for i in range(n)]
    whole, pieces = context.sequence(ids), context.sequence()
    expected = whole.logits.copy()
    whole.close()
    read_tokens(pieces, ids, Interrupt())
    assert pieces.tokens == ids
    np.testing.assert_array_equal(pieces.logits, expected)


def test_tokens_that_wait_go_into_the_first_piece(context: Context) -> None:
    sequence = context.sequence([1, 2])
    sequence.push(3)
    n_before = context.timings.n_decodes
    read_tokens(sequence, list(range(30)), Interrupt())
    assert sequence.tokens == [1, 2, 3, *range(30)]
    assert context.timings.n_decodes - n_before == 2  # 16 and 15


def test_a_microbatch_of_one_token_is_no_trouble(context: Context) -> None:
    sequence = context.model.context(n_ctx=16, n_ubatch=1).sequence([1])
    sequence.push(2)
    read_tokens(sequence, [3, 4], Interrupt())
    assert sequence.tokens == [1, 2, 3, 4]


def test_an_empty_prompt_is_refused(context: Context) -> None:
    with pytest.raises(BatchError, match="empty"):
        read_tokens(context.sequence(), [], Interrupt())


def test_what_does_not_fit_changes_nothing(context: Context) -> None:
    sequence = context.sequence([1, 2, 3])
    with pytest.raises(CacheFull, match=r"62 cells needed, 61 free.*--n-ctx"):
        read_tokens(sequence, [1] * 62, Interrupt())
    assert sequence.tokens == [1, 2, 3]


def test_ctrl_c_is_heard_between_pieces(context: Context) -> None:
    sequence, interrupt = context.sequence(), Interrupt()
    interrupt.pressed = True
    with pytest.raises(KeyboardInterrupt):
        read_tokens(sequence, [1, 2], interrupt)
    assert len(sequence) == 0


@pytest.mark.slow
def test_a_terminal_gets_a_bar_and_loses_it_again(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Sequence):
        def append(self, prompt: str | Iterable[int], *, heal: bool = False) -> Sequence:
            time.sleep(0.3)
            return super().append(prompt, heal=heal)

    terminal = Terminal()
    monkeypatch.setattr(prompts, "sys", SimpleNamespace(stderr=terminal))
    monkeypatch.setattr(prompts, "PATIENCE", 0.01)
    read_tokens(Slow(context, context.sequence().held), [1] * 40, Interrupt())
    text = terminal.getvalue()
    assert "reading the prompt" in text
    assert "32/40" in text
    assert text.endswith("\x1b[1A\x1b[2K")


def test_a_pipe_gets_no_bar(
    context: Context, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prompts, "PATIENCE", 0.0)
    read_tokens(context.sequence(), [1] * 40, Interrupt())
    assert capsys.readouterr() == ("", "")
