"""Where text goes: consoles that are plain unless a person's terminal is at the other end.

Plain means no escape code at all. That is the case when the stream is no terminal, when
``NO_COLOR`` is set, and when ``TERM`` says that the terminal knows no escape codes.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


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
