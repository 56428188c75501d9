"""``kvcellar cache gc``, ``export`` and ``import``: what goes, what stays, what comes over."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcellar.cli import store_tools
from kvcellar.cli.units import human_bytes
from kvcellar.prompts.archive import import_blocks
from kvcellar.stores.base import WRITING_S, Entry
from kvcellar.stores.disk import DiskStore
from kvcellar.stores.disk.files import Name
from kvcellar.stores.memory import MemoryStore
from tests.cli.helpers import Invoke, age, listed, tree, value_file
from tests.disks import DISKS

# --- gc -----------------------------------------------------------------------------------------


def test_a_budget_takes_the_end_of_what_was_not_used(
    invoke: Invoke, filled: Path, entries: list[dict[str, Any]]
) -> None:
    size = str(sum(entry["n_bytes"] for entry in entries) - 1)
    planned = invoke("cache", "gc", filled, "--max-bytes", size, "--dry-run")
    assert planned.stdout.startswith("would remove 1 entries to get within the size")
    assert "4 entries, " in planned.stdout
    assert listed(invoke, filled)["n_entries"] == 5
    done = invoke("cache", "gc", filled, "--max-bytes", size)
    assert done.stdout == planned.stdout.replace("would remove", "removed")
    left = {entry["key"] for entry in listed(invoke, filled)["entries"]}
    assert left == {entry["key"] for entry in entries[:4]}
    assert len(tree(filled)) == 4


def test_what_nobody_used_goes(invoke: Invoke, filled: Path) -> None:
    assert "no entries to remove" in invoke("cache", "gc", filled, "--older-than", "1d").stdout
    result = invoke("cache", "gc", filled, "--older-than", "0s")
    assert "removed 5 entries not used for that long" in result.stdout
    assert result.stdout.endswith("0 entries, 0 bytes are left\n")
    assert tree(filled) == {}


@pytest.mark.parametrize("kind", DISKS)
def test_a_full_disk_is_cleaned(
    invoke: Invoke, filled: Path, entries: list[dict[str, Any]], tmp_path: Path, kind: str
) -> None:
    """It is said in a line, and ``gc`` makes room."""
    with DISKS[kind](tmp_path / "disk") as disk:
        folder = shutil.copytree(filled, disk.root / "store")
        size = str(sum(entry["n_bytes"] for entry in entries) - 1)
        disk.fill()
        for command in (("list",), ("verify",), ("gc", "--dry-run", "--max-bytes", size)):
            result = invoke("cache", command[0], folder, *command[1:])
            assert result.exit_code == 0
            assert f"warning: the store in {folder}: {disk.why}" in result.stderr
            assert "5 entries" in result.stdout or "4 entries" in result.stdout
        done = invoke("cache", "gc", folder, "--max-bytes", size)
        assert done.stdout.startswith("removed 1 entries to get within the size")
        assert len(tree(folder)) == 4
        disk.free()
        invoke("cache", "gc", folder)  # drops the entry of a file that was removed
        assert "4 entries" in invoke("cache", "verify", folder).stdout
        assert "removed" not in invoke("cache", "list", folder).stderr


def test_what_is_of_no_use_goes(
    invoke: Invoke, filled: Path, entries: list[dict[str, Any]]
) -> None:
    value_file(filled, entries[3]["key"]).unlink()
    stray = Name.new(entries[0]["key"]).under(filled)
    stray.write_bytes(bytes(2000))
    os.utime(stray, (1, 1))
    age(filled, WRITING_S)
    planned = invoke("cache", "gc", filled, "--dry-run")
    assert stray.exists()
    result = invoke("cache", "gc", filled)
    assert result.exit_code == 0
    assert result.stdout == planned.stdout.replace("would remove", "removed")
    assert not stray.exists()
    assert "removed 2 files without an entry or entries without a file, 2.0 KiB" in result.stdout
    assert "removed 1 entries with a missing block before them" in result.stdout
    assert "3 entries, " in result.stdout


def test_what_lacks_its_start_gets_as_long_as_strays(
    invoke: Invoke, filled: Path, entries: list[dict[str, Any]]
) -> None:
    store = DiskStore(filled)
    store.delete(entries[1]["key"])
    store.close()
    age(filled, WRITING_S / 2)  # the entries are as old as the session already
    for args in (["--dry-run"], []):
        told = invoke("cache", "gc", filled, *args).stdout.splitlines()
        assert told[0] == "no entries to remove"
        assert told[1].startswith("3 entries have a missing block before them")
        assert told[1].endswith("kept until unused for 10 min")
        assert told[2].startswith("4 entries, ")
    assert "removes them 10 min after" in " ".join(invoke("cache", "list", filled).stdout.split())
    age(filled, WRITING_S / 2)
    told = invoke("cache", "gc", filled).stdout.splitlines()
    assert told[0].startswith("removed 3 entries with a missing block before them, ")
    assert told[1].startswith("1 entries, ")
    assert inspect.signature(DiskStore.gc).parameters["min_age_s"].default == WRITING_S


def test_what_another_process_is_storing_stays(
    invoke: Invoke,
    filled: Path,
    tmp_path: Path,
    entries: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but the first block of a text are there when the store is cleaned."""
    out, other, writer = tmp_path / "text.zip", tmp_path / "other", DiskStore(tmp_path / "other")
    invoke("cache", "export", filled, entries[4]["key"], out)
    put, told = writer.put, list[str]()

    def clean_before(key: str, *args: Any) -> bool:
        if key == entries[0]["key"]:
            told.append(invoke("cache", "gc", other).stdout)
        return put(key, *args)

    monkeypatch.setattr(writer, "put", clean_before)
    assert import_blocks(writer, out).n_new == 4
    assert len(told) == 1
    assert "3 entries have a missing block before them" in told[0]
    writer.close()
    assert all(entry["reachable"] for entry in listed(invoke, other)["entries"])


