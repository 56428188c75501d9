"""Keys of blocks: chained, and the same in every process and on every machine."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.prompts.blocks import block_key, block_keys, root_key

ROOT = root_key("ab" * 32, 4, "")
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)

PINNED_ROOT = "ad612a5eb530ded23819c88e9925b619273f4d448d77c4a6c028710953182a8b"
PINNED = [
    "57abdc3700b2769daf7de5a1c2d2bf158c6aebd0484e1f0f5807cfd042cc462e",
    "5a06135122628843fde67de4ab5a39ad01d77fcb38d8b9d9fc101484cf52f785",
]


def naive(root: str, tokens: list[int], size: int) -> list[str]:
    """Each key from the start on, said plainly."""
    keys = []
    for n in range(1, len(tokens) // size + 1):
        key = root
        for i in range(n):
            block = tokens[i * size : (i + 1) * size]
            data = b"".join(token.to_bytes(4, "little", signed=True) for token in block)
            key = hashlib.sha256(bytes.fromhex(key) + data).hexdigest()
        keys.append(key)
    return keys


@given(TOKENS, st.integers(1, 5))
def test_keys_are_those_of_the_naive_way(tokens: list[int], size: int) -> None:
    assert block_keys(ROOT, tokens, size) == naive(ROOT, tokens, size)


def test_keys_are_pinned() -> None:
    assert ROOT == PINNED_ROOT
    assert block_keys(ROOT, range(9), 4) == PINNED


def test_another_process_has_the_same() -> None:
    code = """
from kvcellar.prompts.blocks import block_keys, root_key
print(*block_keys(root_key("ab" * 32, 4, ""), range(9), 4))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == PINNED, result.stderr


def test_kinds_of_lists_do_not_matter() -> None:
    for tokens in (tuple(range(4)), np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int64)):
        assert block_key(ROOT, tokens) == PINNED[0]  # type: ignore[arg-type]


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_texts_share_the_keys_of_the_blocks_that_they_begin_with(
    a: list[int], b: list[int], size: int
) -> None:
    one, other = block_keys(ROOT, a, size), block_keys(ROOT, b, size)
    assert len(one) == len(a) // size
    for i, (key, again) in enumerate(zip(one, other, strict=False), 1):
        assert (key == again) == (a[: i * size] == b[: i * size])
    assert len({*one}) == len(one)


@given(TOKENS, st.integers(1, 5))
def test_a_chain_is_its_blocks(tokens: list[int], size: int) -> None:
    key, keys = ROOT, []
    for start in range(0, len(tokens) - size + 1, size):
        key = block_key(key, tokens[start : start + size])
        keys.append(key)
    assert block_keys(ROOT, tokens, size) == keys


def test_everything_that_counts_counts() -> None:
    roots = {
        ROOT,
        root_key("cd" * 32, 4, ""),
        root_key("ab" * 32, 5, ""),
        root_key("ab" * 32, 4, "x"),
        root_key("ab" * 32 + "4", 4, ""),  # parts do not run into each other
        root_key("ab" * 32, 44, ""),
        root_key("ab" * 32, 4, "\ud800"),  # no text that could be encoded
    }
    assert len(roots) == 7


@pytest.mark.parametrize("token", [-(2**31) - 1, 2**31])
def test_ids_that_are_none_are_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        block_key(ROOT, [token])
