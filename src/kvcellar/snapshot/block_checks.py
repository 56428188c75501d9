"""Whether a value is the block of a text that its key and its note say it is."""

from __future__ import annotations

from kvcellar.cache.content import CacheContent
from kvcellar.errors import SnapshotFileError
from kvcellar.snapshot.keys import block_key
from kvcellar.snapshot.reading import snapshot_from
from kvcellar.stores.base import Buffer, Note


def check_block(key: str, note: Note, value: Buffer) -> None:
    """See that a value is the block of that key: its tokens, in the text that the key stands for.

    That K and V are those of the tokens nobody can see.

    Raises:
        SnapshotFileError: it is not.
        LibraryError: it is compressed by a library that is not installed.
    """
    tokens = _tokens_of(key, note)
    content = snapshot_from(value).content
    if content.start != note.get("start") or tokens_of(content) != tokens:
        raise SnapshotFileError("the value holds another text than its key says")


def tokens_of(content: CacheContent) -> list[int] | None:
    """The tokens of a block, by the part that has all of them; nothing is believed to be sound."""
    if content.groups:
        tokens: list[int] = content.groups[0].tokens.tolist()
        return tokens
    held = content.states.held if content.states is not None else ()
    return held[0].tokens.tolist() if held and held[0] else None


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
