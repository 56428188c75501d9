"""Sequences: append, fork, trim, generate, close."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.errors import BatchError, CacheFull, ClosedError, OptionError, TokenizerError
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.text.sampler import Sampler, SamplerOptions
from kvcellar.types import Float32Array
from tests.text.vocabularies import make_spm


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[Model]:
    with Model.from_gguf(smollm2_path) as loaded:
        yield loaded


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with model.context(n_ctx=128, n_seq_max=4) as made:
        yield made


@pytest.mark.slow
def test_a_fork_copies_nothing_and_goes_its_own_way(context: Context) -> None:
    parent = context.sequence("Once upon a time")
    used = context.cache.used
    child = parent.fork()
    assert context.cache.used == used
    assert context.cache.token_count == 2 * used
    assert np.array_equal(child.logits, parent.logits)
    assert child.generate(8) == parent.generate(8)
    child.append(" in Spain")
    assert child.tokens[: len(parent)] == parent.tokens
    assert parent.text != child.text
    context.cache.check()


def test_text_that_is_appended_gets_no_space_into_its_middle(tmp_path: Path) -> None:
    pieces = {"▁": -9.0, "el": -3.0, "Hel": -1.0, "▁Hel": -1.0, "lo": -2.0, "▁lo": -1.5}
    vocabulary = make_spm(pieces, (("<U>", 4),))
    tiny = TinyLlama(n_vocab=266)
    metadata: dict[str, Any] = {**tiny.metadata(), **vocabulary}
    path = write_gguf(tmp_path / "spm.gguf", metadata, tiny.tensors())
    with Model.from_gguf(path, n_threads=1) as model, model.context(n_ctx=64) as context:
        ids = model.tokenizer.vocab.ids
        sequence = context.sequence("Hel").append("lo").append(" lo")
        assert sequence.text == "Hello lo"
        assert sequence.tokens == [1, *(ids[piece] for piece in ("▁Hel", "lo", "▁lo"))]
        # Behind a token that is matched whole a text begins, as it does within one prompt.
        sequence.append([ids["<U>"]]).append("lo")
        assert sequence.tokens[-1] == ids["▁lo"]
        assert sequence.text == "Hello lo<U>lo"
        assert context.sequence([1]).append("lo").tokens == [1, ids["▁lo"]]


def test_a_pre_tokenizer_can_be_named(smollm2_path: Path) -> None:
    with Model.from_gguf(smollm2_path, n_threads=1, pre="gpt-2") as model:
        named = model.tokenizer.encode("x  12")
    with Model.from_gguf(smollm2_path, n_threads=1) as model:
        assert model.tokenizer.encode("x  12") != named
    with pytest.raises(OptionError, match=r"pre='quux' is not known; one of .*smollm"):
        Model.from_gguf(smollm2_path, pre="quux")


def test_closing_frees_only_what_is_not_shared(context: Context) -> None:
    parent = context.sequence("Once upon a time")
    shared = context.cache.used
    child = parent.fork().append(" there was")
    parent.close()
    assert context.cache.used == len(child)
    child.close()
    child.close()
    assert context.cache.used == 0 < shared
    with pytest.raises(ClosedError):
        child.generate(1)


def test_a_sequence_may_be_used_as_a_block(context: Context) -> None:
    with context.sequence("Hello") as sequence:
        assert len(sequence) > 0
    assert sequence.is_closed
    assert context.cache.used == 0


def test_trim_takes_back_and_the_rest_goes_on_as_before(context: Context) -> None:
    sequence = context.sequence("The first letters are A, B, C")
    expected = sequence.fork().generate(6)
    n = len(sequence)
    sequence.append(" and nobody knows why").trim(len(sequence) - n)
    assert len(sequence) == n
    assert sequence.generate(6) == expected


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_neither_loses_nor_doubles_a_waiting_token(
    context: Context, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    sequence = context.sequence("Once upon a time")
    sequence.generate(2)
    tokens, decode = sequence.tokens, context.decode

    def interrupted(batch: Batch) -> Float32Array:
        if when == "after":
            decode(batch)
        raise KeyboardInterrupt

    monkeypatch.setattr(context, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _ = sequence.logits
    monkeypatch.undo()
    assert sequence.tokens == tokens
    assert len(sequence.logits) == context.model.spec.n_vocab
    assert sequence.tokens == tokens


def test_trim_reaches_tokens_not_yet_computed(context: Context) -> None:
    sequence = context.sequence("Once upon a time")
    n = len(sequence)
    sequence.generate(3)
    assert context.cache.seq_pos_max(sequence.seq_id) == n + 1  # the third waits
    tokens = sequence.tokens
    sequence.trim(1)
    assert sequence.tokens == tokens[:-1]
    sequence.trim(2)
    assert sequence.tokens == tokens[:n]


def test_logits_follow_what_others_do_to_its_cells(context: Context) -> None:
    sequence, other = context.sequence("Once upon a time"), context.sequence("Once upon a time")
    context.decode(Batch.of([28], sequence.seq_id))
    assert sequence.tokens == other.append([28]).tokens
    np.testing.assert_allclose(sequence.logits, other.logits, atol=1e-4)
    context.cache.seq_rm(sequence.seq_id, -1, -1)
    with pytest.raises(OptionError, match="the sequence is empty"):
        _ = sequence.logits


@pytest.mark.parametrize("n", [-1, 99])
def test_trim_out_of_range_is_refused(context: Context, n: int) -> None:
    sequence = context.sequence("Hello")
    with pytest.raises(OptionError, match=str(n)):
        sequence.trim(n)
    assert sequence.text == "Hello"


def test_trimmed_to_nothing_it_is_empty(context: Context) -> None:
    sequence = context.sequence("Hello")
    sequence.trim(len(sequence))
    assert len(sequence) == 0
    with pytest.raises(OptionError, match="append a prompt"):
        sequence.generate(1)


def test_streamed_pieces_make_the_generated_text(context: Context) -> None:
    sequence = context.sequence("Once upon a time")
    twin = sequence.fork()
    pieces = list(sequence.stream(12))
    assert len(pieces) > 6
    assert "".join(pieces) == twin.generate(12)
    assert sequence.finish_reason == "length"
    assert len(sequence) == len(twin)


def test_stopping_to_listen_loses_no_token(context: Context) -> None:
    sequence = context.sequence("Once upon a time")
    expected = sequence.fork().generate(6)
    stream = sequence.stream(6)
    first = next(stream)
    del stream
    assert sequence.text == "Once upon a time" + first
    assert first + sequence.generate(5) == expected


def test_a_stop_string_is_cut_from_the_text(context: Context) -> None:
    sequence = context.sequence("Once upon a time")
    text = sequence.fork().generate(20)
    stop = text[10:16]
    assert sequence.generate(20, stop=stop) == text[: text.index(stop)]
    assert sequence.finish_reason == "stop_string"


def test_a_stop_token_ends_an_answer(context: Context, model: Model) -> None:
    prompt = model.chat_template.render([{"role": "user", "content": "Say hi."}])
    sequence = context.sequence(model.tokenizer.encode(prompt, parse_special=True))
    answer = sequence.generate(60)
    assert sequence.finish_reason == "stop_token"
    assert "<|im_end|>" not in answer
    assert sequence.tokens[-1] not in model.tokenizer.stop_ids


def test_a_seed_repeats_and_greedy_is_the_default(context: Context) -> None:
    sequence = context.sequence("My favourite colour is")
    runs = [sequence.fork() for _ in range(2)]
    a, b = (run.generate(12, temperature=1.5, seed=3) for run in runs)
    assert a == b
    runs[0].close()
    assert sequence.fork().generate(12, temperature=0.0) == sequence.generate(12)


def test_a_full_cache_keeps_what_was_generated(model: Model) -> None:
    with model.context(n_ctx=16, n_seq_max=1) as context:
        sequence = context.sequence("Once upon a time")
        pieces: list[str] = []
        with pytest.raises(CacheFull):
            collect(sequence.stream(), pieces)
        assert context.cache.used == 16
        assert sequence.text == "Once upon a time" + "".join(pieces)


def collect(stream: Iterator[str], pieces: list[str]) -> None:
    for piece in stream:
        pieces.append(piece)  # noqa: PERF402  (what came before the error is kept)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"max_tokens": -2}, "max_tokens=-2"),
        ({"max_tokens": 2**31}, r"max_tokens=2147483648: .*-1 \(no limit\).*.0, 2147483647."),
        ({"stop_tokens": [-1]}, "a stop token=-1"),
        ({"stop_tokens": [2**31]}, "a stop token=2147483648"),
        ({"ignore_eos": 1}, "ignore_eos=1: must be True or False"),
        ({"sampler": 5}, "sampler must be None or made by Sampler"),
        ({"sampler": Sampler(), "temperature": 1.0}, "sampler: .*options of its own"),
        ({"options": {"top_k": 3}}, "options must be None or made by SamplerOptions"),
        ({"options": SamplerOptions}, "options must be None or made by SamplerOptions"),
        ({"shift": 5}, "shift must be None or made by ContextShift"),
        ({"stop": 5}, "stop must be a string or a list of strings, found 5"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_q": 1}, "top_q"),
        ({"stop": ""}, "stop"),
    ],
)
def test_bad_options_are_refused_before_anything_is_computed(
    context: Context, arguments: dict[str, object], named: str
) -> None:
    sequence = context.sequence("Hello")
    n_decodes = context.timings.n_decodes
    with pytest.raises(OptionError, match=named):
        sequence.generate(**arguments)  # type: ignore[arg-type]
    assert context.timings.n_decodes == n_decodes


def test_an_empty_prompt_is_refused(context: Context) -> None:
    with pytest.raises(BatchError, match="empty"):
        context.sequence("")
    assert context.sequences == ()


def test_text_for_a_model_without_a_tokenizer_is_refused(shared: Path) -> None:
    path = shared / "models" / "llama-dense.gguf"
    with Model.from_gguf(path, n_threads=1) as tiny, tiny.context(n_ctx=32) as context:
        with pytest.raises(TokenizerError, match="token ids"):
            context.sequence("Hello")
        assert len(context.sequence([1, 2, 3])) == 3


def test_odd_arguments_are_named(context: Context) -> None:
    sequence = context.sequence("A, B")
    tokens = sequence.tokens
    odd: list[Any] = [1.0, "1", None]
    for n in odd:
        with pytest.raises(OptionError, match=f"n_tokens={n!r}: must be a whole number"):
            sequence.trim(n)
    for prompt in (5, None):
        with pytest.raises(BatchError, match=f"prompt {prompt}: give text"):
            sequence.append(prompt)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match=r"batch \[1, 2\]: make one"):
        context.decode([1, 2])  # type: ignore[arg-type]
    assert sequence.tokens == tokens


def test_former_names_work_for_a_release_and_say_so(context: Context) -> None:
    sequence = context.sequence([1, 2, 3]).remove(0, 1)
    with pytest.warns(DeprecationWarning, match="is now Sequence.inexact_from"):
        assert sequence.tainted == 0
    with pytest.warns(DeprecationWarning, match="is now Sequence.stored_as"):
        sequence.rounded = "other types"
    with pytest.warns(DeprecationWarning, match="is now Sequence.stored_as"):
        assert sequence.rounded == sequence.stored_as == "other types"
    sequence.push(4)
    with pytest.warns(DeprecationWarning, match="is now Sequence.compute_pending"):
        sequence.compute_waiting()
    assert context.cache.seq_count(sequence.seq_id) == 3
