"""Pieces of text, however a generation is split into calls, are what the text gained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.runtime.sequence import Sequence
from kvcellar.runtime.together import generate_all, stream_all
from kvcellar.testing.gguf_writer import Value, gguf_bytes
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.text.sampler import Sampler, SamplerOptions
from tests.profiles import examples
from tests.text.vocabularies import make_bpe, make_spm

N_VOCAB = 266
CONTROL, WHOLE = ("<C>", 3), ("<U>", 4)
PIECES = {"▁": -1.0, "a": -2.0, "▁a": -3.0, "é": -4.0}
BYTES = "🙂é".encode()


@pytest.fixture(scope="module", params=["bpe", "spm"])
def context(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Context]:
    """A tiny model that has a token for each byte."""
    tiny, special = TinyLlama(n_vocab=N_VOCAB), (CONTROL, WHOLE)
    made = make_bpe((), special) if request.param == "bpe" else make_spm(PIECES, special)
    vocabulary: dict[str, Value] = made  # type: ignore[assignment]
    path = tmp_path_factory.mktemp("models") / "bytes.gguf"
    path.write_bytes(gguf_bytes({**tiny.metadata(), **vocabulary}, tiny.tensors()))
    with Model.from_gguf(path, n_threads=1) as model, model.context(n_ctx=1024) as context:
        yield context


def options(context: Context, seed: int) -> SamplerOptions:
    """Draw bytes of two characters, a letter, a space and tokens that are matched whole."""
    tokens = context.model.tokenizer.vocab.tokens
    names = ["<C>", "<U>", "a"]
    ids = [tokens.index(name) for name in names if name in tokens]
    ids += [i for i in range(len(tokens)) if context.model.tokenizer.token_bytes(i) in ONE_BYTE]
    return SamplerOptions(1.0, 0, 1.0, 0.0, logit_bias=dict.fromkeys(ids, float("inf")), seed=seed)


ONE_BYTE = frozenset(bytes([byte]) for byte in BYTES) | {b" ", b" a"}


def shown(sequence: Sequence) -> str:
    """All of its text but bytes at the end that may still become a character."""
    stream = sequence.context.model.tokenizer.detokenizer()
    return "".join([stream.push(token) for token in sequence.tokens])


def completed(sequence: Sequence, n: int, sampler: Sampler) -> str:
    result = sequence.complete(max_tokens=n, sampler=sampler)
    assert list(result.ids) == sequence.tokens[-len(result.ids) :]
    assert len(result.ids) == n
    return result.text or ""


def in_a_batch(sequence: Sequence, n: int, sampler: Sampler) -> str:
    [result] = generate_all([sequence], n, sampler=sampler)
    return result.text or ""


GENERATE: list[Callable[[Sequence, int, Sampler], str]] = [
    lambda s, n, sampler: s.generate(n, sampler=sampler),
    lambda s, n, sampler: "".join(s.stream(n, sampler=sampler)),
    lambda s, n, sampler: "".join(t.text or "" for t in s.generate_tokens(n, sampler=sampler)),
    lambda s, n, sampler: "".join(x.token.text or "" for x in stream_all([s], n, sampler=sampler)),
    completed,
    in_a_batch,
]


@examples(60)
@given(
    parts=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    verbs=st.lists(st.sampled_from(GENERATE), min_size=6, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_a_generation_in_parts_is_that_in_one(
    context: Context,
    parts: list[int],
    verbs: list[Callable[[Sequence, int, Sampler], str]],
    seed: int,
) -> None:
    sampler = Sampler(options(context, seed))
    with context.sequence("a") as one, one.fork() as other:
        whole = one.generate(sum(parts), sampler=sampler.copy())
        pieces = [verb(other, n, sampler) for verb, n in zip(verbs, parts, strict=False)]
        assert other.tokens == one.tokens
        assert "".join(pieces) == whole
        assert shown(one) == shown_before(one, sum(parts)) + whole


def shown_before(sequence: Sequence, n: int) -> str:
    with sequence.fork() as earlier:
        return shown(earlier.trim(n))


def rolled_back(sequence: Sequence, path: Path) -> None:
    del path
    with sequence.context.cache.transaction() as attempt:
        sequence.generate(2, options=options(sequence.context, 1))
        attempt.rollback()


def loaded(sequence: Sequence, path: Path) -> Sequence:
    sequence.save(path)
    return sequence.context.load(path)


def first_byte(sequence: Sequence) -> int:
    tokenizer = sequence.context.model.tokenizer
    wanted = "🙂".encode()[:1]
    return next(i for i in range(tokenizer.n_vocab) if tokenizer.token_bytes(i) == wanted)


EDITS: dict[str, Callable[[Sequence, Path], object]] = {
    "trim": lambda s, _: s.trim(1),
    "remove": lambda s, _: s.remove(len(s) - 2, len(s) - 1),
    "remove the last": lambda s, _: s.remove(len(s) - 1, len(s)),
    "append text": lambda s, _: s.append("a"),
    "append a part": lambda s, _: s.append([first_byte(s)]),
    "push": lambda s, _: s.push(first_byte(s)),
    "cut cells": lambda s, _: s.context.cache.seq_rm(s.seq_id, len(s) - 2, -1),
    "fork": lambda s, _: s.fork(),
    "roll back": rolled_back,
    "save and load": loaded,
    "score": lambda s, _: s.logprobs("a"),
}


@examples(60)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from(GENERATE), st.sampled_from(sorted(EDITS))),
        min_size=2,
        max_size=4,
    ),
    seed=st.integers(0, 2**32),
)
def test_a_call_gives_what_the_text_gains_by_it_whatever_was_edited(
    context: Context,
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[int, Callable[[Sequence, int, Sampler], str], str]],
    seed: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "text.kv"
    sampler = Sampler(options(context, seed))
    for one in context.sequences:
        one.close()
    sequence = context.sequence("aaaa")
    for n, verb, edit in steps:
        before = shown(sequence)
        piece = verb(sequence, n, sampler)
        assert shown(sequence) == before + piece
        made = EDITS[edit](sequence, path)
        sequence = made if isinstance(made, Sequence) else sequence


@pytest.mark.parametrize("edit", ["trim", "append text", "append a part", "cut cells", "push"])
def test_an_edit_amid_a_stream_is_followed(context: Context, tmp_path: Path, edit: str) -> None:
    for seed in range(20):
        with context.sequence("aaaa") as sequence:
            stream = sequence.generate_tokens(12, options=options(context, seed))
            before = shown(sequence)
            for i, token in enumerate(stream):
                assert shown(sequence) == before + (token.text or "")
                if i % 3 == 2:
                    EDITS[edit](sequence, tmp_path)
                before = shown(sequence)


def test_an_emoji_that_is_cut_is_shown_by_the_next_call(context: Context) -> None:
    tokenizer = context.model.tokenizer
    ids = [
        next(i for i in range(tokenizer.n_vocab) if tokenizer.token_bytes(i) == bytes([byte]))
        for byte in "🙂".encode()
    ]
    with context.sequence("a") as sequence:
        pieces = [sequence.generate(1, logit_bias={i: float("inf")}) for i in ids]
        assert pieces == ["", "", "", "🙂"]
        assert sequence.text.endswith("a🙂")
        sequence.trim(1)
        assert sequence.text.endswith("a\N{REPLACEMENT CHARACTER}")
        # What can never become a character shows at once, with what makes that certain.
        again = sequence.generate(1, logit_bias={ids[0]: float("inf")})
        assert again == "\N{REPLACEMENT CHARACTER}"
