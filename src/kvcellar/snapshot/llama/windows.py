"""What layers with a window hold of a text that other layers hold as a whole.

llama.cpp writes of such a layer what its cache happens to hold: of a sequence the last window, of a
whole context older cells as well, where nothing has taken their place yet.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvcellar.cache.content import CellContent, trimmed
from kvcellar.errors import SnapshotFileError, SnapshotMismatch
from kvcellar.snapshot.llama.naming import Tokens
from kvcellar.types import CacheSpec, Int32Array


def in_window(
    group: CellContent,
    texts: tuple[Int32Array, ...],
    tokens: Tokens,
    spec: CacheSpec,
    n_ctx: int,
    *,
    can_slide: bool,
) -> CellContent:
    """The cells of a window, and of each sequence what has left it.

    Args:
        group: what the layers hold.
        texts: where the tokens of each sequence stand.
        tokens: their ids.
        spec: the shape of the layers' cache.
        n_ctx: how many cells a cache has that keeps everything.
        can_slide: whether there are options with which the cache would not.

    Raises:
        SnapshotMismatch: the cache keeps more than the file has.
        SnapshotFileError: a part of the window is missing.
    """
    held = [group.positions[group.cells_of(seq)] for seq in range(len(texts))]
    if all(np.array_equal(mine, text) for mine, text in zip(held, texts, strict=True)):
        return group
    if spec.size == n_ctx:
        remedy = (
            "let them slide: swa_full=False, a larger n_ctx or a smaller n_seq_max"
            if can_slide
            else "of this model we keep all: compute the text again, and save it with Sequence.save"
        )
        hint = f"of layers with a window the file has the last tokens only; {remedy}"
        raise SnapshotMismatch("window", "slid", "kept in full", hint)
    group = trimmed(group, spec.window)
    slid = []
    for seq, text in enumerate(texts):
        mine = group.positions[group.cells_of(seq)]
        gone = text[: len(text) - len(mine)]
        if not np.array_equal(text[len(gone) :], mine):
            raise SnapshotFileError(f"llama.cpp's file: sequence {seq} lacks a part of its window")
        slid.append(np.stack((gone, tokens.at(seq, gone))))
    return replace(group, slid=tuple(slid))
