"""BPE on characters: Gemma 4 and its kin, against an implementation of the definition."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import TokenizerError
from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import examples

NORMAL, CONTROL, BYTE = 1, 3, 6
LETTERS = ("▁", "a", "b", "é", "\n", "<", "0", "x", "4", "1", ">", "_")
MERGES = ("a b", "▁ ab", "▁ a", "ab ab", "▁ ▁", "▁▁ ▁▁", "é a", "\n \n", "b \n", "b _", "< 0")


def make(model: str = "gemma4", **extra: object) -> dict[str, object]:
    """Metadata: BOS, the bytes, letters, what merges give, and runs of three line breaks."""
    rows = [("<bos>", CONTROL), *((f"<0x{byte:02X}>", BYTE) for byte in range(256))]
    texts = [*LETTERS, *(merge.replace(" ", "") for merge in MERGES), "\n\n\n"]
    rows += [(text, NORMAL) for text in texts]
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [text for text, _ in rows],
        "tokenizer.ggml.token_type": np.array([kind for _, kind in rows], np.int32),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def merged(word: str) -> list[str]:
    """Merge the leftmost pair that comes first in the list until there is none."""
    order = {tuple(merge.split(" ")): i for i, merge in enumerate(MERGES)}
    symbols = list(word)
    while True:
        found = [(order[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in order]
        if not found:
            return symbols
        i = min(found)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def pieces(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    ids = tokenizer.encode(text, add_special=False, **options)
    return [tokenizer.vocab.tokens[i] for i in ids]


@examples(150)
@given(text=st.text("ab é\n<0x41>_日", max_size=25))
def test_gemma4_merges_lines(text: str) -> None:
    tokenizer = Tokenizer.from_metadata(make())
    wanted: list[str] = []
    for run in re.findall(r"\n+|[^\n]+", text.replace(" ", "▁")):
        whole = run in ("\n", "\n\n", "\n\n\n")
        for symbol in [run] if whole else merged(run):
            known = symbol in tokenizer.vocab.ids
            wanted += [symbol] if known else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    assert pieces(tokenizer, text) == wanted
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gemma4_always_begins_with_bos() -> None:
    assert Tokenizer.from_metadata(make(add_bos_token=False)).encode("") == [0]


def test_text_cannot_spell_special_or_byte_tokens() -> None:
    metadata = make()
    metadata["tokenizer.ggml.merges"] = ["< 0", "<0 x", "<0x 4", "<0x4 1", "<0x41 >", "a b"]
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, np.ndarray)
    added = ["<0x", "<0x4"]
    metadata["tokenizer.ggml.tokens"] = [*tokens, *added, "<0x41"]
    metadata["tokenizer.ggml.token_type"] = np.append(kinds, np.ones(3, np.int32))
    tokenizer = Tokenizer.from_metadata(metadata)
    assert pieces(tokenizer, "<0x41>ab") == ["<0x41", ">", "ab"]
    assert "<bos>" not in pieces(tokenizer, "<bos>")
    assert pieces(tokenizer, "<bos>", parse_special=True) == ["<bos>"]


@pytest.mark.parametrize(
    ("pre", "text", "wanted"),
    [
        ("sarvam-moe", "ab ab\n\n\na", ["ab", "▁ab", "\n\n", "\n", "a"]),
        ("gemma4", "ab ab\n\n\na", ["ab", "▁ab", "\n\n\n", "a"]),
        ("granite-embed-multi-311m", "ab  ab", ["ab", "▁", "▁ab"]),
        ("mmbert", "ab  ab\n\na", ["▁ab", "▁", "▁ab", "\n\n", "▁a"]),
        ("mmbert", " ab▁", ["▁ab", "▁"]),
        ("whitespace", "ab_ \tb", ["ab", "_", "<0x20>", "<0x09>", "b"]),
    ],
)
def test_words_are_those_of_the_pre_tokenizer(pre: str, text: str, wanted: list[str]) -> None:
    assert pieces(Tokenizer.from_metadata(make("gpt2", pre=pre)), text) == wanted


def test_mmbert_begins_lines_with_a_space_unless_the_text_continues() -> None:
    tokenizer = Tokenizer.from_metadata(make("gpt2", pre="mmbert"))
    assert pieces(tokenizer, "a\na", continuing=True) == ["a", "\n", "▁a"]
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_white_space_only_separates_words_in_vocabularies_of_that_kind() -> None:
    metadata = make("whitespace", **{"normalizer.lowercase": True})
    tokenizer = Tokenizer.from_metadata(metadata)
    assert pieces(tokenizer, " AB\u3000a\n\nb") == ["ab", "a", "b"]
    assert pieces(tokenizer, "a\x1cb") == ["a", "<0x1C>", "b"]  # no white space to Unicode
    assert pieces(Tokenizer.from_metadata(make("whitespace")), "A") == ["<0x41>"]


def test_bytes_without_a_token_are_left_out() -> None:
    metadata = make()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[1 + 0xE6] = "other"  # the first byte of 日
    kinds = metadata["tokenizer.ggml.token_type"]
    assert isinstance(kinds, np.ndarray)
    kinds[1 + 0xE6] = NORMAL
    assert pieces(Tokenizer.from_metadata(metadata), "a日b") == ["a", "<0x97>", "<0xA5>", "b"]


def test_byte_tokens_must_be_written_as_such() -> None:
    metadata = make()
    kinds = metadata["tokenizer.ggml.token_type"]
    assert isinstance(kinds, np.ndarray)
    kinds[-1] = BYTE
    with pytest.raises(TokenizerError, match="is a byte token"):
        Tokenizer.from_metadata(metadata)


def test_a_long_line_takes_no_quadratic_time() -> None:
    tokenizer = Tokenizer.from_metadata(make())
    assert len(tokenizer.encode("ab" * 100_000, add_special=False)) == 50_000
