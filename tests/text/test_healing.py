"""Which tokens may take the place of the last one of a prompt: by looking at each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.text.healing import beginning_with, can_heal
from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import examples
from tests.text.following import BYTES, END, TOOL
from tests.text.test_rwkv import make as make_rwkv
from tests.text.vocabularies import make_spm

VOCABULARIES = {
    "byte BPE": BYTES,
    "SentencePiece": Tokenizer.from_metadata(make_spm({"▁": -1, "▁a": -2, "ab": -3, "é": -4})),
    "rwkv": Tokenizer.from_metadata(make_rwkv([b"ab", "bé".encode(), b" a", b"\xc3\xa9a"])),
    "none": Tokenizer.from_metadata({}),
}


@pytest.mark.parametrize("kind", ["byte BPE", "SentencePiece", "rwkv"])
@examples(40)
@given(
    text=st.one_of(st.text("ab é", min_size=1, max_size=3).map(str.encode), st.binary(max_size=2))
)
def test_all_tokens_that_begin_with_a_text_are_found(kind: str, text: bytes) -> None:
    tokenizer = VOCABULARIES[kind]
    expected = {
        i
        for i in range(tokenizer.n_vocab)
        if tokenizer.token_bytes(i).startswith(text)
        and not tokenizer.is_special(i)
        and i not in tokenizer.stop_ids
    }
    assert set(beginning_with(tokenizer, text).nonzero()[0].tolist()) == expected


def test_only_text_of_whole_characters_that_can_grow_is_healed() -> None:
    for text, healed in (("a", True), ("ab", True), ("abc", False), ("z", False), (" ", True)):
        assert can_heal(BYTES, BYTES.encode(text)) is healed, text
    assert not can_heal(BYTES, [0xC3 + 0])  # a byte that is no character
    assert not can_heal(BYTES, [TOOL])
    assert not can_heal(BYTES, [END])
    assert not can_heal(BYTES, [])
    assert not can_heal(VOCABULARIES["none"], [0])
