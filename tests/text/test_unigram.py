"""The unigram model against all ways to spell a text, and normalisation against its definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from kvcellar.errors import TokenizerError
from kvcellar.text.charsmap import Charsmap
from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import examples
from tests.text.charsmaps import charsmap_blob

Maker = Callable[..., dict[str, object]]

MAP_KEY = "tokenizer.ggml.precompiled_charsmap"
PIECES = st.dictionaries(
    st.text("ab▁", min_size=1, max_size=4), st.integers(-9, 0).map(float), min_size=1, max_size=20
)


def make(spm: Maker, pieces: Mapping[str, float], **extra: object) -> dict[str, object]:
    """Metadata of a unigram vocabulary: <unk> <s> </s> and the pieces."""
    options = {"unknown_token_id": 0, "add_eos_token": False} | extra
    made = spm(pieces, (("<U>", 4), ("<C>", 3)), with_bytes=False, **options)
    return made | {"tokenizer.ggml.model": "t5"}


@examples(150)
@given(pieces=PIECES, text=st.text("ab▁c", min_size=1, max_size=14))
def test_pieces_have_the_best_sum_of_scores(
    spm: Maker, pieces: dict[str, float], text: str
) -> None:
    tokenizer = Tokenizer.from_metadata(make(spm, pieces))
    ids = tokenizer.encode(text, add_special=False)
    assert all(not a == b == 0 for a, b in pairwise(ids))
    spelled = "".join("?" if i == 0 else tokenizer.vocab.tokens[i] for i in ids)
    unknown = min(pieces.values()) - 10
    best = [0.0] + [-np.inf] * len(text)  # of the beginnings of the text
    for end in range(1, len(text) + 1):
        ways = [best[end - 1] + unknown] * (text[end - 1] not in pieces)
        ways += [
            best[begin] + pieces[text[begin:end]]
            for begin in range(end)
            if text[begin:end] in pieces
        ]
        best[end] = max(ways)
    n_unknown = len(text) - len(spelled) + spelled.count("?")
    scores = tokenizer.vocab.scores
    assert scores is not None
    assert sum(scores[i] for i in ids if i) + unknown * n_unknown == best[-1]


@examples(200)
@given(pieces=PIECES, text=st.text("ab c", max_size=30))
def test_tokens_are_those_of_the_library(spm: Maker, pieces: dict[str, float], text: str) -> None:
    # Scores that no two sums share, so that there is one best way.
    odd = {piece: -1 - (hash(piece) % 9973) / 9973 for piece in pieces}
    tokenizer = Tokenizer.from_metadata(make(spm, odd))
    vocabulary = [("<unk>", 0.0), *odd.items()]
    library = models.Unigram(vocabulary, unk_id=0, byte_fallback=False)
    pieces_of = [token.value for token in library.tokenize(text.replace(" ", "▁"))]
    found = tokenizer.encode(text, add_special=False)
    if "c" not in text:  # the library's score of an unknown letter is another
        assert [tokenizer.vocab.tokens[i] for i in found if i] == [p for p in pieces_of if p in odd]


@pytest.mark.parametrize(
    ("options", "text", "pieces"),
    [
        ({}, " a  b ", ["▁", "a", "▁", "▁b", "▁"]),
        ({"add_space_prefix": True}, "b  b", ["▁b", "▁", "▁b"]),
        ({"add_space_prefix": True}, "  b", ["▁", "▁", "▁b"]),
        ({"add_space_prefix": True}, "  ", ["▁", "▁"]),
        ({"remove_extra_whitespaces": True}, "  b   b  ", ["▁b", "▁b"]),
        ({"remove_extra_whitespaces": True}, "   ", []),
        ({"add_space_prefix": True}, "b<U>b<C>b", ["▁b", "<U>", "▁b", "<C>", "▁b"]),
    ],
)
def test_spaces(spm: Maker, options: dict[str, bool], text: str, pieces: list[str]) -> None:
    metadata = make(spm, {"▁": -2.0, "a": -1.0, "b": -1.5, "▁b": -1.0}, **options)
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    assert [tokenizer.vocab.tokens[i] for i in ids] == pieces


@pytest.mark.parametrize("option", ["add_space_prefix", "remove_extra_whitespaces"])
def test_text_that_continues_gets_no_space(spm: Maker, option: str) -> None:
    tokenizer = Tokenizer.from_metadata(make(spm, {"▁": -2.0, "a": -1.0}, **{option: True}))
    space, a = tokenizer.vocab.ids["▁"], tokenizer.vocab.ids["a"]
    assert tokenizer.encode("a", add_special=False) == [space, a]
    assert tokenizer.encode("a", add_special=False, continuing=True) == [a]
    assert tokenizer.encode(" a", add_special=False, continuing=True) == [space, a]
    assert tokenizer.decode([space, a]) == "a"
    assert tokenizer.decode([space, a], continuing=True) == " a"


def test_user_defined_tokens_are_likelier_than_any_other(spm: Maker) -> None:
    metadata = make(spm, {"a": -1.0, "aa": -0.5})
    assert Tokenizer.from_metadata(metadata).encode("aa<U>", add_special=False) == [4, 5]


def test_defaults_are_t5s(spm: Maker) -> None:
    metadata = spm({"a": -1.0}, with_bytes=False) | {"tokenizer.ggml.model": "t5"}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab.unknown_id) == (None, 1, 2)
    assert tokenizer.encode("a") == [3, 1]


@pytest.mark.parametrize("key", ["scores", "unknown_token_id"])
def test_what_it_needs_is_named(spm: Maker, key: str) -> None:
    metadata = make(spm, {"a": -1.0})
    del metadata[f"tokenizer.ggml.{key}"]
    if key == "unknown_token_id":
        metadata["tokenizer.ggml.tokens"] = ["a", "b"]  # so that 2 is outside
        metadata["tokenizer.ggml.scores"] = np.zeros(2, np.float32)
        del metadata["tokenizer.ggml.token_type"]
    with pytest.raises(TokenizerError, match=f"{key} is missing"):
        Tokenizer.from_metadata(metadata)


# -- replacements


def naive_replacements(text: str, replacements: Mapping[str, str]) -> str:
    """Replace the longest key at each place, from left to right."""
    result, at = "", 0
    while at < len(text):
        keys = [key for key in replacements if text.startswith(key, at)]
        longest = max(keys, key=len, default="")
        result += replacements[longest] if longest else text[at]
        at += len(longest) or 1
    return result


REPLACEMENTS = st.dictionaries(
    st.text("ae\u0301ﬁ \t日", min_size=1, max_size=4), st.text("aéx ", max_size=3), max_size=12
)


def charsmap_of(replacements: Mapping[str, str]) -> Charsmap:
    """A map as a file would have it."""
    blob = np.frombuffer(charsmap_blob(replacements), np.uint8)
    return Charsmap.from_metadata({MAP_KEY: blob})


@examples(150)
@given(replacements=REPLACEMENTS, text=st.text("ae\u0301ﬁ \t日z", max_size=20))
def test_the_longest_key_is_replaced(replacements: dict[str, str], text: str) -> None:
    found = charsmap_of(replacements).normalize(text)
    assert found == naive_replacements(text, replacements)


def test_text_is_normalised_before_it_is_spelled(spm: Maker) -> None:
    blob = np.frombuffer(charsmap_blob({"ﬁ": "fi", "\t": " ", "e\u0301": "é"}), np.uint8)
    metadata = make(spm, {"f": -1.0, "i": -1.0, "▁": -1.0, "é": -1.0}) | {MAP_KEY: blob}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.decode(tokenizer.encode("ﬁ\te\u0301é", add_special=False)) == "fi éé"


@examples(150)
@given(data=st.binary(max_size=200), size=st.integers(0, 200), text=st.text(max_size=10))
def test_damaged_maps_are_refused_or_harmless(data: bytes, size: int, text: str) -> None:
    blob = size.to_bytes(4, "little") + data
    try:
        found = Charsmap.from_metadata({MAP_KEY: np.frombuffer(blob, np.uint8)}).normalize(text)
    except TokenizerError:
        return
    assert isinstance(found, str)


@pytest.mark.parametrize("value", ["abc", np.zeros(9, np.int32), np.zeros(3, np.uint8)])
def test_what_is_no_map_is_named(value: object) -> None:
    with pytest.raises(TokenizerError, match="precompiled_charsmap"):
        Charsmap.from_metadata({MAP_KEY: value})
