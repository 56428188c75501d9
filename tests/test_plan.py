"""Plans: splits against what every split must keep, masks and lists against the double loop."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar import plan as plan_module
from kvcellar.batch import MicroBatch, split_equal, split_simple
from kvcellar.cellsets import pack_owners
from kvcellar.errors import OptionError
from kvcellar.plan import CellPlan, Plan, attention_mask, cell_lists
from kvcellar.testing.naive import NaiveCell, NaiveToken, naive_mask
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


CELLS = st.lists(
    st.tuples(GROUPS, st.integers(0, 5)).map(
        lambda made: NaiveCell(made[1] if made[0] else -1, owners=set(made[0]))
    ),
    min_size=1,
    max_size=12,
)
TOKENS = st.lists(
    st.builds(NaiveToken, st.just(0), st.integers(0, 5), OWNED), min_size=1, max_size=6
)


class TestMask:
    @given(tokens=TOKENS, cells=CELLS)
    def test_equals_the_double_loop(self, tokens: list[NaiveToken], cells: list[NaiveCell]) -> None:
        positions = np.array([cell.pos for cell in cells], np.int32)
        owners = bits_of([frozenset(cell.owners) for cell in cells])

        mask = attention_mask(micro_of(tokens), positions, owners)

        assert mask.dtype == np.float16
        np.testing.assert_array_equal(mask, naive_mask(tokens, cells, len(cells)))

    def test_equals_the_double_loop_when_built_in_blocks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plan_module, "_BLOCK", 10)
        groups = [frozenset({0}), frozenset({1})]
        tokens = [NaiveToken(0, i, groups[i % 2]) for i in range(9)]
        cells = [NaiveCell(i // 2, owners=set(groups[i % 2])) for i in range(7)]
        positions = np.array([cell.pos for cell in cells], np.int32)
        owners = bits_of([frozenset(cell.owners) for cell in cells])

        for part in (tokens, tokens[::2]):
            mask = attention_mask(micro_of(part), positions, owners)
            np.testing.assert_array_equal(mask, naive_mask(part, cells, len(cells)))

    @given(tokens=TOKENS, cells=CELLS)
    def test_a_buffer_is_filled_and_only_where_asked(
        self, tokens: list[NaiveToken], cells: list[NaiveCell]
    ) -> None:
        buffer = np.full((8, 16), 7, np.float16)
        positions = np.array([cell.pos for cell in cells], np.int32)
        owners = bits_of([frozenset(cell.owners) for cell in cells])

        mask = attention_mask(micro_of(tokens), positions, owners, buffer)

        assert np.shares_memory(mask, buffer)
        np.testing.assert_array_equal(mask, naive_mask(tokens, cells, len(cells)))
        assert (buffer[len(tokens) :] == 7).all()
        assert (buffer[:, len(cells) :] == 7).all()

    def test_the_largest_position_is_visible_to_itself_only_if_owned(self) -> None:
        top = 2**31 - 2
        tokens = [NaiveToken(0, top, frozenset({0})), NaiveToken(0, top, frozenset({0}))]
        positions = np.array([top, -1, top], np.int32)
        owners = bits_of([frozenset({0}), frozenset(), frozenset({1})])

        mask = attention_mask(micro_of(tokens), positions, owners)

        assert np.isfinite(mask).tolist() == [[True, False, False]] * 2


class TestLists:
    @given(tokens=TOKENS, cells=CELLS, window=st.integers(0, 4))
    def test_are_what_the_mask_lets_through_by_position(
        self, tokens: list[NaiveToken], cells: list[NaiveCell], window: int
    ) -> None:
        positions = np.array([cell.pos for cell in cells], np.int32)
        owners = bits_of([frozenset(cell.owners) for cell in cells])
        micro = micro_of(tokens)

        lists = cell_lists(micro, positions, owners, window)

        mask = attention_mask(micro, positions, owners, window=window)
        assert lists.cells.dtype == lists.starts.dtype == lists.ends.dtype == np.int32
        assert len(lists.starts) == len(lists.ends) == len(tokens)
        for i, row in enumerate(mask):
            seen = np.flatnonzero(row == 0)
            expected = seen[np.argsort(positions[seen], kind="stable")]
            assert lists.of(i).tolist() == expected.tolist()

    @given(cells=CELLS, seed=st.integers(0, 99))
    def test_do_not_depend_on_where_cells_lie(self, cells: list[NaiveCell], seed: int) -> None:
        held = [cell for cell in cells if 0 in cell.owners]
        at = np.arange(len(held), dtype=np.int32)
        where = np.random.default_rng(seed).permutation(12)[: len(held)]
        scattered = np.full(12, -1, np.int32)
        scattered[where] = at
        owners = bits_of([frozenset({0}) if pos >= 0 else frozenset() for pos in scattered])
        tokens = [NaiveToken(0, 5, frozenset({0}))]

        lists = cell_lists(micro_of(tokens), scattered, owners)

        assert lists.of(0).tolist() == where[at <= 5].tolist()

    def test_tokens_of_one_sequence_share_a_list(self) -> None:
        tokens = [NaiveToken(0, pos, frozenset({0})) for pos in range(4)]
        positions = np.arange(4, dtype=np.int32)

        lists = cell_lists(micro_of(tokens), positions, bits_of([frozenset({0})] * 4), 2)

        assert lists.cells.tolist() == [0, 1, 2, 3]
        assert lists.starts.tolist() == [0, 0, 1, 2]
        assert lists.ends.tolist() == [1, 2, 3, 4]
