"""Keys of blocks: the same everywhere and for good, and different for whatever differs."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.snapshot.keys import block_keys, root_key

TEXTS = st.lists(st.integers(0, 3), max_size=12)
ROOT = "ab" * 32


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


@given(TEXTS, st.integers(1, 5))
def test_keys_are_those_of_the_naive_way(tokens: list[int], size: int) -> None:
    assert block_keys(ROOT, tokens, size) == naive(ROOT, tokens, size)


@given(TEXTS, TEXTS, st.integers(1, 5))
def test_texts_share_the_keys_of_what_they_begin_with(
    one: list[int], two: list[int], size: int
) -> None:
    n = next((i for i, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), None)
    n_common = min(len(one), len(two)) if n is None else n
    a, b = block_keys(ROOT, one, size), block_keys(ROOT, two, size)
    same = [x == y for x, y in zip(a, b, strict=False)]
    assert same == [(i + 1) * size <= n_common for i in range(len(same))]
    assert len(set(a)) == len(a)


def test_keys_are_what_they_were() -> None:
    """Stores outlive versions: if this has to change, so has the version in the module."""
    root = root_key("f" * 64, 16, "salt")
    assert root == "6f8f91629273ef791f68ac0828252c367b930a51f69dcc09368d60563051b9aa"
    assert block_keys(root, list(range(16)), 16) == [
        "701c29336b2359b632559df982ebeb7200c9ceb27fde18ccf0f08fa42c96c735"
    ]


def test_whatever_differs_has_another_root() -> None:
    roots = [
        root_key(digest, size, salt)
        for digest in ("a" * 64, "b" * 64, "")
        for size in (1, 16, 161)
        for salt in ("", "a", "1a", "\udc80", "ä", "a\0", "16a")
    ]
    assert len(set(roots)) == len(roots) == 63
