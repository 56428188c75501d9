"""``kvcellar chat``: turns, commands, and what a person at a terminal gets."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.helpers import Invoke, Start

GREEDY = ("-n", "6", "--temp", "0", "--threads", "1", "--n-ctx", "256")


def test_each_piped_line_is_answered(invoke: Invoke, talker: Path) -> None:
    result = invoke("chat", talker, *GREEDY, stdin="one\n\n  \ntwo\n")
    assert result.exit_code == 0
    assert result.stderr == "(cut off after 6 tokens; -n allows more)\n" * 2
    assert len(result.stdout) == 2 * 7


def test_stats_say_what_was_reused(invoke: Invoke, talker: Path) -> None:
    result = invoke("chat", talker, *GREEDY, "--stats", stdin="one\ntwo\n")
    first, second = result.stderr.splitlines()
    assert first.startswith("0 of ")
    assert int(second.split()[0]) > 15
    assert "of 256 cells" in second


def test_commands(invoke: Invoke, talker: Path) -> None:
    lines = (
        "/undo",
        "one",
        "/undo",
        "/cells",
        "/help",
        "/reset",
        "one",
        "/exit",
        "two",
    )
    result = invoke("chat", talker, *GREEDY, stdin="\n".join(lines))
    assert result.exit_code == 0
    answer, again = result.stdout[:7], result.stdout[7:]
    assert answer == again
    for text in (
        "no turn to take back",
        "took back the last turn",
        "0 of 256 cells used",
        "Ctrl-C stops an answer",
        "all cells are free",
    ):
        assert text in result.stderr
    assert "\x1b" not in result.output


def test_a_full_cache_is_explained_and_can_be_emptied(invoke: Invoke, talker: Path) -> None:
    result = invoke("chat", talker, *GREEDY, stdin=f"{'x' * 300}\n/reset\nhello\n")
    assert result.exit_code == 1
    assert "error: the cache is full" in result.stderr
    assert "/reset starts over" in result.stderr
    assert len(result.stdout) == 7


def test_an_unknown_command_is_a_line_that_failed(invoke: Invoke, talker: Path) -> None:
    result = invoke("chat", talker, *GREEDY, stdin="/nonsense x\n/help\none\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: unknown command /nonsense: /help lists the commands\n")
    assert len(result.stdout) == 7


def test_an_answer_that_fills_the_cache_names_the_option(invoke: Invoke, talker: Path) -> None:
    args = ("-n", "-1", "--temp", "0", "--threads", "1", "--n-ctx", "64")
    result = invoke("chat", talker, *args, stdin="hello\nagain\n")
    assert result.exit_code == 1
    first, second, third = result.stderr.splitlines()
    assert "0 free: use a larger --n-ctx" in first
    assert second == "(the context is full: the oldest turn was dropped)"
    assert "0 free: use a larger --n-ctx" in third


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_person_gets_a_prompt_and_ends_with_ctrl_d(start: Start, talker: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    process = start("chat", talker, *GREEDY, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    for expected, typed in (
        (b"/help lists the commands", b"hello\n"),
        (b"hello", b"/undo\n"),
        (b"took back the last turn", b""),
    ):
        _read_until(ours, expected, b"> ")
        os.write(ours, typed)
    # One signal may be lost: between the prompt and the wait for a key nobody listens.
    _read_until(
        ours,
        b"(Ctrl-D or /exit ends the conversation)",
        nudge=lambda: process.send_signal(signal.SIGINT),
    )
    _read_until(ours, b"> ")
    os.write(ours, b"\x04")
    assert process.wait(timeout=60) == 0
    os.close(ours)


def _read_until(terminal: int, *expected: bytes, nudge: Callable[[], None] | None = None) -> None:
    """Read until all that is expected has come, one after the other; nudge while nothing comes."""
    screen, deadline = b"", time.monotonic() + 60
    for part in expected:
        before = len(screen)
        while part not in screen[before:]:
            assert time.monotonic() < deadline, f"{part!r} did not come after {screen!r}"
            if select.select([terminal], [], [], 0.3)[0]:
                screen += os.read(terminal, 1)
            elif nudge:
                nudge()
    assert b"Traceback" not in screen
