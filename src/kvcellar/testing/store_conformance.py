"""What every store of snapshots has to do, as test classes to subclass.

Give them a way to open a new, empty store; with pytest::

    class TestMyStore(StoreConformance):
        def open(self):
            return MyStore()

    class TestBudgetOfMyStore(BudgetConformance):
        def open(self, max_bytes):
            return MyStore(max_bytes)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from kvcellar.errors import ClosedError, OptionError
from kvcellar.stores.base import BytesLike, Note, Store
from kvcellar.testing.store_use import BAD_KEYS, GOOD_KEYS, content, found, hammer, order, refusal


class StoreConformance:
    """Round trips, order of use, notes and what is found by them, refusals, threads; no budget."""

    def open(self) -> Store:
        """A new store."""
        raise NotImplementedError

    def test_a_new_store_is_empty(self) -> None:
        """And says of any key that it was never stored."""
        store = self.open()
        assert store.get("a") is None
        assert not store.has("a")
        assert not store.delete("a")
        assert store.why_absent("a") == "never stored"
        assert order(store) == []
        assert store.bytes_used == 0
        store.close()

    def test_pieces_come_back_joined(self) -> None:
        """Whatever buffers they are, empty ones and none at all included."""
        store, rows = self.open(), np.arange(12, dtype=np.float32).reshape(3, 4)
        pieces: list[BytesLike] = [
            b"head",
            bytearray(b""),
            rows.data,
            memoryview(b"xyz")[1:],
            b"\0",
        ]
        assert store.put("a", pieces)
        assert store.put("none", [])
        assert store.put("empty", [b"", bytearray()])
        assert store.put("large", [bytes(1 << 20), b"!" * 77_777])
        whole = b"head" + rows.tobytes() + b"yz\0"
        large = bytes(1 << 20) + b"!" * 77_777
        assert content(store, ["a", "none", "empty", "large"]) == [whole, b"", b"", large]
        assert store.bytes_used == len(whole) + len(large)
        store.close()

    def test_changing_a_buffer_changes_no_value(self) -> None:
        """Neither the one that was put nor the one that was got."""
        store, piece = self.open(), bytearray(b"abc")
        store.put("a", [piece])
        piece[:] = b"xyz"
        got = memoryview(store.get("a") or b"")
        assert got.readonly
        assert bytes(got) == b"abc"
        store.close()

    def test_a_value_stays_readable(self) -> None:
        """After it was deleted, and after the store was closed."""
        store = self.open()
        store.put("a", [b"abc"])
        store.put("b", [b"xyz" * 9999])
        first, second = store.get("a"), store.get("b")
        store.delete("a")
        store.close()
        assert first is not None
        assert second is not None
        assert (bytes(first), bytes(second)) == (b"abc", b"xyz" * 9999)

    def test_what_is_there_stays(self) -> None:
        """Another put under its key is a use; value, note and time of creation are the first's."""
        store = self.open()
        store.put("a", [b"first"], {"n": 1})
        store.put("b", [b"other"])
        (created,) = (entry.created for entry in store.entries() if entry.key == "a")
        assert store.put("a", [b"first"], {"n": 2})
        assert order(store) == ["b", "a"]
        *_, last = store.entries()
        assert (last.note, last.created, last.n_bytes) == ({"n": 1}, created, 5)
        assert store.bytes_used == 10
        store.close()

    def test_the_order_is_that_of_use(self) -> None:
        """Getting and touching are uses; looking whether it is there, or why not, is none."""
        store = self.open()
        for key in "abcde":
            store.put(key, [key.encode()])
        store.get("b")
        assert store.touch("e")
        store.get("a")
        store.has("c")
        store.why_absent("d")
        assert order(store) == ["c", "d", "b", "e", "a"]
        used = [entry.used for entry in store.entries()]
        assert used == sorted(used)
        assert all(entry.created <= entry.used for entry in store.entries())
        store.close()

    def test_notes_are_kept(self) -> None:
        """Text of any kind, and numbers of any size."""
        store = self.open()
        note: Note = {
            "model": "Größe \N{SNOWMAN} \"'\\\n\0",
            "n": -(2**60),
            "": "",
            "long": "x" * 5000,
        }
        store.put("a", [b"1"], note)
        store.put("b", [b"1"])
        assert [dict(entry.note) for entry in store.entries()] == [note, {}]
        store.close()

    def test_touching_what_is_not_there(self) -> None:
        """It says so, and keeps nothing."""
        store = self.open()
        assert not store.touch("a")
        store.put("a", [b"1"])
        store.delete("a")
        assert not store.touch("a")
        assert order(store) == []
        store.close()

    def test_touching_several(self) -> None:
        """In the order in which they are named; those that are not there are left out."""
        store = self.open()
        for key in "abcd":
            store.put(key, [b"1"])
        assert store.touch_all(["c", "x", "a"]) == {"a", "c"}
        assert order(store) == ["b", "d", "c", "a"]
        assert store.touch_all([]) == store.touch_all(["x"]) == set()
        assert order(store) == ["b", "d", "c", "a"]
        store.delete("a")
        assert store.touch_all(["a", "b"]) == {"b"}
        for key in BAD_KEYS:
            assert repr(key) in refusal(OptionError, partial(store.touch_all, ["b", key]))
        store.close()
        refusal(ClosedError, lambda: store.touch_all(["b"]))

    def test_deleting(self) -> None:
        """Once; then the key can be put again, and was never stored as far as anybody knows."""
        store = self.open()
        store.put("a", [b"1"])
        store.put("b", [b"22"])
        assert store.delete("a")
        assert not store.delete("a")
        assert (store.has("a"), store.has("b"), store.get("a")) == (False, True, None)
        assert store.why_absent("a") == "never stored"
        assert (order(store), store.bytes_used) == (["b"], 2)
        assert store.put("a", [b"333"])
        assert content(store, ["a", "b"]) == [b"333", b"22"]
        store.close()

    def test_every_good_key_is_taken(self) -> None:
        """None is taken for another."""
        store = self.open()
        for key in GOOD_KEYS:
            store.put(key, [key.encode()])
        assert content(store, GOOD_KEYS) == [key.encode() for key in GOOD_KEYS]
        assert order(store) == list(GOOD_KEYS)
        store.close()

    def test_bad_keys_are_refused_by_every_verb(self) -> None:
        """By name, and nothing was kept."""
        store = self.open()
        for key in BAD_KEYS:
            for work in (store.get, store.has, store.touch, store.why_absent, store.delete):
                assert repr(key) in refusal(OptionError, partial(work, key))
            assert repr(key) in refusal(OptionError, partial(store.put, key, [b"1"]))
        assert order(store) == []
        store.close()

    def test_bad_values_and_notes_are_refused(self) -> None:
        """Nothing was kept."""
        store = self.open()
        values: list[Any] = [b"not pieces", [1], ["text"], [np.ones((4, 4))[:, ::2]]]
        notes: list[Mapping[Any, Any]] = [{"a": 1.5}, {"a": None}, {1: "a"}, {"a": "x" * 70_000}]
        for value in values:
            refusal(OptionError, partial(store.put, "a", value))
        for note in notes:
            refusal(OptionError, partial(store.put, "a", [b"1"], note))
        assert (order(store), store.has("a")) == ([], False)
        store.close()

    def test_entries_may_be_walked_while_the_store_changes(self) -> None:
        """None comes twice, and those that nobody touched all come."""
        store = self.open()
        for i in range(40):
            store.put(f"k{i:02}", [b"x"])
        seen = []
        for entry in store.entries():
            seen.append(entry.key)
            store.get("k05")
            store.delete("k39")
            store.put(f"new{len(seen)}", [b"y"])
        assert len(seen) == len(set(seen))
        assert {f"k{i:02}" for i in range(39)} <= set(seen)
        store.close()

    def test_a_closed_store_is_refused(self) -> None:
        """Closing it twice is fine."""
        store = self.open()
        store.put("a", [b"1"])
        store.close()
        store.close()
        for work in (store.get, store.has, store.touch, store.why_absent, store.delete):
            refusal(ClosedError, partial(work, "a"))
        refusal(ClosedError, lambda: store.put("a", [b"1"]))
        refusal(ClosedError, lambda: list(store.entries()))
        refusal(ClosedError, lambda: store.bytes_used)

    def test_threads_may_share_a_store(self) -> None:
        """They put, get and delete the same few keys; none ever gets what was not put."""
        store = self.open()
        hammer(store, n_threads=4, n_steps=100)
        assert store.bytes_used == sum(entry.n_bytes for entry in store.entries())
        store.close()

    def test_values_are_found_by_the_keys_in_their_notes(self) -> None:
        """By what each note says now, and only where it says it; no more than are asked for."""
        store = self.open()
        for i in range(12):
            note: Note = {"parent": f"p{i % 3}", "text": f"t{i % 4}", "other": "p0"}
            store.put(f"k{i}", [b"1"], note)
        store.delete("k6")
        store.put("k0", [b"1"], {"parent": "p1"})  # what is there stays
        assert found(store, "parent", "p0") == ["k0", "k3", "k9"]
        assert found(store, "text", "t3") == ["k11", "k3", "k7"]
        assert [found(store, "parent", key) for key in ("t0", "p", "p00")] == [[]] * 3
        some = [entry.key for entry in store.find("parent", "p0", 2)]
        assert len(set(some)) == 2
        assert set(some) < {"k0", "k3", "k9"}
        (entry,) = (entry for entry in store.entries() if entry.key == "k3")
        assert entry in store.find("parent", "p0", 9)
        for key in ("k0", "k3", "k9"):
            store.delete(key)
        assert found(store, "parent", "p0") == []
        store.put("k0", [b"1"], {"parent": "p0"})
        assert found(store, "parent", "p0") == ["k0"]
        store.close()

    def test_what_is_no_key_finds_nothing(self) -> None:
        """Asked for it is refused; in a note it does no harm."""
        store = self.open()
        odd: list[str | int] = [*BAD_KEYS, "\ud800", "x" * 5000, 7]
        for i, said in enumerate(odd):
            store.put(f"k{i}", [b"1"], {"parent": said, "text": "t"})
        assert len(store.find("text", "t", 99)) == len(odd)
        assert found(store, "parent", "7") == []
        for key in BAD_KEYS:
            refusal(OptionError, partial(store.find, "parent", key, 1))
        for key in GOOD_KEYS:
            store.put(f"good-{key}"[:128], [b"1"], {"parent": key})
            assert found(store, "parent", key) == [f"good-{key}"[:128]]
        store.close()


