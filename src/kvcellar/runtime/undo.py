"""What a rollback of the cache takes back in the sequences that live in it.

Sequences that were closed meanwhile are open again; those that were made are closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.cache.transaction import Undo

if TYPE_CHECKING:
    from kvcellar.runtime.sequence import Sequence


def remember_sequences(sequences: dict[int, Sequence], free_ids: list[int]) -> Undo:
    """What puts a context's sequences back as they are now."""
    kept, kept_ids = dict(sequences), list(free_ids)
    undos = [sequence.remember() for sequence in kept.values()]

    def undo() -> None:
        made = [s for seq_id, s in sequences.items() if kept.get(seq_id) is not s]
        sequences.clear()
        for sequence in made:
            sequence.close()  # no longer known, so no cell is touched
        sequences.update(kept)
        free_ids[:] = kept_ids
        for restore in undos:
            restore()

    return undo
