"""The part of ggml's C interface that kvcellar calls, declared for ctypes; views of its memory.

ggml aborts the process on bad arguments, and where it has no memory, so callers check first.
Sources: ggml.h, ggml-alloc.h, ggml-backend.h, ggml-cpu.h and gguf.h of ggml 0.20.
"""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcellar.backends.memory import aligned, check_room
from kvcellar.errors import ClosedError

MAX_DIMS = 4
MAX_SRC = 10
MAX_OP_PARAMS = 64
MAX_NAME = 64
OBJECT_SIZE = 32  # sizeof(struct ggml_object), part of ggml_tensor_overhead()

ROPE_MODES: Mapping[str, int] = MappingProxyType({"normal": 0, "neox": 2})
SUCCESS = 0  # GGML_STATUS_SUCCESS
ABORTED = 1  # GGML_STATUS_ABORTED
PREC_F32 = 10  # GGML_PREC_F32
ALL_THREADS = -1  # GGML_N_TASKS_MAX
HINT_HADAMARD = 1  # GGML_HINT_SRC0_IS_HADAMARD

TYPE_F32 = 0
TYPE_F16 = 1
TYPE_I32 = 26
TYPE_I64 = 27


class InitParams(c.Structure):
    """``struct ggml_init_params``."""

    _fields_ = (("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool))


class GgufInitParams(c.Structure):
    """``struct gguf_init_params``."""

    _fields_ = (("no_alloc", c.c_bool), ("ctx", c.POINTER(c.c_void_p)))


class Tensor(c.Structure):
    """``struct ggml_tensor``; checked against ``ggml_tensor_overhead()`` when loading."""

    _fields_ = (
        ("type", c.c_int),
        ("buffer", c.c_void_p),
        ("ne", c.c_int64 * MAX_DIMS),
        ("nb", c.c_size_t * MAX_DIMS),
        ("op", c.c_int),
        ("op_params", c.c_int32 * (MAX_OP_PARAMS // 4)),
        ("flags", c.c_int32),
        ("src", c.c_void_p * MAX_SRC),
        ("view_src", c.c_void_p),
        ("view_offs", c.c_size_t),
        ("data", c.c_void_p),
        ("name", c.c_char * MAX_NAME),
        ("extra", c.c_void_p),
        ("padding", c.c_char * 8),
    )


tensor_at = Tensor.from_address
"""The C structure of the tensor at an address."""


def array_at(address: int, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A writable view of C memory; the caller keeps the memory alive."""
    wanted = np.dtype(dtype)
    n_bytes = wanted.itemsize * int(np.prod(shape, dtype=np.int64))
    raw = (c.c_uint8 * n_bytes).from_address(address)
    view: npt.NDArray[Any] = np.frombuffer(memoryview(raw), dtype=wanted).reshape(shape)
    return view


class ThreadpoolParams(c.Structure):
    """``struct ggml_threadpool_params``."""

    _fields_ = (
        ("cpumask", c.c_bool * 512),
        ("n_threads", c.c_int),
        ("prio", c.c_int),
        ("poll", c.c_uint32),
        ("strict_cpu", c.c_bool),
        ("paused", c.c_bool),
    )


ToFloat = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_int64)


class TypeTraits(c.Structure):
    """``struct ggml_type_traits``."""

    _fields_ = (
        ("type_name", c.c_char_p),
        ("blck_size", c.c_int64),
        ("blck_size_interleave", c.c_int64),
        ("type_size", c.c_size_t),
        ("is_quantized", c.c_bool),
        ("to_float", ToFloat),
        ("from_float_ref", c.c_void_p),
    )


class GraphPlan(c.Structure):
    """``struct ggml_cplan``."""

    _fields_ = (
        ("work_size", c.c_size_t),
        ("work_data", c.c_void_p),
        ("n_threads", c.c_int),
        ("threadpool", c.c_void_p),
        ("abort_callback", c.c_void_p),
        ("abort_callback_data", c.c_void_p),
        ("use_ref", c.c_bool),
    )


LogCallback = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)

P = c.c_void_p
I32 = c.c_int
I64 = c.c_int64
F32 = c.c_float
SIZE = c.c_size_t
STR = c.c_char_p
BOOL = c.c_bool

Signature = tuple[Any, tuple[Any, ...]]

_CORE: dict[str, Signature] = {
    "ggml_version": (STR, ()),
    "ggml_log_set": (None, (LogCallback, P)),
    "ggml_tensor_overhead": (SIZE, ()),
    "ggml_graph_overhead_custom": (SIZE, (SIZE, BOOL)),
    "ggml_init": (P, (InitParams,)),
    "ggml_free": (None, (P,)),
    "ggml_reset": (None, (P,)),
    "ggml_type_name": (STR, (I32,)),
    "ggml_op_desc": (STR, (P,)),
    "ggml_blck_size": (I64, (I32,)),
    "ggml_type_size": (SIZE, (I32,)),
    "ggml_nbytes": (SIZE, (P,)),
    "ggml_is_contiguous": (BOOL, (P,)),
    "ggml_is_contiguous_1": (BOOL, (P,)),
    "ggml_get_type_traits": (c.POINTER(TypeTraits), (I32,)),
    "ggml_quantize_chunk": (SIZE, (I32, P, P, I64, I64, I64, P)),
    "ggml_set_input": (None, (P,)),
    "ggml_set_output": (None, (P,)),
    "ggml_set_name": (P, (P, STR)),
    "ggml_get_first_tensor": (P, (P,)),
    "ggml_get_next_tensor": (P, (P, P)),
    "ggml_new_graph_custom": (P, (P, SIZE, BOOL)),
    "ggml_build_forward_expand": (None, (P, P)),
    "ggml_graph_n_nodes": (I32, (P,)),
    "ggml_graph_node": (P, (P, I32)),
    "ggml_graph_clear": (None, (P,)),
    "ggml_graph_add_node": (None, (P, P)),
}

_TENSORS: dict[str, Signature] = {
    "ggml_new_tensor_1d": (P, (P, I32, I64)),
    "ggml_new_tensor_2d": (P, (P, I32, I64, I64)),
    "ggml_new_tensor_3d": (P, (P, I32, I64, I64, I64)),
    "ggml_new_tensor_4d": (P, (P, I32, I64, I64, I64, I64)),
    "ggml_view_1d": (P, (P, P, I64, SIZE)),
    "ggml_view_2d": (P, (P, P, I64, I64, SIZE, SIZE)),
    "ggml_view_3d": (P, (P, P, I64, I64, I64, SIZE, SIZE, SIZE)),
    "ggml_view_4d": (P, (P, P, I64, I64, I64, I64, SIZE, SIZE, SIZE, SIZE)),
    "ggml_reshape_2d": (P, (P, P, I64, I64)),
    "ggml_reshape_3d": (P, (P, P, I64, I64, I64)),
    "ggml_reshape_4d": (P, (P, P, I64, I64, I64, I64)),
    "ggml_permute": (P, (P, P, I32, I32, I32, I32)),
    "ggml_transpose": (P, (P, P)),
    "ggml_cont": (P, (P, P)),
    "ggml_concat": (P, (P, P, P, I32)),
    "ggml_cast": (P, (P, P, I32)),
    "ggml_cpy": (P, (P, P, P)),
    "ggml_get_rows": (P, (P, P, P)),
    "ggml_set_rows": (P, (P, P, P, P)),
}

_MATH: dict[str, Signature] = {
    "ggml_add": (P, (P, P, P)),
    "ggml_add_id": (P, (P, P, P, P)),
    "ggml_mul": (P, (P, P, P)),
    "ggml_div": (P, (P, P, P)),
    "ggml_scale": (P, (P, P, F32)),
    "ggml_clamp": (P, (P, P, F32, F32)),
    "ggml_repeat_4d": (P, (P, P, I64, I64, I64, I64)),
    "ggml_sum": (P, (P, P)),
    "ggml_sum_rows": (P, (P, P)),
    "ggml_norm": (P, (P, P, F32)),
    "ggml_rms_norm": (P, (P, P, F32)),
    "ggml_silu": (P, (P, P)),
    "ggml_gelu": (P, (P, P)),
    "ggml_tanh": (P, (P, P)),
    "ggml_sigmoid": (P, (P, P)),
    "ggml_swiglu_split": (P, (P, P, P)),
    "ggml_swiglu_oai": (P, (P, P, P, F32, F32)),
    "ggml_geglu_split": (P, (P, P, P)),
    "ggml_mul_mat": (P, (P, P, P)),
    "ggml_mul_mat_id": (P, (P, P, P, P)),
    "ggml_mul_mat_set_hint": (None, (P, I32)),
    "ggml_soft_max": (P, (P, P)),
    "ggml_soft_max_ext": (P, (P, P, P, F32, F32)),
    "ggml_soft_max_add_sinks": (None, (P, P)),
    "ggml_argsort_top_k": (P, (P, P, I32)),
    "ggml_rope_ext": (P, (P, P, P, P, I32, I32, I32, F32, F32, F32, F32, F32, F32)),
    "ggml_flash_attn_ext": (P, (P, P, P, P, P, F32, F32, F32)),
    "ggml_flash_attn_ext_set_prec": (None, (P, I32)),
    "ggml_flash_attn_ext_add_sinks": (None, (P, P)),
    "ggml_ssm_conv": (P, (P, P, P)),
    "ggml_ssm_scan": (P, (P, P, P, P, P, P, P, P, I64)),
    "ggml_custom_4d": (P, (P, I32, I64, I64, I64, I64, P, I32, P, I32, P)),
}

_BACKEND: dict[str, Signature] = {
    "ggml_gallocr_new": (P, (P,)),
    "ggml_gallocr_free": (None, (P,)),
    "ggml_gallocr_reserve": (BOOL, (P, P)),
    "ggml_gallocr_reserve_n_size": (None, (P, P, P, P, c.POINTER(SIZE))),
    "ggml_gallocr_alloc_graph": (BOOL, (P, P)),
    "ggml_backend_buft_name": (STR, (P,)),
    "ggml_backend_buft_alloc_buffer": (P, (P, SIZE)),
    "ggml_backend_buft_get_alignment": (SIZE, (P,)),
    "ggml_backend_buft_is_host": (BOOL, (P,)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, (P, P)),
    "ggml_backend_alloc_ctx_tensors_from_buft_size": (SIZE, (P, P)),
    "ggml_backend_buffer_free": (None, (P,)),
    "ggml_backend_buffer_get_base": (P, (P,)),
    "ggml_backend_buffer_get_size": (SIZE, (P,)),
    "ggml_backend_buffer_clear": (None, (P, c.c_uint8)),
    "ggml_backend_tensor_alloc": (I32, (P, P, P)),
    "ggml_backend_cpu_buffer_type": (P, ()),
    "ggml_backend_cpu_buffer_from_ptr": (P, (P, SIZE)),
    "ggml_threadpool_params_default": (ThreadpoolParams, (I32,)),
}

_CPU: dict[str, Signature] = {
    "ggml_graph_plan": (GraphPlan, (P, I32, P)),
    "ggml_graph_compute": (I32, (P, c.POINTER(GraphPlan))),
    "ggml_threadpool_new": (P, (c.POINTER(ThreadpoolParams),)),
    "ggml_threadpool_free": (None, (P,)),
}

_X86 = "avx avx2 fma f16c bmi2 avx_vnni avx512 avx512_vbmi avx512_vnni avx512_bf16 amx_int8"
_ARM = "neon fp16_va dotprod matmul_int8 sve sme"
CPU_FEATURES = (*_X86.split(), *_ARM.split())
"""Instructions that ggml tells whether its build uses them."""

_FEATURES: dict[str, Signature] = {f"ggml_cpu_has_{name}": (I32, ()) for name in CPU_FEATURES}

_GGUF: dict[str, Signature] = {
    "gguf_init_from_file": (P, (STR, GgufInitParams)),
    "gguf_init_from_buffer": (P, (P, SIZE, GgufInitParams)),
    "gguf_free": (None, (P,)),
    "gguf_get_alignment": (SIZE, (P,)),
    "gguf_get_data_offset": (SIZE, (P,)),
    "gguf_get_n_kv": (I64, (P,)),
    "gguf_get_key": (STR, (P, I64)),
    "gguf_get_kv_type": (I32, (P, I64)),
    "gguf_get_arr_type": (I32, (P, I64)),
    "gguf_get_val_data": (P, (P, I64)),
    "gguf_get_val_str": (STR, (P, I64)),
    "gguf_get_arr_n": (SIZE, (P, I64)),
    "gguf_get_arr_data": (P, (P, I64)),
    "gguf_get_arr_str": (STR, (P, I64, SIZE)),
    "gguf_get_n_tensors": (I64, (P,)),
    "gguf_get_tensor_offset": (SIZE, (P, I64)),
    "gguf_get_tensor_name": (STR, (P, I64)),
    "gguf_get_tensor_ne": (c.POINTER(I64), (P, I64)),
    "gguf_get_tensor_type": (I32, (P, I64)),
}

SIGNATURES: Mapping[str, Signature] = MappingProxyType(
    {**_CORE, **_TENSORS, **_MATH, **_BACKEND, **_CPU, **_FEATURES, **_GGUF}
)


FREED_BY: Mapping[str, str] = MappingProxyType(
    {
        "ggml_init": "ggml_free",
        "ggml_gallocr_new": "ggml_gallocr_free",
        "ggml_threadpool_new": "ggml_threadpool_free",
        "ggml_backend_cpu_buffer_from_ptr": "ggml_backend_buffer_free",
        "gguf_init_from_buffer": "gguf_free",
    }
)
"""What makes an object of C that must be freed, and what frees it."""


class Owned(c.c_void_p):
    """An object of C that is freed once: by :meth:`close`, or with the last reference to it.

    ctypes makes it while the call that it results from returns, so an exception that comes then
    frees it too. Functions take it like an address.
    """

    api: Ggml
    free: str
    memory: object = None
    """What it lies in, if that is ours."""
    process: int | None = None
    """The only process that may free it; None: any."""

    @property
    def address(self) -> int:
        """Where it is.

        Raises:
            ClosedError: it was freed; ggml would read whatever is there now.
        """
        if self.value is None:
            raise ClosedError("freed memory of ggml was asked for: its owner is closed")
        return self.value

    @property
    def is_closed(self) -> bool:
        """Whether it was freed, or C gave nothing."""
        return self.value is None

    def close(self) -> None:
        """Free it; closing twice is fine."""
        pointer, self.value = self.value, None
        if pointer is not None and self.process in (None, os.getpid()):
            getattr(self.api, self.free)(pointer)
        self.memory = None

    def __del__(self) -> None:
        self.close()


class Ggml:
    """The functions of :data:`SIGNATURES`, found in a set of loaded libraries."""

    def __init__(self, libraries: list[c.CDLL]) -> None:
        self.missing: list[str] = []
        self._makers: dict[str, Callable[..., Owned]] = {}
        for name, (restype, argtypes) in SIGNATURES.items():
            library = _find(libraries, name)
            if library is None:
                self.missing.append(name)
                continue
            self.__dict__[name] = _declare(library, name, restype, argtypes)
            if name in FREED_BY:
                kind = type(Owned.__name__, (Owned,), {"api": self, "free": FREED_BY[name]})
                self._makers[name] = _declare(library, name, kind, argtypes)

    def make(self, name: str, *args: object) -> Owned:
        """Call one of :data:`FREED_BY`; the result is closed if C returned nothing.

        Raises:
            AllocationError: there is little memory left, and ggml would end the process.
        """
        check_room(f"what {name} makes")
        return self._makers[name](*args)

    def context(self, what: str, n_bytes: int) -> Owned:
        """A ggml context for descriptions of tensors, which take ``n_bytes``.

        Raises:
            AllocationError: they cannot be had.
        """
        memory = aligned(what, n_bytes)
        made = self.make("ggml_init", InitParams(n_bytes, memory.ctypes.data, True))
        made.memory = memory
        return made

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Only reached for names that the libraries lack; tells the type checker the rest."""
        raise AttributeError(f"libggml has no function {name}")


def _find(libraries: list[c.CDLL], name: str) -> c.CDLL | None:
    return next((library for library in libraries if hasattr(library, name)), None)


def _declare(library: c.CDLL, name: str, restype: Any, argtypes: tuple[Any, ...]) -> Any:
    function = library[name]  # a new object each time
    function.restype, function.argtypes = restype, argtypes
    return function


def byte_test() -> int:
    """The address of a C function ``bool (*)(void *)``: whether the byte there is not zero.

    The byte behind it must be zero: the function is ``strlen``.
    """
    library = c.CDLL("msvcrt") if os.name == "nt" else c.CDLL(None)
    address = c.cast(library.strlen, c.c_void_p).value
    assert address is not None
    return address
