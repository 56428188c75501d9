"""Contexts: options, decoding, ids, errors that change nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.ggml.jit import attention as attention_kernel
from kvcellar.backends.ggml.jit.compiler import Compiled, compile_ir, why_not
from kvcellar.batch import Batch
from kvcellar.errors import (
    AllocationError,
    BatchError,
    CacheFull,
    ClosedError,
    KVCellarError,
    OptionError,
    PositionError,
    SequenceIdError,
)
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.types import AnyArray, KVType
from tests.runtime.helpers import attention


@pytest.fixture(scope="module")
def model(shared: Path) -> Iterator[Model]:
    with Model.from_gguf(shared / "models" / "llama-dense.gguf", n_threads=1) as loaded:
        yield loaded


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with model.context(n_ctx=32, n_seq_max=2, n_ubatch=8) as made:
        yield made


def state(context: Context) -> tuple[bytes, ...]:
    """Everything that a failed operation must not change."""
    table = attention(context).table
    cells = np.arange(context.spec.size)
    rows: list[AnyArray] = [
        attention(context).store.read_raw(i, part, cells) for i in range(2) for part in ("k", "v")
    ]
    arrays: tuple[AnyArray, ...] = (
        table.positions,
        table.owners,
        table.tokens,
        table.pending,
        *rows,
    )
    return (*(a.tobytes() for a in arrays), str(table.head).encode())


def test_more_cells_than_the_model_was_trained_for_warn_once(model: Model) -> None:
    trained = model.spec.n_ctx_train
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for n_ctx in (trained, None, trained + 1, trained + 1):
            model.context(n_ctx=n_ctx).close()
    assert [str(one.message).partition(";")[0] for one in caught] == [
        f"n_ctx={trained + 1}: {model.path.name} was trained for {trained} positions"
    ]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="trained for"):
            model.context(n_ctx=trained + 1)


def test_logits_come_in_the_order_of_the_batch(context: Context) -> None:
    batch = Batch()
    for token in range(20):
        batch.add(token, logits=token % 3 == 0)
    logits = context.decode(batch)
    assert logits.shape == (7, 128)
    context.cache.clear()
    everything = context.decode(Batch.of(range(20), logits="all"))
    np.testing.assert_allclose(logits, everything[::3], rtol=1e-3, atol=1e-3)


def test_a_batch_that_wants_no_logits_returns_none_but_fills_the_cache(context: Context) -> None:
    with_logits = context.decode(Batch.of(range(12)))
    context.cache.clear()
    assert len(context.decode(Batch.of(range(11), logits="none"))) == 0
    assert context.cache.used == 11
    last = context.decode(Batch.of([11]))
    np.testing.assert_allclose(last, with_logits, rtol=1e-3, atol=1e-3)


def test_logits_outlive_the_next_decode(context: Context) -> None:
    first = context.decode(Batch.of([1, 2, 3]))
    kept = first.copy()
    context.decode(Batch.of([4]))
    assert np.array_equal(first, kept)


BAD_BATCHES = [
    (Batch(), BatchError, "empty"),
    (Batch.of([128]), BatchError, "128"),
    (Batch.of([-1]), BatchError, "-1"),
    (Batch.of([1], seq_id=2), SequenceIdError, "2"),
    (Batch.of([1], positions=[3]), PositionError, "3"),
    (Batch.of([1, 2], positions=[9, 8]), PositionError, "8"),
    (Batch.of(range(29)), CacheFull, "29"),
    (Batch.of_embeddings(np.zeros((2, 8))), BatchError, "8"),
]


@pytest.mark.parametrize(("batch", "error", "named"), BAD_BATCHES)
def test_a_refused_batch_changes_nothing(
    context: Context, batch: Batch, error: type[KVCellarError], named: str
) -> None:
    context.decode(Batch.of([1, 2, 3, 4]))
    before = state(context)
    with pytest.raises(error, match=named):
        context.decode(batch)
    assert state(context) == before


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_decode_changes_nothing(
    context: Context, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    """Ctrl-C in the second of three microbatches."""
    context.decode(Batch.of([1, 2, 3, 4]))
    before = state(context)
    run, calls = context._executor.run, []

    def fail_second(plan: object) -> np.ndarray:
        calls.append(plan)
        if len(calls) == 2:
            raise failure
        return run(plan)  # type: ignore[arg-type]

    monkeypatch.setattr(context._executor, "run", fail_second)
    with pytest.raises(failure):
        context.decode(Batch.of(range(20)))
    assert state(context) == before


BAD_OPTIONS = [
    ({"n_ctx": 0}, "n_ctx=0"),
    ({"n_ctx": -5}, "n_ctx=-5"),
    ({"n_ctx": 2**31}, "n_ctx"),
    ({"n_ctx": 1.5}, "n_ctx=1.5"),
    ({"n_ctx": True}, "n_ctx=True"),
    ({"n_seq_max": 0}, "n_seq_max=0"),
    ({"n_ubatch": 0}, "n_ubatch=0"),
    ({"type_k": "q3_k"}, "q3_k"),
    ({"type_v": "q4_0", "flash_attn": False}, "flash_attn"),
]


@pytest.mark.parametrize(("options", "named"), BAD_OPTIONS)
def test_options_out_of_range_are_named(
    model: Model, options: dict[str, object], named: str
) -> None:
    with pytest.raises(OptionError, match=named):
        model.context(**options)  # type: ignore[arg-type]


def test_more_cells_than_memory_is_an_error_that_names_the_bytes(model: Model) -> None:
    with pytest.raises(AllocationError, match="MiB for the K/V buffer") as caught:
        model.context(n_ctx=2**31 - 1)
    assert caught.value.n_bytes > 2**40


def test_quantised_v_takes_flash_attention_by_default(model: Model) -> None:
    with model.context(n_ctx=32, n_seq_max=1, type_v="q8_0") as context:
        assert context.spec.flash_attn
    with model.context(n_ctx=32, n_seq_max=1, kernel=False) as context:
        assert not context.spec.flash_attn


def test_with_the_kernel_v_lies_in_rows_for_one_sequence_too(model: Model) -> None:
    pytest.importorskip("llvmlite")
    for kernel in (None, True):
        with model.context(n_ctx=32, n_seq_max=1, kernel=kernel) as context:
            assert context.spec.flash_attn


@pytest.mark.parametrize("options", [{"type_k": "q5_1"}, {"flash_attn": False}])
def test_a_kernel_that_is_asked_for_and_cannot_run_is_an_error(
    model: Model, options: dict[str, Any]
) -> None:
    with pytest.raises(OptionError, match="kernel=True: it needs"):
        model.context(n_ctx=32, kernel=True, **options)


def test_kernel_and_flash_attention_agree(model: Model) -> None:
    pytest.importorskip("llvmlite")
    tokens = list(range(3, 90))
    rows = []
    for kernel in (True, False):
        with model.context(n_ctx=128, n_ubatch=32, kernel=kernel) as context:
            rows.append(context.decode(Batch.of(tokens, logits="all")))
    assert float(((rows[0] - rows[1]) ** 2).mean() / (rows[1] ** 2).mean()) < 1e-5


@pytest.mark.parametrize("kind", list(KVType))
def test_every_type_of_k_and_v_gives_similar_logits(model: Model, kind: KVType) -> None:
    prompt = list(range(3, 40))
    with model.context(n_ctx=64, type_k="f32", type_v="f32") as context:
        exact = context.decode(Batch.of(prompt))
    with model.context(n_ctx=64, type_k=kind, type_v=kind) as context:
        got = context.decode(Batch.of(prompt))
    error = float(((got - exact) ** 2).mean() / (exact**2).mean())
    assert error < {2: 1e-4, 34: 1e-3}.get(kind.block_bytes, 0.2)
    assert error > 0 or kind is KVType.F32


def test_ids_are_given_and_taken_back(context: Context) -> None:
    a, b = context.sequence(), context.sequence()
    assert (a.seq_id, b.seq_id) == (0, 1)
    with pytest.raises(SequenceIdError, match="n_seq_max"):
        context.sequence()
    a.close()
    assert context.sequence().seq_id == 0
    assert context.sequences[1] is b


def test_a_prompt_that_does_not_fit_leaves_no_sequence(context: Context) -> None:
    with pytest.raises(CacheFull):
        context.sequence(range(33))
    assert context.sequences == ()
    assert context.sequence(range(32)).seq_id == 0


def test_closed_things_say_so(model: Model) -> None:
    context = model.context(n_ctx=32)
    sequence = context.sequence([1, 2])
    context.close()
    context.close()
    with pytest.raises(ClosedError, match="context"):
        context.decode(Batch.of([1]))
    with pytest.raises(ClosedError, match="sequence"):
        sequence.append([3])


@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
@pytest.mark.parametrize("n_tokens", [1, 6])
def test_compiling_is_no_part_of_other_timings(
    context: Context, monkeypatch: pytest.MonkeyPatch, n_tokens: int
) -> None:
    def slow(*args: Any) -> Compiled:
        sleep(0.2)
        return compile_ir(*args)

    monkeypatch.setattr(attention_kernel, "compile_ir", slow)
    attention_kernel._compile.cache_clear()
    start = perf_counter()
    context.decode(Batch.of(range(n_tokens)))
    whole = perf_counter() - start
    timings = context.timings
    others = timings.prefill_seconds + timings.decode_seconds
    assert timings.compile_seconds >= 0.2
    assert 0 < timings.graph_seconds <= others <= whole - timings.compile_seconds
    compiled = timings.compile_seconds
    context.decode(Batch.of(range(n_tokens)))
    assert timings.compile_seconds == compiled


def test_timings_tell_prefill_from_decode(context: Context) -> None:
    context.decode(Batch.of(range(10)))
    context.decode(Batch.of([1]))
    context.decode(Batch.of([2]))
    timings = context.timings
    assert (timings.prefill_tokens, timings.decode_tokens, timings.n_decodes) == (10, 2, 3)
    assert 0 < timings.graph_seconds <= timings.prefill_seconds + timings.decode_seconds
    timings.reset()
    assert timings.compile_seconds == 0
    assert timings.prefill_rate == timings.decode_rate == timings.overhead_seconds == 0