def test_what_comes_while_a_store_is_cleaned_stays(
    invoke: Invoke, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its files were seen to, and before its entries are."""
    look = DiskStore.entries

    def after_a_put(store: DiskStore) -> Iterator[Entry]:
        monkeypatch.setattr(DiskStore, "entries", look)
        store.put("late", [b"end"], {"parent": "soon", "start": 8, "tokens": "1"})
        return look(store)

    monkeypatch.setattr(DiskStore, "entries", after_a_put)
    told = invoke("cache", "gc", filled).stdout
    assert "1 entries have a missing block before them" in told
    assert "6 entries, " in told


@pytest.mark.parametrize("args", [("--max-bytes", "20X"), ("--older-than", "7")])
def test_odd_amounts_are_named(invoke: Invoke, filled: Path, args: tuple[str, str]) -> None:
    result = invoke("cache", "gc", filled, *args)
    assert result.exit_code == 1
    assert f"error: {args[0]} '{args[1]}'" in result.stderr


# --- export and import --------------------------------------------------------------------------


def test_a_text_goes_to_another_store(
    invoke: Invoke, filled: Path, tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    out, other = tmp_path / "text.zip", tmp_path / "other"
    done = invoke("cache", "export", filled, entries[4]["key"][:8], out)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("4 blocks, 32 tokens: ")
    first, again = (invoke("cache", "import", other, out) for _ in range(2))
    assert first.stdout.startswith(f"{out}: 4 blocks, ")
    assert again.stdout == f"{out}: 0 blocks, 0 bytes; 4 already stored\n"
    keep = {entry["key"]: entry["tokens"] for entry in listed(invoke, other)["entries"]}
    assert keep == {entries[i]["key"]: entries[i]["tokens"] for i in (0, 1, 3, 4)}
    assert invoke("cache", "verify", other).exit_code == 0


def test_no_store_is_made_for_a_file_that_is_none(
    invoke: Invoke, filled: Path, tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    """Nor does anything of the sound files beside it go in."""
    whole, other, held = tmp_path / "whole.zip", tmp_path / "other", tmp_path / "held"
    invoke("cache", "export", filled, entries[4]["key"], whole)
    DiskStore(held).close()
    damaged = bytearray(whole.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    for content in (b"no export", whole.read_bytes()[:-1], bytes(damaged)):
        bad = tmp_path / "bad.zip"
        bad.write_bytes(content)
        for where, files in ((other, [bad]), (other, [whole, bad]), (held, [whole, bad])):
            result = invoke("cache", "import", where, *files)
            assert (result.exit_code, result.stdout) == (1, "")
            assert "bad.zip" in result.stderr
    assert "absent.zip" in invoke("cache", "import", other, tmp_path / "absent.zip").stderr
    assert not other.exists()
    assert listed(invoke, held)["entries"] == []


def test_what_does_not_fit_is_told(
    invoke: Invoke,
    filled: Path,
    tmp_path: Path,
    entries: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder that others keep within a budget, or a server that evicts."""
    out, size = tmp_path / "text.zip", int(entries[0]["n_bytes"])
    invoke("cache", "export", filled, entries[4]["key"], out)
    store = MemoryStore(3 * size)
    monkeypatch.setattr(store_tools, "open_or_make", lambda _: store)
    done = invoke("cache", "import", tmp_path / "other", out)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{out}: 3 blocks, {human_bytes(3 * size)}; 1 did not fit\n"


def test_a_text_without_its_start_is_not_exported(
    invoke: Invoke, filled: Path, tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    value_file(filled, entries[0]["key"]).unlink()
    result = invoke("cache", "export", filled, entries[4]["key"], tmp_path / "out")
    assert result.exit_code == 1
    assert "a block before it is missing" in result.stderr
    assert not (tmp_path / "out").exists()
