"""PLaMo 2's tokenizer against the definition: the least cost, the longest piece of equal ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import TokenizerError
from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import examples

N_SPECIAL = 4


def make(pieces: Mapping[str, float]) -> dict[str, object]:
    """Metadata: special tokens, the bytes, and the pieces."""
    special = ["<unk>", "<bos>", "<eos>", "<pad>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3, 3] + [6] * 256 + [1] * len(pieces)
    return {
        "tokenizer.ggml.model": "plamo2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.scores": np.array([0.0] * 260 + list(pieces.values()), np.float32),
    }


def naive_pieces(text: str, pieces: Mapping[str, float]) -> list[str]:
    """The cheapest way from each place on; of equal ones that with the longest piece there."""

    @cache
    def best(at: int) -> tuple[int, tuple[str, ...]]:
        if at == len(text):
            return 0, ()
        ways = []
        for end in range(len(text), at, -1):
            piece = text[at:end]
            if piece in pieces:
                cost, rest = best(end)
                ways.append((cost - round(pieces[piece] * 1e4), (piece, *rest)))
        cost, rest = best(at + 1)
        ways.append((cost + 10_000_000, ("", *rest)))
        return min(ways, key=lambda way: way[0])

    spelled, at = [], 0
    for piece in best(0)[1]:
        spelled.append(piece or text[at])
        at += len(piece or text[at])
    return spelled


PIECES = st.dictionaries(
    st.text("ab 日", min_size=1, max_size=4), st.integers(-9, 0).map(float), max_size=20
)


@examples(150)
@given(pieces=PIECES, text=st.text("ab 日é", max_size=12))
def test_pieces_cost_the_least(pieces: dict[str, float], text: str) -> None:
    tokenizer = Tokenizer.from_metadata(make(pieces))
    ids = tokenizer.encode(text)
    wanted: list[int] = []
    for piece in naive_pieces(text, pieces):
        known = piece in pieces
        wanted += [tokenizer.vocab.ids[piece]] if known else [N_SPECIAL + b for b in piece.encode()]
    assert ids == wanted
    assert tokenizer.decode(ids) == text


def test_a_byte_order_mark_is_dropped_at_the_beginning_only() -> None:
    tokenizer = Tokenizer.from_metadata(make({"a": -1.0}))
    assert tokenizer.encode("\ufeffa") == tokenizer.encode("a") == [260]
    assert len(tokenizer.encode("a\ufeff")) == 4
    assert len(tokenizer.encode("\ufeffa", continuing=True)) == 4


@pytest.mark.parametrize("score", [-2000.0, -1e30, float("-inf"), float("inf")])
def test_scores_that_say_nothing_are_of_no_piece(score: float) -> None:
    tokenizer = Tokenizer.from_metadata(make({"a": score}))
    assert tokenizer.encode("a") == [N_SPECIAL + ord("a")]


def test_nothing_is_added() -> None:
    tokenizer = Tokenizer.from_metadata(make({}) | {"tokenizer.ggml.add_bos_token": True})
    assert tokenizer.encode("") == []
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab.unknown_id) == (1, 2, 0)


def test_text_cannot_spell_special_or_byte_tokens() -> None:
    tokenizer = Tokenizer.from_metadata(make({"<": -1.0}))
    for text in ("<bos>", "<0x41>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<bos>", parse_special=True) == [1]


def test_every_byte_needs_a_token() -> None:
    metadata = make({})
    kinds = metadata["tokenizer.ggml.token_type"]
    assert isinstance(kinds, np.ndarray)
    kinds[N_SPECIAL + 0x41] = 1
    with pytest.raises(TokenizerError, match="lacks the byte token <0x41>"):
        Tokenizer.from_metadata(metadata)
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(TokenizerError, match="scores is missing"):
        Tokenizer.from_metadata(metadata)
