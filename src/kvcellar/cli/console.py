"""Where text goes: consoles that are plain unless a person's terminal is at the other end.

Plain means no escape code at all. That is the case when the stream is no terminal, when
``NO_COLOR`` is set, and when ``TERM`` says that the terminal knows no escape codes.

Ctrl-C as a question that is asked between tokens, so that no step is cut in two.

Sizes and ages as people write and read them: 20G, 7d.

Generated text on its way to stdout.

What a model writes must not drive a terminal: control characters are dropped there. A file or a
pipe gets the text as it is.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from time import perf_counter
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import typer

from kvcellar.errors import OptionError
from kvcellar.stores.base import MAX_AGE_S

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Interrupt:
    """While open, the first Ctrl-C only sets ``pressed``; the second raises as usual."""

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def check(self) -> None:
        """Raise if Ctrl-C was pressed; called where nothing is half done.

        Raises:
            KeyboardInterrupt: it was.
        """
        if self.pressed:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupt:
        self.pressed = False
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, _number: int, _frame: FrameType | None) -> None:
        self.check()
        self.pressed = True


_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_MAX_BYTES = 2**60
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(?:i?b)?", re.IGNORECASE | re.ASCII)
_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([smhdw])", re.IGNORECASE | re.ASCII)


def parse_size(text: str, option: str) -> int:
    """Bytes; units are powers of 1024, whether K, KB or KiB.

    Raises:
        OptionError: no such size; names the option.
    """
    if (match := _SIZE.fullmatch(text.strip())) is None:
        raise OptionError(f"{option} {text!r}: give bytes, or a size such as 500M or 20G")
    n_bytes = float(match[1]) * _SIZES[match[2].lower()]
    if n_bytes > _MAX_BYTES:
        raise OptionError(f"{option} {text:.40}: give at most {_MAX_BYTES >> 40}T")
    return int(n_bytes)


def parse_age(text: str, option: str) -> float:
    """Seconds.

    Raises:
        OptionError: no such age; names the option.
    """
    if (match := _AGE.fullmatch(text.strip())) is None:
        raise OptionError(f"{option} {text!r}: give an age such as 90s, 30m, 12h, 7d or 2w")
    seconds = float(match[1]) * _AGES[match[2].lower()]
    if seconds > MAX_AGE_S:
        raise OptionError(f"{option} {text:.40}: give at most {MAX_AGE_S // _AGES['d']}d")
    return seconds


def human_age(seconds: float) -> str:
    """How long ago, in one unit: 3 h."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def is_plain(stream: TextIO) -> bool:
    """Whether no escape code may be written to the stream."""
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return True
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def console_for(stream: TextIO) -> Console:
    """A console on the stream, which shows text as it is: no markup, no emoji codes."""
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
    """Print parts below each other; plain lines end where their text ends."""
    if console.is_terminal:
        console.print(*parts, sep="\n")
        return
    with console.capture() as capture:
        console.print(*parts, sep="\n")
    for line in capture.get().splitlines():
        print(line.rstrip(), file=console.file)


def note(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def complain(error: Exception | str) -> None:
    """An error as one line on stderr."""
    note(f"error: {' '.join(str(error).split())}")


def read_prompt(prompt: str | None) -> str:
    """The prompt as given, or all of stdin when it is ``-`` or absent.

    A single line break at the end of stdin is dropped.

    Raises:
        typer.BadParameter: nothing was given and stdin is a terminal.
    """
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
    if prompt in (None, "-"):
        return sys.stdin.read().removesuffix("\n")
    assert prompt is not None
    return clean(prompt)


def clean(text: str) -> str:
    """Text whose undecodable bytes, surrogates to Python, became replacement characters."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def harmless(text: str) -> str:
    """Text without the control characters that could drive a terminal; tab and newline stay."""
    return text.translate(_CONTROLS)


def human_bytes(n: float) -> str:
    """``n`` bytes for people: 22.5 KiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


class Output:
    """Writes pieces of text as they come, and knows when the first one came.

    Attributes:
        seconds_to_first: from the making of this object to the first text; None before.
    """

    def __init__(self) -> None:
        self._start = perf_counter()
        self._last = ""
        self._for_terminal = sys.stdout.isatty()
        self.seconds_to_first: float | None = None

    def write(self, text: str) -> None:
        """Write a piece and let it be seen."""
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
