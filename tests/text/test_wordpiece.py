"""WordPiece against the library's, and what a text may continue."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers

from kvcellar.errors import TokenizerError
from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import examples

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
STARTS = ("hello", "hell", "h", "e", "un", "!", "#", "日", "ko", "ᄒ", "a", "1", "12")
INNER = ("o", "lo", "able", "e", "ᅡ", "ᆫ", "a", "1", "2", "ing")


def make(**extra: object) -> dict[str, object]:
    """Metadata of a vocabulary: special tokens, beginnings of words, and the rest."""
    tokens = [*SPECIAL, *("▁" + text for text in STARTS), *INNER]
    kinds = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    ids = {"unknown": 1, "bos": 2, "seperator": 3}
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def pieces(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    return [tokenizer.vocab.tokens[i] for i in ids]


@pytest.fixture(scope="module")
def bert() -> Tokenizer:
    return Tokenizer.from_metadata(make())


@examples(150)
@given(
    text=st.text(
        st.sampled_from("hHeloO unabináÁ!#日한1\uff12 \n\t\x00\u0301\u200bß"), max_size=20
    ),
    lowercase=st.booleans(),
    strip=st.booleans(),
)
def test_tokens_are_those_of_the_library(text: str, lowercase: bool, strip: bool) -> None:
    metadata = make(**{"normalizer.lowercase": lowercase, "normalizer.strip_accents": strip})
    ours = Tokenizer.from_metadata(metadata)
    plain = {"▁" + word: word for word in STARTS} | {word: "##" + word for word in INNER}
    vocabulary = {plain.get(word, word): i for i, word in enumerate(ours.vocab.tokens)}
    library = Library(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    assert ours.encode(text, add_special=False) == library.encode(text).ids


def test_every_text_begins_with_bos_and_ends_with_sep(bert: Tokenizer) -> None:
    assert pieces(bert, bert.encode("hello")) == ["[CLS]", "▁hello", "[SEP]"]
    assert pieces(bert, bert.encode("")) == ["[CLS]", "[SEP]"]
    flags = make(add_bos_token=False, add_eos_token=True)
    assert Tokenizer.from_metadata(flags).encode("") == [2, 3]


def test_special_tokens_are_parsed_only_when_asked(bert: Tokenizer) -> None:
    text = "hello[SEP]hello"
    assert bert.encode(text, add_special=False, parse_special=True) == [4, 3, 4]
    assert pieces(bert, bert.encode("[SEP]", add_special=False)) == ["[UNK]"] * 3


def test_words_come_back_with_a_space_between(bert: Tokenizer) -> None:
    assert bert.decode(bert.encode("  Hello \n helloable!")) == "hello helloable !"
    assert bert.token_bytes(4) == b" hello"
    unknown = bert.encode("hello xyz hello", add_special=False)
    assert bert.decode(unknown) == "hello hello"
    assert bert.decode(unknown, skip_special=False) == "hello[UNK] hello"


def test_text_may_continue_a_word(bert: Tokenizer) -> None:
    def follow(text: str) -> list[str]:
        return pieces(bert, bert.encode(text, add_special=False, continuing=True))

    assert follow("lo hello") == ["lo", "▁hello"]
    assert follow(" hello") == ["▁hello"]
    assert follow("!") == ["▁!"]
    assert follow("日") == ["▁日"]
    assert follow("") == follow("  ") == []


def test_a_word_that_cannot_be_spelled_is_one_unknown_token(bert: Tokenizer) -> None:
    assert pieces(bert, bert.encode("hellox unable", add_special=False)) == ["[UNK]", "▁un", "able"]


def test_words_of_any_length_are_spelled_in_linear_time(bert: Tokenizer) -> None:
    assert len(bert.encode("h" + "able" * 50_000, add_special=False)) == 50_001


@pytest.mark.parametrize("name", ["unknown", "bos", "seperator"])
def test_special_tokens_must_be_there(name: str) -> None:
    metadata = make()
    del metadata[f"tokenizer.ggml.{name}_token_id"]  # and the default is outside
    with pytest.raises(TokenizerError, match=f"{name}_token_id is missing"):
        Tokenizer.from_metadata(metadata)
