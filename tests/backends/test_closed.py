"""After close() every verb says so: nothing touches memory that belongs to somebody else by now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.backends.base import KVStore, StateStore
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.states import GgmlStateStore
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.backends.numpy.states import NumpyStateStore
from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.errors import ClosedError
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.testing.plans import causal_plan
from kvcellar.types import CacheSpec, KVType, LayerSpec, RopeSpec, StateLayer, StateSpec
from tests.backends.helpers import run_python
from tests.runtime.helpers import attention

CELLS = np.array([0, 3])
K, V = np.ones((2, 16), np.float32), np.ones((2, 8), np.float32)
SPEC = CacheSpec(8, 1, (LayerSpec(2, 8, 4, RopeSpec("normal", 8)),), KVType.F32, KVType.F32)
ACROSS = CacheSpec(8, 1, SPEC.layers, KVType.F32, KVType.F32, flash_attn=False)
STATES = StateSpec(4, 2, (StateLayer(6, 16), StateLayer(3)))
BACKENDS = ("ggml", "numpy")

VERBS: dict[str, Callable[[KVStore], object]] = {
    "write": lambda store: store.write(0, CELLS, K, V),
    "read": lambda store: store.read(0, "v", CELLS),
    "read_raw": lambda store: store.read_raw(0, "k", CELLS),
    "write_raw": lambda store: store.write_raw(0, "k", CELLS, K.view(np.uint8)),
    "copy": lambda store: store.copy(CELLS, CELLS + 1),
    "rotate": lambda store: store.rotate(CELLS, np.ones(2, np.int32)),
    "wipe": lambda store: store.wipe(CELLS),
    "zero": lambda store: store.zero(),
    "grow": lambda store: store.resize(16, CELLS, CELLS),
    "shrink": lambda store: store.resize(4, CELLS, CELLS),
}
STATE_VERBS: dict[str, Callable[[StateStore], object]] = {
    "read": lambda store: store.read(CELLS),
    "write": lambda store: store.write(CELLS, np.ones((2, 25), np.float32)),
    "wipe": lambda store: store.wipe(CELLS),
    "zero": lambda store: store.zero(),
}


@pytest.fixture
def threads() -> Iterator[GgmlBackend]:
    made = GgmlBackend(1)
    yield made
    made.close()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("spec", [SPEC, ACROSS], ids=["rows", "across"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closed_store(threads: GgmlBackend, backend: str, spec: CacheSpec, verb: str) -> None:
    store: KVStore = GgmlStore(spec, threads) if backend == "ggml" else NumpyStore(spec)
    VERBS[verb](store)
    spec = store.spec
    store.close()
    with pytest.raises(ClosedError, match="the K/V buffer is closed"):
        VERBS[verb](store)
    assert store.spec == spec
    store.close()


@pytest.mark.parametrize("verb", STATE_VERBS)
@pytest.mark.parametrize("kind", [GgmlStateStore, NumpyStateStore])
def test_a_closed_store_of_states(kind: Callable[[StateSpec], StateStore], verb: str) -> None:
    store = kind(STATES)
    STATE_VERBS[verb](store)
    store.close()
    with pytest.raises(ClosedError, match="the state buffer is closed"):
        STATE_VERBS[verb](store)
    store.close()


def _shift(context: Context) -> None:
    context.cache.seq_add(0, 0, -1, 3)
    context.cache.update()


def _compact(context: Context) -> None:
    context.cache.seq_rm(0, 1, 3)
    context.cache.defrag()
    context.cache.update()


def _run(context: Context) -> None:
    context._executor.run(causal_plan([1, 2]))


USES: dict[str, Callable[[Context], object]] = {
    "shift": _shift,
    "compact": _compact,
    "clear": lambda context: context.cache.clear(),
    "shrink": lambda context: context.cache.resize(16),
    "grow": lambda context: context.cache.resize(128),
    "rows": lambda context: attention(context).store.read_raw(0, "k", CELLS),
    "run": _run,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_of_a_closed_context(shared: Path, backend: str, use: str) -> None:
    path = shared / "models" / "llama-dense.gguf"
    with Model.from_gguf(path, n_threads=1, backend=backend) as model:
        context = model.context(n_ctx=64, kernel=False)
        context.sequence([1, 2, 3, 4, 5])
        context.close()
        with pytest.raises(ClosedError):
            USES[use](context)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closed_model_gives_no_hash(shared: Path, backend: str) -> None:
    """It would be one of nothing, and be kept beside the file."""
    path = shared / "models" / "llama-dense.gguf"
    model = Model.from_gguf(path, n_threads=1, backend=backend)
    model.close()
    with pytest.raises(ClosedError, match=r"llama-dense\.gguf is closed"):
        _ = model.weights_hash


@pytest.mark.slow
def test_shifting_after_close_does_not_end_the_process(shared: Path) -> None:
    result = run_python(_PENDING.format(path=str(shared / "models" / "llama-dense.gguf")))
    assert (result.returncode, result.stdout.strip()) == (0, "refused"), result.stderr


_PENDING = """
import kvcellar
from kvcellar.errors import ClosedError
with kvcellar.Model.from_gguf({path!r}, n_threads=1) as model:
    context = model.context(n_ctx=2048)
    context.sequence([1] * 600)
    context.cache.seq_add(0, 0, -1, 5)
    context.close()
    for _ in range(20):
        other = model.context(n_ctx=2048)
        try:
            context.cache.update()
        except ClosedError:
            said = "refused"
print(said)
"""
