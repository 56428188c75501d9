"""Metadata of vocabularies made for tests: byte-level and SentencePiece-style."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

MetadataMaker = Callable[..., dict[str, object]]

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_letters() -> list[str]:
    """The letters that stand for the bytes 0 to 255 in byte-level vocabularies."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def make_bpe(
    merges: tuple[str, ...] = (),
    special: tuple[tuple[str, int], ...] = (),
    pre: str = "gpt-2",
    **extra: object,
) -> dict[str, object]:
    """Metadata of a byte-level vocabulary: 256 bytes, then the merges, then special tokens."""
    tokens = byte_letters() + [merge.replace(" ", "") for merge in merges]
    kinds = [NORMAL] * len(tokens) + [kind for _, kind in special]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + [text for text, _ in special],
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": list(merges),
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def make_spm(
    pieces: Mapping[str, float],
    special: tuple[tuple[str, int], ...] = (),
    *,
    with_bytes: bool = True,
    **extra: object,
) -> dict[str, object]:
    """Metadata of a SentencePiece vocabulary: <unk> <s> </s>, bytes, pieces, special tokens."""
    rows: list[tuple[str, int, float]] = [
        ("<unk>", UNKNOWN, 0.0),
        ("<s>", CONTROL, 0.0),
        ("</s>", CONTROL, 0.0),
    ]
    if with_bytes:
        rows += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    rows += [(text, NORMAL, score) for text, score in pieces.items()]
    rows += [(text, kind, 0.0) for text, kind in special]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _, _ in rows],
        "tokenizer.ggml.token_type": np.array([kind for _, kind, _ in rows], np.int32),
        "tokenizer.ggml.scores": np.array([score for _, _, score in rows], np.float32),
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }
