"""Files: written whole or not at all, read only if they are what was written."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import kvcellar
from kvcellar.errors import SnapshotFileError
from kvcellar.snapshot import container
from kvcellar.snapshot.container import (
    FORMAT,
    from_bytes,
    read_description,
    read_file,
    to_bytes,
    write_file,
)
from kvcellar.snapshot.native import VERSION, from_arrays, to_arrays
from kvcellar.types import AnyArray, KVType
from tests.snapshot.samples import assert_same, sample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "text.safetensors"


def write(path: Path, seed: int = 0, *, compress: bool = False) -> int:
    return write_file(path, to_arrays(sample(seed)), compress=compress)


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "numpy") as file:
        found: dict[str, str] = file.metadata()
        return found


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("kind", [KVType.F32, KVType.F16, KVType.Q8_0])
def test_what_is_written_is_read(path: Path, kind: KVType, compress: bool) -> None:
    snapshot = sample(kind_k=kind)
    n_bytes = write_file(path, to_arrays(snapshot), compress=compress)
    assert n_bytes == path.stat().st_size
    assert_same(from_arrays(read_file(path)), snapshot)


@pytest.mark.parametrize("compress", [False, True])
def test_bytes_are_those_of_a_file(path: Path, compress: bool) -> None:
    write(path, compress=compress)
    data = to_bytes(to_arrays(sample()), compress=compress)
    assert len(data) == path.stat().st_size
    assert_same(from_arrays(from_bytes(path.read_bytes())), sample())
    for kind in (bytes, bytearray, memoryview):
        assert_same(from_arrays(from_bytes(kind(data))), sample())


def test_what_was_there_is_replaced(path: Path) -> None:
    write(path, 1)
    before = path.read_bytes()
    write(path)
    assert_same(from_arrays(read_file(path)), sample())
    assert_same(from_arrays(from_bytes(before)), sample(1))


def test_plain_safetensors_reads_it(path: Path) -> None:
    write(path)
    arrays = load_file(path)
    wanted = to_arrays(sample()).arrays
    assert set(arrays) == set(wanted)
    for name, array in arrays.items():
        assert array.dtype == wanted[name].dtype
        assert np.array_equal(array, wanted[name], equal_nan=array.dtype.kind == "f")


def test_the_metadata_say_what_it_is(path: Path) -> None:
    write(path)
    metadata = metadata_of(path)
    assert set(metadata) == {"format", "version", "kvcellar", "description", "hash"}
    assert metadata["format"] == FORMAT == "kvcellar-snapshot"
    assert metadata["version"] == str(VERSION) == "1"
    assert metadata["kvcellar"] == kvcellar.__version__
    about = json.loads(metadata["description"])
    assert set(about) == {*to_arrays(sample()).description, "arrays"}
    assert read_description(path) == {**about, "version": "1", "kvcellar": kvcellar.__version__}
    assert set(about["arrays"]) == set(load_file(path))
    assert all(len(one["hash"]) == 32 for one in about["arrays"].values())


def test_the_hash_of_an_array_is_pinned() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert container._hash(array) == "23d93fab871b455f77f7ec2103acb966"
    assert container._hash(b"kvcellar") == "ea749a94fa26d227d6d656c11de67578"


def test_the_hash_of_an_array_has_its_type_and_shape() -> None:
    array = np.zeros((2, 6), np.int32)
    same_bytes: list[AnyArray] = [array.reshape(3, 4), array.view(np.float32), array.view(np.int64)]
    hashes = {container._hash(one) for one in (array, *same_bytes)}
    assert len(hashes) == 4
    assert container._hash(np.empty((0, 3), np.int32)) != container._hash(
        np.empty((0, 4), np.int32)
    )


# -- refusals


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, str]], object]) -> None:
    """Write a file again with other arrays or metadata."""
    arrays, metadata = load_file(path), metadata_of(path)
    change(arrays, metadata)
    save_file(arrays, path, metadata)


def refused(path: Path, match: str) -> None:
    with pytest.raises(SnapshotFileError, match=match) as caught:
        read_file(path)
    assert str(path) in str(caught.value)
    with pytest.raises(SnapshotFileError, match=match):
        from_bytes(path.read_bytes())


def test_a_missing_file(path: Path) -> None:
    for read in (read_file, read_description):
        with pytest.raises(SnapshotFileError, match=f"cannot read {path}"):
            read(path)


def test_a_directory_and_an_empty_file(path: Path, tmp_path: Path) -> None:
    with pytest.raises(SnapshotFileError, match="cannot read"):
        read_file(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(SnapshotFileError, match="cannot read"):
        read_file(path)
    with pytest.raises(SnapshotFileError, match="no snapshot"):
        from_bytes(b"")


def test_other_safetensors_are_refused(path: Path) -> None:
    save_file({"x": np.zeros(3, np.float32)}, path)
    refused(path, "no snapshot of kvcellar")
    save_file({"x": np.zeros(3, np.float32)}, path, {"format": "pt"})
    refused(path, "no snapshot of kvcellar")
    with pytest.raises(SnapshotFileError, match=f"{path}.*no snapshot of kvcellar"):
        read_description(path)


def test_a_later_version_is_refused_by_name(path: Path) -> None:
    write(path)
    rewritten(path, lambda _, about: about.update(version="2", kvcellar="9.9"))
    refused(path, r"format version 2, written by kvcellar 9\.9; this one reads 1")


def test_no_version_is_refused(path: Path) -> None:
    write(path)
    rewritten(path, lambda _, about: about.pop("version"))
    refused(path, "format version None")


def test_another_description_is_refused(path: Path) -> None:
    write(path)
    rewritten(path, lambda _, m: m.update(description=m["description"].replace("sample", "simple")))
    refused(path, "the description is damaged")


@pytest.mark.parametrize("field", ["description", "hash"])
def test_a_missing_description_or_hash_is_refused(path: Path, field: str) -> None:
    write(path)
    rewritten(path, lambda _, about: about.pop(field))
    refused(path, "the description is damaged")


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "{}",
        "[" * 100_000,
        '{"arrays": []}',
        '{"arrays": {"a": 1}}',
        "1" * 10_000,
        "NaN",
    ],
)
def test_a_description_with_a_right_hash_that_makes_no_sense(path: Path, body: str) -> None:
    write(path)
    proof = container._hash(body.encode())
    rewritten(path, lambda _, about: about.update(description=body, hash=proof))
    refused(path, "the description is damaged")


def test_a_missing_or_an_added_array_is_refused(path: Path) -> None:
    write(path)
    rewritten(path, lambda arrays, _: arrays.pop("states"))
    refused(path, "missing or were added: states")
    write(path)
    rewritten(path, lambda arrays, _: arrays.update(more=np.zeros(3, np.int32)))
    refused(path, "missing or were added: more")


def test_other_bytes_another_type_or_shape_are_refused(path: Path) -> None:
    states = load_file_states(path)
    for damaged in (states + 1, states.view(np.int32), states.reshape(-1)):
        write(path)
        rewritten(path, lambda arrays, _, d=damaged: arrays.update(states=d))  # type: ignore[misc]
        refused(path, "the array states is damaged")


def load_file_states(path: Path) -> Any:
    write(path)
    return load_file(path)["states"]


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "BOOL", "I8", "U32", "F64"])
def test_types_that_we_do_not_write_are_refused(path: Path, dtype: str) -> None:
    size = {"BF16": 2, "U32": 4, "F64": 8}.get(dtype, 1)
    write(path)
    metadata = metadata_of(path)
    about = json.loads(metadata["description"])
    about["arrays"] = {"odd": {"hash": "0" * 32}}
    metadata["description"] = json.dumps(about)
    metadata["hash"] = container._hash(metadata["description"].encode())
    tensor = {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * size]}
    header = json.dumps({"__metadata__": metadata, "odd": tensor}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(2 * size))
    refused(path, f"the array odd is damaged: it has type {dtype}")


# -- writing whole or not at all


def left_alone(path: Path, error: type[BaseException], match: str | None = None) -> None:
    """See that a failed write leaves what was there, and nothing else."""
    before = path.read_bytes()
    with pytest.raises(error, match=match):
        write(path, 1)
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_half_way(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write(path)

    def fail(_: object, name: Path, __: object) -> None:
        Path(name).write_bytes(b"half")
        raise error

    monkeypatch.setattr(container, "save_file", fail)
    if isinstance(error, OSError):
        left_alone(path, SnapshotFileError, "cannot write .*No space left")
    else:
        left_alone(path, KeyboardInterrupt)


def test_a_disk_that_does_not_keep_what_was_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path)

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    left_alone(path, SnapshotFileError, "Input/output error")


def test_a_file_that_cannot_be_put_in_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path)

    def fail(*_: object) -> None:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", fail)
    left_alone(path, SnapshotFileError, "Permission denied")


def test_nothing_is_written_before_all_is_compressed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(container, "pack", fail)
    with pytest.raises(MemoryError):
        write(path, compress=True)
    assert not list(path.parent.iterdir())


def test_no_directory_and_a_directory_in_its_place(path: Path, tmp_path: Path) -> None:
    with pytest.raises(SnapshotFileError, match="cannot write"):
        write(tmp_path / "none" / "x")
    path.mkdir()
    with pytest.raises(SnapshotFileError, match="cannot write"):
        write(path)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(SnapshotFileError, match="cannot write"):
        write(Path())


def test_a_directory_that_may_not_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    left_alone(path, SnapshotFileError, "Permission denied")


def test_it_has_the_permissions_of_any_new_file(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"")
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_the_longest_name_there_can_be(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    write(path)
    assert_same(from_arrays(read_file(path)), sample())
