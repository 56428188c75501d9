"""Hypothesis strategies for caches: tiny sizes, so that rare cases become common."""

from __future__ import annotations

from hypothesis import strategies as st

from kvcellar.types import CacheSpec, LayerSpec, RopeSpec

SEQ_IDS = st.integers(0, 3)
"""Ids of a cache with four sequences."""

BOUNDS = st.integers(-1, 9)
"""Bounds of a range of positions; negative ones are open."""

TOKEN_OWNERS = st.frozensets(SEQ_IDS, min_size=1, max_size=2)
"""Whom a token belongs to: mostly one sequence, sometimes two."""


def attention_spec(
    size: int, n_seq_max: int = 4, padding: int = 1, *, rope: bool = True
) -> CacheSpec:
    """A cache of one tiny layer."""
    layer = LayerSpec(1, 2, 2, RopeSpec("normal", 2) if rope else None)
    return CacheSpec(size, n_seq_max, (layer,), padding=padding)
