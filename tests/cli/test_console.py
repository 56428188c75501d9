"""What goes to which stream, and when it is plain."""

from __future__ import annotations

import io
import sys

import pytest
from rich.table import Table

from kvcellar.cli.console import (
    Output,
    clean,
    complain,
    console_for,
    is_plain,
    show,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_not_plain_unless_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_plain(io.StringIO())
    assert not is_plain(Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert is_plain(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert is_plain(Terminal())


def test_plain_output_has_no_escape_codes_and_no_trailing_blanks() -> None:
    table = Table("a", "b")
    table.add_row("1", "x" * 5)
    for stream in (io.StringIO(), Terminal()):
        show(console_for(stream), "", table)
        assert ("\x1b" in stream.getvalue()) == stream.isatty()
    plain = io.StringIO()
    show(console_for(plain), table, "end   ")
    assert all(line == line.rstrip() for line in plain.getvalue().splitlines())


def test_markup_in_text_is_text() -> None:
    stream = io.StringIO()
    show(console_for(stream), "[bold]not[/bold] :smile:")
    assert stream.getvalue() == "[bold]not[/bold] :smile:\n"


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    complain("two\nlines")
    assert capsys.readouterr().err == "error: two lines\n"


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert clean("caf\udce9") == "caf�"


def test_output_ends_the_line_it_began(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.end()
    for text in ("a", "b\n", "c"):
        output.write(text)
        output.end()
        output.end()
    assert capsys.readouterr().out == "a\nb\nc\n"


def test_a_model_cannot_drive_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b[2Jb\x9b1mc\r\x07\td\n"
    for stream, expected in ((Terminal(), "a[2Jb1mc\td\n"), (io.StringIO(), text)):
        monkeypatch.setattr(sys, "stdout", stream)
        Output().write(text)
        assert stream.getvalue() == expected


def test_output_knows_when_the_first_text_came(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    assert vars(output)["seconds_to_first"] is None
    output.write("a")
    first = output.seconds_to_first
    output.write("b")
    assert output.seconds_to_first == first is not None
    assert capsys.readouterr().out == "ab"
