"""The tensors of a GGUF file as ggml tensors that point into the mapped file."""

from __future__ import annotations

from kvcellar.backends.ggml.binding import TYPE_F32, InitParams, Tensor
from kvcellar.backends.ggml.gguf import GgufFile, TensorInfo, stored_shape
from kvcellar.backends.ggml.library import load
from kvcellar.backends.ggml.memory import array_at
from kvcellar.errors import ModelFileError, UnsupportedModel

_ALIGNMENT = 32  # what ggml's CPU buffers ask for
_UNUSABLE = frozenset({"f64", "i8", "i16", "i32", "i64", "q8_1", "q8_K"})  # no product exists


class GgmlWeights:
    """Model tensors by name; a tensor is its C address. Implements ``Weights[int]``.

    The file stays mapped until :meth:`close`; pages are read when first used.
    """

    _context: int | None = None

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._api = load().api
        self._tensors: dict[str, int] = {}
        self._check_alignment()
        n = len(file.tensors)
        size = (n + 1) * self._api.ggml_tensor_overhead()
        self._context = self._api.ggml_init(InitParams(size, None, True))
        self._buffer: int | None = self._api.ggml_backend_cpu_buffer_from_ptr(
            file.address(), file.n_bytes
        )

    def has(self, name: str) -> bool:
        """Whether the file has that tensor."""
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that the file must have."""
        return self._require(name).shape

    def matrix(self, name: str, *shape: int) -> int:
        """A weight of any type that products take; see ``Weights.matrix``."""
        info = self._info(name, shape)
        if info.type_name in _UNUSABLE:
            raise UnsupportedModel(f"tensor {name} has type {info.type_name}, which has no product")
        return self._tensor(info)

    def vector(self, name: str, *shape: int) -> int:
        """A norm, bias or the like, of f32 values; see ``Weights.vector``."""
        return self._tensor(self._f32(name, *shape))

    def values(self, name: str, n: int) -> tuple[float, ...]:
        """The numbers of a small f32 tensor; see ``Weights.values``."""
        info = self._f32(name, n)
        data = array_at(self._file.address() + info.offset, "f4", (n,))
        return tuple(float(x) for x in data)

    def close(self) -> None:
        """Free the tensors and unmap the file; closing twice is fine."""
        if self._context is None:
            return
        self._api.ggml_free(self._context)
        self._api.ggml_backend_buffer_free(self._buffer)
        self._context = self._buffer = None
        self._tensors.clear()

    def __del__(self) -> None:
        self.close()

    def _check_alignment(self) -> None:
        for info in self._file.tensors.values():
            if (self._file.address() + info.offset) % _ALIGNMENT:
                raise UnsupportedModel(
                    f"tensor {info.name} begins at byte {info.offset}, which is not a multiple of "
                    f"{_ALIGNMENT}: convert the file with general.alignment = 32"
                )

    def _require(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(name)
        if info is None:
            raise UnsupportedModel(f"{self._file.path} has no tensor {name}")
        return info

    def _info(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._require(name)
        if info.shape != stored_shape(shape) or 0 in shape:
            raise ModelFileError(f"tensor {name} has shape {info.shape}, expected {shape}")
        return info

    def _f32(self, name: str, *shape: int) -> TensorInfo:
        info = self._info(name, shape)
        if info.ggml_type != TYPE_F32:
            raise UnsupportedModel(f"tensor {name} has type {info.type_name}, expected f32")
        return info

    def _tensor(self, info: TensorInfo) -> int:
        if info.name not in self._tensors:
            ne = [*reversed(info.shape), 1, 1, 1][:4]
            tensor = self._api.ggml_new_tensor_4d(self._context, info.ggml_type, *ne)
            self._api.ggml_set_name(tensor, info.name.encode()[:63])
            address = self._file.address() + info.offset
            self._api.ggml_backend_tensor_alloc(self._buffer, tensor, address)
            self._tensors[info.name] = tensor
        return self._tensors[info.name]


def tensor_at(address: int) -> Tensor:
    """The C structure of a tensor."""
    return Tensor.from_address(address)
