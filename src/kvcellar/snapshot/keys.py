"""Names for what is computed from tokens: the same text, model and salt have the same key anywhere.

A text is cut into blocks of equally many tokens. The key of a block is a hash of its tokens and of
the key of the block before it; the first one follows a hash of the fingerprint and the salt. So a
key stands for the whole text up to the end of its block, and two texts share the keys of exactly
the blocks that they begin with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

VERSION = b"kvcellar-prompt-1"


def root_key(fingerprint_digest: str, block_size: int, cache_salt: str) -> str:
    """The key before the first block.

    Args:
        fingerprint_digest: of the context and of how its blocks are stored.
        block_size: how many tokens a block has.
        cache_salt: texts under another one are never found, whatever they are.
    """
    whole = hashlib.sha256(VERSION)
    for part in (fingerprint_digest, str(block_size), cache_salt):
        data = part.encode("utf-8", "surrogatepass")
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()


def block_key(parent: str, tokens: Sequence[int]) -> str:
    """The key of a block that follows another one."""
    ids = np.asarray(tokens, "<i4")
    return hashlib.sha256(bytes.fromhex(parent) + ids.tobytes()).hexdigest()


def block_keys(root: str, tokens: Sequence[int], block_size: int) -> list[str]:
    """The keys of all whole blocks of a text."""
    keys: list[str] = []
    for end in range(block_size, len(tokens) + 1, block_size):
        keys.append(block_key(keys[-1] if keys else root, tokens[end - block_size : end]))
    return keys
