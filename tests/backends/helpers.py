"""A model loaded by hand, with stores and executors over it, for tests that need no cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.binding import Tensor
from kvcellar.backends.ggml.gguf import GgmlWeights, GgufFile
from kvcellar.backends.ggml.graph import GgmlExecutor
from kvcellar.backends.ggml.model_memory import GgmlMemory
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.models.registry import load_architecture
from kvcellar.types import AnyArray, CacheSpec


def tensor_over(array: AnyArray) -> Tensor:
    """What a custom operation is given of an array, which has to be kept."""
    tensor = Tensor()
    tensor.data = array.ctypes.data
    for i in range(4):
        inside = i < array.ndim
        tensor.ne[i] = array.shape[::-1][i] if inside else 1
        tensor.nb[i] = array.strides[::-1][i] if inside else array.nbytes
    return tensor


class Rig:
    """A GGUF file that is ready to decode."""

    def __init__(self, path: Path, n_threads: int = 1) -> None:
        self.backend = GgmlBackend(n_threads)
        self.file = GgufFile(path)
        self.weights = GgmlWeights(self.file)
        self.model = load_architecture(self.file.metadata, self.weights)
        self._open: list[GgmlStore | GgmlExecutor] = []

    def spec(self, size: int = 512, **options: Any) -> CacheSpec:
        """The shape of a cache for the model."""
        return CacheSpec(size, 4, self.model.spec.attention_layers, **options)

    def executor(self, size: int = 512, **options: Any) -> tuple[GgmlStore, GgmlExecutor]:
        """A new store and what computes over it."""
        store = GgmlStore(self.spec(size, **options))
        memory = GgmlMemory.single(store)
        executor = GgmlExecutor(self.backend, memory, self.model.forward)
        self._open += [store, executor]
        return store, executor

    def close(self) -> None:
        """Free all of it."""
        for opened in reversed(self._open):
            opened.close()
        self.weights.close()
        self.backend.close()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter with these environment variables added."""
    env = {**os.environ, **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
