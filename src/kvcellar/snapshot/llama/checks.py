"""Whether K and V of a file are of the types that a cache has, and finite."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvcellar.errors import SnapshotFileError, SnapshotMismatch
from kvcellar.snapshot.llama.layout import VERSION, PartShape
from kvcellar.snapshot.llama.value import Block, LlamaFile, Stream
from kvcellar.types import ByteArray, CacheSpec, KVType, MemorySpec

_EXPONENT = {
    KVType.F32: ("<u4", 0x7F800000),
    KVType.F16: ("<u2", 0x7C00),
    KVType.BF16: ("<u2", 0x7F80),
}
_SCALE_BYTES = {KVType.Q4_1: 4, KVType.Q5_1: 4}
"""Where a block begins with a scale and a minimum; the others have a scale of 2 bytes."""


def check_part(
    streams: Iterable[Stream], shape: PartShape, spec: MemorySpec, file: LlamaFile
) -> None:
    """See that every block of a part is what the cache has in that place.

    Raises:
        SnapshotMismatch: of another type or size, or quantised in another way.
        SnapshotFileError: not finite.
    """
    alike = transforms_alike(spec, file.version)
    for stream in streams:
        for name, blocks in (("K", stream.k), ("V", stream.v)):
            for block, (group, layer) in zip(blocks, shape.layers, strict=False):
                _check_block(name, block, spec.groups[group], layer, alike)


def check_finite(what: str, kind: KVType, rows: ByteArray) -> None:
    """See that no value, or scale of values, is NaN or infinite.

    Raises:
        SnapshotFileError: one is.
    """
    if kind.is_quantized:
        size = _SCALE_BYTES.get(kind, 2)
        rows = rows.reshape(-1, kind.block_bytes)[:, :size]
        kind = KVType.F16
    dtype, exponent = _EXPONENT[kind]
    bits = np.ascontiguousarray(rows).view(dtype) & exponent
    if bool((bits == exponent).any()):
        raise SnapshotFileError(f"llama.cpp's file: {what} are not finite: it is damaged")


def transforms_alike(spec: MemorySpec, version: int) -> bool:
    """Whether llama.cpp stores quantised rows under the transform under which we do.

    It does since 2026, but neither in latent attention nor beside both windows and states. A file
    whose version it had before that month does not say.
    """
    layers = [layer for group in spec.groups for layer in group.layers]
    has_windows = any(layer.window for layer in layers)
    is_latent = any(layer.v_offset is not None for layer in layers)
    is_new = version in (*VERSION["2026-10"].values(), 0)
    return is_new and not is_latent and not (has_windows and spec.states is not None)


def lies_otherwise(spec: CacheSpec, layer: int) -> tuple[bool, bool]:
    """Whether K, and V, of a layer would lie otherwise where not all is transformed alike."""
    is_latent = spec.layers[layer].v_offset is not None and spec.type_k.is_quantized
    return spec.hadamard_k(layer) > 0 or is_latent, spec.hadamard_v(layer) > 0


def _check_block(name: str, block: Block, spec: CacheSpec, layer: int, alike: bool) -> None:
    is_k, shape = name == "K", spec.layers[layer]
    kind = spec.type_k if is_k else spec.type_v
    width = shape.n_embd_k if is_k else shape.n_embd_v
    if block.kind is not kind:
        hint = f"open the context with type_{name.lower()}={block.kind.label!r}"
        raise SnapshotMismatch(f"{name} of type", block.kind.label, kind.label, hint)
    if block.rows.shape[1] != (row_bytes := kind.row_bytes(width)):
        raise SnapshotMismatch(f"bytes a row of {name}", block.rows.shape[1], row_bytes)
    if not alike and lies_otherwise(spec, layer)[0 if is_k else 1]:
        hint = "compute the text anew, or let llama.cpp save f16"
        raise SnapshotMismatch(f"{kind.label} {name}", "as it is", "under a transform", hint)
    check_finite(f"{name} rows", kind, block.rows)
