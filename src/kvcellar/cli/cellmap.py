"""The cells of a small cache, a letter each: who owns which.

A cell of one sequence shows its letter, ``a`` for sequence 0; a shared cell the number of its
owners; a free cell a dot. Colours say the same once more, so that nothing is lost without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from kvcellar.cache.view import CacheView

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
_SHARED, _FREE = "bold black on white", "dim"
_INDENT = 5


def letter(seq_id: int) -> str:
    """The letter of a sequence."""
    return chr(ord("a") + seq_id % 26)


def colour(seq_id: int) -> str:
    """The colour of a sequence."""
    return _COLOURS[seq_id % len(_COLOURS)]


def badge(seq_id: int) -> Text:
    """The letter of a sequence as its cells show it."""
    return Text.assemble((letter(seq_id), _style((seq_id,))))


def cell_map(view: CacheView, width: int) -> Text:
    """A row of cells a line, each line begun with the number of its first cell."""
    per_row = next((n for n in (64, 32) if n + _INDENT <= width), 16)
    text = Text()
    for cell, owners in enumerate(view.sequences):
        if cell % per_row == 0:
            text.append("\n" if cell else "").append(f"{cell:>{_INDENT - 1}} ", "dim")
        text.append(_glyph(owners), _style(owners))
    return text


def legend(view: CacheView, names: Mapping[int, str]) -> Text:
    """What the letters of a map mean: sequences by name, shared and free cells."""
    text = Text(" " * _INDENT)
    for seq_id, name in names.items():
        text.append_text(badge(seq_id)).append(f" {name}   ")
    for n in sorted({len(owners) for owners in view.sequences if len(owners) > 1}):
        text.append(str(n), _SHARED).append(f" shared by {n}   ")
    return text.append(".", _FREE).append(" free")


def _glyph(owners: tuple[int, ...]) -> str:
    if not owners:
        return "."
    return letter(owners[0]) if len(owners) == 1 else str(min(len(owners), 9))


def _style(owners: tuple[int, ...]) -> str:
    if not owners:
        return _FREE
    return f"black on {colour(owners[0])}" if len(owners) == 1 else _SHARED
