"""Text on its way to stdout and stderr.

Output is plain, without a single escape code, unless a person's terminal is at the other end:
where the stream is no terminal, where ``NO_COLOR`` is set, and where ``TERM`` names a terminal
without escape codes.

Generated text must not drive a terminal: control characters are dropped there. A file or a pipe
gets the text as it is.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, RenderableType
    from rich.table import Table

_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def is_plain(stream: TextIO) -> bool:
    """Return whether no escape code may be written to the stream."""
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return True
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def console_for(stream: TextIO) -> Console:
    """Return a console on the stream that prints text as it is: no markup, no emoji codes."""
    from rich.console import Console

    plain = is_plain(stream)
    return Console(
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
    from rich.table import Table

    table = Table(box=None, show_header=False, title=harmless(title), title_justify="left")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(harmless(name), harmless(value))
    return table


def columns_table(
    left: Iterable[str], right: Iterable[str], *, no_wrap: bool = False, **options: Any
) -> Table:
    """Return a table with a head: columns aligned left, then columns aligned right."""
    from rich import box
    from rich.table import Table

    table = Table(**{"box": box.SIMPLE_HEAD, "title_justify": "left", **options})
    for head in left:
        table.add_column(head, no_wrap=no_wrap)
    for head in right:
        table.add_column(head, justify="right", no_wrap=no_wrap)
    return table


def print_json(data: object) -> None:
    """Print JSON to stdout."""
    json.dump(data, sys.stdout, indent=2)
    sys.stdout.write("\n")


def note(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)


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


def one_line(error: Exception | str) -> str:
    """Return a message without line breaks."""
    return " ".join(str(error).split())


def clean(text: str) -> str:
    """Return text with replacement characters for bytes that could not be decoded."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def harmless(text: str) -> str:
    """Return text without the control characters that could drive a terminal."""
    return text.translate(_CONTROLS)


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
        sys.stdout.write(harmless(text) if self._for_terminal else text)
        sys.stdout.flush()

    def end(self) -> None:
        """End the line, if one was begun."""
        if self._last and not self._last.endswith("\n"):
            self.write("\n")
        self._last = ""
