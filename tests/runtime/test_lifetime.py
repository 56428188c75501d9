"""Memory is given back by closing, by leaving a block, or by dropping the last reference."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar.errors import ClosedError, KVCellarError
from kvcellar.runtime.model import Model
from tests.runtime.helpers import attention


@pytest.fixture
def path(shared: Path) -> Path:
    return shared / "models" / "llama-dense.gguf"


@pytest.mark.slow
def test_a_dropped_context_frees_its_cells(path: Path) -> None:
    with Model.from_gguf(path, n_threads=1) as model:
        for _ in range(3):
            context = model.context(n_ctx=64)
            store = weakref.ref(attention(context).store)
            context.sequence([1, 2, 3])
            del context
            gc.collect()
            assert store() is None


@pytest.mark.alone
def test_a_dropped_model_ends_its_threads(path: Path) -> None:
    model = Model.from_gguf(path, n_threads=2)
    file = weakref.ref(model._file)
    model.context(n_ctx=64).sequence([1, 2, 3])
    del model
    gc.collect()
    assert file() is None


def test_a_context_outlives_the_name_of_its_model(path: Path) -> None:
    context = Model.from_gguf(path, n_threads=1).context(n_ctx=64)
    gc.collect()
    assert len(context.sequence([1, 2, 3])) == 3


def test_closing_a_model_closes_its_contexts(path: Path) -> None:
    with Model.from_gguf(path, n_threads=1) as model:
        context = model.context(n_ctx=64)
    model.close()
    with pytest.raises(ClosedError):
        context.sequence([1])
    with pytest.raises(ClosedError, match=r"llama-dense\.gguf"):
        model.context()


def test_a_model_that_does_not_load_leaves_nothing(path: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(path.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(KVCellarError, match=r"blk\.1\.attn_q"):
        Model.from_gguf(damaged)
    gc.collect()
    damaged.unlink()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """No cyclic collector: what goes, goes by counting references."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def n_mapped(path: Path) -> int:
    """How often a file is mapped into this process."""
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("arch", ["llama-dense", "gemma2-dense", "jamba-dense", "mamba-dense"])
@pytest.mark.parametrize("backend", ["ggml", "numpy"])
def test_the_file_is_unmapped_at_once(
    shared: Path, tmp_path: Path, backend: str, arch: str
) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes((shared / "models" / f"{arch}.gguf").read_bytes())
    with Model.from_gguf(path, n_threads=1, backend=backend) as model:
        assert n_mapped(path) == 1
        context = model.context(n_ctx=64)
        sequence = context.sequence([1, 2, 3])
    assert n_mapped(path) == 0
    assert (sequence.is_closed, context.is_closed) == (True, True)
    model = Model.from_gguf(path, n_threads=1, backend=backend)
    context = model.context(n_ctx=64)
    sequence = context.sequence([1, 2, 3])
    store = weakref.ref(context._memory.executor)
    del sequence, context
    assert store() is None
    assert n_mapped(path) == 1
    del model
    assert n_mapped(path) == 0
