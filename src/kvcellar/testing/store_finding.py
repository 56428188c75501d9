"""Finding values by the keys in their notes, as every store of snapshots has to."""

from __future__ import annotations

from functools import partial

from kvcellar.errors import OptionError
from kvcellar.stores.base import Note, Store
from kvcellar.testing.store_use import BAD_KEYS, GOOD_KEYS, found, refusal


class FindingConformance:
    """What is found and what is not; part of ``StoreConformance``."""

    def open(self) -> Store:
        """A new store."""
        raise NotImplementedError

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
