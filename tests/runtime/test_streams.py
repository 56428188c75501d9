"""Streams: one at a time on a sequence, from the text as it is, and none without a tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from weakref import ref

import numpy as np
import pytest

from kvcellar.errors import CacheFull, OptionError, SequenceBusy, TokenizerError
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.runtime.options import ContextShift
from kvcellar.runtime.sequence import Sequence
from kvcellar.testing.gguf_writer import Value, gguf_bytes
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.text.sampler import Sampler, SamplerOptions
from tests.text.vocabularies import byte_letters, make_bpe

N_VOCAB = 260


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny model with a token for each byte, and four tokens that its vocabulary lacks."""
    tiny = TinyLlama(n_vocab=N_VOCAB)
    vocabulary: dict[str, Value] = make_bpe()  # type: ignore[assignment]
    path = tmp_path_factory.mktemp("models") / "bytes.gguf"
    path.write_bytes(gguf_bytes({**tiny.metadata(), **vocabulary}, tiny.tensors()))
    with Model.from_gguf(path, n_threads=1) as made:
        yield made


@pytest.fixture
def sequence(model: Model) -> Iterator[Sequence]:
    with model.context(n_ctx=128, n_seq_max=4, type_k="f32", type_v="f32") as context:
        yield context.sequence("Once upon")


def byte_id(letter: str) -> int:
    return byte_letters().index(letter)


def stream(sequence: Sequence, n: int | None = 8, **options: Any) -> Iterator[str]:
    """A stream of ASCII letters, a piece each."""
    bias = {byte_id(letter): 1e3 for letter in "abcdefgh"}
    return sequence.stream(n, logit_bias=bias, **options)


# -- one at a time


def test_a_second_stream_is_refused_while_the_first_runs(sequence: Sequence) -> None:
    first = stream(sequence)
    text = next(first)
    before, reason = sequence.tokens, sequence.finish_reason
    for second in (lambda: stream(sequence), lambda: sequence.generate(2)):
        with pytest.raises(SequenceBusy, match=r"sequence 0: .*close\(\).*fork\(\)"):
            second()
    assert sequence.tokens == before
    assert sequence.finish_reason == reason
    text += "".join(first)
    assert sequence.text == "Once upon" + text
    assert sequence.finish_reason == "length"


def test_a_stream_runs_from_when_it_is_made(sequence: Sequence) -> None:
    first = stream(sequence)
    with pytest.raises(SequenceBusy):
        stream(sequence)
    assert len("".join(first)) == 8


def exhausted(sequence: Sequence) -> object:
    list(made := stream(sequence))
    return made


def closed(sequence: Sequence) -> object:
    next(made := stream(sequence))
    made.close()  # type: ignore[attr-defined]
    return made


def closed_unused(sequence: Sequence) -> object:
    made = stream(sequence)
    made.close()  # type: ignore[attr-defined]
    return made


def broken_off(sequence: Sequence) -> object:
    for _ in stream(sequence):
        break
    return None


def never_used(sequence: Sequence) -> object:
    stream(sequence)
    return None


def full(sequence: Sequence) -> object:
    made = stream(sequence, None)
    with pytest.raises(CacheFull):
        list(made)
    sequence.trim(20)
    return made


def thrown_into(sequence: Sequence) -> object:
    next(made := stream(sequence))
    with pytest.raises(KeyboardInterrupt):
        made.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    return made


def in_a_circle(sequence: Sequence) -> object:
    circle: list[object] = [stream(sequence)]
    circle.append(circle)
    return None


def with_wrong_options(sequence: Sequence) -> object:
    with pytest.raises(OptionError):
        stream(sequence, top_k=-1)
    return None


ENDS: list[Callable[[Sequence], object]] = [
    exhausted,
    closed,
    closed_unused,
    broken_off,
    never_used,
    full,
    thrown_into,
    in_a_circle,
    with_wrong_options,
]


@pytest.mark.parametrize("end", ENDS)
def test_a_stream_that_ended_is_out_of_the_way(
    sequence: Sequence, end: Callable[[Sequence], object]
) -> None:
    held = end(sequence)
    assert len("".join(stream(sequence))) == 8
    del held


