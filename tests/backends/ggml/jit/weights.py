"""Weights of every type that products read, K types too, for which NumPy has no quantiser."""

from __future__ import annotations

import numpy as np

from kvcellar.backends.ggml.jit.product_formats import Format
from kvcellar.types import AnyArray


def random_rows(form: Format, n_out: int, n_blocks: int, size: float = 1.0) -> AnyArray:
    """Any bytes, but for scales and minimums, which are numbers below the size."""
    rng = np.random.default_rng(n_out)
    rows = rng.integers(0, 256, (n_out, n_blocks, form.block_bytes), np.uint8)
    halves = size * rng.uniform(0.1, 1.0, (n_out, n_blocks, 1 + form.has_min))
    if form.has_min and form.n_blocks == 1:
        halves[..., 1] *= -8
    raw = halves.astype(np.float16).view(np.uint8)
    rows[..., form.scale_at : form.scale_at + raw.shape[-1]] = raw
    return rows.reshape(n_out, -1)
