"""Pieces at a place, and words that no piece spans."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import TokenizerError
from kvcellar.text.pieces import MAX_PIECE, PieceIndex, WordCache
from tests.profiles import examples

PIECES = st.sets(st.text("ab▁", min_size=1, max_size=6), max_size=30)


@examples(150)
@given(pieces=PIECES, text=st.text("ab▁c", max_size=20))
def test_all_pieces_at_a_place_are_found_longest_first(pieces: set[str], text: str) -> None:
    ids = {piece: i for i, piece in enumerate(sorted(pieces, key=hash))}
    index = PieceIndex(ids)
    for at in range(len(text) + 1):
        wanted = [piece for piece in pieces if text.startswith(piece, at)]
        wanted.sort(key=len, reverse=True)
        assert list(index.matches(text, at)) == [(len(piece), ids[piece]) for piece in wanted]
        first = index.longest(text, at)
        assert first == ((len(wanted[0]), ids[wanted[0]]) if wanted else None)


@given(st.sets(st.binary(min_size=1, max_size=3), max_size=20), st.binary(max_size=10))
def test_bytes_are_pieces_too(pieces: set[bytes], data: bytes) -> None:
    index = PieceIndex({piece: len(piece) for piece in pieces})
    wanted = sorted((len(piece) for piece in pieces if data.startswith(piece)), reverse=True)
    assert [length for length, _ in index.matches(data, 0)] == wanted


def test_pieces_without_end_are_refused() -> None:
    PieceIndex({"a" * MAX_PIECE: 0})
    with pytest.raises(TokenizerError, match=r"tokens\[7\] has a length of 1025: at most 1024"):
        PieceIndex({"a": 3, "a" * (MAX_PIECE + 1): 7})


@examples(150)
@given(pieces=PIECES, text=st.text("ab▁c", max_size=30))
def test_words_are_cut_where_no_piece_spans(pieces: set[str], text: str) -> None:
    words: list[str] = []

    def spell(word: str) -> list[int]:
        words.append(word)
        return list(map(ord, word))

    assert WordCache(pieces, spell).encode(text) == list(map(ord, text))
    joined = set(words)
    for at in range(1, len(text)):
        spanned = any(
            text.startswith(piece, begin) and begin + len(piece) > at
            for piece in pieces
            for begin in range(max(0, at - 6), at)
        )
        if spanned:  # some word has both letters
            assert any(text[at - 1 : at + 1] in word for word in joined)


def test_pieces_within_pieces_take_no_quadratic_time() -> None:
    index = PieceIndex({"a" * n: n for n in range(1, MAX_PIECE + 1)})
    text = "ab" * 10_000
    begin = time.process_time()
    assert sum(len(list(index.matches(text, at))) for at in range(len(text))) == 10_000
    assert time.process_time() - begin < 10
