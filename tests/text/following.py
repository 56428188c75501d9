"""Texts followed through a grammar, byte by byte or by any tokens."""

from __future__ import annotations

import random
from collections.abc import Collection

from kvcellar.text.grammar import Grammar
from kvcellar.text.grammar_matcher import GrammarMatcher
from kvcellar.text.tokenizer import Tokenizer
from tests.text.vocabularies import CONTROL, USER, make_bpe

END, TURN, TOOL = 266, 267, 268
BYTES = Tokenizer.from_metadata(
    make_bpe(
        ("a b", "ab c", "Ġ a", "t r", "tr u", "tru e", '" :', '" ,', "1 2", "Ã ©"),
        (("<eos>", CONTROL), ("<eot>", CONTROL), ("<tool>", CONTROL), ("<mark>", USER)),
        eos_token_id=END,
        eot_token_id=TURN,
    )
)
"""Every byte, a few longer tokens, two that end a text, and one that is no text."""

BYTE_IDS = {BYTES.token_bytes(i): i for i in range(256)}


def fits(grammar: Grammar, text: str | bytes) -> bool:
    """Whether a text as a whole is one of a grammar, a byte at a time."""
    matcher = grammar.matcher(BYTES)
    for byte in text.encode() if isinstance(text, str) else text:
        token = BYTE_IDS[bytes([byte])]
        if not matcher.allowed()[token]:
            return False
        matcher.accept(token)
    return matcher.is_accepting


def written(matcher: GrammarMatcher, seed: int, *, most: int = 400) -> str | None:
    """A random text of a grammar that prefers to end; None if it is not complete by then."""
    chance = random.Random(seed)
    text = b""
    for n in range(most):
        tokens = matcher.allowed().nonzero()[0].tolist()
        if matcher.is_finished or (matcher.is_accepting and chance.random() < 0.4):
            return text.decode()
        # The longer it gets, the more what closes brackets and quotes is preferred.
        tokens = [t for t in tokens if t not in BYTES.stop_ids]
        closing = [t for t in tokens if BYTES.token_bytes(t)[:1] in (b"}", b"]", b'"', b",", b":")]
        pool = closing if closing and chance.random() < n / 60 else tokens
        token = chance.choice(pool)
        matcher.accept(token)
        text += BYTES.token_bytes(token)
    return None


def continuing(texts: Collection[bytes], so_far: bytes, tokenizer: Tokenizer) -> set[int]:
    """The tokens that may follow, of a grammar whose texts are listed: by trying each."""
    found = {
        token
        for token in range(tokenizer.n_vocab)
        if not tokenizer.is_special(token)
        and token not in tokenizer.stop_ids
        and (piece := tokenizer.token_bytes(token))
        and any(text.startswith(so_far + piece) for text in texts)
    }
    return found | (set(tokenizer.stop_ids) if so_far in texts else set())
