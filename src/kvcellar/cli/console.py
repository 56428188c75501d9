"""Text on its way to stdout and stderr: nothing in the commands writes there but this module.

Output is plain, without a single escape code, unless a person's terminal is at the other end:
where the stream is no terminal, where ``NO_COLOR`` is set, and where ``TERM`` names a terminal
without escape codes.

Texts come from strangers: metadata of a model, messages of its template, what it generates, heads
of snapshots, notes of stores, names of files. None of it may drive a terminal, so whatever is
printed goes through :func:`visible`, which spells out control characters. The one exception is the
text that a model generates, where stdout is no terminal: that is data, and is passed on as it is.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

# C0 and C1 controls and DEL, marks and overrides of writing direction, the separators that some
# terminals take for line breaks, and halves of surrogate pairs, which stand for bytes of no text.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]"
)
_UNSAFE_IN_LINE = re.compile(f"[\t\n{_UNSAFE.pattern[1:]}")


def visible(text: str) -> str:
    r"""Return text with ``\x1b`` and the like in place of what could drive a terminal.

    Line breaks and tabs stay. Each character is replaced by itself, so a text may come in pieces.
    """
    return _UNSAFE.sub(_spelled, text)


def visible_line(text: str) -> str:
    r"""Return text that cannot drive a terminal, with ``\n`` and ``\t`` spelled out too.

    For names and values, which must not look like further lines or columns.
    """
    return _UNSAFE_IN_LINE.sub(_spelled, text)


def _spelled(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def is_plain(stream: TextIO) -> bool:
    """Return whether no escape code may be written to the stream."""
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return True
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def console_for(stream: TextIO) -> Console:
    """Return a console on the stream: no markup, no emoji codes, and no controls but its own."""
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(visible(text), **options)  # before widths are computed

        def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
            for segment in super().render(*args, **options):
                yield segment if segment.control else Segment(visible(segment.text), segment.style)

    plain = is_plain(stream)
    return SafeConsole(
        file=stream,
        force_terminal=not plain,
        force_interactive=not plain,
        color_system=None if plain else "auto",
        markup=False,
        emoji=False,
        highlight=False,
    )


def show(console: Console, *parts: RenderableType) -> None:
    """Print parts below each other; plain lines have no trailing blanks."""
    if console.is_terminal:
        console.print(*parts, sep="\n")
        return
    with console.capture() as capture:
        console.print(*parts, sep="\n")
    for line in capture.get().splitlines():
        print(line.rstrip(), file=console.file)


def facts_table(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values, a line each."""
    table = _table(box=None, show_header=False, title=title, title_justify="left")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    return table


def columns_table(
    left: Iterable[str], right: Iterable[str], *, no_wrap: bool = False, **options: Any
) -> Table:
    """Return a table with a head: columns aligned left, then columns aligned right."""
    from rich import box

    table = _table(**{"box": box.SIMPLE_HEAD, "title_justify": "left", **options})
    for head in left:
        table.add_column(head, no_wrap=no_wrap)
    for head in right:
        table.add_column(head, justify="right", no_wrap=no_wrap)
    return table


def _table(title: str | None = None, **options: Any) -> Table:
    """Return a table whose cells are single lines."""
    from rich.table import Table

    class LineTable(Table):
        def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
            super().add_row(
                *(visible_line(one) if isinstance(one, str) else one for one in cells), **options
            )

    return LineTable(title=None if title is None else visible_line(title), **options)


def print_json(data: object) -> None:
    """Print JSON to stdout, in ASCII; JSON lets DEL stand in a string, a terminal does not."""
    say(*json.dumps(data, indent=2).replace("\x7f", "\\u007f").split("\n"))


def say(*lines: str) -> None:
    """Print lines to stdout."""
    for line in lines:
        print(visible_line(line))


def note(*lines: str) -> None:
    """Print lines to stderr."""
    for line in lines:
        print(visible_line(line), file=sys.stderr, flush=True)


class Warnings(logging.Handler):
    """While entered, prints what stores and prompt caches warn of to stderr, a line each."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._loggers = [logging.getLogger(f"kvcellar.{name}") for name in ("stores", "prompts")]

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning."""
        note(f"warning: {one_line(record.getMessage())}")

    def __enter__(self) -> None:
        for logger in self._loggers:
            logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)


def complain(error: Exception | str) -> None:
    """Print an error to stderr, as one line."""
    note(f"error: {one_line(error)}")


def show_traceback(error: BaseException) -> None:
    """Print an error to stderr as the interpreter does, messages included, which are no code."""
    note(*"".join(traceback.format_exception(error)).rstrip("\n").split("\n"))


def one_line(error: Exception | str) -> str:
    """Return a message without line breaks."""
    return " ".join(str(error).split())


def clean(text: str) -> str:
    """Return text with replacement characters for bytes that could not be decoded."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class Output:
    """Writes pieces of generated text to stdout, and remembers when the first one came.

    Attributes:
        seconds_to_first: from the creation of this object to the first text; None before.
    """

    def __init__(self) -> None:
        self._start = perf_counter()
        self._last = ""
        self._for_terminal = sys.stdout.isatty()
        self.seconds_to_first: float | None = None

    def write(self, text: str) -> None:
        """Write a piece and flush it."""
        if self.seconds_to_first is None:
            self.seconds_to_first = perf_counter() - self._start
        self._last = text or self._last
        sys.stdout.write(visible(text) if self._for_terminal else text)
        sys.stdout.flush()

    def end(self) -> None:
        """End the line, if one was begun."""
        if self._last and not self._last.endswith("\n"):
            self.write("\n")
        self._last = ""
