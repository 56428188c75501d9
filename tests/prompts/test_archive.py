"""Blocks moved from store to store in a file, which nothing in it is believed."""

from __future__ import annotations

import json
import random
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvcellar.errors import SnapshotError, SnapshotFileError, StoreError
from kvcellar.prompts.archive import Imported, export_blocks, import_blocks
from kvcellar.prompts.cache import PromptCache
from kvcellar.runtime.model import Model
from kvcellar.stores.base import Entry
from kvcellar.stores.memory import MemoryStore
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.store_use import order
from kvcellar.testing.tiny_llama import TinyLlama

TEXT = list(range(1, 13))
SIZE = 4

Members = dict[str, bytes]
Change = Callable[[Members, dict[str, Any]], None]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = TinyLlama()
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return write_gguf(path, tiny.metadata(), tiny.tensors())


@pytest.fixture(scope="module")
def full(model_path: Path) -> MemoryStore:
    """A store with three blocks of a text."""
    store = MemoryStore()
    with Model.from_gguf(model_path, n_threads=1) as model:
        PromptCache(store, block_size=SIZE).append(model.context(n_ctx=32).sequence(), TEXT)
    return store


def chain(store: MemoryStore) -> list[Entry]:
    return sorted(store.entries(), key=lambda entry: int(entry.note["start"]))


@pytest.fixture
def exported(full: MemoryStore, tmp_path: Path) -> Path:
    path = tmp_path / "text.zip"
    assert export_blocks(full, chain(full), path) == path.stat().st_size
    return path


def test_a_text_goes_over_with_keys_and_notes(full: MemoryStore, exported: Path) -> None:
    other = MemoryStore()
    n_bytes = full.bytes_used
    assert import_blocks(other, exported) == Imported(3, 0, 0, n_bytes)
    assert [(one.key, one.note) for one in chain(other)] == [
        (one.key, one.note) for one in chain(full)
    ]
    assert all(other.get(one.key) == full.get(one.key) for one in chain(full))
    assert import_blocks(other, exported) == Imported(0, 3, 0, 0)
    other.delete(chain(full)[1].key)
    assert import_blocks(other, exported) == Imported(1, 2, 0, chain(full)[1].n_bytes)


def test_what_came_over_is_found(exported: Path, model_path: Path) -> None:
    other = MemoryStore()
    import_blocks(other, exported)
    with Model.from_gguf(model_path, n_threads=1) as model:
        prompts = PromptCache(other, block_size=SIZE)
        hit = prompts.append(model.context(n_ctx=32).sequence(), [*TEXT, 5])
    assert hit.n_reused == len(TEXT)


def test_the_end_of_a_text_leaves_first(full: MemoryStore, exported: Path) -> None:
    """As when it is stored the usual way; also of what was there, which counts as used."""
    keys, size = [one.key for one in chain(full)], chain(full)[0].n_bytes
    assert {one.n_bytes for one in chain(full)} == {size}
    other = MemoryStore(4 * size)
    other.put(keys[0], [bytes(size)], chain(full)[0].note)
    other.put("other", [bytes(size)])
    assert import_blocks(other, exported) == Imported(2, 1, 0, 2 * size)
    assert order(other) == ["other", *reversed(keys)]
    for key in ("a", "b", "c"):
        other.put(key, [bytes(size)])
    assert order(other) == [keys[0], "a", "b", "c"]


@pytest.mark.parametrize("room", [1, 2])
def test_only_what_stayed_is_counted(full: MemoryStore, exported: Path, room: int) -> None:
    keys, size = [one.key for one in chain(full)], chain(full)[0].n_bytes
    other = MemoryStore(room * size)
    other.put(keys[2], [bytes(size)], chain(full)[2].note)  # evicted by those before it
    assert import_blocks(other, exported) == Imported(room, 0, 3 - room, room * size)
    assert order(other) == [keys[1], keys[0]][-room:]


