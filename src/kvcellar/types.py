"""Arrays, K/V types, what a model stores between decodes and how a context lays it out.

Sizes are in elements unless a name ends in ``_bytes``. Positions, cells and token ids are plain
``int`` at the border and ``int32`` inside arrays; ranges are half open.

There are three kinds of memory: K and V of every token, K and V of the tokens in a window, and
states of recurrent layers. A layer may have more than one of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from kvcellar.errors import (
    OptionError,
    check_bool,
    check_choice,
    check_kind,
    check_range,
    check_real,
    shown,
)

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Float16Array: TypeAlias = npt.NDArray[np.float16]
Float32Array: TypeAlias = npt.NDArray[np.float32]
ByteArray: TypeAlias = npt.NDArray[np.uint8]
OwnerBits: TypeAlias = npt.NDArray[np.uint64]  # [n_words, n]: bit s % 64 of word s // 64 is owner s
AnyArray: TypeAlias = npt.NDArray[Any]

MAX_POSITION = 2**31 - 1
"""Positions are below this; it is also the open end of a range."""


class KVType(Enum):
    """A storage type of K or V rows: GGUF name, ggml's number, values and bytes of a block.

    A new type begins with a line here; ``docs/adding-a-kv-type.md`` has the rest.
    """

    F32 = ("f32", 0, 1, 4)
    F16 = ("f16", 1, 1, 2)
    BF16 = ("bf16", 30, 1, 2)
    Q8_0 = ("q8_0", 8, 32, 34)
    Q5_1 = ("q5_1", 7, 32, 24)
    Q5_0 = ("q5_0", 6, 32, 22)
    Q4_1 = ("q4_1", 3, 32, 20)
    Q4_0 = ("q4_0", 2, 32, 18)
    IQ4_NL = ("iq4_nl", 20, 32, 18)

    def __init__(self, label: str, ggml_id: int, block_size: int, block_bytes: int) -> None:
        self.label = label
        self.ggml_id = ggml_id
        self.block_size = block_size
        self.block_bytes = block_bytes

    @property
    def is_quantized(self) -> bool:
        """Whether values are stored in blocks that share a scale."""
        return self.block_size > 1

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of n values; n must be a multiple of ``block_size``."""
        return check_range("n", n, 0, 2**62) // self.block_size * self.block_bytes

    @property
    def limit(self) -> int:
        """The bits of the smallest magnitude that no value, or scale of a block, may have."""
        return _LIMITS.get(self, _LIMITS[KVType.F16])

    @property
    def largest(self) -> float:
        """The largest magnitude that rows of this type always hold."""
        return _LARGEST.get(self, _LARGEST[KVType.F16])

    def numbers(self, rows: AnyArray) -> AnyArray:
        """View the last axis of raw rows as the bits of their values, or of the scales of blocks.

        Integers without a sign, ``[..., row_bytes / 4]`` or ``[..., row_bytes / 2]``; of quantised
        types ``[..., n_blocks, n_scales]``.
        """
        if not self.is_quantized:
            return rows.view(f"<u{self.block_bytes}")
        n_scales, n_blocks = _SCALES.get(self, 1), rows.shape[-1] // self.block_bytes
        shape = (*rows.shape[:-1], n_blocks, 2 * n_scales)
        strides = (*rows.strides[:-1], self.block_bytes, 1)
        return as_strided(rows, shape, strides, writeable=False).view("<u2")

    @classmethod
    def parse(cls, name: str | KVType) -> KVType:
        """The type of that GGUF name (case does not matter).

        Raises:
            OptionError: no such type; the message lists those there are.
        """
        if isinstance(name, cls):
            return name
        for member in cls:
            if isinstance(name, str) and member.label == name.lower():
                return member
        known = ", ".join(member.label for member in cls)
        raise OptionError(f"unknown K/V type {shown(name)}; one of {known}")


MAX_VALUE = 2.0**100
"""K and V stay below it in magnitude, in any type.

A larger key makes scores infinite, and a mask does not hide those: infinity and -inf are NaN.
"""
_LIMITS = {
    KVType.F32: 0x71800000,  # MAX_VALUE
    KVType.BF16: 0x7180,
    KVType.F16: 0x7C00,  # infinity
}
_LARGEST = {
    KVType.F32: 2.0**99,
    KVType.BF16: 2.0**99,
    KVType.F16: 65504.0,
    KVType.Q8_0: 127 * 65504.0,
    KVType.Q5_0: 16 * 65504.0,
    KVType.Q4_0: 8 * 65504.0,
    KVType.IQ4_NL: 8 * 65504.0,
}
_SCALES = {KVType.Q4_1: 2, KVType.Q5_1: 2}
"""Where blocks begin with a scale and a minimum, f16 each; the others have a scale alone."""


def all_finite(numbers: AnyArray, kind: KVType) -> bool:
    """Return whether bits that :meth:`KVType.numbers` returned are all of finite values.

    Finite means below :data:`MAX_VALUE` too.
    """
    if numbers.size == 0:
        return True
    sign = _sign(numbers)
    # Two passes that copy nothing: what has a sign is negative as an int, and largest without one.
    positive, negative = numbers.view(f"<i{numbers.itemsize}").max(), numbers.max()
    return int(positive) < kind.limit and int(negative) < sign | kind.limit


