"""The cache that belongs to a memory: one that fits each kind, alone or under one roof."""

from __future__ import annotations

from kvcellar.backends.base import KVStore, OpenMemory
from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.base import Cache, CellCache, CheckpointBudget, CheckpointPolicy
from kvcellar.cache.hybrid import HybridCache
from kvcellar.cache.recurrent import RecurrentCache
from kvcellar.cache.sliding import SlidingCache
from kvcellar.runtime.options import ContextOptions
from kvcellar.types import CacheSpec, MemorySpec


def make_cache(spec: MemorySpec, memory: OpenMemory, options: ContextOptions, n_ctx: int) -> Cache:
    """The cache over the stores of a memory of that shape, made for so many tokens.

    A part that is the only one is used as it is, so models of one kind pay for no other.
    """
    groups: list[CellCache] = []
    for group, store in zip(spec.groups, memory.groups, strict=True):
        groups.append(_make_group(group, store, n_ctx, options))
    if memory.states is None:
        return groups[0] if len(groups) == 1 else HybridCache(groups)
    policy = CheckpointPolicy(CheckpointBudget(*options.checkpoint_budget))
    states = RecurrentCache(memory.states, policy, size=n_ctx)
    return HybridCache(groups, states) if groups else states


def _make_group(spec: CacheSpec, store: KVStore, n_ctx: int, options: ContextOptions) -> CellCache:
    threshold = options.defrag_threshold
    if spec.size == n_ctx:  # nothing ever has to make room
        return AttentionCache(spec, store, defrag_threshold=threshold)
    budget = CheckpointBudget(*options.checkpoint_budget)
    return SlidingCache(spec, store, defrag_threshold=threshold, checkpoints=budget)
