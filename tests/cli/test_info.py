"""``kvcellar info``: what is said of models that run, and of those that do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcellar.backends.ggml.gguf import GgufFile
from kvcellar.cli import model_info
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.types import KVType, LayerSpec
from tests.cli.helpers import Invoke


def test_json_says_what_the_reference_model_is(invoke: Invoke, shared: Path) -> None:
    path = shared / "models/llama-dense.gguf"
    result = invoke("info", path, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["architecture"] == "llama"
    assert found["supported"] is True
    assert found["reason"] is None
    assert (found["n_layers"], found["n_head"], found["n_head_kv"]) == (2, 2, 2)
    assert (found["head_dim_k"], found["n_embd"], found["n_vocab"]) == (128, 256, 128)
    assert found["n_ctx_train"] == 256
    assert found["file_bytes"] == path.stat().st_size
    assert found["kv_types"]["f16"]["bytes_per_token"] == 2 * 2 * 256 * 2
    assert found["kv_types"]["q8_0"]["bytes_per_token"] == 2 * 2 * 256 // 32 * 34
    assert set(found["kv_types"]) == {kind.label for kind in KVType}


def test_a_table_for_people(invoke: Invoke, talker: Path) -> None:
    result = invoke("info", talker)
    assert result.exit_code == 0
    assert "talker.gguf" in result.stdout
    assert "2, 1 of K and V, 32 values each" in result.stdout
    assert "gpt2, gpt-2" in result.stdout
    assert "\x1b" not in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_types_that_do_not_fit_the_heads_are_marked(invoke: Invoke, tmp_path: Path) -> None:
    tiny = TinyLlama(n_embd=96)  # heads of 48
    path = write_gguf(tmp_path / "odd.gguf", tiny.metadata(), tiny.tensors())
    types = json.loads(invoke("info", path, "--json").stdout)["kv_types"]
    assert {name for name, cost in types.items() if cost["bytes_per_token"] is None} == {
        kind.label for kind in KVType if kind.is_quantized
    }
    assert invoke("info", path).stdout.count("  does not fit\n") == 6


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "no model is named"),
        (".", ". is a folder"),
        ("/dev/null", "/dev/null is no regular file"),
        ("absent", "absent does not exist"),
    ],
)
def test_what_is_no_model_is_called_what_it_is(invoke: Invoke, name: str, problem: str) -> None:
    result = invoke("info", name)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {problem}: give the path of a GGUF file")


@pytest.mark.parametrize("arch", ["rwkv9", "bert"])
def test_what_cannot_be_run_is_described_with_the_reason(
    invoke: Invoke, tmp_path: Path, arch: str
) -> None:
    tiny = TinyLlama()
    metadata = {**tiny.metadata(), "general.architecture": arch}
    path = write_gguf(tmp_path / "other.gguf", metadata, tiny.tensors())
    result = invoke("info", path)
    assert result.exit_code == 0
    assert f"{arch} (not supported)" in result.stdout
    assert "why not" in result.stdout
    found = json.loads(invoke("info", path, "--json").stdout)
    assert found["supported"] is False
    assert found["kv_types"] == {}


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04 something else"])
def test_what_is_no_model_is_an_error(invoke: Invoke, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    result = invoke("info", path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "broken.gguf" in result.stderr


def test_memory_that_is_not_known_is_not_guessed(
    invoke: Invoke, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_info, "available_bytes", lambda: None)
    found = json.loads(invoke("info", talker, "--json").stdout)
    assert found["memory_available"] is None
    assert found["kv_types"]["f16"]["cells_that_fit"] is None
    assert "unknown" in invoke("info", talker).stdout


def test_weights_count_against_memory(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_info, "available_bytes", lambda: 1000)
    found = model_info.read_model_info(talker)
    assert found.weight_bytes == sum(t.n_bytes for t in GgufFile(talker).tensors.values())
    assert found.memory_available == 0
    assert found.kv_types["f16"].cells_that_fit == 0


def test_k_and_v_are_counted_by_their_own_sizes() -> None:
    cost = model_info._cost(KVType.F16, (LayerSpec(2, 64, 32), LayerSpec(1, 64, 32)), 5000)
    assert cost == model_info.TypeCost(2 * (128 + 64 + 64 + 32), 5000 // 576)
