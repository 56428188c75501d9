"""What goes into a store, checked: keys, the pieces of a value, notes; and how much it may take."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from kvcellar.errors import OptionError
from kvcellar.snapshot.stores.base import FIELDS, Buffer, Note

MAX_NOTE = 1 << 16
"""Characters that a note may take as JSON."""

REMEMBERED = 10_000
"""How many evicted keys a store remembers."""

MAX_AGE_S = 100 * 365 * 24 * 3600
"""The longest time, in seconds, that can be asked for; servers take no time without end."""

_KEY = re.compile(r"[0-9a-z_-][0-9a-z._-]{0,127}")


def check_key(key: str) -> str:
    """The key, refused if it could be taken for anything else, such as a path."""
    if not is_key(key):
        raise OptionError(
            f"key {key!r}: a key is 1 to 128 characters of 0-9, a-z, '.', '_' and '-', "
            "and does not begin with a dot"
        )
    return key


def is_key(key: object) -> bool:
    """Whether a store can keep something under it."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def check_budget(max_bytes: int | None) -> int | None:
    """The budget, refused if nothing can be within it."""
    if max_bytes is not None and max_bytes < 0:
        raise OptionError(f"max_bytes {max_bytes} is negative: give a size in bytes, or None")
    return max_bytes


def flat(value: Sequence[Buffer]) -> list[memoryview]:
    """The pieces as plain bytes, without a copy; empty ones left out."""
    try:
        views = [memoryview(piece) for piece in value]
        return [view.cast("B") for view in views if view.nbytes]
    except TypeError as error:
        raise OptionError(
            f"value of {type(value).__name__}: give a list of contiguous buffers: {error}"
        ) from None


def encode_note(note: Note | None) -> str:
    """A note as JSON."""
    found: dict[object, object] = dict((note or {}).items())
    for name, content in found.items():
        if not isinstance(name, str) or not isinstance(content, (str, int)):
            raise OptionError(f"note {name!r}: {content!r}: a note has names, and str or int each")
    text = json.dumps(found)
    if len(text) > MAX_NOTE:
        raise OptionError(f"note of {len(text)} characters: at most {MAX_NOTE} are kept")
    return text


def keys_in(note: Note | None) -> list[str | None]:
    """Of each field, the key that a value with such a note is found by."""
    said = [(note or {}).get(field) for field in FIELDS]
    return [key if isinstance(key, str) and is_key(key) else None for key in said]


def decode_note(text: str) -> Note:
    """What :func:`encode_note` was given; empty if it cannot be read."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
