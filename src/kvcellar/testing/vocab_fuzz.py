"""Hostile vocabularies: text is tokenized and comes back as text, or an error of ours says why not.

``python -m kvcellar.testing.vocab_fuzz FIRST COUNT`` tries COUNT vocabularies whose seeds begin at
FIRST. Each seed is printed before it is tried, and at the end how many vocabularies gave what. A
vocabulary may not

1. raise anything but a :class:`~kvcellar.errors.KVCellarError`,
2. give an id that is not in it, or a control token that was not asked for,
3. take more than :data:`SECONDS` of processor time for a text of :data:`N_LETTERS`.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter

import numpy as np

from kvcellar.errors import KVCellarError
from kvcellar.text.pre_tokenizers import known_names
from kvcellar.text.tokenizer import Tokenizer

KINDS = ("gpt2", "llama", "gemma4", "t5", "bert", "rwkv", "plamo2", "whitespace")
N_LETTERS = 8_000
SECONDS = 10.0
UNITS = (
    *("a", "ab", "aA", " ", "  ", "\n", "\t", "\r\n", "1", "a1", "!", "'s", "é", "e\u0301", "日"),
    *(
        "한",
        "\u0301",
        "\u00a0",
        "\u200b",
        "\ufeff",
        "\x00",
        "🙂",
        "▁",
        "<0x41>",
        "<s>",
        "\\x41",
        "½",
    ),
)
"""What texts and pieces are made of."""

_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces")
_IDS = ("bos", "eos", "eot", "unknown", "seperator")
_NAMED = ("<s>", "</s>", "<unk>", "<|im_end|>", "<|end|>", "<|tool_response>", "<mask>", "[PAD]")
_SCORES = (0.0, -1.0, -1.0, -2.5, -1e-9, -3000.0, 7.0, 1e38, float("inf"), -float("inf"))


def hostile_vocab(rng: random.Random) -> dict[str, object]:
    """Metadata of a vocabulary that no model would have."""
    kind = rng.choice(KINDS)
    tokens = list(dict.fromkeys(_piece(rng) for _ in range(rng.choice((1, 30, 300)))))
    if rng.random() < 0.8:
        form = "\\x{:02x}" if kind == "rwkv" else "<0x{:02X}>"
        tokens += map(form.format, range(256))
    tokens = [*dict.fromkeys(tokens + rng.sample(_NAMED, 3))]
    rng.shuffle(tokens)
    prefix = "tokenizer.ggml."
    found: dict[str, object] = {
        prefix + "model": kind,
        prefix + "pre": rng.choice(known_names()),
        prefix + "tokens": tokens,
        prefix + "token_type": np.array([_kind_of(text, rng) for text in tokens], np.int32),
        prefix + "scores": np.array([rng.choice(_SCORES) for _ in tokens], np.float32),
        prefix + "merges": _merges(tokens, rng),
        "general.name": rng.choice(("", "phi-3", "modern-bert")),
    }
    for flag in (*_FLAGS, "normalizer.lowercase", "normalizer.strip_accents"):
        if rng.random() < 0.4:
            found[prefix + flag] = rng.random() < 0.5
    for name in _IDS:
        if rng.random() < 0.9:
            found[f"{prefix}{name}_token_id"] = rng.randrange(len(tokens))
    if rng.random() < 0.5:
        found[prefix + "precompiled_charsmap"] = np.frombuffer(_charsmap(rng), np.uint8)
    if rng.random() < 0.2:
        found.pop(rng.choice(list(found)))
    return found


def attempt(metadata: dict[str, object], rng: random.Random) -> str:
    """What a vocabulary comes to: "tokenized", or the name of an error.

    Raises:
        AssertionError: it did what none may.
    """
    try:
        tokenizer = Tokenizer.from_metadata(metadata)
        for text in _texts(rng):
            _try(tokenizer, text, rng)
    except KVCellarError as error:
        return type(error).__name__
    return "tokenized"


def _try(tokenizer: Tokenizer, text: str, rng: random.Random) -> None:
    continuing, parse_special = rng.random() < 0.5, rng.random() < 0.3
    begin = time.process_time()
    ids = tokenizer.encode(
        text, add_special=False, parse_special=parse_special, continuing=continuing
    )
    seconds = time.process_time() - begin
    assert seconds < SECONDS, f"{seconds:.1f} seconds for {text[:20]!r}"
    assert not ids or 0 <= min(ids) <= max(ids) < tokenizer.n_vocab
    if not parse_special:
        special = {i for i in set(ids) if tokenizer.is_special(i)}
        assert special <= {tokenizer.vocab.unknown_id}, f"{text[:20]!r} gave {special}"
    tokenizer.decode(ids, skip_special=False, continuing=continuing)


def _texts(rng: random.Random) -> list[str]:
    long = rng.choice(UNITS)
    mixed = "".join(rng.choices(UNITS, k=40))
    return [long * (N_LETTERS // len(long)), mixed, mixed * 50 + "x", ""]


def _piece(rng: random.Random) -> str:
    unit = rng.choice(UNITS)
    how = rng.random()
    if how < 0.4:
        return "".join(rng.choices(UNITS, k=rng.randrange(1, 5)))
    if how < 0.8:
        return unit * rng.randrange(1, 40)
    if how < 0.99:
        return rng.choice(("\udc80", "a b", " a", "", "\0▁", "a" * 900, "▁" * 300))
    return rng.choice(("\\", "a\\x4", "a" * 3000))


def _kind_of(text: str, rng: random.Random) -> int:
    if len(text) == 6 and text.startswith("<0x"):
        return 6
    return rng.choice((1, 1, 1, 1, 1, 1, 3, 4, 5, 0) if rng.random() < 0.999 else (2, 6, 99, -1))


def _merges(tokens: list[str], rng: random.Random) -> list[str]:
    known = set(tokens)
    pairs = [(token[:i], token[i:]) for token in tokens for i in range(1, min(len(token), 4))]
    fitting = [pair for pair in pairs if known.issuperset(pair) and " " not in "".join(pair)]
    merges = [" ".join(pair) for pair in fitting]
    rng.shuffle(merges)
    return merges + ["a  b", "nothing here"][: rng.random() < 0.1]


def _charsmap(rng: random.Random) -> bytes:
    """A trie whose nodes lead anywhere, in circles too, and replacements."""
    n = rng.choice((1, 16, 256, 1024))
    labels = [rng.choice((0x61, 0x20, 0xC3, 0xA9, 0xE6, rng.randrange(256))) for _ in range(n)]
    units = [label | rng.randrange(2) << 8 | rng.randrange(n) << 10 for label in labels]
    trie = np.array(units, "<u4").tobytes()
    size = len(trie) if rng.random() < 0.9 else rng.randrange(2 * len(trie))
    return size.to_bytes(4, "little") + trie + b"x\0\xffy\0 \0\0"


def main(first: str, count: str) -> None:
    """See the module's docstring."""
    outcomes: Counter[str] = Counter()
    for seed in range(int(first), int(first) + int(count)):
        print("seed", seed, flush=True)
        rng = random.Random(seed)
        outcomes[attempt(hostile_vocab(rng), rng)] += 1
    print("outcomes", *(f"{name}={n}" for name, n in sorted(outcomes.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
