"""Every recorded trace of llama.cpp's attention cache replays exactly, bytes included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcellar.backends.base import KVStore
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.testing.signed import SignedStore
from kvcellar.testing.traces import TraceReplay, load_traces
from kvcellar.types import CacheSpec

Maker = Callable[[CacheSpec], KVStore]


@pytest.fixture(params=["numpy", "ggml"])
def make_store(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """Opens a store of real bytes."""
    if request.param == "numpy":
        yield NumpyStore
        return
    backend = GgmlBackend(1)
    yield lambda spec: GgmlStore(spec, backend)
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("flash_attn", [True, False])
def test_attention_traces_replay(shared: Path, make_store: Maker, flash_attn: bool) -> None:
    traces = load_traces(shared / "golden" / "attention_traces.jsonl")

    assert len(traces) == 200
    for trace in traces:
        replay = TraceReplay(
            trace, make_store=lambda spec: SignedStore(make_store(spec)), flash_attn=flash_attn
        )
        replay.run()
        replay.store.close()


@pytest.mark.slow
def test_attention_traces_replay_without_bytes(shared: Path) -> None:
    for trace in load_traces(shared / "golden" / "attention_traces.jsonl"):
        TraceReplay(trace).run()
