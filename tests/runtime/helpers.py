"""Looking into contexts."""

from __future__ import annotations

from kvcellar.cache import AttentionCache
from kvcellar.runtime.context import Context


def attention(context: Context) -> AttentionCache:
    """The cache of a context that has no other than one of K and V, at full size."""
    assert type(context.cache) is AttentionCache
    return context.cache
