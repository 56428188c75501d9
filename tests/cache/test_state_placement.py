"""Which rows a batch reads and writes, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvcellar.batch import MicroBatch
from kvcellar.cache.state_placement import members_of, plan_rows
from kvcellar.cellsets import pack_owners
from kvcellar.errors import BatchError, CacheFull

ZERO = 9  # the row of zeros


def micro(*owners: Sequence[int], n_seq_max: int = 80) -> MicroBatch:
    """A microbatch whose tokens have these owners."""
    pairs = [(row, seq) for row, seqs in enumerate(owners) for seq in seqs]
    rows, seqs = (np.array(part, np.int64) for part in zip(*pairs, strict=True))
    n = len(owners)
    bits = pack_owners(rows, seqs, n, -(-n_seq_max // 64))
    positions = np.arange(n, dtype=np.int32)
    return MicroBatch(positions, positions, None, positions, bits, positions[:0])


def moves(
    micros: Sequence[MicroBatch], rows: Sequence[int], pool: Sequence[int]
) -> list[list[tuple[int, int]]]:
    plans = plan_rows(micros, rows, pool, "").plans
    return [list(zip(plan.sources.tolist(), plan.targets.tolist(), strict=True)) for plan in plans]


def test_stretches_are_told_by_their_owners() -> None:
    assert members_of(micro([0])) == [(0,)]
    assert members_of(micro([3], [3], [1], [1])) == [(3,), (1,)]
    assert members_of(micro([0, 70], [0, 70], [64], [64])) == [(0, 70), (64,)]


def test_an_unequal_split_is_refused() -> None:
    with pytest.raises(BatchError, match=r"has \[2, 1\] tokens of sequences \[\[0\], \[1\]\]"):
        members_of(micro([0], [0], [1]))


@pytest.mark.parametrize("owners", [([0], [1], [0]), ([0, 1], [1])])
def test_a_sequence_is_not_computed_twice_at_once(owners: tuple[list[int], ...]) -> None:
    with pytest.raises(BatchError, match="computes a sequence twice at once"):
        members_of(micro(*owners))


def test_the_first_microbatch_writes_a_fresh_row_and_later_ones_go_on_there() -> None:
    batch = [micro([0], [0], [1], [1]), micro([0], [1]), micro([1])]

    assert moves(batch, [4, ZERO, 5], [1, 2, 3]) == [
        [(4, 1), (ZERO, 2)],
        [(1, 1), (2, 2)],
        [(2, 2)],
    ]


def test_sequences_that_shared_a_token_part_in_rows_of_their_own() -> None:
    batch = [micro([0, 1]), micro([0], [1]), micro([0]), micro([1])]

    assert moves(batch, [4, 4], [1, 2, 3]) == [[(4, 1)], [(1, 2), (1, 3)], [(2, 2)], [(3, 3)]]


def test_one_of_those_that_shared_leaves_the_row_to_the_other() -> None:
    assert moves([micro([0, 1]), micro([0]), micro([1])], [ZERO, ZERO], [1, 2]) == [
        [(ZERO, 1)],
        [(1, 2)],
        [(1, 1)],
    ]


def test_a_row_that_nobody_needs_any_more_is_filled_again() -> None:
    batch = [micro([0, 1]), micro([0], [1]), micro([0, 2])]
    rows = [ZERO, ZERO, ZERO]
    with pytest.raises(CacheFull):
        plan_rows(batch, rows, [1, 2], "")

    plans = plan_rows([micro([0, 1]), micro([0], [1]), micro([2])], rows, [1, 2, 3], "")

    assert plans.plans[2].targets.tolist() == [1]
    assert plans.taken == [1, 2, 3]


def test_a_state_that_others_share_is_left_to_them() -> None:
    assert moves([micro([0])], [4, 4], [7]) == [[(4, 7)]]


def test_too_few_rows_are_an_error_that_counts_them() -> None:
    with pytest.raises(CacheFull, match="3 cells needed, 2 free: use more") as full:
        plan_rows([micro([0], [1], [2])], [ZERO] * 3, [0, 1], "use more")
    assert (full.value.needed, full.value.free) == (3, 2)