def test_an_export_that_fails_leaves_what_was_there(full: MemoryStore, tmp_path: Path) -> None:
    path = tmp_path / "text.zip"
    path.write_bytes(b"before")
    gone = Entry("0" * 64, 1, 0.0, 0.0, {})
    with pytest.raises(SnapshotFileError, match="0000 is damaged, or was removed"):
        export_blocks(full, [*chain(full), gone], path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(SnapshotFileError, match="cannot write"):
        export_blocks(full, chain(full), tmp_path / "absent" / "text.zip")


def test_what_is_no_block_is_not_exported(full: MemoryStore, tmp_path: Path) -> None:
    store, first = MemoryStore(), chain(full)[0]
    store.put(first.key, [b"a letter"], first.note)
    with pytest.raises(SnapshotFileError, match=f"block {first.key}: .* no snapshot"):
        export_blocks(store, [first], tmp_path / "x")


def rewritten(path: Path, change: Change) -> Path:
    """The archive with its members and its index as ``change`` leaves them."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    index = json.loads(members.pop("index.json"))
    change(members, index)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**members, "index.json": json.dumps(index).encode()}.items():
            archive.writestr(name, data)
    return path


def first_value(members: Members, index: dict[str, Any], data: bytes) -> None:
    """Another first value, of which the index says nothing wrong."""
    members["000000.safetensors"] = data
    index["entries"][0] |= {"n_bytes": len(data), "hash": xxhash.xxh3_128_hexdigest(data)}


def without_last(members: Members, _: dict[str, Any]) -> None:
    del members["000002.safetensors"]


CHANGES: dict[str, tuple[Change, str]] = {
    "another format": (lambda _, index: index.update(format="x"), "no export"),
    "a later version": (lambda _, index: index.update(version=2), "update kvcellar"),
    "no blocks": (lambda _, index: index.update(entries=[]), "0 blocks"),
    "no list": (lambda _, index: index.update(entries=7), "damaged"),
    "odd entries": (lambda _, index: index.update(entries=[7]), "damaged"),
    "a file more": (lambda members, _: members.update({"../../x": b""}), "added"),
    "a file less": (without_last, "missing"),
    "a key like a path": (lambda _, index: index["entries"][0].update(key="../x"), "key"),
    "another key": (lambda _, index: index["entries"][0].update(key="0" * 64), "does not follow"),
    "another last key": (lambda _, index: index["entries"][2].update(key="0" * 64), "another blo"),
    "a huge size": (lambda _, index: index["entries"][0].update(n_bytes=1 << 60), "damaged"),
    "a size that is none": (lambda _, index: index["entries"][0].update(n_bytes="1"), "damaged"),
    "another hash": (lambda _, index: index["entries"][1].update(hash="0"), "is damaged"),
    "a note that is none": (lambda _, index: index["entries"][0].update(note=[1]), "damaged"),
    "a huge note": (
        lambda _, index: index["entries"][0]["note"].update(x="y" * 70_000),
        "note of",
    ),
    "other tokens": (lambda _, index: index["entries"][2]["note"].update(tokens="1"), "another bl"),
    "no tokens": (lambda _, index: index["entries"][2]["note"].update(tokens="x"), "nothing of a"),
    "the end of a text": (lambda _, index: index["entries"].pop(0), "missing"),
    "no snapshot": (lambda m, i: first_value(m, i, b"something else"), "no snapshot"),
    "another block": (lambda m, i: first_value(m, i, m["000001.safetensors"]), "another text"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_tampered_with_is_refused_as_a_whole(exported: Path, name: str) -> None:
    change, message = CHANGES[name]
    store = MemoryStore()
    with pytest.raises(SnapshotFileError, match=message) as found:
        import_blocks(store, rewritten(exported, change))
    assert str(exported) in str(found.value)
    assert list(store.entries()) == []


def test_what_is_compressed_is_refused(exported: Path) -> None:
    """A little of it could be a lot."""
    with zipfile.ZipFile(exported) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(exported, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(SnapshotFileError, match="compressed"):
        import_blocks(MemoryStore(), exported)


def test_nothing_in_it_is_larger_than_it_is(exported: Path) -> None:
    with zipfile.ZipFile(exported, "a") as archive:
        archive.filelist[0].file_size = archive.filelist[0].compress_size = 1 << 30
        archive.comment = b"has the list of files written anew"
    with pytest.raises(SnapshotFileError, match="more than it is long"):
        import_blocks(MemoryStore(), exported)


def test_a_name_that_is_there_twice_is_refused(exported: Path) -> None:
    with zipfile.ZipFile(exported, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr("000000.safetensors", archive.read("000001.safetensors"))
    with pytest.raises(SnapshotFileError, match="added"):
        import_blocks(MemoryStore(), exported)


@pytest.mark.parametrize("content", [b"PK\x05\x06", b"no zip at all", b"PK\x05\x06" + b"\0" * 18])
def test_what_is_no_archive_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(content)
    with pytest.raises(SnapshotFileError, match=r"x\.zip is no export"):
        import_blocks(MemoryStore(), path)
    with pytest.raises(SnapshotFileError, match="absent"):
        import_blocks(MemoryStore(), tmp_path / "absent")


def test_damage_is_refused_or_does_no_harm(full: MemoryStore, exported: Path) -> None:
    """Flipped bits and lost ends: nothing else than what was exported ever goes in."""
    whole, chance = exported.read_bytes(), random.Random(1)
    expected = {one.key: full.get(one.key) for one in chain(full)}
    n_refused = 0
    for i in range(150):
        data = bytearray(whole)
        if i % 5 == 0:
            del data[chance.randrange(len(data)) :]
        else:
            at = chance.randrange(len(data)) if i % 2 else len(data) - 1 - chance.randrange(700)
            data[at] ^= 1 << chance.randrange(8)
        exported.write_bytes(data)
        store = MemoryStore()
        try:
            import_blocks(store, exported)
        except SnapshotError:
            n_refused += 1
            assert list(store.entries()) == []
        found = {one.key: store.get(one.key) for one in store.entries()}
        assert found in ({}, expected)
    assert n_refused > 100


def test_a_store_that_takes_no_more_says_how_far_it_went(exported: Path) -> None:
    class Full(MemoryStore):
        def put(self, key: str, *rest: Any) -> bool:
            if sum(1 for _ in self.entries()) == 1:
                raise StoreError("no space left")
            return super().put(key, *rest)

    with pytest.raises(StoreError, match=r"no space left; 1 of 3 went in"):
        import_blocks(Full(), exported)
    with pytest.raises(StoreError, match=r"exceeds the store's budget; 0 of 3"):
        import_blocks(MemoryStore(max_bytes=10), exported)
