"""Every recorded trace of llama.cpp's attention and recurrent caches replays exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest

from kvcellar.backends.base import KVStore
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.testing.signs import SignedStore
from kvcellar.testing.traces import RecurrentReplay, TraceReplay, load_traces
from kvcellar.types import CacheSpec

Maker = Callable[[CacheSpec], KVStore]


@pytest.fixture
def make_store(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """Opens a store of real bytes."""
    if request.param == "numpy":
        yield NumpyStore
        return
    backend = GgmlBackend(1)
    yield lambda spec: GgmlStore(spec, backend)
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_store", "flash_attn"), [("numpy", True), ("ggml", False)], indirect=["make_store"]
)
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


@pytest.mark.slow
@pytest.mark.parametrize("n_ubatch", [512, 3])
def test_recurrent_traces_replay(shared: Path, n_ubatch: int) -> None:
    traces = load_traces(shared / "golden" / "recurrent_traces.jsonl")

    assert len(traces) == 120
    for trace in traces:
        RecurrentReplay(trace, n_ubatch=n_ubatch).run()


@pytest.mark.parametrize("what", ["ret", "used", "pos", "shared", "history_len"])
def test_a_replay_notices_every_difference(shared: Path, what: str) -> None:
    trace = load_traces(shared / "golden" / "recurrent_traces.jsonl")[0]
    changed = deepcopy(trace)
    step = next(step for step in changed["steps"] if what in step["expect"])
    step["expect"][what] = "another"

    RecurrentReplay(trace).run()
    with pytest.raises(AssertionError, match="another"):
        RecurrentReplay(changed).run()
