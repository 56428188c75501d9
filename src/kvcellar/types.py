"""The nouns that every layer shares.

Sizes are in elements unless a name ends in ``_bytes``. Positions, cells and token ids are plain
``int`` at the border and ``int32`` inside arrays; ranges are half open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcellar.errors import OptionError

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
    """A storage type of K or V rows, under its GGUF name."""

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
        return n // self.block_size * self.block_bytes

    @classmethod
    def parse(cls, name: str | KVType) -> KVType:
        """The type of that GGUF name (case does not matter).

        Raises:
            OptionError: no such type; the message lists those there are.
        """
        if isinstance(name, cls):
            return name
        for member in cls:
            if member.label == str(name).lower():
                return member
        known = ", ".join(member.label for member in cls)
        raise OptionError(f"unknown K/V type {name!r}; one of {known}")


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How rows of K or V are stored: their type, and the size of the transform they lie under."""

    kind: KVType
    hadamard: int = 0


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
        if self.padding == 0:
            object.__setattr__(self, "padding", 256 if self.flash_attn else 32)

    @property
    def window(self) -> int:
        """How many tokens a token attends to, itself included; 0: all before it."""
        return self.layers[0].window if self.layers else 0

    @property
    def v_trans(self) -> bool:
        """Whether V is stored a row a channel rather than a row a cell."""
        return not self.flash_attn

    def k_bytes(self, layer: int) -> int:
        """Bytes of a layer's K buffer."""
        return self.type_k.row_bytes(self.layers[layer].n_embd_k) * self.size

    def v_bytes(self, layer: int) -> int:
        """Bytes of a layer's V buffer."""
        return self.type_v.row_bytes(self.layers[layer].n_embd_v) * self.size

    def hadamard_k(self, layer: int) -> int:
        """Size of the Hadamard transform under which the layer's K is stored, 0 for none."""
        return _hadamard_size(self.type_k, self.layers[layer].head_dim_k)

    def hadamard_v(self, layer: int) -> int:
        """Size of the Hadamard transform under which the layer's V is stored, 0 for none.

        Small runs suit V better: Gemma 3's likelihoods with q4_0 are 1.5 % worse with whole heads.
        """
        return min(64, _hadamard_size(self.type_v, self.layers[layer].head_dim_v))

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


_BITS_SET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1).sum(axis=1)


def owner_words(n_seq_max: int) -> int:
    """How many 64-bit words hold the owner bits of ``n_seq_max`` sequences."""
    return max(1, -(-n_seq_max // 64))


def pack_owners(rows: Int64Array, seq_ids: Int64Array, n: int, n_words: int) -> OwnerBits:
    """Owner bits ``[n_words, n]`` of n cells or tokens: ``rows[i]`` is owned by ``seq_ids[i]``."""
    bits = np.zeros((n_words, n), np.uint64)
    ones = np.left_shift(np.uint64(1), (seq_ids & 63).astype(np.uint64))
    np.bitwise_or.at(bits, (seq_ids >> 6, rows), ones)
    return bits


def unpack_owners(bits: OwnerBits) -> tuple[Int64Array, Int64Array]:
    """The pairs (row, sequence id) of owner bits, rows ascending, then ids ascending."""
    octets = np.ascontiguousarray(bits.T, dtype="<u8").view(np.uint8)
    rows, seq_ids = np.nonzero(np.unpackbits(octets, axis=1, bitorder="little"))
    return rows, seq_ids


def count_owners(bits: OwnerBits) -> int:
    """How many owner bits are set in all."""
    octets = np.ascontiguousarray(bits).view(np.uint8)
    return int(_BITS_SET[octets].sum(dtype=np.int64))


def _hadamard_size(kind: KVType, head_dim: int) -> int:
    """The largest power of two that divides a head, if it is 64 or more and the type quantised.

    Blocks that share a scale lose less when outliers are spread over a head; the transform is
    orthogonal, so products of Q and K do not change. llama.cpp does the same since 2026.
    """
    size = head_dim & -head_dim
    return size if kind.is_quantized and size >= 64 else 0
