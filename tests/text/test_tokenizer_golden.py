"""Token ids of real vocabularies, as the reference gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import examples

# Bytes that SmolLM2's vocabulary has no token for; neither the reference can spell them.
_SMOLLM2_HOLES = frozenset(b"\x04\x06\x13\x14\x16\x1d\xf1\xf2")


def _cases(shared: Path, name: str) -> list[dict[str, Any]]:
    golden = json.loads((shared / "golden" / f"{name}.json").read_text("utf-8"))
    cases: list[dict[str, Any]] = golden["tokenize"]
    for case in cases:
        if "text_file" in case:
            case["text"] = (shared / "texts" / f"{case['text_file']}.txt").read_text("utf-8")
    assert len(cases) > 20
    return cases


def _check(tokenizer: Tokenizer, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        ids = tokenizer.encode(
            case["text"], add_special=case["add_special"], parse_special=case["parse_special"]
        )
        assert ids == case["tokens"], case["text"][:60]
        if not case["add_special"]:
            assert tokenizer.decode(ids, skip_special=False) == case["text"]


def test_smollm2_tokens_are_the_references(smollm2_tokenizer: Tokenizer, shared: Path) -> None:
    _check(smollm2_tokenizer, _cases(shared, "smollm2-135m"))


@pytest.mark.slow
def test_gemma3_tokens_are_the_references(gemma3_tokenizer: Tokenizer, shared: Path) -> None:
    _check(gemma3_tokenizer, _cases(shared, "gemma3-270m"))


def test_smollm2_special_tokens(smollm2_tokenizer: Tokenizer) -> None:
    tokenizer = smollm2_tokenizer
    assert tokenizer.n_vocab == 49152
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eot_id) == (1, 2, 2)
    assert tokenizer.stop_ids == {0, 2, 4}
    assert not tokenizer.add_bos
    assert tokenizer.is_special(1)
    assert not tokenizer.is_special(4093)
    assert tokenizer.token_bytes(4093) == b"user"


@pytest.mark.slow
def test_gemma3_special_tokens(gemma3_tokenizer: Tokenizer) -> None:
    tokenizer = gemma3_tokenizer
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eot_id) == (2, 1, 106)
    # "</s>" is HTML here: the file says user-defined, so it is text and stops nothing.
    assert tokenizer.stop_ids == {1, 106}
    assert tokenizer.encode("</s>", add_special=False) == [tokenizer.vocab.ids["</s>"]]


@examples(200)
@given(text=st.text(max_size=60), parse_special=st.booleans())
def test_smollm2_gives_text_back(
    smollm2_tokenizer: Tokenizer, text: str, parse_special: bool
) -> None:
    if _SMOLLM2_HOLES.intersection(text.encode()):
        return
    ids = smollm2_tokenizer.encode(text, add_special=False, parse_special=parse_special)
    assert smollm2_tokenizer.decode(ids, skip_special=False) == text


@pytest.mark.slow
@examples(200)
@given(text=st.text(max_size=60))
def test_gemma3_gives_text_back(gemma3_tokenizer: Tokenizer, text: str) -> None:
    if "▁" in text:  # SentencePiece writes a space so; the two are one to it
        return
    ids = gemma3_tokenizer.encode(text, add_special=False)
    assert gemma3_tokenizer.decode(ids, skip_special=False) == text


def test_bytes_without_a_token_do_not_let_their_neighbours_merge(
    smollm2_tokenizer: Tokenizer,
) -> None:
    with_hole = smollm2_tokenizer.encode(" \x06'")
    assert [smollm2_tokenizer.token_bytes(i) for i in with_hole] == [b" ", b"'"]
