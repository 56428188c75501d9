"""Contexts that many tests use, and vocabularies: small ones made here, and of real models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from kvcellar.backends.ggml.gguf import read_metadata
from kvcellar.runtime.context import Context
from kvcellar.runtime.prompt_cache import PromptCache
from kvcellar.runtime.tokenizer import Tokenizer
from kvcellar.stores.memory import MemoryStore
from tests.runtime.archs import F32, opened
from tests.runtime.prompts import BLOCK

MetadataMaker = Callable[..., dict[str, object]]

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a text may be saved."""
    return tmp_path / "text.safetensors"


@pytest.fixture
def llama(shared: Path) -> Iterator[Context]:
    """A context with K and V of all tokens, exact."""
    with opened(shared, "llama-dense", **F32) as made:
        yield made


@pytest.fixture(scope="module")
def llama_of_module(shared: Path) -> Iterator[Context]:
    """One for many tests; use ``plain``."""
    with opened(shared, "llama-dense", **F32) as made:
        yield made


@pytest.fixture
def plain(llama_of_module: Context) -> Iterator[Context]:
    """The same, shared by a module's tests: each finds it empty and leaves no cell taken."""
    yield llama_of_module
    for sequence in llama_of_module.sequences:
        sequence.close()
    assert llama_of_module.cache.used == 0


@pytest.fixture
def store() -> MemoryStore:
    """Where blocks of prompts are kept."""
    return MemoryStore()


@pytest.fixture
def prompts(store: MemoryStore) -> PromptCache:
    """A cache of prompts over it, with small blocks."""
    return PromptCache(store, block_size=BLOCK)


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


@pytest.fixture(scope="session")
def bpe() -> MetadataMaker:
    """Makes metadata of a byte-level vocabulary."""
    return make_bpe


@pytest.fixture(scope="session")
def spm() -> MetadataMaker:
    """Makes metadata of a SentencePiece vocabulary."""
    return make_spm


def _missing(what: str) -> None:
    reason = f"{what} is not installed"
    if os.environ.get("KVCELLAR_REQUIRE_DATA") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> Mapping[str, object]:
    """Metadata of the SmolLM2 demo model."""
    return read_metadata(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_metadata: Mapping[str, object]) -> Tokenizer:
    """Tokenizer of the SmolLM2 demo model."""
    return Tokenizer.from_metadata(smollm2_metadata)


@pytest.fixture(scope="session")
def gemma3_tokenizer(gemma3_path: Path) -> Tokenizer:
    """Tokenizer of Gemma 3 270M."""
    return Tokenizer.from_metadata(read_metadata(gemma3_path))
