"""What a state demands of a batch: no gaps, and no token that would mix two states."""

from __future__ import annotations

from collections.abc import Sequence

from kvcellar.batch import Rows
from kvcellar.cellsets import unpack_owners
from kvcellar.errors import BatchError, PositionError


def check_follows(rows: Rows, last: Sequence[int], states: Sequence[int]) -> None:
    """Refuse a batch that states cannot absorb.

    Args:
        rows: the batch.
        last: of each sequence its last position, -1 if it is empty and may start anywhere.
        states: of each sequence a number that tells its state from others.

    Raises:
        PositionError: a position does not follow on; names both.
        BatchError: a token's owners have not the same state.
    """
    last, states = list(last), list(states)
    owners: list[list[int]] = [[] for _ in range(len(rows))]
    for row, seq in zip(*(ids.tolist() for ids in unpack_owners(rows.owners)), strict=True):
        owners[row].append(seq)
    for row, (at, seqs) in enumerate(zip(rows.positions.tolist(), owners, strict=True)):
        for seq in seqs:
            if last[seq] >= 0 and at != last[seq] + 1:
                raise PositionError(
                    f"token {row} of sequence {seq} stands at position {at}, but the sequence "
                    f"ends at {last[seq]}: a state has to absorb its tokens without a gap"
                )
            if states[seq] != states[seqs[0]]:
                raise BatchError(
                    f"token {row} is shared by sequences {seqs}, which do not share their state: "
                    "give each its own token, or seq_cp one to the others first"
                )
        for seq in seqs:
            last[seq], states[seq] = at, -1 - row  # a state that only these have
