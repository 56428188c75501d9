"""A GGUF file mapped for ggml, and the threads that compute with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from kvcellar.backends.base import OpenMemory, TensorBytes
from kvcellar.backends.ggml.backend import GgmlBackend
from kvcellar.backends.ggml.gguf import GgmlWeights, GgufFile
from kvcellar.backends.ggml.graph import GgmlExecutor
from kvcellar.backends.ggml.jit.attention import why_no_kernel
from kvcellar.backends.ggml.model_memory import GgmlMemory
from kvcellar.backends.ggml.store import from_rows, to_rows
from kvcellar.backends.hadamard import transform
from kvcellar.backends.operations import Forward
from kvcellar.types import ByteArray, CacheSpec, MemorySpec, RowFormat


class GgmlModelFile:
    """Weights are mapped from the file, so opening costs little. Implements ``ModelFile[int]``."""

    def __init__(self, path: str | Path, n_threads: int | None = None) -> None:
        self._file = file = GgufFile(path)
        self.path = file.path
        self.stamp = file.stamp
        self.metadata: Mapping[str, object] = file.metadata
        self.weights = GgmlWeights(file)
        self.weight_bytes = sum(info.n_bytes for info in file.tensors.values())
        try:
            self._backend = GgmlBackend(n_threads)
        except BaseException:
            self.weights.close()
            raise

    def tensors(self) -> Iterator[TensorBytes]:
        """See ``ModelFile.tensors``."""
        for name, info in sorted(self._file.tensors.items()):
            data = self._file.data[info.offset : info.offset + info.n_bytes]
            yield TensorBytes(name, info.type_name, info.shape, data)

    def convert_rows(self, rows: ByteArray, src: RowFormat, dst: RowFormat) -> ByteArray:
        """See ``ModelFile.convert_rows``."""
        plain = transform(from_rows(rows, src.kind), src.hadamard)
        return to_rows(transform(plain, dst.hadamard), dst.kind)

    def why_no_kernel(self, spec: CacheSpec) -> str | None:
        """See ``ModelFile.why_no_kernel``."""
        return why_no_kernel(spec)

    def open_memory(
        self,
        spec: MemorySpec,
        forward: Forward[int],
        *,
        kernel: bool = False,
        products: bool = False,
    ) -> OpenMemory:
        """Stores and the graphs over them; see ``ModelFile.open_memory``."""
        memory = GgmlMemory.open(spec, self._backend, kernel=kernel, products=products)
        executor = GgmlExecutor(self._backend, memory, forward)
        return OpenMemory(memory.groups, memory.states, executor)

    def close(self) -> None:
        """Stop the threads and unmap the file; closing twice is fine."""
        self._backend.close()
        self.weights.close()
