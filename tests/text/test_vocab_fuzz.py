"""Hostile vocabularies give tokens or errors of ours, in time that does not explode."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import numpy as np
import pytest

from kvcellar.testing.vocab_fuzz import KINDS, attempt, hostile_vocab
from kvcellar.text.tokenizer import Tokenizer

N = 20_000
LETTERS = "ab▁é\n1日"


@pytest.mark.slow
def test_hostile_vocabularies() -> None:
    command = [sys.executable, "-m", "kvcellar.testing.vocab_fuzz", "0", "100"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    lines = result.stdout.splitlines()
    assert result.returncode == 0, f"{lines[-1:]} {result.stderr[-2000:]}"
    outcomes = dict(pair.split("=") for pair in lines[-1].split()[1:])
    assert outcomes.keys() == {"tokenized", "TokenizerError"}
    assert int(outcomes["tokenized"]) > 40


def test_the_fuzzer_meets_every_kind() -> None:
    kinds = {hostile_vocab(random.Random(seed)).get("tokenizer.ggml.model") for seed in range(80)}
    assert kinds >= set(KINDS)


def test_the_fuzzer_notices_a_control_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "is_special", lambda *_: True)
    vocabs = [hostile_vocab(random.Random(seed)) for seed in range(80)]
    with pytest.raises(AssertionError, match="gave"):
        _ = [attempt(vocab, random.Random(0)) for vocab in vocabs]


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_letters_take_no_quadratic_time(kind: str) -> None:
    """Pieces that are runs of a letter, for a text that is one."""
    texts = [letter * n for letter in LETTERS for n in (1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 257)]
    texts += [f"<0x{byte:02X}>" for byte in range(256)]
    if kind == "rwkv":
        texts += [f"\\x{byte:02x}" for byte in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    tokens = special + texts
    kinds = [2, 3, 3] + [6 if text.startswith("<0x") else 1 for text in texts]
    merges = [f"{letter * n} {letter * n}" for letter in LETTERS for n in (1, 2, 4, 8, 16, 32)]
    tokenizer = Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": kind,
            "tokenizer.ggml.pre": "whitespace" if kind == "whitespace" else "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(kinds, np.int32),
            "tokenizer.ggml.scores": np.array([-1 / len(text) for text in tokens], np.float32),
            "tokenizer.ggml.merges": [] if kind == "gpt2" else merges,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.seperator_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )
    for letter in (*LETTERS, " ", "ab", " a", "a1"):
        begin = time.process_time()
        tokenizer.encode(letter * (N // len(letter)))
        assert time.process_time() - begin < 5, letter
