"""Masks and lists against the double loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar import plan as masks_module
from kvcellar.plan import attention_mask, cell_lists
from kvcellar.testing.naive import NaiveCell, NaiveToken, naive_mask
from tests.test_plan import GROUPS, OWNED, bits_of, micro_of

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
        monkeypatch.setattr(masks_module, "_BLOCK", 10)
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
