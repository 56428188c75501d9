"""What goes to which stream, and when it is plain."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import unicodedata
from pathlib import Path

import pytest
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import kvcellar.cli
from kvcellar.cli.console import (
    Output,
    clean,
    complain,
    console_for,
    facts_table,
    is_plain,
    print_json,
    show,
    visible,
    visible_line,
)

BIDI_CONTROLS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


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


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_cannot_drive_the_terminal(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    text = "a\x1b[2Jb\x9b1mc\r\x07\td\u202ee\n"
    expected = "a\\x1b[2Jb\\x9b1mc\\r\\x07\td\\u202ee\n"
    for stream, printed in ((Terminal(), expected), (io.StringIO(), text)):
        monkeypatch.setattr(sys, "stdout", stream)
        output = Output()
        for piece in [text] if whole else text:
            output.write(piece)
        assert stream.getvalue() == printed


def test_what_is_printed_has_no_character_that_drives_a_terminal() -> None:
    every = "".join(map(chr, range(0x110000)))
    kinds = {unicodedata.category(c) for c in visible(every) if c not in "\n\t"}
    assert not kinds & {"Cc", "Cs", "Zl", "Zp"}
    assert not {unicodedata.bidirectional(c) for c in visible(every)} & BIDI_CONTROLS
    assert not set(visible(every)) & set("\u061c\u200e\u200f")
    assert not set(visible_line(every)) & set("\n\t")
    kept = "\n\té日🙂👩\u200d💻\u05d0\u0628 [bold] \\x1b"
    assert visible(kept) == kept


def test_rich_lets_no_control_through_but_its_own() -> None:
    hostile = "a\x1b]0;x\x07\x9b31m\u202e\x7f\udce9[red]b"
    shown = "a\\x1b]0;x\\x07\\x9b31m\\u202e\\x7f\\udce9[red]b"
    table = facts_table(hostile, [(hostile, f"{hostile}\nweights none\tmore")])
    parts: list[RenderableType] = [
        table,
        hostile,
        Text(hostile),
        Group(Padding(Text(hostile))),
        Panel(hostile),
    ]
    for stream in (io.StringIO(), Terminal()):
        console = console_for(stream)
        console.width = 300
        show(console, *parts)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
        assert plain.count("a\\x1b]0;x") == 7
        assert plain.count(shown) == 5  # Text drops some of them itself
        assert f"{shown}\\nweights none\\tmore" in plain
        assert visible(plain) == plain


def test_json_is_ascii_without_controls(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"a\x7f\x1b": "\x00\n\x9b\u202e\udce9", "b": [1.5, None]}
    print_json(data)
    out = capsys.readouterr().out
    assert json.loads(out) == data
    assert out.isascii()
    assert visible(out) == out


def test_nothing_writes_to_a_terminal_but_this_module() -> None:
    """``print``, ``echo`` and streams are used in one place; consoles come from ``console_for``."""
    found = []
    for path in sorted(Path(kvcellar.cli.__file__).parent.glob("*.py")):
        if path.name == "console.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name.split(".")[-1] in {"print", "echo", "secho", "Console", "print_exc"}:
                    found.append(f"{path.name}: {name}")
                if re.fullmatch(r"sys\.(stdout|stderr)\.write(lines)?", name):
                    found.append(f"{path.name}: {name}")
    allowed = {"chat.py: console_for(sys.stderr).print", "tour_steps.py: self.console.print"}
    assert set(found) == allowed


def test_output_knows_when_the_first_text_came(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    assert vars(output)["seconds_to_first"] is None
    output.write("a")
    first = output.seconds_to_first
    output.write("b")
    assert output.seconds_to_first == first is not None
    assert capsys.readouterr().out == "ab"
