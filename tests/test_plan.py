"""Plans, and splits against what every split must keep."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.batch import MicroBatch, split_equal, split_simple
from kvcellar.cellsets import pack_owners
from kvcellar.errors import OptionError
from kvcellar.plan import CellPlan, Plan
from kvcellar.testing.naive import NaiveToken
from kvcellar.types import Int64Array, OwnerBits

N_WORDS = 2
GROUPS = st.frozensets(st.sampled_from([0, 1, 2, 63, 64, 127]), max_size=3)
OWNED = GROUPS.filter(bool)


def bits_of(groups: list[frozenset[int]]) -> OwnerBits:
    pairs = [(row, seq) for row, group in enumerate(groups) for seq in sorted(group)]
    rows, seq_ids = np.array(pairs, np.int64).reshape(-1, 2).T
    return pack_owners(rows, seq_ids, len(groups), N_WORDS)


def micro_of(tokens: list[NaiveToken]) -> MicroBatch:
    n = len(tokens)
    return MicroBatch(
        rows=np.arange(n, dtype=np.int32),
        tokens=np.zeros(n, np.int32),
        embeddings=None,
        positions=np.array([token.pos for token in tokens], np.int32),
        owners=bits_of([token.owners for token in tokens]),
        outputs=np.array([n - 1], np.int32),
    )


class TestPlan:
    def plan(self, cells: list[int]) -> Plan:
        micro = micro_of([NaiveToken(0, i, frozenset({0})) for i in range(len(cells))])
        mask = np.zeros((len(cells), 32), np.float16)
        return Plan(micro, (CellPlan(np.array(cells, np.int64), mask),))

    def test_sizes(self) -> None:
        plan = self.plan([4, 5])
        assert (plan.n_tokens, plan.n_kv) == (2, 32)

    @pytest.mark.parametrize(
        ("cells", "contiguous"), [([3], True), ([3, 4, 5], True), ([3, 5], False), ([4, 3], False)]
    )
    def test_contiguous(self, cells: list[int], contiguous: bool) -> None:
        assert self.plan(cells).is_contiguous is contiguous


def kept_in_order(parts: list[Int64Array], groups: list[frozenset[int]], n_ubatch: int) -> None:
    """Every row once, no microbatch too large, the rows of each sequence in their order."""
    rows = [int(row) for part in parts for row in part]
    assert sorted(rows) == list(range(len(groups)))
    assert all(0 < len(part) <= n_ubatch for part in parts)
    for seq in set().union(*groups):
        mine = [row for row in rows if seq in groups[row]]
        assert mine == sorted(mine)


class TestSplits:
    @given(st.integers(1, 40), st.integers(1, 12))
    def test_simple(self, n: int, n_ubatch: int) -> None:
        parts = split_simple(n, n_ubatch)

        assert np.concatenate(parts).tolist() == list(range(n))
        assert [len(part) for part in parts[:-1]] == [n_ubatch] * (len(parts) - 1)
        assert 0 < len(parts[-1]) <= n_ubatch

    @given(st.lists(OWNED, min_size=1, max_size=24), st.integers(1, 9))
    def test_equal(self, groups: list[frozenset[int]], n_ubatch: int) -> None:
        parts = split_equal(bits_of(groups), n_ubatch)

        kept_in_order(parts, groups, n_ubatch)
        for part in parts:
            sets = [groups[row] for row in part]
            lengths = {sets.count(group) for group in sets}
            assert len(lengths) == 1
            # Set after set, so that a microbatch is a rectangle of sets and tokens.
            assert sum(a != b for a, b in pairwise(sets)) == len(set(sets)) - 1

    def test_equal_takes_sequences_together_until_the_shortest_ends(self) -> None:
        groups = [frozenset({s}) for s in (0, 0, 0, 0, 1, 1, 2)]

        parts = [part.tolist() for part in split_equal(bits_of(groups), 6)]

        assert parts == [[0, 4, 6], [1, 5], [2, 3]]

    def test_a_token_shared_by_two_sequences_waits_for_both(self) -> None:
        groups = [frozenset({0}), frozenset({1}), frozenset({0, 1}), frozenset({0})]

        parts = [part.tolist() for part in split_equal(bits_of(groups), 8)]

        assert parts == [[0, 1], [2], [3]]

    @pytest.mark.parametrize("n_ubatch", [0, -1])
    def test_sizes_below_one_are_refused(self, n_ubatch: int) -> None:
        owners = bits_of([frozenset({0})])
        with pytest.raises(OptionError, match=f"n_ubatch is {n_ubatch}"):
            split_simple(1, n_ubatch)
        with pytest.raises(OptionError, match="at least 1"):
            split_equal(owners, n_ubatch)
