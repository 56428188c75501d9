"""``kvcellar cache``: what is stored is told and checked; looking changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcellar.prompts.cache import PromptCache
from kvcellar.prompts.misses import BlockRef, mark
from kvcellar.runtime.model import Model
from kvcellar.stores.disk import DiskStore
from kvcellar.stores.redis import RedisStore
from tests.cli.helpers import LEFT, RIGHT, TRUNK, Invoke, listed, spoil, tree, value_file
from tests.stores.conftest import running_redis

# --- list ---------------------------------------------------------------------------------------


def test_machines_get_every_entry(invoke: Invoke, filled: Path) -> None:
    found = listed(invoke, filled)
    assert (found["store"], found["n_entries"]) == (str(filled), 5)
    entries = found["entries"]
    assert found["n_bytes"] == sum(entry["n_bytes"] for entry in entries) > 0
    spans = sorted((entry["start"], entry["end"], entry["tokens"]) for entry in entries)
    assert spans == [
        (0, 8, TRUNK[:8]),
        (8, 16, TRUNK[8:]),
        (16, 24, RIGHT),
        (16, 24, LEFT[:8]),
        (24, 32, LEFT[8:]),
    ]
    by_start = {entry["start"]: entry for entry in entries}
    assert by_start[8]["parent"] == by_start[0]["key"]
    assert all(entry["reachable"] and len(entry["model"]) == 16 for entry in entries)


@pytest.mark.parametrize("order", ["used", "created", "n_bytes"])
def test_lists_are_sorted(invoke: Invoke, filled: Path, order: str) -> None:
    entries = listed(invoke, filled, "--sort", order.removeprefix("n_"))["entries"]
    found = [entry[order] for entry in entries]
    assert found == sorted(found, reverse=True)


def test_people_get_a_line_for_what_the_same_texts_share(
    invoke: Invoke, filled: Path, entries: list[dict[str, Any]]
) -> None:
    result = invoke("cache", "list", filled)
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    rows = {line[0]: line for line in lines if len(line) > 8 and line[0] != "key"}
    trunk, right, left = entries[1], entries[2], entries[4]
    assert set(rows) == {one["key"][:8] for one in (trunk, left, right)}
    assert [rows[one["key"][:8]][2] for one in (trunk, left, right)] == ["0-16", "16-32", "16-24"]
    assert [rows[one["key"][:8]][-2] for one in (trunk, left, right)] == ["2", "1", "1"]
    assert rows[left["key"][:8]][-1].startswith("QRST")
    assert "5 entries, " in result.stdout
    assert "\x1b" not in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_texts_begin_as_they_were_and_are_cut_to_the_width(
    invoke: Invoke, chatter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control tokens and controls are spelled; characters that a block cuts are none."""
    said = "<|im_start|>a b\n\x1b[2J" + "é" * 100
    with Model.from_gguf(chatter, n_threads=1) as model, model.context(n_ctx=256) as context:
        ids = model.tokenizer.encode(said)
        store = DiskStore(tmp_path / "store")
        PromptCache(store, block_size=40).append(context.sequence(), ids)
        store.close()
    entries = sorted(listed(invoke, tmp_path / "store")["entries"], key=lambda one: one["start"])
    begins = [one["begins"] for one in entries]
    assert begins[0] == said[: len(begins[0])]
    assert len(begins) == 5
    assert all(40 <= len(text.encode()) <= 64 or "é" * 19 in text for text in begins)
    monkeypatch.setenv("COLUMNS", "150")
    shown = invoke("cache", "list", tmp_path / "store").stdout
    assert r"<|im_start|>a b\n\x1b[2Jéé" in shown
    monkeypatch.setenv("COLUMNS", "80")
    lines = invoke("cache", "list", tmp_path / "store").stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert entries[-1]["key"][:8] in lines[3], "other columns keep their room"
    assert "<|im_star" in lines[3]
    assert len(lines) == 6


def test_entries_without_a_text_show_token_ids(invoke: Invoke, filled: Path) -> None:
    """Older versions stored such, and models without a vocabulary do."""
    store = DiskStore(filled)
    for entry in list(store.entries()):
        value = store.get(entry.key)
        assert value is not None
        note = {name: one for name, one in entry.note.items() if name != "begins"}
        store.delete(entry.key)
        store.put(entry.key, [bytes(value)], note)
    store.close()
    assert "tokens 65,66" in invoke("cache", "list", filled).stdout
    assert {one["begins"] for one in listed(invoke, filled)["entries"]} == {""}
    assert invoke("cache", "verify", filled).exit_code == 0


def test_what_cannot_be_reached_is_told(
    invoke: Invoke, filled: Path, entries: list[dict[str, Any]]
) -> None:
    store = DiskStore(filled)
    store.delete(entries[1]["key"])
    store.close()
    result = invoke("cache", "list", filled)
    assert "3 of them, " in result.stdout
    assert "gc removes them" in " ".join(result.stdout.split())
    assert sum(entry["reachable"] for entry in listed(invoke, filled)["entries"]) == 1