def test_a_failed_body_drops_its_stream(sequence: Sequence) -> None:
    """Also while its traceback is kept, as an interactive session keeps the last one."""

    def use() -> None:
        for _ in stream(sequence):
            raise RuntimeError("in the body")

    with pytest.raises(RuntimeError) as kept:
        use()
    assert sequence.generate(1, logit_bias={byte_id("a"): 1e3}) == "a"
    del kept


def test_a_dropped_stream_is_freed_at_once(sequence: Sequence) -> None:
    made = stream(sequence)
    next(made)
    watched = ref(made)
    del made
    assert watched() is None


def test_forks_and_other_sequences_stream_meanwhile(sequence: Sequence) -> None:
    other = sequence.context.sequence("Twice")
    first = stream(sequence)
    next(first)
    fork = sequence.fork()
    both = list(zip(stream(fork), stream(other), first, strict=False))
    assert len(both) == 7
    assert sequence.tokens == fork.tokens[: len(sequence)]


def test_a_rollback_does_not_forget_which_stream_runs(sequence: Sequence) -> None:
    with sequence.context.cache.transaction() as attempt:
        first = stream(sequence)
        next(first)
        attempt.rollback()
    with pytest.raises(SequenceBusy):
        stream(sequence)
    assert sequence.text == "Once upon"
    rest = "".join(first)
    assert sequence.text == "Once upon" + rest
    before = stream(sequence)
    with sequence.context.cache.transaction() as attempt:
        list(before)
        attempt.rollback()
    assert len("".join(stream(sequence))) == 8


# -- edits meanwhile


def replay(sequence: Sequence, tokens: list[int], options: SamplerOptions) -> int:
    """What a fresh sequence with these tokens would go on with."""
    with sequence.context.sequence(tokens) as other:
        return Sampler(options).sample(other.logits, other.tokens)


