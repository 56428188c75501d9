"""Texts saved by one context, and whether another is as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.errors import (
    KVCellarError,
)
from kvcellar.runtime.context import Context
from kvcellar.testing.golden import nmse
from tests.runtime.archs import (
    F32,
    SAME,
    opened,
    text,
)

TEXT = text(1, 40)


def written(shared: Path, arch: str, path: Path, tokens: list[int] = TEXT, **options: Any) -> Path:
    """Save a text by a context of its own."""
    with opened(shared, arch, **{**F32, **options}) as context:
        context.sequence(tokens).save(path)
    return path


def seen(context: Context) -> tuple[Any, ...]:
    """What is known of a context, its K and V by the logits that they give."""
    texts = [(s.seq_id, s.tokens, s.positions.tolist(), s.inexact_from) for s in context.sequences]
    return context.cache.used, context.cache.view().to_json(), texts


def unchanged(
    context: Context, error: type[KVCellarError], match: str, call: Callable[[], object]
) -> None:
    """See that a call is refused, and that nothing has changed."""
    before, logits = seen(context), [s.logits for s in context.sequences if len(s)]
    with pytest.raises(error, match=match):
        call()
    assert seen(context) == before
    context.cache.check()
    for sequence, row in zip([s for s in context.sequences if len(s)], logits, strict=True):
        assert np.array_equal(sequence.logits, row)
        sequence._state = sequence._state._replace(logits=None)
        assert nmse(sequence.logits, row) < SAME  # computed again, from K and V
