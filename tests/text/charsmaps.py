"""Maps of characters as SentencePiece's files have them: a double array and replacements."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import numpy as np

VALUE = 1 << 31


def charsmap_blob(replacements: Mapping[str, str]) -> bytes:
    """The bytes of ``tokenizer.ggml.precompiled_charsmap``."""
    texts, places = b"", {}
    for key, replacement in replacements.items():
        places[key.encode()] = len(texts)
        texts += replacement.encode() + b"\0"
    trie = _double_array(places).astype("<u4").tobytes()
    return len(trie).to_bytes(4, "little") + trie + (texts or b"\0")


def _double_array(places: Mapping[bytes, int]) -> np.ndarray:
    units = np.zeros(1 << 16, np.uint32)
    taken = {0}
    bases: set[int] = set()

    def lay(node: int, beginning: bytes) -> None:
        following = {
            key[len(beginning)]
            for key in places
            if len(key) > len(beginning) and key.startswith(beginning)
        }
        children = following | ({0} if beginning in places else set())
        if not children:
            return
        # No two nodes share a base: a child only says by which byte it was reached.
        base = next(
            base
            for base in count(1)
            if base not in bases and not any(base ^ child in taken for child in children)
        )
        bases.add(base)
        taken.update(base ^ child for child in children)
        units[node] |= (node ^ base) << 10
        if beginning in places:
            units[node] |= 1 << 8
            units[base] = VALUE | places[beginning]
        for child in following:
            units[base ^ child] |= child
            lay(base ^ child, beginning + bytes([child]))

    lay(0, b"")
    used = max(taken) | 0xFF
    return units[: used + 1]
