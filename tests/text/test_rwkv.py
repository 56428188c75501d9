"""RWKV's vocabulary against the definition: the longest piece at each place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import TokenizerError
from kvcellar.text.rwkv import unescape
from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import examples


def escape(piece: bytes) -> str:
    """Write bytes as the file does, each that is no plain letter as a number."""
    plain = {ord("\t"): r"\t", ord("\n"): r"\n", ord("\r"): r"\r", ord("\\"): r"\\"}
    return "".join(
        plain.get(byte, chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}") for byte in piece
    )


def make(pieces: list[bytes], **extra: object) -> dict[str, object]:
    """Metadata: the end of text, the bytes, and the pieces."""
    tokens = ["<s>", *(escape(bytes([byte])) for byte in range(256)), *map(escape, pieces)]
    return {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": tokens,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


PIECES = st.sets(
    st.text("ab é日\n\\", min_size=1, max_size=5).map(str.encode).filter(lambda p: len(p) > 1),
    max_size=25,
)


@examples(150)
@given(pieces=PIECES, text=st.text("abc é日\n\\", max_size=25))
def test_the_longest_piece_is_taken(pieces: set[bytes], text: str) -> None:
    tokenizer = Tokenizer.from_metadata(make(sorted(pieces)))
    ids = tokenizer.encode(text)
    data, at = text.encode(), 0
    for i in ids:
        piece = tokenizer.token_bytes(i)
        longer = [p for p in pieces if data.startswith(p, at) and len(p) > len(piece)]
        assert data.startswith(piece, at)
        assert not longer
        at += len(piece)
    assert at == len(data)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("written", "piece"),
    [
        (r"a\tb\n\r", b"a\tb\n\r"),
        (r"\x00\xfF", b"\x00\xff"),
        (r"\\x41\'\é", "\\x41'é".encode()),
        ("日 ", "日 ".encode()),
        ("\\", None),
        (r"a\x4", None),
        (r"\\\xg1", None),
    ],
)
def test_escapes(written: str, piece: bytes | None) -> None:
    assert unescape(written) == piece


def test_an_escape_that_is_not_complete_is_named() -> None:
    metadata = make([]) | {"tokenizer.ggml.tokens": ["a", r"b\x1"]}
    with pytest.raises(TokenizerError, match=r"tokens\[1\] = .* has an escape that is none of"):
        Tokenizer.from_metadata(metadata)


def test_a_byte_without_a_token_is_an_error() -> None:
    metadata = make([]) | {"tokenizer.ggml.tokens": ["a", "bc"]}
    with pytest.raises(TokenizerError, match="no token begins with the byte 0x62"):
        Tokenizer.from_metadata(metadata).encode("ab")


def test_nothing_is_added_and_token_zero_ends_a_text() -> None:
    tokenizer = Tokenizer.from_metadata(make([], add_bos_token=True, bos_token_id=0))
    assert tokenizer.encode("") == []
    assert tokenizer.eos_id == 0
    assert tokenizer.stop_ids == {0}


def test_characters_wait_until_they_are_whole() -> None:
    tokenizer = Tokenizer.from_metadata(make([]))
    stream = tokenizer.detokenizer()
    assert [stream.push(i) for i in tokenizer.encode("é")] == ["", "é"]