def test_an_empty_store_is_no_error(invoke: Invoke, tmp_path: Path) -> None:
    DiskStore(tmp_path / "new").close()
    assert invoke("cache", "list", tmp_path / "new").stdout == "0 entries, 0 bytes\n"
    assert invoke("cache", "verify", tmp_path / "new").stdout == "0 entries, 0 bytes: all intact\n"


@pytest.mark.parametrize("command", ["list", "verify", "gc", "inspect", "export"])
def test_no_store_is_made_of_a_name_that_is_mistyped(
    invoke: Invoke, tmp_path: Path, command: str
) -> None:
    names: dict[str, list[str | Path]] = {"inspect": ["abcd"], "export": ["abcd", tmp_path / "o"]}
    (tmp_path / "other").mkdir()
    for name, message in (("absent", "does not exist"), ("other", "is no store")):
        result = invoke("cache", command, tmp_path / name, *names.get(command, []))
        assert result.exit_code == 1
        assert (name in result.stderr, message in result.stderr) == (True, True)
        assert result.stdout == ""
    assert [path.name for path in tmp_path.rglob("*")] == ["other"]


def test_a_password_is_never_printed(
    invoke: Invoke, filled: Path, tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    out = tmp_path / "text.zip"
    assert invoke("cache", "export", filled, entries[4]["key"], out).exit_code == 0
    for url in ("redis://me:secret@127.0.0.1:1/0", "redis:/me:secret@x", "redis://:se/secret@x"):
        for args in (["list"], ["verify"], ["gc"], ["inspect"], ["import"]):
            result = invoke("cache", *args, url, *([out] if args == ["import"] else []))
            assert result.exit_code == 1
            assert "text.zip" not in result.stderr
            assert "secret" not in result.output
    assert "name a folder or a URL" in invoke("cache", "list", "memory:").stderr


# --- inspect ------------------------------------------------------------------------------------


def test_an_entry_by_the_start_of_its_key(
    invoke: Invoke, filled: Path, entries: list[dict[str, Any]]
) -> None:
    before = listed(invoke, filled)
    result = invoke("cache", "inspect", filled, entries[1]["key"][:8])
    assert result.exit_code == 0, result.stderr
    assert entries[1]["key"] in result.stdout
    assert entries[0]["key"] in result.stdout  # which it follows
    assert "8 to 15 of the text" in result.stdout
    assert "8 tokens at positions 8 to 15; ids 73 74" in result.stdout
    assert "8 cells in 2 layers; K f16 1.0 KiB, V f16 1.0 KiB" in result.stdout
    found = json.loads(invoke("cache", "inspect", filled, entries[0]["key"], "--json").stdout)
    assert found["tokens"] == TRUNK[:8]
    assert found["absent"] is None
    assert found["snapshot"]["groups"][0]["bytes_k"] == 1024
    assert found["snapshot"]["architecture"] == "llama"
    assert listed(invoke, filled) == before  # looking at it is no use of it


def test_keys_that_name_nothing_or_too_much(
    invoke: Invoke, filled: Path, entries: list[dict[str, Any]]
) -> None:
    absent, short = (invoke("cache", "inspect", filled, key) for key in ("zzzz", ""))
    assert "no such entry" in absent.stderr
    assert "too short: 5 begin with it" in short.stderr
    assert "too short" in invoke("cache", "inspect", filled, entries[0]["key"][:3]).stderr


def test_a_mark_in_place_of_a_block(invoke: Invoke, filled: Path) -> None:
    store = DiskStore(filled)
    mark(store, BlockRef("marked", "parent", 8, [], "text", "model"), "no checkpoint")
    store.close()
    listing = invoke("cache", "list", filled).stdout
    assert "1 of them only say why a block could not be stored" in listing
    assert "cannot be reached" not in listing
    assert "marked" not in listing
    result = invoke("cache", "inspect", filled, "marked")
    assert result.exit_code == 0
    assert "no state was kept at token 8" in result.stdout
    found = json.loads(invoke("cache", "inspect", filled, "marked", "--json").stdout)
    assert (found["absent"], found["snapshot"]) == ("no checkpoint", None)
    assert invoke("cache", "verify", filled).exit_code == 0


def test_a_block_that_came_after_its_mark(
    invoke: Invoke, filled: Path, tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    """Its key, as it is listed, names the block; the mark has a name of its own."""
    key = entries[2]["key"]
    store = DiskStore(filled)
    mark(store, BlockRef(key, entries[1]["key"], 16, RIGHT, "text", "model"), "window slid")
    store.close()
    assert f" {key[:8]} " in f" {invoke('cache', 'list', filled).stdout} ".replace("\n", " ")
    for prefix in (key[:8], key):
        found = json.loads(invoke("cache", "inspect", filled, prefix, "--json").stdout)
        assert (found["key"], found["absent"]) == (key, None)
        done = invoke("cache", "export", filled, prefix, tmp_path / "out")
        assert done.stdout.startswith("3 blocks, 24 tokens"), done.stderr
    told = json.loads(invoke("cache", "inspect", filled, f"{key}.absent", "--json").stdout)
    assert told["absent"] == "window slid"
    store = DiskStore(filled)
    store.delete(key)
    store.close()
    assert "had slid away" in invoke("cache", "inspect", filled, key[:8]).stdout


def test_a_saved_file(invoke: Invoke, filled_once: Path) -> None:
    path = filled_once / "chat.kv"
    result = invoke("cache", "inspect", path)
    assert result.exit_code == 0, result.stderr
    for text in (
        "chat.kv",
        "version 1, written by kvcellar",
        "24 tokens at positions 0 to 23, with logits; ids 65 66 67 68 69 70 71 72 ...",
        "24 cells in 2 layers; K f16 3.0 KiB, V f16 3.0 KiB",
        "checksums     match",
    ):
        assert text in " ".join(result.stdout.split(" ")).replace("\n" + " " * 15, " ")
    found = json.loads(invoke("cache", "inspect", path, "--json").stdout)
    assert found["n_bytes"] == path.stat().st_size
    assert found["sequences"][0]["n_tokens"] == 24


def test_a_file_that_is_damaged_or_something_else(
    invoke: Invoke, filled_once: Path, tmp_path: Path
) -> None:
    path = tmp_path / "chat.kv"
    for content, message in (
        ((filled_once / "chat.kv").read_bytes()[:-1] + b"?", "is damaged"),
        (b"nothing of ours", "cannot read"),
        (b"qsgg\x03\0\0\0", "--model"),
    ):
        path.write_bytes(content)
        result = invoke("cache", "inspect", path)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "chat.kv" in result.stderr
        assert message in result.stderr
    for where in (tmp_path, tmp_path / "absent"):
        assert "is no file" in invoke("cache", "inspect", where).stderr


# --- verify -------------------------------------------------------------------------------------


def test_a_sound_store(invoke: Invoke, filled: Path) -> None:
    before, files = listed(invoke, filled), tree(filled)
    result = invoke("cache", "verify", filled)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("5 entries, ")
    assert result.stdout.endswith(": all intact\n")
    assert listed(invoke, filled) == before
    assert tree(filled) == files


def test_what_is_damaged_is_named(
    invoke: Invoke, filled: Path, entries: list[dict[str, Any]]
) -> None:
    keys = [entry["key"] for entry in entries]
    spoil(value_file(filled, keys[0]))
    value_file(filled, keys[1]).unlink()
    store = DiskStore(filled)
    note = next(entry.note for entry in store.entries() if entry.key == keys[2])
    other = store.get(keys[3])
    assert other is not None
    store.delete(keys[2])
    store.put(keys[2], [other], note)  # sound, but another block
    store.put("letter", [b"no snapshot"])
    store.close()
    files = tree(filled)
    result = invoke("cache", "verify", filled)
    assert result.exit_code == 1
    told = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert told[keys[0]] == "damaged"
    assert told[keys[1]] == "its file is missing"
    assert "another text" in told[keys[2]]
    assert "no snapshot" in told["letter"]
    assert result.stdout.rstrip().endswith("4 damaged")
    assert keys[4] not in result.stdout
    assert tree(filled) == files  # they are dropped when they are asked for, not now


# --- a server -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A URL with a password."""
    with running_redis("--requirepass", "secret") as url:
        yield url.replace("redis://", "redis://:secret@")


def test_a_server_is_looked_after_as_well(
    invoke: Invoke, filled: Path, tmp_path: Path, server: str, entries: list[dict[str, Any]]
) -> None:
    out = tmp_path / "text.zip"
    invoke("cache", "export", filled, entries[4]["key"], out)
    assert invoke("cache", "import", server, out).exit_code == 0
    store = RedisStore(server, ttl_s=1000)
    assert store.get(entries[0]["key"]) is not None  # now it has a time to live
    before = listed(invoke, server)
    assert before["n_entries"] == 4
    results = [
        invoke("cache", "list", server),
        invoke("cache", "verify", server),
        invoke("cache", "inspect", server, entries[0]["key"]),
        invoke("cache", "export", server, entries[1]["key"], tmp_path / "again.zip"),
        invoke("cache", "gc", server),
    ]
    assert [result.exit_code for result in results] == [0] * 5
    assert "server's maxmemory" in results[-1].stdout
    refused = invoke("cache", "gc", server, "--max-bytes", "1G")
    assert refused.exit_code == 1
    assert "maxmemory-policy allkeys-lru" in refused.stderr
    assert listed(invoke, server) == before  # nothing of it counted as a use
    store.close()
    told = "".join(result.output for result in [*results, refused]) + before["store"]
    assert "secret" not in told
