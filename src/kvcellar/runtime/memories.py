"""The cache that belongs to a memory: one that fits each kind, alone or under one roof."""

from __future__ import annotations

from kvcellar.backends.base import KVStore, OpenMemory
from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.base import Cache, CellCache
from kvcellar.cache.hybrid import HybridCache
from kvcellar.memory import MemorySpec
from kvcellar.runtime.options import ContextOptions
from kvcellar.types import CacheSpec


def make_cache(spec: MemorySpec, memory: OpenMemory, options: ContextOptions) -> Cache:
    """The cache over the stores of a memory of that shape.

    A part that is the only one is used as it is, so models of one kind pay for no other.
    """
    groups = [
        _make_group(group, store, options, is_widest=number == 0)
        for number, (group, store) in enumerate(zip(spec.groups, memory.groups, strict=True))
    ]
    if spec.states is None and len(groups) == 1:
        return groups[0]
    return HybridCache(groups)


def _make_group(
    spec: CacheSpec, store: KVStore, options: ContextOptions, *, is_widest: bool
) -> CellCache:
    return AttentionCache(spec, store, defrag_threshold=options.defrag_threshold)
