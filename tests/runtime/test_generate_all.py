"""Several sequences in one batch a step: each gets what it would get alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcellar
from kvcellar.errors import CacheFull, OptionError, SequenceBusy
from kvcellar.runtime.context import Context
from kvcellar.runtime.options import ContextShift
from kvcellar.runtime.sequence import Sequence
from kvcellar.runtime.together import generate_all, stream_all
from tests.runtime.archs import F32, opened

PROMPTS = [[1, 2, 3], list(range(12)), [7], [30, 31, 5, 2]]
EACH: list[dict[str, object]] = [
    {"seed": 1, "temperature": 1.0},
    {"seed": 2, "temperature": 1.5, "max_tokens": 3},
    {"temperature": 0.0},
    {"seed": 4, "temperature": 0.9, "logprobs": 2, "stop_tokens": [9, 10, 11]},
]
WAYS: dict[str, dict[str, Any]] = {
    "kernel": {"kernel": True, "type_k": "f16", "type_v": "f16"},
    "ggml": {"kernel": False},
    "numpy": {"backend": "numpy"},
}


def prompted(context: Context, n: int = len(PROMPTS)) -> list[Sequence]:
    return [context.sequence(prompt) for prompt in PROMPTS[:n]]


@pytest.fixture
def context(shared: Path) -> Iterator[Context]:
    with opened(shared, "llama-dense", n_ctx=64, n_seq_max=8, **F32) as made:
        yield made


@pytest.mark.parametrize("arch", ["llama-dense", "gemma2-window", "jamba-dense"])
@pytest.mark.parametrize("way", WAYS)
def test_results_are_those_of_one_after_the_other(shared: Path, way: str, arch: str) -> None:
    with opened(shared, arch, n_ctx=256, **{**F32, **WAYS[way]}) as context:
        together = generate_all(prompted(context), 8, each=EACH)
        for sequence in context.sequences:
            sequence.close()
        for prompt, result, own in zip(PROMPTS, together, EACH, strict=True):
            with context.sequence(prompt) as sequence:
                alone = sequence.complete(**{"max_tokens": 8, **own})  # type: ignore[arg-type]
            assert (result.ids, result.finish_reason) == (alone.ids, alone.finish_reason)
            assert result.cache.n_prompt == alone.cache.n_prompt
            for one, other in zip(result.logprobs or (), alone.logprobs or (), strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert len(together[1].ids) == 3
        assert together[2].logprobs is None


def test_a_step_is_one_batch(context: Context) -> None:
    sequences = prompted(context)
    context.timings.reset()
    results = generate_all(sequences, 5, each=[{"max_tokens": n} for n in (5, 2, 0, 4)])
    assert context.timings.n_decodes == 4  # the first logits were the prompts'
    assert [len(result.ids) for result in results] == [5, 2, 0, 4]
    assert [sequence.finish_reason for sequence in sequences] == ["length"] * 4
    assert context.timings.decode_tokens == 4 + 1 + 0 + 3


def test_tokens_stream_with_their_place(context: Context) -> None:
    sequences = prompted(context)
    lengths = [len(sequence) for sequence in sequences]
    found: dict[int, list[int]] = {}
    for place, token in stream_all(sequences, 4):
        found.setdefault(place, []).append(token.id)
        assert sequences[place].tokens[-1] == token.id
    assert [found[i] for i in range(4)] == [
        sequence.tokens[n:] for sequence, n in zip(sequences, lengths, strict=True)
    ]


def test_computing_together_gives_what_computing_alone_gives(context: Context) -> None:
    sequences, others = prompted(context), prompted(context)
    for sequence in [*sequences, *others]:
        sequence.push(5)
        sequence.push(6)
    sequences[1].compute_pending()
    known = sequences[1].logits
    edited = [sequences[2].trim(1), others[2].trim(1)]
    assert context.compute(sequences) == [2, 0, 1, 2]
    assert sequences[1].logits is known
    n_decodes = context.timings.n_decodes
    rows = [sequence.logits for sequence in sequences]
    assert context.timings.n_decodes == n_decodes
    for row, other in zip(rows, others, strict=True):
        np.testing.assert_allclose(row, other.logits, atol=1e-4)
        assert row.base is None or len(row.base) == 1  # it keeps no other's logits
    assert len(edited[0]) == len(edited[1])


def test_all_or_none_are_computed(context: Context) -> None:
    sequences = prompted(context)
    for sequence in sequences:
        sequence.push(5)
    before = [sequence.tokens for sequence in sequences]
    for _ in range(context.cache.n_free() - 2):
        sequences[0].push(6)
    with pytest.raises(CacheFull):
        context.compute(sequences)
    assert [sequence.tokens for sequence in sequences[1:]] == before[1:]
    assert context.cache.used == sum(map(len, PROMPTS))
    with pytest.raises(OptionError, match="the sequence is empty"):
        context.compute([sequences[1], context.sequence()])
    assert context.cache.used == sum(map(len, PROMPTS))
    with pytest.raises(OptionError, match="named twice"):
        context.compute([sequences[1], sequences[1]])


def test_what_was_generated_stays_where_the_cache_is_full(context: Context) -> None:
    sequences = prompted(context, 3)
    before = [sequence.tokens for sequence in sequences]
    results = generate_all(sequences, 40, temperature=1.0, seed=5)
    reasons = [result.finish_reason for result in results]
    assert reasons == ["cache_full"] * 3
    for sequence, tokens, result in zip(sequences, before, results, strict=True):
        assert sequence.tokens == [*tokens, *result.ids]
    assert context.cache.n_free() == 0
    assert len(results[0].ids) >= len(results[1].ids) >= len(results[2].ids) > 0
    context.cache.check()


def test_each_makes_room_for_itself(context: Context) -> None:
    """All of them together need more cells than there are for any one of them."""
    sequences = prompted(context, 3)
    each = [{"shift": ContextShift(discard=4)}] * 3
    results = generate_all(sequences, 40, each=each, temperature=1.0, seed=5)
    assert [(len(one.ids), one.finish_reason) for one in results] == [(40, "length")] * 3
    assert sum(map(len, sequences)) <= 64 + 3  # the last tokens are pending
    mixed = [{"shift": ContextShift(discard=4)}, {}, {}]
    again = generate_all(sequences, 30, each=mixed, temperature=1.0, seed=5)
    assert again[0].finish_reason == "length"
    assert {again[1].finish_reason, again[2].finish_reason} == {"cache_full"}
    context.cache.check()


def test_reasons_are_told_as_they_come(context: Context) -> None:
    sequences = prompted(context, 2)
    reasons = []
    for _, _ in stream_all(sequences, each=[{"max_tokens": 1}, {"max_tokens": 3}]):
        reasons.append([one.finish_reason for one in sequences])
    assert reasons == [
        ["length", None],
        ["length", None],
        ["length", None],
        ["length", "length"],
    ]


def test_an_error_leaves_what_was_generated(context: Context) -> None:
    sequences = prompted(context, 2)
    stream = stream_all(sequences, 8, each=[{}, {"logit_bias": dict.fromkeys(range(999), -np.inf)}])
    assert next(stream).place == 0
    with pytest.raises(OptionError, match="logit_bias") as kept:
        list(stream)
    assert [len(sequence) for sequence in sequences] == [4, 12]
    context.cache.check()
    # Also while its traceback is kept, as an interactive session keeps the last one.
    assert generate_all(sequences, 1)[1].finish_reason in ("length", "stop_token")
    with pytest.raises(OptionError, match="max_tokens") as also:
        generate_all(sequences, each=[{}, {"max_tokens": -2}])
    assert len(generate_all(sequences, 1)) == 2
    del kept, also


def test_sequences_are_taken_while_it_runs(context: Context) -> None:
    sequences = prompted(context, 2)
    stream = stream_all(sequences, 3)
    next(stream)
    with pytest.raises(SequenceBusy):
        generate_all(sequences, 1)
    del stream
    assert len(generate_all(sequences, 1)) == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"each": [{}]}, "each: 1 mappings for 2 sequences"),
        ({"each": [{}, 5]}, "each"),
        ({"each": [{}, {"top_q": 1}]}, "top_q"),
        ({"max_tokens": -2}, "max_tokens=-2"),
        ({"options": 5}, "options"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(
    context: Context, change: dict[str, Any], named: str
) -> None:
    sequences = prompted(context, 2)
    for _ in range(2):  # sequences are free again
        with pytest.raises(OptionError, match=named):
            generate_all(sequences, **change)
    with pytest.raises(OptionError, match="sequences"):
        kvcellar.generate_all([5])  # type: ignore[list-item]
    with pytest.raises(OptionError, match="named twice"):
        generate_all([sequences[0], sequences[0]])
    assert generate_all([]) == []
    assert list(stream_all([])) == []
