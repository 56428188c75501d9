"""Whatever comes at whatever line: the next call works, and computes what it would have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.base import KVStore, ModelFile, OpenMemory, StateStore
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.jit.compiler import why_not
from kvcellar.backends.ggml.model_file import GgmlModelFile
from kvcellar.backends.ggml.states import GgmlStateStore
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.backends.numpy.model_file import NumpyModelFile
from kvcellar.backends.numpy.states import NumpyStateStore
from kvcellar.backends.numpy.store import NumpyStore
from kvcellar.errors import ClosedError
from kvcellar.models.registry import load_architecture
from kvcellar.plan import CellLists, CellPlan, Plan
from kvcellar.testing.plans import causal_plan
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.types import (
    AnyArray,
    CacheSpec,
    Float32Array,
    KVType,
    LayerSpec,
    MemorySpec,
    RopeSpec,
    StateLayer,
    StateSpec,
)
from tests.backends.interrupts import interrupted

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

KINDS = pytest.mark.parametrize("backend", ["ggml", "numpy"])
HOWEVER = pytest.mark.parametrize(
    "twice",
    [pytest.param(False, id="once"), pytest.param(True, id="twice", marks=pytest.mark.slow)],
)
PLANS = [causal_plan([i % 48 for i in range(n)], outputs=[0, n - 1]) for n in (2, 9, 70)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    made.write_bytes(TinyLlama().to_bytes())
    return made


def _listed(plan: Plan) -> Plan:
    """The same with lists."""
    n = len(plan.micro.positions)
    lists = CellLists.separate([np.arange(i + 1, dtype=np.int32) for i in range(n)])
    return Plan(plan.micro, (CellPlan(np.arange(n), np.zeros((n, 0), np.float16), lists),), None)


class Opened:
    """A model and memory for its contexts."""

    def __init__(self, path: Path, backend: str, *, kernel: bool = False) -> None:
        kind: Any = GgmlModelFile if backend == "ggml" else NumpyModelFile
        self.file: ModelFile[Any] = kind(path, 1)
        self.model = load_architecture(self.file.metadata, self.file.weights)
        self.kernel = kernel
        self.memory: OpenMemory = self.open()

    def open(self) -> OpenMemory:
        group = CacheSpec(256, 4, self.model.spec.attention_layers)
        spec = MemorySpec.single(group)
        return self.file.open_memory(spec, self.model.forward, kernel=self.kernel)

    def run(self, plan: Plan) -> Float32Array:
        logits = self.memory.executor.run(_listed(plan) if self.kernel else plan)
        return np.array(logits)

    def close(self) -> None:
        self.memory.close()
        self.file.close()


@pytest.fixture(
    params=[
        "ggml",
        pytest.param("kernel", marks=pytest.mark.skipif(bool(why_not()), reason=str(why_not()))),
        "numpy",
    ]
)
def opened(path: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    name: str = request.param
    made = Opened(path, "numpy" if name == "numpy" else "ggml", kernel=name == "kernel")
    yield made
    made.close()


@HOWEVER
@pytest.mark.slow
def test_computing(opened: Opened, twice: bool) -> None:
    """A graph that is there, one that is not, and one that makes the others go."""
    expected = [opened.run(plan) for plan in PLANS]
    store = opened.memory.groups[0]
    none = np.empty(0, np.int64)

    def forget() -> None:
        store.resize(300 if store.spec.size == 256 else 256, none, none)
        opened.run(PLANS[0])

    for i, plan in enumerate(PLANS):
        for line in interrupted(partial(opened.run, plan), forget, twice=twice, step=2 * i + 2):
            for j in (0, i or 2):  # a smaller one first
                np.testing.assert_array_equal(opened.run(PLANS[j]), expected[j], err_msg=line)


@KINDS
@HOWEVER
def test_opening_a_model(path: Path, backend: str, twice: bool) -> None:
    plan = PLANS[0]
    made = Opened(path, backend)
    expected = made.run(plan)
    made.close()
    for line in interrupted(lambda: Opened(path, backend).close(), twice=twice, step=5):
        again = Opened(path, backend)
        np.testing.assert_array_equal(again.run(plan), expected, err_msg=line)
        again.close()


def test_opening_memory(opened: Opened) -> None:
    expected = opened.run(PLANS[0])
    for line in interrupted(lambda: opened.open().close()):
        opened.memory.close()
        opened.memory = opened.open()
        np.testing.assert_array_equal(opened.run(PLANS[0]), expected, err_msg=line)


@pytest.mark.slow
def test_closing(path: Path) -> None:
    """It can be finished, and nothing is computed afterwards."""
    made: list[Opened] = []

    def prepare() -> None:
        made.append(Opened(path, "ggml"))
        made[-1].run(PLANS[0])

    for _ in interrupted(lambda: made[-1].close(), prepare):
        made[-1].close()
        with pytest.raises(ClosedError):
            made[-1].run(PLANS[0])


def test_a_watched_executor(path: Path) -> None:
    opened = Opened(path, "ggml")
    expected = opened.run(PLANS[1])
    for line in interrupted(lambda: opened.memory.executor.watch(lambda _: None)):
        np.testing.assert_array_equal(opened.run(PLANS[1]), expected, err_msg=line)
    for line in interrupted(lambda: opened.run(PLANS[1])):
        np.testing.assert_array_equal(opened.run(PLANS[1]), expected, err_msg=line)
    opened.close()


ROPE = RopeSpec("neox", 16, factors=(1.0, 2.0) * 4)
SPEC = CacheSpec(
    40, 1, (LayerSpec(2, 64, 32, ROPE), LayerSpec(2, 64, 32)), KVType.Q8_0, KVType.Q8_0
)
ALL = np.arange(40)


@pytest.fixture
def store(backend: str) -> Iterator[KVStore]:
    threads = GgmlBackend(1)
    made: KVStore = GgmlStore(SPEC, threads) if backend == "ggml" else NumpyStore(SPEC)
    rng = np.random.default_rng(1)
    for i in range(2):
        k, v = (rng.standard_normal((40, n)).astype(np.float32) for n in (128, 64))
        made.write(i, ALL, k, v)
    yield made
    made.close()
    threads.close()


def _bytes(store: KVStore) -> list[AnyArray]:
    cells = np.arange(store.spec.size)
    return [store.read_raw(i, part, cells) for i in range(2) for part in ("k", "v")]


@KINDS
@HOWEVER
def test_resizing_a_store(backend: str, store: KVStore, twice: bool) -> None:
    """It has one size or the other, with all that belongs to it."""
    first, moved = _bytes(store), ALL[::-1].copy()
    large = 50

    def prepare() -> None:
        if store.spec.size == large:
            store.resize(40, moved, ALL)

    for line in interrupted(lambda: store.resize(large, ALL, moved), prepare, twice=twice):
        at = moved if store.spec.size == large else ALL
        for found, expected in zip(_bytes(store), first, strict=True):
            np.testing.assert_array_equal(found[at], expected, err_msg=f"{backend} {line}")


@KINDS
@HOWEVER
def test_rotated_rows(backend: str, store: GgmlStore | NumpyStore, twice: bool) -> None:
    """Nothing changes but where somebody writes them, and that can be done again."""
    before, shifts = _bytes(store), (np.arange(40) % 5 - 2).astype(np.int32)
    cells = ALL[::-1].copy()
    expected = store.rotated(0, "k", cells, shifts)
    for line in interrupted(lambda: store.rotated(0, "k", cells, shifts), twice=twice):
        for found, rows in zip(_bytes(store), before, strict=True):
            np.testing.assert_array_equal(found, rows, err_msg=line)
        np.testing.assert_array_equal(store.rotated(0, "k", cells, shifts), expected)
    for line in interrupted(lambda: store.write_raw(0, "k", cells, expected), twice=twice):
        store.write_raw(0, "k", cells, expected)
        np.testing.assert_array_equal(store.read_raw(0, "k", cells), expected, err_msg=line)
    assert backend


@KINDS
def test_rotating(backend: str, store: KVStore) -> None:
    """Rows are rotated as a whole or not at all, and what is rotated next is right."""
    cells, shifts = ALL[:7], np.full(7, 3, np.int32)
    start = store.read_raw(0, "k", ALL)
    store.rotate(cells, shifts)
    end = store.read_raw(0, "k", ALL)

    def prepare() -> None:
        store.write_raw(0, "k", ALL, start)

    for line in interrupted(lambda: store.rotate(cells, shifts), prepare):
        found = store.read_raw(0, "k", ALL)
        for row, old, new in zip(found, start, end, strict=True):
            assert (row == old).all() or (row == new).all(), f"{backend} {line}"
        prepare()
        store.rotate(cells, shifts)
        np.testing.assert_array_equal(store.read_raw(0, "k", ALL), end, err_msg=line)


STATES = StateSpec(4, 2, (StateLayer(6, 16), StateLayer(3)))


@pytest.mark.parametrize("kind", [GgmlStateStore, NumpyStateStore])
def test_states(kind: Callable[[StateSpec], StateStore]) -> None:
    for _ in interrupted(lambda: kind(STATES).close()):
        kind(STATES).close()
    store, rows = kind(STATES), np.array([0, 3])
    states = np.arange(50, dtype=np.float32).reshape(2, 25)
    for line in interrupted(lambda: store.write(rows, states)):
        store.write(rows, states)
        np.testing.assert_array_equal(store.read(rows), states, err_msg=line)
    store.close()
