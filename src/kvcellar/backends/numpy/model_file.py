"""A GGUF file for the NumPy backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from kvcellar.backends.base import OpenMemory, TensorBytes
from kvcellar.backends.checks import check_threads
from kvcellar.backends.hadamard import transform
from kvcellar.backends.numpy.gguf import GgufTensors, NumpyWeights
from kvcellar.backends.numpy.ops import NumpyExecutor
from kvcellar.backends.numpy.states import NumpyStateStore
from kvcellar.backends.numpy.store import NumpyStore, check_made, from_rows, to_rows
from kvcellar.backends.operations import Forward
from kvcellar.types import ByteArray, CacheSpec, Float32Array, MemorySpec, RowFormat


class NumpyModelFile:
    """Weights become f32 arrays. Implements ``ModelFile[Float32Array]``.

    NumPy chooses its threads itself: ``n_threads`` is checked, and has no effect.
    """

    def __init__(self, path: str | Path, n_threads: int | None = None) -> None:
        check_threads(n_threads)
        self._file = file = GgufTensors(path)
        self.path = file.path
        self.stamp = file.stamp
        self.metadata: Mapping[str, object] = file.metadata
        self.weights = NumpyWeights(file)
        self.weight_bytes = file.n_bytes

    def tensors(self) -> Iterator[TensorBytes]:
        """See ``ModelFile.tensors``."""
        return self._file.tensors()

    def convert_rows(self, rows: ByteArray, src: RowFormat, dst: RowFormat) -> ByteArray:
        """See ``ModelFile.convert_rows``."""
        check_made("type", dst.kind)
        plain = transform(from_rows(rows, src.kind), src.hadamard)
        return to_rows(transform(plain, dst.hadamard), dst.kind)

    def why_no_kernel(self, spec: CacheSpec) -> str | None:  # noqa: ARG002
        """See ``ModelFile.why_no_kernel``."""
        return "the NumPy backend has none"

    def open_memory(
        self,
        spec: MemorySpec,
        forward: Forward[Float32Array],
        *,
        kernel: bool = False,  # noqa: ARG002
        products: bool = False,  # noqa: ARG002
    ) -> OpenMemory:
        """Stores and what computes over them; see ``ModelFile.open_memory``."""
        groups = tuple(NumpyStore(group) for group in spec.groups)
        states = None if spec.states is None else NumpyStateStore(spec.states)
        return OpenMemory(groups, states, NumpyExecutor(spec, groups, forward, states))

    def close(self) -> None:
        """Free the arrays and unmap the file; closing twice is fine."""
        self.weights.close()