class BudgetConformance:
    """What a store with a budget of bytes does when it is full."""

    def open(self, max_bytes: int) -> Store:
        """A new store with that budget."""
        raise NotImplementedError

    def test_those_used_longest_ago_leave(self) -> None:
        """No more of them than must."""
        store = self.open(10)
        for key in "abc":
            store.put(key, [key.encode() * 3])
        store.get("a")
        assert store.put("d", [b"dddd"])
        assert (order(store), store.bytes_used) == (["c", "a", "d"], 10)
        assert store.get("b") is None
        assert [store.why_absent(key) for key in "bx"] == ["evicted", "never stored"]
        store.close()

    def test_a_value_may_take_the_whole_budget_and_no_more(self) -> None:
        """One that is too large evicts nothing."""
        store = self.open(10)
        store.put("a", [b"a"])
        assert not store.put("huge", [b"x" * 6, b"x" * 5])
        assert (order(store), store.why_absent("huge")) == (["a"], "never stored")
        assert store.put("whole", [b"x" * 10])
        assert (order(store), store.why_absent("a")) == (["whole"], "evicted")
        store.close()

    def test_putting_what_is_there_evicts_nothing(self) -> None:
        """It takes no more than before."""
        store = self.open(4)
        store.put("a", [b"aa"])
        store.put("b", [b"bb"])
        assert store.put("a", [b"aa"])
        assert order(store) == ["b", "a"]
        store.close()

    def test_what_comes_back_was_not_evicted(self) -> None:
        """Nor if it is deleted then."""
        store = self.open(2)
        for key in "aba":
            store.put(key, [b"xx"])
        assert [store.why_absent(key) for key in "ba"] == ["evicted", "never stored"]
        store.delete("a")
        assert store.why_absent("a") == "never stored"
        store.close()

    def test_without_room_only_nothing_fits(self) -> None:
        """A budget of 0 takes empty values."""
        store = self.open(0)
        assert store.put("empty", [])
        assert not store.put("a", [b"a"])
        assert order(store) == ["empty"]
        store.close()

    def test_it_tells_its_budget(self) -> None:
        """So that whoever stores much need not store what would leave at once."""
        store = self.open(10)
        assert store.max_bytes == 10
        store.close()

    def test_less_than_nothing_is_refused(self) -> None:
        """By name and value."""
        said = refusal(OptionError, lambda: self.open(-1))
        assert "max_bytes" in said
        assert "-1" in said

    def test_threads_keep_within_the_budget(self) -> None:
        """Although each of them evicts what others put."""
        store = self.open(2000)
        hammer(store, n_threads=4, n_steps=100)
        assert 0 < store.bytes_used <= 2000
        assert store.bytes_used == sum(entry.n_bytes for entry in store.entries())
        store.close()
