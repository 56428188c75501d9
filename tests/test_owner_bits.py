"""Owner bits: a bit a sequence, words of 64, one column a cell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cellsets import count_owners, owner_words, pack_owners, unpack_owners


@pytest.mark.parametrize(("n_seq_max", "words"), [(1, 1), (64, 1), (65, 2), (300, 5)])
def test_enough_words_for_every_sequence(n_seq_max: int, words: int) -> None:
    assert owner_words(n_seq_max) == words


@given(st.lists(st.frozensets(st.integers(0, 199), max_size=6), min_size=1, max_size=20))
def test_packing_and_unpacking_are_inverse(owners: list[frozenset[int]]) -> None:
    pairs = [(row, seq) for row, group in enumerate(owners) for seq in sorted(group)]
    rows = np.array([row for row, _ in pairs], np.int64)
    seq_ids = np.array([seq for _, seq in pairs], np.int64)

    bits = pack_owners(rows, seq_ids, len(owners), owner_words(200))
    back_rows, back_ids = unpack_owners(bits)

    assert bits.shape == (4, len(owners))
    assert list(zip(back_rows.tolist(), back_ids.tolist(), strict=True)) == pairs
    assert count_owners(bits) == len(pairs)


def test_the_highest_bit_of_a_word_is_a_sequence_too() -> None:
    bits = pack_owners(np.array([0, 0]), np.array([63, 64]), 1, 2)

    assert bits[:, 0].tolist() == [1 << 63, 1]
    assert unpack_owners(bits)[1].tolist() == [63, 64]
