"""Whether a value is the block of a text that its key and its note say it is."""

from __future__ import annotations

from collections.abc import Iterable

from kvcellar.errors import SnapshotFileError
from kvcellar.snapshot.container import from_bytes
from kvcellar.snapshot.keys import block_key
from kvcellar.snapshot.native import understand
from kvcellar.snapshot.saved import Snapshot
from kvcellar.snapshot.stores.base import Buffer, Note


def read_value(value: Buffer) -> Snapshot:
    """The snapshot in a value, whoever wrote it.

    Raises:
        SnapshotFileError: it is none, or damaged.
        LibraryError: it is compressed by a library that is not installed.
    """
    try:
        return understand(from_bytes(value))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise SnapshotFileError(f"the value is no snapshot: {error!r:.200}") from error


def check_block(key: str, note: Note, value: Buffer) -> None:
    """See that a value is the block of that key: its tokens, in the text that the key stands for.

    That K and V are those of the tokens nobody can see.

    Raises:
        SnapshotFileError: it is not.
        LibraryError: it is compressed by a library that is not installed.
    """
    tokens = _tokens_of(key, note)
    content = read_value(value).content
    found: Iterable[int] | None = None
    if content.groups:
        found = content.groups[0].tokens.tolist()
    elif content.states is not None and content.states.held and content.states.held[0]:
        found = content.states.held[0].tokens.tolist()
    if content.start != note.get("start") or found != tokens:
        raise SnapshotFileError("the value holds another text than its key says")


def _tokens_of(key: str, note: Note) -> list[int]:
    """The tokens in a note that its key agrees with."""
    try:
        tokens = [int(word) for word in str(note["tokens"]).split()]
        expected = block_key(str(note["parent"]), tokens)
    except (KeyError, ValueError, OverflowError) as error:
        raise SnapshotFileError(f"the note says nothing of a block: {error!r:.200}") from error
    if expected != key:
        raise SnapshotFileError("the note is about another block than the key")
    return tokens
