"""Tokens as values: log-probabilities against a naive softmax, results, stops, and samplers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvcellar.errors import CacheFull, NotSupported, OptionError, SequenceBusy
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.runtime.options import ContextShift
from kvcellar.runtime.results import Token
from kvcellar.runtime.sequence import Sequence
from kvcellar.runtime.together import generate_all
from kvcellar.testing.gguf_writer import Value, gguf_bytes
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.text.grammar import Grammar
from kvcellar.text.sampler import Sampler, SamplerOptions
from tests.text.vocabularies import make_bpe

N_VOCAB, END, MARK = 259, 256, 257
DRAWN = SamplerOptions(1.0, 0, 1.0, 0.0, seed=7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    tiny = TinyLlama(n_vocab=N_VOCAB)
    special = (("<end>", 3), ("<mark>", 3), ("<user>", 4))
    vocabulary: dict[str, Value] = make_bpe((), special, eos_token_id=END)  # type: ignore[assignment]
    path = tmp_path_factory.mktemp("models") / "bytes.gguf"
    path.write_bytes(gguf_bytes({**tiny.metadata(), **vocabulary}, tiny.tensors()))
    with Model.from_gguf(path, n_threads=1) as made:
        yield made


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with model.context(n_ctx=96, n_seq_max=4, n_ubatch=8, type_k="f32", type_v="f32") as made:
        yield made


@pytest.fixture
def sequence(context: Context) -> Sequence:
    return context.sequence("Once upon")


def naive(logits: Any) -> Any:
    """Log-probabilities by the formula."""
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return np.log(weights / weights.sum())


def fresh(context: Context, tokens: list[int]) -> Any:
    """The log-probabilities behind a text, computed by itself."""
    with context.sequence(tokens) as other:
        return naive(other.logits)


# -- log-probabilities


def test_log_probabilities_are_those_of_the_model_and_of_the_draw(sequence: Sequence) -> None:
    options = SamplerOptions(0.7, 5, 1.0, 0.0, seed=3)
    before = sequence.tokens
    tokens = list(sequence.generate_tokens(6, options=options, logprobs=3, ignore_eos=True))
    assert [token.id for token in tokens] == sequence.tokens[len(before) :]
    for i, token in enumerate(tokens):
        logits = naive(fresh(sequence.context, before + [t.id for t in tokens[:i]]))
        assert token.logprob == pytest.approx(logits[token.id], abs=1e-4)
        best = np.argsort(-logits, kind="stable")
        assert [top.id for top in token.top_logprobs] == best[:3].tolist()
        assert [top.logprob for top in token.top_logprobs] == pytest.approx(
            logits[best[:3]], abs=1e-4
        )
        kept = np.delete(best, np.flatnonzero(best == END))[:5]
        shares = naive(logits[kept] / 0.7)
        assert token.sampled_logprob == pytest.approx(
            shares[kept.tolist().index(token.id)], abs=1e-3
        )
        assert token.top_logprobs[0].text == sequence.context.model.tokenizer.token_bytes(
            int(best[0])
        ).decode("utf-8", "replace")


def test_nothing_is_told_unless_asked_for(sequence: Sequence) -> None:
    [token] = sequence.generate_tokens(1, ignore_eos=True)
    assert token[2:] == (None, None, ())
    [token] = sequence.generate_tokens(1, ignore_eos=True, logprobs=0)
    assert token.logprob is not None
    assert token.top_logprobs == ()


@pytest.mark.parametrize("n", [1, 8, 19])
def test_scores_of_a_text_are_those_of_its_tokens(sequence: Sequence, n: int) -> None:
    before, view = sequence.tokens, sequence.context.cache.view()
    logits = sequence.logits
    ids = list(range(40, 40 + n))
    scores = sequence.logprobs(ids, top=2)
    assert [token.id for token in scores] == ids
    for i, token in enumerate(scores):
        wanted = fresh(sequence.context, before + ids[:i])
        assert token.logprob == pytest.approx(wanted[token.id], abs=1e-4)
        assert token.top_logprobs[0].logprob == pytest.approx(wanted.max(), abs=1e-4)
    assert (
        "".join(token.text or "" for token in scores)
        == bytes(b for i in ids for b in sequence.context.model.tokenizer.token_bytes(i)).decode()
    )
    assert (sequence.tokens, sequence.context.cache.view()) == (before, view)
    assert sequence.logits is logits
    assert not sequence.context.cache.in_transaction


def test_echo_scores_the_sequence_itself(sequence: Sequence) -> None:
    text, view = sequence.tokens, sequence.context.cache.view()
    scores = sequence.logprobs("!", echo=True)
    assert [token.id for token in scores] == [*text, ord("!")]
    assert scores[0] == Token(text[0], "O")
    for i, token in enumerate(scores[1:], 1):
        wanted = fresh(sequence.context, [t.id for t in scores[:i]])
        assert token.logprob == pytest.approx(wanted[token.id], abs=1e-4)
    assert sequence.context.cache.view() == view
    with sequence.context.sequence() as empty:
        assert empty.logprobs(text) == scores[: len(text)]
        assert (len(empty), empty.logprobs(), sequence.logprobs()) == (0, [], [])
        assert sequence.logprobs(echo=True) == scores[: len(text)]


def test_scores_leave_the_sequence_as_it_was_where_they_fail(sequence: Sequence) -> None:
    sequence.push(40)
    before = sequence.tokens
    with pytest.raises(CacheFull):
        sequence.logprobs(range(97))
    with pytest.raises(Exception, match="outside the vocabulary"):
        sequence.logprobs([1, N_VOCAB])
    for wrong in ({"top": -1}, {"echo": 1}):
        with pytest.raises(OptionError):
            sequence.logprobs([1], **wrong)  # type: ignore[arg-type]
    assert sequence.tokens == before
    assert sequence.context.cache.used == len(before)
    assert sequence.logits.tolist() == sequence.context.sequence(before).logits.tolist()


def test_embeddings_cannot_be_scored_again(sequence: Sequence) -> None:
    from kvcellar.batch import Batch

    width = sequence.context.model.spec.n_embd
    batch = Batch.of_embeddings(np.ones((1, width)), sequence.seq_id)
    sequence.context.decode(batch)
    with pytest.raises(NotSupported, match="embeddings"):
        sequence.logprobs(echo=True)


# -- results


def test_a_result_says_all_about_a_generation(context: Context) -> None:
    sequence = context.sequence("Once")
    result = sequence.complete(" upon", 5, options=DRAWN, logprobs=1, ignore_eos=True)
    assert list(result.ids) == sequence.tokens[-5:]
    assert result.logprobs is not None
    assert [token.id for token in result.logprobs] == list(result.ids)
    assert (result.finish_reason, sequence.finish_reason) == ("length", "length")
    assert result.seed == 7
    assert (result.cache.n_prompt, result.cache.n_computed, result.cache.n_reused) == (9, 5, 4)
    assert str(result.cache) == "4 of 9 tokens reused"
    assert (result.timings.n_prompt, result.timings.n_tokens) == (5, 5)
    assert result.timings.prompt_seconds > 0 < result.timings.seconds_per_token
    again = sequence.trim(5).complete(max_tokens=5, options=DRAWN, ignore_eos=True)
    assert (again.ids, again.logprobs) == (result.ids, None)
    assert again.cache.n_computed == 1  # the last token's logits were those of another
    more = sequence.complete(max_tokens=0)
    assert (more.ids, more.text, more.cache.n_computed) == ((), "", 1)


def test_a_seed_that_was_not_given_is_told(context: Context) -> None:
    results = [context.sequence("Once").complete(max_tokens=8, temperature=2.0) for _ in range(2)]
    assert results[0].seed != results[1].seed
    for result in results:
        again = context.sequence("Once").complete(max_tokens=8, temperature=2.0, seed=result.seed)
        assert again.ids == result.ids


def test_a_full_cache_ends_a_result_with_what_there_is(context: Context) -> None:
    sequence = context.sequence("a" * 90)
    result = sequence.complete(ignore_eos=True)
    assert (result.finish_reason, len(result.ids)) == ("cache_full", 7)
    assert sequence.tokens[90:] == list(result.ids)
    assert (len(sequence), sequence.finish_reason) == (97, "cache_full")
    with pytest.raises(CacheFull):
        context.sequence().complete("a" * 97, 1)
    assert len(sequence) == 97


def test_a_prompt_without_room_changes_nothing(sequence: Sequence) -> None:
    before = sequence.tokens
    with pytest.raises(CacheFull, match="cells needed") as kept:
        sequence.complete("a" * 96, 1)
    assert sequence.tokens == before
    assert sequence.complete("a", 1, ignore_eos=True).cache.n_computed == 1
    del kept  # a traceback holds no stream


def test_one_stream_at_a_time_whatever_it_gives(sequence: Sequence) -> None:
    tokens = sequence.generate_tokens(2)
    with pytest.raises(SequenceBusy):
        sequence.complete(max_tokens=1)
    del tokens
    assert sequence.complete(max_tokens=1, ignore_eos=True).ids


# -- where it stops


def test_stop_tokens_end_a_generation_and_are_not_added(sequence: Sequence) -> None:
    before = sequence.tokens
    for wanted, arguments in {
        "stop_token": {"stop_tokens": [99, 98]},
        "stop_string": {"stop": "b"},
    }.items():
        result = sequence.complete(max_tokens=4, logit_bias={98: np.inf}, **arguments)  # type: ignore[arg-type]
        assert result.finish_reason == wanted
        assert len(result.ids) == (wanted == "stop_string")
        sequence.trim(len(result.ids))
    assert sequence.tokens == before


def test_the_model_s_own_stop_token_can_be_ignored(sequence: Sequence) -> None:
    likely = {END: 1000.0, 98: 500.0}
    assert sequence.complete(max_tokens=3, logit_bias=likely).finish_reason == "stop_token"
    result = sequence.complete(max_tokens=3, logit_bias=likely, ignore_eos=True)
    assert (result.ids, result.finish_reason) == ((98, 98, 98), "length")
    also = sequence.complete(max_tokens=3, logit_bias=likely, ignore_eos=True, stop_tokens=[98])
    assert (also.ids, also.finish_reason) == ((), "stop_token")


@pytest.mark.parametrize("stop", ["<mark>", ["x", "<mark>"]])
def test_a_stop_string_that_spells_a_control_token_stops_at_it(
    sequence: Sequence, stop: Any
) -> None:
    """Text leaves such tokens out, so looking for the string finds nothing."""
    result = sequence.complete(max_tokens=3, logit_bias={MARK: np.inf}, stop=stop)
    assert (result.ids, result.text, result.finish_reason) == ((), "", "stop_string")
    passed = sequence.complete(max_tokens=3, logit_bias={MARK: np.inf}, stop="<mark")
    assert (passed.ids, passed.text) == ((MARK,) * 3, "")


@pytest.mark.parametrize("verb", ["generate", "stream", "generate_tokens", "complete"])
def test_no_stops_and_no_limit_can_be_said(context: Context, verb: str) -> None:
    sequence = context.sequence("a" * 88)
    arguments: dict[str, Any] = {"max_tokens": -1, "stop": None, "stop_tokens": [98]}
    bias = {98: 100.0, 97: 50.0}
    made = getattr(sequence, verb)(logit_bias=bias, **arguments)
    if verb in ("stream", "generate_tokens"):
        assert not list(made)
    assert sequence.finish_reason == "stop_token"
    assert len(sequence) == 88


# -- samplers


def test_a_sampler_goes_on_from_call_to_call(context: Context) -> None:
    sampler = Sampler(DRAWN)
    one, other = context.sequence("Once"), context.sequence("Once")
    parts = [one.complete(max_tokens=n, sampler=sampler, ignore_eos=True) for n in (2, 1, 5)]
    whole = other.complete(max_tokens=8, options=DRAWN, ignore_eos=True)
    assert sum((part.ids for part in parts), ()) == whole.ids
    assert {part.seed for part in parts} == {7}
    for given in ({"options": DRAWN}, {"temperature": 0.5}):
        with pytest.raises(OptionError, match="sampler: it has options of its own"):
            one.generate(1, sampler=sampler, **given)


def test_calls_with_one_seed_go_on_where_the_last_ended(context: Context) -> None:
    """A random number follows from the seed and the place of the token."""
    one, other = context.sequence("Once"), context.sequence("Once")
    parts = [one.complete(max_tokens=n, options=DRAWN, ignore_eos=True).ids for n in (2, 1, 5)]
    assert sum(parts, ()) == other.complete(max_tokens=8, options=DRAWN, ignore_eos=True).ids
    other.trim(6)
    assert other.complete(max_tokens=6, options=DRAWN, ignore_eos=True).ids == sum(parts, ())[2:]


def test_a_shift_repeats_no_random_number(context: Context) -> None:
    """Places go on although tokens move up."""
    flat = dict.fromkeys(range(256), 0.0)
    sequence = context.sequence("a" * 80)
    drawn: list[float] = []

    class Seen(Sampler):
        def sample(self, *args: Any, **kwargs: Any) -> int:
            drawn.append(kwargs["position"])
            return super().sample(*args, **kwargs)

    sampler = Seen(SamplerOptions(1.0, seed=1, logit_bias=flat))
    result = sequence.complete(max_tokens=60, sampler=sampler, shift=ContextShift(discard=20))
    assert len(sequence) < 96
    assert drawn[: len(result.ids)] == list(range(80, 80 + len(result.ids)))


# -- constraints


class Letters:
    """Allow the letters of a word, one after the other."""

    def __init__(self, word: str, n_done: int = 0) -> None:
        self.word, self.n_done = word, n_done

    @property
    def is_finished(self) -> bool:
        return self.n_done == len(self.word)

    def allowed(self) -> Any:
        mask = np.zeros(N_VOCAB, np.bool_)
        mask[END if self.is_finished else ord(self.word[self.n_done])] = True
        return mask

    def accept(self, token: int) -> None:
        assert self.allowed()[token]
        self.n_done += 1

    def copy(self) -> Letters:
        return Letters(self.word, self.n_done)


def test_a_constraint_says_what_may_come_and_ends_it(sequence: Sequence) -> None:
    constraint = Letters("yes")
    first = sequence.complete(max_tokens=2, constraint=constraint, logprobs=0, temperature=1.0)
    assert (first.text, first.finish_reason) == ("ye", "length")
    assert first.logprobs is not None
    for token in first.logprobs:
        assert token.sampled_logprob == 0 != token.logprob
    rest = sequence.complete(constraint=constraint)
    assert (rest.text, rest.finish_reason) == ("s", "constraint")
    again = sequence.complete(constraint=constraint, stop="x")
    assert (again.ids, again.finish_reason) == ((), "stop_token")
    results = generate_all(
        [sequence, sequence.fork()],
        each=[{"constraint": Letters("no")}, {"sampler": Sampler(constraint=Letters("maybe"))}],
    )
    assert [result.text for result in results] == ["no", "maybe"]
    for given in ({"sampler": Sampler()}, {"grammar": Grammar.regex("a")}):
        with pytest.raises(OptionError, match="constraint"):
            sequence.generate(1, constraint=constraint, **given)


def test_a_grammar_is_one(sequence: Sequence) -> None:
    pytest.importorskip("llguidance")
    for verb in (sequence.generate, lambda **given: "".join(sequence.stream(**given))):
        text = verb(grammar=Grammar.regex("[0-9]{3}-(a|b)"), temperature=1.0, seed=3)
        assert re.fullmatch("[0-9]{3}-(a|b)", text)
    for wrong in ({"grammar": "[0-9]"}, {"constraint": 5}):
        with pytest.raises(OptionError):
            sequence.generate(1, **wrong)
