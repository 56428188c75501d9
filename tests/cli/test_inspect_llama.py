"""State files of llama.cpp are told with their model at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcellar.runtime.context import save_llama_file
from kvcellar.runtime.model import Model
from kvcellar.snapshot.llama.layout import FileGeneration
from tests.cli.helpers import Invoke


@pytest.mark.parametrize("generation", ["2025-01", "2026-10"])
@pytest.mark.parametrize("kind", ["sequence", "session"])
def test_what_a_file_holds(
    invoke: Invoke, talker: Path, tmp_path: Path, generation: FileGeneration, kind: str
) -> None:
    path = tmp_path / "state.bin"
    with Model.from_gguf(talker, n_threads=1) as model, model.context(n_ctx=32) as context:
        sequence = context.sequence(range(65, 77))
        save_llama_file(sequence if kind == "sequence" else context, path, generation)
    result = invoke("cache", "inspect", path, "--model", talker)
    assert result.exit_code == 0, result.stderr
    told = " ".join(result.stdout.split())
    assert f"{kind} of llama.cpp, version" in told
    assert f"as of {generation}" in told
    assert "12 tokens; ids 65 66 67 68 69 70 71 72 ..." in told
    assert "12 cells in 2 layers; K f16 1.5 KiB, V f16 1.5 KiB" in told
    found = json.loads(invoke("cache", "inspect", path, "--model", talker, "--json").stdout)
    assert (found["n_tokens"], found["kind"]) == (12, kind)
    assert found["parts"][0]["bytes_k"] == 12 * 2 * 32 * 2
    assert found["n_bytes"] == path.stat().st_size


def test_states_are_told_too(invoke: Invoke, shared: Path, tmp_path: Path) -> None:
    path, gguf = tmp_path / "state.bin", shared / "models/mamba-dense.gguf"
    with Model.from_gguf(gguf, n_threads=1) as model, model.context(n_ctx=32) as context:
        save_llama_file(context.sequence([1, 2, 3]), path)
    found = json.loads(invoke("cache", "inspect", path, "--model", gguf, "--json").stdout)
    assert 0 < found["bytes_states"] < path.stat().st_size


def test_what_cannot_be_read_is_an_error(
    invoke: Invoke, talker: Path, shared: Path, tmp_path: Path
) -> None:
    path = tmp_path / "state.bin"
    with Model.from_gguf(talker, n_threads=1) as model, model.context(n_ctx=32) as context:
        save_llama_file(context.sequence([1, 2, 3]), path)
    nameless = invoke("cache", "inspect", path)
    assert "name its model with --model" in nameless.stderr
    other = invoke("cache", "inspect", path, "--model", shared / "models/mamba-dense.gguf")
    path.write_bytes(path.read_bytes()[:-3])
    short = invoke("cache", "inspect", path, "--model", talker)
    for result in (nameless, other, short):
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.count("\n") == 1
        assert "state.bin" in result.stderr or result is other
