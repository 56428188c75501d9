"""Blocks form trees, whatever notes claim; what leaves first is never what another one needs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.cli.blocks import Block, Forest
from kvcellar.stores.base import Entry
from tests.profiles import examples

SIZE = 4
NEVER = float("inf")
"""No block is waited for."""


def entry(key: str, parent: str, i: int, used: float = 0.0, n_bytes: int = 1) -> Entry:
    """The i-th block of a text."""
    note: dict[str, str | int] = {
        "parent": parent,
        "start": i * SIZE,
        "tokens": "1 2 3 4",
        "model": "m",
    }
    return Entry(key, n_bytes, 0.0, used, note)


def keys(forest: Forest, max_bytes: int | None = None, since: float | None = None) -> list[str]:
    return [block.key for block, _ in forest.removable(max_bytes, since, NEVER)]


FORK = [
    entry("a", "root", 0, used=1),
    entry("b", "a", 1, used=1),
    entry("c", "b", 2, used=1),
    entry("x", "a", 1, used=5),
]
"""Two texts that have their first block in common; that of x was used last."""


def test_texts_go_from_their_ends_inward() -> None:
    assert keys(Forest(FORK), max_bytes=0) == ["c", "b", "x", "a"]
    assert keys(Forest(FORK), max_bytes=2) == ["c", "b"]
    assert keys(Forest(FORK), max_bytes=4) == []
    assert keys(Forest(FORK)) == []


def test_age_counts_for_whole_texts() -> None:
    """The first block was not used since 5, but the text that goes on from it was."""
    assert keys(Forest(FORK), since=5.0) == ["c", "b"]
    assert keys(Forest(FORK), since=5.1) == ["c", "b", "x", "a"]
    reasons = {reason for _, reason in Forest(FORK).removable(0, 5.0, NEVER)}
    assert reasons == {"unused", "over budget"}


def test_what_lacks_a_block_before_it_goes() -> None:
    forest = Forest([one for one in FORK if one.key != "b"])
    assert list(forest.removable(None, None, NEVER)) == [(forest.blocks["c"], "unreachable")]
    assert forest.chain("c") is None
    assert forest.chain("x") == [forest.blocks["a"], forest.blocks["x"]]


def test_what_may_be_being_stored_stays() -> None:
    """Used since, or followed by what was: then those before it are on their way."""
    used = {"c": 7.0, "b": 3.0, "x": 1.0}
    world = [replace(one, used=used[one.key]) for one in FORK if one.key != "a"]
    gone = [
        [b.key for b, _ in Forest(world).removable(None, None, t)] for t in (0.5, 1.0, 6.9, 7.0)
    ]
    assert gone == [[], ["x"], ["x"], ["x", "c", "b"]]
    assert {reason for _, reason in Forest(world).removable(None, 7.5, 0.5)} == {"unused"}
    assert [block.key for block, _ in Forest(world).removable(1, None, 0.5)] == ["x", "c"]


def test_stretches_are_what_the_same_texts_share() -> None:
    found = {stretch.blocks[-1].key: stretch for stretch in Forest(FORK).stretches()}
    assert {key: [block.key for block in one.blocks] for key, one in found.items()} == {
        "a": ["a"],
        "c": ["b", "c"],
        "x": ["x"],
    }
    assert {key: one.n_texts for key, one in found.items()} == {"a": 2, "c": 1, "x": 1}
    assert found["c"].n_bytes == 2


def test_what_is_no_block_is_left_alone() -> None:
    odd = Entry("odd", 9, 0.0, 0.0, {"tokens": "x -1 99999999999999", "start": -5, "parent": 3})
    forest = Forest([odd, Entry("none", 1, 0.0, 0.0, {})])
    assert forest.blocks["odd"].tokens == ()
    assert keys(forest) == []
    assert sorted(keys(forest, max_bytes=0)) == ["none", "odd"]
    assert len(forest.stretches()) == 2


notes = st.fixed_dictionaries(
    {
        "parent": st.sampled_from(["a", "b", "c", "d", "root"]),
        "start": st.sampled_from([0, 4, 8]),
        "tokens": st.sampled_from(["", "1 2 3 4"]),
    }
)
worlds = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(Entry, st.just(""), st.integers(0, 3), st.just(0.0), st.floats(0, 3), notes),
)


@examples(60)
@given(worlds, st.integers(0, 12), st.floats(0, 3), st.floats(0, 3) | st.just(NEVER))
def test_whatever_notes_claim(
    world: dict[str, Entry], size: int, since: float, idle: float
) -> None:
    """Blocks that follow themselves, that have two beginnings, and so on."""
    entries = [replace(one, key=key) for key, one in world.items()]
    forest = Forest(entries)
    listed = [block.key for one in forest.stretches() for block in one.blocks]
    assert sorted(listed) == sorted(world)
    gone = [block.key for block, _ in forest.removable(size, since, idle)]
    assert len(set(gone)) == len(gone)
    left = Forest([one for one in entries if one.key not in gone])
    assert sum(one.entry.n_bytes for one in left.blocks.values()) <= size
    used = forest._last_uses()
    for block in left.blocks.values():
        assert left.is_reachable(block) or used[block.key] > idle
    for block in forest.blocks.values():
        assert forest.is_reachable(block) == (_naive_chain(forest, block) is not None)
        assert forest.chain(block.key) == _naive_chain(forest, block)


def _naive_chain(forest: Forest, block: Block) -> list[Block] | None:
    if block.start == 0:
        return [block]
    parent = forest.blocks.get(block.parent)
    if parent is None or parent.end != block.start or parent.start >= block.start:
        return None
    before = _naive_chain(forest, parent)
    return None if before is None else [*before, block]
