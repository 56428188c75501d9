"""SentencePiece's BPE against an implementation that only follows the definition."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import TokenizerError
from kvcellar.text.spm import SpmEncoder
from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import examples

Maker = Callable[..., dict[str, object]]


def naive_pieces(text: str, scores: dict[str, float]) -> list[str]:
    """Merge the leftmost pair of the best score until there is none."""
    symbols = list(text)
    while True:
        unions = [left + right for left, right in pairwise(symbols)]
        places = [i for i, union in enumerate(unions) if union in scores]
        if not places:
            return symbols
        best = max(places, key=lambda i: (scores[unions[i]], -i))
        symbols[best : best + 2] = [unions[best]]


_PIECES = st.dictionaries(
    st.text("ab▁>", min_size=1, max_size=5),
    st.integers(-9, 0).map(float),
    min_size=1,
    max_size=25,
)


@examples(150)
@given(pieces=_PIECES, texts=st.lists(st.text("ab> é", max_size=25), min_size=1, max_size=4))
def test_tokens_are_those_of_the_definition(
    spm: Maker, pieces: dict[str, float], texts: list[str]
) -> None:
    tokenizer = Tokenizer.from_metadata(spm(pieces, add_space_prefix=False))
    for text in texts:
        ids: list[int] = []
        for piece in naive_pieces(text.replace(" ", "▁"), pieces):
            known = [tokenizer.vocab.ids[piece]] if piece in pieces else []
            ids += known or [3 + byte for byte in piece.encode()]
        assert tokenizer.encode(text, add_special=False) == ids


@examples(200)
@given(pieces=_PIECES, text=st.text(max_size=30), prefix=st.booleans())
def test_text_comes_back(spm: Maker, pieces: dict[str, float], text: str, prefix: bool) -> None:
    pieces.setdefault("▁", -50.0)
    metadata = spm(pieces, (("<U>", 4), ("<C>", 3)), add_space_prefix=prefix)
    tokenizer = Tokenizer.from_metadata(metadata)
    text = text.replace("▁", "")
    for whole in (text, f"<C>{text}<U>{text}", f" {text}<U>  {text}"):
        ids = tokenizer.encode(whole, add_special=False, parse_special=True)
        assert tokenizer.decode(ids, skip_special=False) == whole


@pytest.fixture(scope="module")
def words(spm: Maker) -> Tokenizer:
    pieces = {"▁": -9.0, "h": -9.0, "i": -9.0, "hi": -2.0, "▁hi": -1.0, "<s": -5.0}
    return Tokenizer.from_metadata(spm(pieces, (("<U>", 4),)))


def test_a_space_goes_before_text_and_after_special_tokens(words: Tokenizer) -> None:
    space_hi = words.vocab.ids["▁hi"]
    user = words.vocab.ids["<U>"]
    assert words.encode("hi") == [1, space_hi]
    assert words.encode("hi<U>hi", add_special=False) == [space_hi, user, space_hi]
    assert words.encode("<s>hi", add_special=False, parse_special=True) == [1, space_hi]
    assert words.encode("", add_special=False) == []


def test_the_space_is_kept_where_text_continues(words: Tokenizer) -> None:
    space_hi = words.vocab.ids["▁hi"]
    assert words.decode([space_hi, space_hi]) == "hi hi"
    assert words.decode([space_hi, space_hi], continuing=True) == " hi hi"


def test_text_cannot_spell_control_or_byte_tokens(words: Tokenizer) -> None:
    for text in ("<s>", "</s>", "<0x0A>", "<unk>"):
        ids = words.encode(text, add_special=False)
        assert 1 not in ids
        assert 2 not in ids
        assert words.decode(ids) == text


def test_byte_tokens_are_bytes(words: Tokenizer) -> None:
    assert words.token_bytes(3 + 0xE9) == b"\xe9"
    assert words.decode([3 + byte for byte in "é🙂".encode()]) == "é🙂"


def test_what_cannot_be_spelled_is_unknown_or_an_error(spm: Maker) -> None:
    metadata = spm({"a": -1.0}, with_bytes=False, add_space_prefix=False, add_bos_token=False)
    assert Tokenizer.from_metadata(metadata).encode("aéa") == [3, 0, 3]


def test_without_bytes_and_unknown_token_it_is_an_error(bpe: Maker) -> None:
    metadata = bpe() | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": False}
    metadata["tokenizer.ggml.scores"] = np.zeros(256, np.float32)
    tokenizer = Tokenizer.from_metadata(metadata)
    object.__setattr__(tokenizer.vocab, "unknown_id", None)
    with pytest.raises(TokenizerError, match="no token for"):
        Tokenizer(tokenizer.vocab, SpmEncoder(tokenizer.vocab, metadata)).encode("é日")


def test_scores_are_needed(spm: Maker) -> None:
    metadata = spm({"a": -1.0})
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(TokenizerError, match="scores is missing"):
        Tokenizer.from_metadata(metadata)


def test_byte_tokens_must_be_written_as_such(spm: Maker) -> None:
    metadata = spm({"a": -1.0})
    kinds = metadata["tokenizer.ggml.token_type"]
    assert isinstance(kinds, np.ndarray)
    kinds[-1] = 6
    with pytest.raises(TokenizerError, match=r"'a' is a byte token"):
        Tokenizer.from_metadata(metadata)


def test_a_long_word_takes_no_quadratic_time(words: Tokenizer) -> None:
    assert len(words.encode("hi" * 20000, add_special=False)) == 20000
