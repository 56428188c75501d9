"""Streaming: whole characters only, and nothing else than decoding at once gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcellar.errors import TokenizerError
from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import examples

Maker = Callable[..., dict[str, object]]


@pytest.fixture(scope="module")
def tokenizers(bpe: Maker, spm: Maker) -> list[Tokenizer]:
    special = (("<C>", 3), ("<U>", 4))
    pieces = {"▁": -1.0, "a": -2.0, "▁a": -3.0, "é": -4.0}
    return [
        Tokenizer.from_metadata(bpe(("h i", "Ġ h"), special)),
        Tokenizer.from_metadata(spm(pieces, special)),
        Tokenizer.from_metadata(spm(pieces, special, add_space_prefix=False)),
    ]


@examples(150)
@given(
    which=st.integers(0, 2),
    ids=st.lists(st.integers(0, 259), max_size=40),
    skip_special=st.booleans(),
    continuing=st.booleans(),
)
@example(which=1, ids=[0, 259], skip_special=False, continuing=True)
def test_parts_join_to_the_whole(
    tokenizers: list[Tokenizer], which: int, ids: list[int], skip_special: bool, continuing: bool
) -> None:
    tokenizer = tokenizers[which]
    stream = tokenizer.detokenizer(skip_special=skip_special, continuing=continuing)
    parts = [stream.push(i) for i in ids]
    parts.append(stream.finish())
    joined = "".join(parts)
    assert joined == tokenizer.decode(ids, skip_special=skip_special, continuing=continuing)
    # Behind a special token the encoder puts a space again, which is not part of the text.
    begins_anew = any(tokenizer.is_matched_whole(i) for i in ids)
    if not tokenizer.strips_space or (continuing and not begins_anew):
        kept = [i for i in ids if not (skip_special and tokenizer.is_special(i))]
        data = b"".join(tokenizer.token_bytes(i) for i in kept)
        assert joined == data.decode("utf-8", "replace")


@examples(300)
@given(
    which=st.integers(0, 2),
    ids=st.lists(st.integers(0, 259) | st.sampled_from([0, 3, 32, 258, 259]), max_size=12),
    rest=st.lists(st.integers(0, 259), max_size=6),
    skip_special=st.booleans(),
    as_array=st.booleans(),
)
@example(which=0, ids=[0xF0, 0x9F, 0xE0], rest=[0x99, 0x82], skip_special=True, as_array=False)
@example(which=1, ids=[262, 1, 259], rest=[260], skip_special=True, as_array=True)
def test_following_tokens_equals_having_been_given_them(
    tokenizers: list[Tokenizer],
    which: int,
    ids: list[int],
    rest: list[int],
    skip_special: bool,
    as_array: bool,
) -> None:
    tokenizer = tokenizers[which]
    n_vocab = tokenizer.n_vocab
    ids, rest = [i % n_vocab for i in ids], [i % n_vocab for i in rest]
    whole = tokenizer.detokenizer(skip_special=skip_special)
    for i in ids:
        whole.push(i)
    behind = tokenizer.detokenizer(skip_special=skip_special)
    behind.push(0xE2)  # what it was given before does not matter
    behind.follow(np.array(ids, np.int32) if as_array else ids)
    assert [behind.push(i) for i in rest] == [whole.push(i) for i in rest]
    assert behind.finish() == whole.finish()


def test_following_stops_at_ids_without_text(tokenizers: list[Tokenizer]) -> None:
    stream = tokenizers[0].detokenizer()
    stream.follow([0xF0, -1, 0x9F])
    assert stream.push(0x99) == "\N{REPLACEMENT CHARACTER}"
    with pytest.raises(TokenizerError, match="flat list of integers"):
        stream.follow("ab")  # type: ignore[arg-type]


@examples(100)
@given(text=st.text(max_size=20))
def test_valid_text_never_shows_a_replacement(tokenizers: list[Tokenizer], text: str) -> None:
    stream = tokenizers[0].detokenizer()
    shown = ""
    for i in tokenizers[0].encode(text):
        shown += stream.push(i)
        assert text.startswith(shown)
    assert stream.finish() == ""
    assert shown == text


def test_an_unfinished_character_waits_and_ends_as_a_replacement(
    tokenizers: list[Tokenizer],
) -> None:
    smile = "🙂".encode()
    stream = tokenizers[0].detokenizer()
    ids = [tokenizers[0].encode(chr(byte)) for byte in b"a"]
    assert stream.push(ids[0][0]) == "a"
    assert [stream.push(byte) for byte in smile[:3]] == ["", "", ""]
    assert stream.push(smile[3]) == "🙂"
    assert stream.push(smile[0]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""


def test_bytes_that_are_no_character_show_at_once(tokenizers: list[Tokenizer]) -> None:
    stream = tokenizers[0].detokenizer()
    assert stream.push(0xFF) == "\N{REPLACEMENT CHARACTER}"


def test_tokens_that_do_not_exist_are_refused(tokenizers: list[Tokenizer]) -> None:
    with pytest.raises(TokenizerError, match="no token 9999"):
        tokenizers[0].detokenizer().push(9999)
