"""``docs/format.md`` names what is in a real file: no more and no less."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from safetensors import safe_open

from tests.runtime.archs import opened, text

DOC = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def section(title: str) -> str:
    """The text of a section."""
    return DOC.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> dict[str, list[str]]:
    """The rows of a section's table: what is in quotes in the first column, and the others."""
    found: dict[str, list[str]] = {}
    lines = [line for line in section(title).splitlines() if line.startswith("| `")]
    for line in lines:
        first, *rest = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`([^`]+)`", first)
        for name in names:
            stem = names[0].rsplit(".", 1)[0]
            found[stem + name if name.startswith(".") else name] = rest
    return found


def quoted(cells: list[str]) -> set[str]:
    return set(re.findall(r"`([a-z_0-9]+)`", " ".join(cells)))


@pytest.fixture(scope="module", params=["gemma3-dense", "jamba-dense", "deepseek2-moe"])
def path(
    request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("format") / "text"
    with opened(shared, request.param, type_k="q8_0") as context:
        context.sequence(text(1, 300)).append(text(2, 9))
        context.sequence()
        context.save(path)
        yield path


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "numpy") as file:
        found: dict[str, str] = file.metadata()
        return found


def arrays_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def about(path: Path) -> Any:
    return json.loads(metadata_of(path)["description"])


def pattern(name: str) -> str:
    return re.sub(r"\b[GLSC]\b", lambda _: r"\d+", re.escape(name))


def test_metadata(path: Path) -> None:
    found, table = metadata_of(path), rows("Metadata")
    assert set(found) == set(table)
    for name in ("format", "version"):
        assert f"`{found[name]}`" in table[name][0]
    assert DOC.startswith(f"# The snapshot format, version {found['version']}\n")


def test_description(path: Path) -> None:
    found, table = about(path), rows("Description")
    assert list(found) == list(table)
    assert {key for group in found["groups"] for key in group} <= quoted(table["groups"])
    held = [one for one in found["states"] or [] if one is not None]
    assert {key for one in held for key in one} <= quoted(table["states"])
    for one in found["texts"]:
        assert set(one) == quoted(table["texts"]) - {"self_extend"}


def test_fingerprint(path: Path) -> None:
    found, table = about(path)["fingerprint"], rows("Fingerprint")
    assert list(found) == list(table)
    said = quoted(table["groups"])
    for group in found["groups"]:
        keys = {*group, *(key for layer in group["layers"] for key in layer)}
        keys |= {key for layer in group["layers"] for key in layer["rope"] or ()}
        assert keys <= said
        if any(layer["rope"] for layer in group["layers"]):
            assert said == keys
    for layer in found["states"]:
        assert set(layer) == quoted(table["states"])


def test_arrays(path: Path) -> None:
    table = rows("Arrays")
    kinds = {"int32": "i32", "int64": "i64", "float32": "f32", "float16": "f16", "uint8": "u8"}
    for name, array in arrays_of(path).items():
        entries = [cells for known, cells in table.items() if re.fullmatch(pattern(known), name)]
        assert len(entries) == 1, name
        kind, shape, _ = entries[0]
        assert kinds[array.dtype.name] in kind or kind == "as above"
        assert len(shape.split(",")) == array.ndim


def test_every_array_that_is_described_exists(shared: Path, tmp_path: Path) -> None:
    names: set[str] = set()
    for arch in ("gemma3-dense", "jamba-dense"):
        with opened(shared, arch, n_ctx=512) as context:
            context.sequence(text(1, 300)).append(text(2, 100))
            context.save(tmp_path / arch)
        names |= set(arrays_of(tmp_path / arch))
    for known in rows("Arrays"):
        assert any(re.fullmatch(pattern(known), name) for name in names), known


def test_the_hashes_are_as_described(path: Path) -> None:
    found = metadata_of(path)
    assert xxhash.xxh3_128_hexdigest(found["description"].encode()) == found["hash"]
    listed = about(path)["arrays"]
    for name, array in arrays_of(path).items():
        data = f"{array.dtype.str}{array.shape}".encode() + array.tobytes()
        assert xxhash.xxh3_128_hexdigest(data) == listed[name]["hash"]


def test_compressed_arrays_are_as_described(shared: Path, tmp_path: Path) -> None:
    with opened(shared, "llama-dense") as context:
        sequence = context.sequence(text(1, 60))
        sequence.save(tmp_path / "plain")
        sequence.save(tmp_path / "small", compress=True)
    plain, small = arrays_of(tmp_path / "plain"), arrays_of(tmp_path / "small")
    listed, n_small = about(tmp_path / "small")["arrays"], 0
    for name, how in listed.items():
        array = small[name]
        if "codec" in how:
            assert set(how) == quoted(rows("Description")["arrays"])
            assert f"`{how['codec']}`" in section("Arrays")
            data = zstandard.ZstdDecompressor().decompress(array.tobytes())
            dtype = np.dtype(how["dtype"])
            planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
            array = planes.T.copy().view(dtype).reshape(how["shape"])
            n_small += 1
        assert array.tobytes() == plain[name].tobytes()
        assert array.shape == plain[name].shape
    assert n_small > 2


def test_the_example_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = DOC.split("```python\n")[1].split("```")[0]
    path.with_name("text.safetensors").write_bytes(path.read_bytes())
    monkeypatch.chdir(path.parent)
    exec(code, {})
    assert "fingerprint" in capsys.readouterr().out


def test_the_errors_that_it_names_exist() -> None:
    from kvcellar import errors

    for name in re.findall(r"`(Snapshot\w+)`", DOC):
        assert issubclass(getattr(errors, name), errors.SnapshotError)