def finite_rows(rows: ByteArray, kind: KVType) -> BoolArray:
    """Return for each of raw rows ``[n, row_bytes]`` whether all its values are finite, ``[n]``."""
    is_finite = _magnitudes(kind.numbers(np.ascontiguousarray(rows))) < kind.limit
    finite: BoolArray = np.all(is_finite, axis=tuple(range(1, is_finite.ndim)))
    return finite


def overflowed(row: ByteArray, kind: KVType) -> bool:
    """Return whether a raw row that is not finite came from values too large for an f16."""
    return (
        kind.limit == _LIMITS[KVType.F16]
        and int(_magnitudes(kind.numbers(row)).max()) == kind.limit
    )


def _magnitudes(numbers: AnyArray) -> AnyArray:
    """Bits without their signs: in the order of magnitudes, NaN above infinity."""
    unsigned: AnyArray = numbers & numbers.dtype.type(_sign(numbers) - 1)
    return unsigned


def _sign(numbers: AnyArray) -> int:
    return 1 << (8 * numbers.itemsize - 1)


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How rows of K or V are stored: their type, and the size of the transform applied before."""

    kind: KVType
    hadamard: int = 0


_MAX_REAL = sys.float_info.max
_REALS = ("freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")


def _set(value: object, name: str, checked: object) -> None:
    """Set a field of a frozen value to the plain value of what was given."""
    object.__setattr__(value, name, checked)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How K and Q are rotated by their position.

    ``mode`` is the pairing: "normal" pairs neighbours (2i, 2i+1), "neox" pairs halves
    (i, i + n_rot/2). Only the first ``n_rot`` values of a head are rotated. ``factors`` holds
    n_rot/2 divisors of the frequencies. The rest are YaRN's parameters under ggml's names.
    """

    mode: Literal["normal", "neox"]
    n_rot: int
    freq_base: float = 10000.0
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0
    factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("normal", "neox"))
        for name in ("n_rot", "n_ctx_orig"):
            _set(self, name, check_range(name, getattr(self, name), 0, MAX_POSITION))
        for name in _REALS:
            _set(self, name, check_real(name, getattr(self, name), -_MAX_REAL, _MAX_REAL))
        if self.factors is not None:
            factors = check_kind("factors", self.factors, tuple)
            reals = (check_real("factors", one, -_MAX_REAL, _MAX_REAL) for one in factors)
            _set(self, "factors", tuple(reals))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer keeps for each cell: K and V of ``n_head_kv`` heads.

    ``window`` is how many tokens a token attends to, itself included; 0: all before it. With
    ``v_offset``, V is the ``head_dim_v`` values of a K head from there on, and no V is stored
    (DeepSeek's latent attention).
    """

    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    rope: RopeSpec | None = None
    window: int = 0
    v_offset: int | None = None

    def __post_init__(self) -> None:
        for name in ("n_head_kv", "head_dim_k", "head_dim_v", "window"):
            _set(self, name, check_range(name, getattr(self, name), 0, MAX_POSITION))
        if self.rope is not None:
            check_kind("rope", self.rope, RopeSpec)
        if self.v_offset is not None:
            _set(self, "v_offset", check_range("v_offset", self.v_offset, 0, MAX_POSITION))

    @property
    def n_embd_k(self) -> int:
        """Values of K a cell."""
        return self.n_head_kv * self.head_dim_k

    @property
    def n_embd_v(self) -> int:
        """Values of V that are stored a cell."""
        return 0 if self.v_offset is not None else self.n_head_kv * self.head_dim_v


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The shape of a cache; model code, caches and stores share nothing else.

    ``size`` is in cells. ``padding`` is what ``n_kv`` is rounded up to.
    """

    size: int
    n_seq_max: int
    layers: tuple[LayerSpec, ...]
    type_k: KVType = KVType.F16
    type_v: KVType = KVType.F16
    flash_attn: bool = True
    padding: int = field(default=0)

    def __post_init__(self) -> None:
        for name in ("size", "n_seq_max"):
            _set(self, name, check_range(name, getattr(self, name), 1, MAX_POSITION))
        for layer in check_kind("layers", self.layers, tuple):
            check_kind("layers", layer, LayerSpec)
        for name in ("type_k", "type_v"):
            _set(self, name, KVType.parse(getattr(self, name)))
        _set(self, "flash_attn", check_bool("flash_attn", self.flash_attn))
        padding = check_range("padding", self.padding, 0, MAX_POSITION)
        _set(self, "padding", padding or (256 if self.flash_attn else 32))

    @property
    def window(self) -> int:
        """How many tokens a token attends to, itself included; 0: all before it."""
        return self.layers[0].window if self.layers else 0

    @property
    def v_trans(self) -> bool:
        """Whether V is stored a row a channel rather than a row a cell."""
        return not self.flash_attn

    def layer_name(self, layer: int) -> str:
        """What messages call a layer."""
        among = f" of those with a window of {self.window}" if self.window else ""
        return f"layer {layer}{among}"

    def k_bytes(self, layer: int) -> int:
        """Bytes of a layer's K buffer."""
        return self.type_k.row_bytes(self._layer(layer).n_embd_k) * self.size

    def v_bytes(self, layer: int) -> int:
        """Bytes of a layer's V buffer."""
        return self.type_v.row_bytes(self._layer(layer).n_embd_v) * self.size

    def hadamard_k(self, layer: int) -> int:
        """Size of the Hadamard transform under which the layer's K is stored, 0 for none."""
        return _hadamard_size(self.type_k, self._layer(layer).head_dim_k)

    def hadamard_v(self, layer: int) -> int:
        """Size of the Hadamard transform under which the layer's V is stored, 0 for none.

        Small runs suit V better: Gemma 3's likelihoods with q4_0 are 1.5 % worse with whole heads.
        """
        return min(64, _hadamard_size(self.type_v, self._layer(layer).head_dim_v))

    def k_format(self, layer: int) -> RowFormat:
        """How the layer's K rows are stored."""
        return RowFormat(self.type_k, self.hadamard_k(layer))

    def v_format(self, layer: int) -> RowFormat:
        """How the layer's V rows are stored."""
        return RowFormat(self.type_v, self.hadamard_v(layer))

    @property
    def bytes_per_cell(self) -> int:
        """Bytes that one cell takes over all layers, K and V."""
        return self.n_bytes // self.size

    @property
    def n_bytes(self) -> int:
        """Bytes of all K and V buffers."""
        return sum(self.k_bytes(i) + self.v_bytes(i) for i in range(len(self.layers)))

    def _layer(self, layer: int) -> LayerSpec:
        return self.layers[check_range("layer", layer, 0, len(self.layers) - 1)]


def _hadamard_size(kind: KVType, head_dim: int) -> int:
    """The largest power of two that divides a head, if it is 64 or more and the type quantised.

    Blocks that share a scale lose less when outliers are spread over a head; the transform is
    orthogonal, so products of Q and K do not change. llama.cpp does the same since 2026.
    """
    size = head_dim & -head_dim
    return size if kind.is_quantized and size >= 64 else 0


@dataclass(frozen=True, slots=True)
class StateLayer:
    """What one recurrent layer keeps for each sequence, in f32.

    ``n_conv`` values are the last inputs of its convolution, ``n_ssm`` its recurrent state proper
    (0 where there is none).
    """

    n_conv: int
    n_ssm: int = 0


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What one layer of a model keeps: K and V of each token, a state of each sequence, or both."""

    attention: LayerSpec | None = None
    state: StateLayer | None = None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The shape of a store of recurrent states: ``n_rows`` rows, each one sequence's state."""

    n_rows: int
    n_seq_max: int
    layers: tuple[StateLayer, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one state over all layers."""
        return 4 * sum(layer.n_conv + layer.n_ssm for layer in self.layers)

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return self.n_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a model's layer keeps what it keeps: which group and which layer in it, which state."""

    group: int = -1  # -1: no K and V
    index: int = -1
    state: int = -1  # -1: no state


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """All that a context keeps for a model.

    ``groups`` are caches of K and V whose layers have one window each, the widest first (window 0,
    where there is one); ``places`` says where each layer of the model is found.
    """

    groups: tuple[CacheSpec, ...]
    states: StateSpec | None
    places: tuple[LayerPlace, ...]

    def __post_init__(self) -> None:
        for group in self.groups:
            if len({layer.window for layer in group.layers}) > 1:
                raise OptionError("the layers of a group must have the same window")

    @classmethod
    def single(cls, spec: CacheSpec) -> MemorySpec:
        """That of a model all of whose layers attend alike."""
        return cls((spec,), None, tuple(LayerPlace(0, i) for i in range(len(spec.layers))))

    @property
    def stores(self) -> tuple[CacheSpec | StateSpec, ...]:
        """The shapes of all stores, that of the states last."""
        return self.groups if self.states is None else (*self.groups, self.states)

    @property
    def n_bytes(self) -> int:
        """Bytes of all of it."""
        states = 0 if self.states is None else self.states.n_bytes
        return states + sum(group.n_bytes for group in self.groups)


def group_layers(
    layers: tuple[LayerMemory, ...],
) -> tuple[tuple[tuple[LayerSpec, ...], ...], tuple[StateLayer, ...], tuple[LayerPlace, ...]]:
    """A model's attention layers by window, its states, and where each layer went."""
    windows = {layer.attention.window for layer in layers if layer.attention is not None}
    order = sorted(windows, key=lambda window: -(window or MAX_POSITION))
    groups: list[list[LayerSpec]] = [[] for _ in order]
    states: list[StateLayer] = []
    places: list[LayerPlace] = []
    for layer in layers:
        group = index = state = -1
        if layer.attention is not None:
            group = order.index(layer.attention.window)
            index = len(groups[group])
            groups[group].append(layer.attention)
        if layer.state is not None:
            state = len(states)
            states.append(layer.state)
        places.append(LayerPlace(group, index, state))
    return tuple(map(tuple, groups)), tuple(states), tuple(places)
