"""Prompts whose last token is left open: what takes its place, and what closes it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvcellar.errors import OptionError
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.runtime.sequence import Sequence
from kvcellar.testing.gguf_writer import Value, gguf_bytes
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.text.grammar import Grammar
from tests.text.vocabularies import make_bpe

MERGES = ("l l", "ll o", "h e", "he llo", "l d", "Ġ w", ": /", ":/ /")
N_VOCAB = 256 + len(MERGES) + 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    tiny = TinyLlama(n_vocab=N_VOCAB)
    vocabulary: dict[str, Value] = make_bpe(  # type: ignore[assignment]
        MERGES, (("<end>", 3),), eos_token_id=N_VOCAB - 1
    )
    path = tmp_path_factory.mktemp("models") / "bytes.gguf"
    path.write_bytes(gguf_bytes({**tiny.metadata(), **vocabulary}, tiny.tensors()))
    with Model.from_gguf(path, n_threads=1) as made:
        yield made


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with model.context(n_ctx=128, n_seq_max=4, type_k="f32", type_v="f32") as made:
        yield made


def opened(context: Context, prompt: str) -> Sequence:
    return context.sequence().append(prompt, heal=True)


@pytest.mark.parametrize("prompt", ["see http:", "a he", "xl", " hell", "so h"])
def test_the_first_token_begins_with_the_text_of_the_last_one(
    context: Context, model: Model, prompt: str
) -> None:
    tokenizer = model.tokenizer
    ids = tokenizer.encode(prompt)
    last = tokenizer.token_bytes(ids[-1])
    fitting = [i for i in range(N_VOCAB - 1) if tokenizer.token_bytes(i).startswith(last)]
    assert len(fitting) > 1
    with context.sequence(ids[:-1]) as before:
        expected = max(fitting, key=lambda i: float(before.logits[i]))
    sequence = opened(context, prompt)
    assert (sequence.tokens, sequence.text) == (ids, prompt)
    pieces = list(sequence.generate_tokens(5))
    assert sequence.tokens == [*ids[:-1], *(token.id for token in pieces)]
    assert pieces[0].id == expected
    assert sequence.text.startswith(prompt)
    with context.sequence(sequence.tokens) as fresh:
        np.testing.assert_allclose(sequence.logits, fresh.logits, atol=1e-5)


def test_what_is_yielded_is_what_the_text_gained(context: Context) -> None:
    for how in ("generate", "complete"):
        sequence = opened(context, "see http:")
        gained = sequence.generate(6) if how == "generate" else sequence.complete(max_tokens=6).text
        assert sequence.text.encode().startswith(b"see http:")
        assert "see http:" + str(gained) == sequence.text
        sequence.close()


def test_a_forced_token_takes_the_place_of_the_open_one(context: Context, model: Model) -> None:
    sequence = opened(context, "see http:")
    wanted = model.tokenizer.encode("://")[0]
    assert sequence.generate(1, logit_bias={wanted: 100.0}) == "//"
    assert sequence.text == "see http://"


def test_what_is_computed_or_edited_is_closed(context: Context, model: Model) -> None:
    ids = model.tokenizer.encode("see http:")
    colon = ids[-1]
    for close in (
        lambda s: s.append("x"),
        lambda s: s.compute_pending(),
        lambda s: s.push(5),
        lambda s: s.trim(1),
        lambda s: (s.trim(2), s.push(colon)),
        lambda s: s.logits,
    ):
        sequence = opened(context, "see http:")
        assert sequence.open_token() is not None
        close(sequence)
        assert sequence.open_token() is None
        before = sequence.tokens
        sequence.generate(2)
        assert sequence.tokens[: len(before)] == before
        sequence.close()


def test_a_fork_is_open_as_well(context: Context) -> None:
    sequence = opened(context, "see http:")
    other = sequence.fork()
    assert sequence.generate(3) == other.generate(3)
    assert sequence.tokens == other.tokens


def test_with_a_grammar_the_token_stays(context: Context) -> None:
    pytest.importorskip("llguidance")
    sequence = opened(context, "see http:")
    before = sequence.tokens
    assert sequence.generate(5, grammar=Grammar.regex("//x")) == "//x"
    assert sequence.tokens[: len(before)] == before


def test_nothing_happens_where_nothing_can_be_healed(context: Context) -> None:
    for prompt in ("see x", ":"):
        sequence = opened(context, prompt)
        assert sequence.open_token() is None
        assert sequence.text == prompt
        sequence.close()
    with pytest.raises(OptionError, match="heal"):
        context.sequence().append("a", heal="yes")  # type: ignore[arg-type]


def test_nothing_is_generated_and_nothing_is_lost(context: Context) -> None:
    sequence = opened(context, "see http:")
    assert sequence.generate(0) == ""
    assert sequence.text == "see http:"
