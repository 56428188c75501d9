"""Caches: llama.cpp's verbs over a table of cells and a store of K and V rows."""

from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.base import (
    Cache,
    CheckpointBudget,
    CheckpointPolicy,
    Coupled,
    OnShared,
    Transaction,
)
from kvcellar.cache.hybrid import HybridCache
from kvcellar.cache.placement import Placement
from kvcellar.cache.recurrent import RecurrentCache, state_rows
from kvcellar.cache.sliding import SlidingCache, sliding_size
from kvcellar.cache.view import CacheView

__all__ = [
    "AttentionCache",
    "Cache",
    "CacheView",
    "CheckpointBudget",
    "CheckpointPolicy",
    "Coupled",
    "HybridCache",
    "OnShared",
    "Placement",
    "RecurrentCache",
    "SlidingCache",
    "Transaction",
    "sliding_size",
    "state_rows",
]