EDITS: dict[str, Callable[[Sequence], object]] = {
    "append": lambda s: s.append("xyz"),
    "push": lambda s: s.push(byte_id("z")),
    "trim": lambda s: s.trim(3),
    "remove": lambda s: s.remove(len(s) - 3, len(s) - 1),
    "rm": lambda s: s.context.cache.seq_rm(s.seq_id, 5, -1),
    "shift": lambda s: s.shift_context(discard=2),
    "compute": lambda s: s.compute_pending(),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_stream_goes_on_from_the_text_as_it_is(sequence: Sequence, name: str) -> None:
    """What penalties look back at is the edited text too."""
    options = SamplerOptions(
        temperature=0.0,
        frequency_penalty=1.0,
        penalty_last_n=-1,
        logit_bias={byte_id(letter): 1e3 for letter in "abcdefgh"},
    )
    first = sequence.stream(6, options=options)
    for _ in range(3):
        next(first)
    EDITS[name](sequence)
    before = sequence.tokens
    wanted = replay(sequence, before, options) if name not in ("remove", "shift") else None
    next(first)
    got = sequence.tokens
    assert got[:-1] == before
    assert wanted in (None, got[-1])
    assert len(list(first)) == 2


@pytest.mark.parametrize("penalty", [0.0, 500.0])
def test_penalties_see_each_token_once(sequence: Sequence, penalty: float) -> None:
    options = SamplerOptions(
        temperature=0.0,
        frequency_penalty=penalty,
        logit_bias={byte_id(letter): 1e3 for letter in "abcdefgh"},
    )
    tokens = sequence.tokens
    for _ in range(8):
        tokens.append(replay(sequence, tokens, options))
    sequence.generate(8, options=options)
    assert sequence.tokens == tokens
    six = set(tokens[-8:-2])  # the letters that "Once upon" lacks, if it counts
    assert (six == {byte_id(letter) for letter in "abdfgh"}) == (penalty > 0)


def test_appends_of_another_thread_do_not_fall_into_a_step(sequence: Sequence) -> None:
    options = SamplerOptions(temperature=0.0, logit_bias={byte_id(c): 1e3 for c in "abcdefgh"})
    thread = threading.Thread(target=lambda: [sequence.append("Z") for _ in range(20)])
    thread.start()
    list(sequence.stream(20, options=options))
    thread.join()
    tokens = sequence.tokens
    start = len("Once upon")
    for i in range(start, len(tokens)):
        if tokens[i] != byte_id("Z"):
            assert tokens[i] == replay(sequence, tokens[:i], options)


# -- models without text


@pytest.mark.parametrize("verb", ["generate", "stream"])
def test_without_a_tokenizer_nothing_is_sampled(plain: Context, verb: str) -> None:
    sequence = plain.sequence([1, 2, 3])
    sequence.finish_reason = "length"
    n_decodes, before = plain.timings.n_decodes, plain.cache.view()
    with pytest.raises(TokenizerError, match=r"generate_tokens\(\) and complete\(\)"):
        getattr(sequence, verb)(3)
    assert sequence.tokens == [1, 2, 3]
    assert plain.cache.view() == before
    assert plain.timings.n_decodes == n_decodes
    assert sequence.finish_reason == "length"


def test_what_is_advised_without_a_tokenizer_works(plain: Context) -> None:
    sequence, other = plain.sequence([1, 2, 3]), plain.sequence([1, 2, 3])
    wanted = []
    for _ in range(3):
        wanted.append(int(sequence.logits.argmax()))
        sequence.append(wanted[-1:])
    tokens = list(other.fork().generate_tokens(3))
    assert [(token.id, token.text, token.logprob) for token in tokens] == [
        (i, None, None) for i in wanted
    ]
    result = other.complete(max_tokens=3, logprobs=1)
    assert (result.ids, result.text, result.finish_reason) == (tuple(wanted), None, "length")
    assert other.tokens == sequence.tokens
    with pytest.raises(OptionError, match=r"no tokenizer.*stop_tokens"):
        other.generate_tokens(3, stop="a")
    [first] = other.fork().complete(max_tokens=1).ids
    stopped = other.complete(max_tokens=9, stop_tokens=[first])
    assert (stopped.ids, stopped.finish_reason) == ((), "stop_token")


def test_a_token_that_the_vocabulary_lacks_is_not_added(sequence: Sequence) -> None:
    before = sequence.tokens
    with pytest.raises(TokenizerError, match="no token 258: the vocabulary has 256"):
        sequence.generate(3, logit_bias={258: np.inf})
    assert sequence.tokens == before
    sequence.generate(1, shift=ContextShift(), logit_bias={byte_id("a"): np.inf})
    assert sequence.text == "Once upona"


def test_a_pushed_token_must_be_one(sequence: Sequence) -> None:
    before = sequence.tokens
    wrong: list[Any] = [-1, N_VOCAB, 1.5, None, "a", True, b"a", [1]]
    for token in wrong:
        with pytest.raises(OptionError, match="token="):
            sequence.push(token)
    assert sequence.tokens == before
    number: Any = np.int64(5)
    sequence.push(number)
    assert sequence.tokens == [*before, 5]


# -- random numbers and repetitions


def test_a_seed_gives_the_same_text_however_it_is_cut(sequence: Sequence) -> None:
    options = SamplerOptions(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=5)
    others = [sequence.fork(), sequence.fork()]
    sequence.generate(12, options=options)
    for _ in range(3):
        others[0].generate(4, options=options)
    list(others[1].stream(12, options=replace(options, choice=1)))
    assert others[0].tokens == sequence.tokens
    assert others[1].tokens != sequence.tokens


def test_what_dry_penalizes_is_not_repeated(sequence: Sequence) -> None:
    """Its breakers are strings, which the model's own tokenizer spells."""
    bias = {byte_id("a"): 1.2e3, byte_id("b"): 1e3}
    options = SamplerOptions(temperature=0.0, dry_multiplier=500.0, logit_bias=bias)
    sequence.append("abababab")
    plain, broken = sequence.fork(), sequence.fork()
    broken.append("ab:")
    broken.append("ab:")
    for one, repeats in ((plain, False), (broken, True)):
        one.generate(1, options=options)
        assert (one.tokens[-1] == byte_id("a")) is repeats
