"""``kvcellar info``: what is said of models that run, of those that do not, and of the machine."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from pathlib import Path

import pytest

import kvcellar
from kvcellar.backends.ggml.gguf import GgufFile
from kvcellar.backends.ggml.jit import compiler
from kvcellar.backends.ggml.library import ENV
from kvcellar.cli import environment, model_info
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.types import KVType, LayerSpec
from tests.backends.helpers import run_python
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


def test_a_vocabulary_that_is_not_known_is_described(invoke: Invoke, tmp_path: Path) -> None:
    tiny = TinyLlama()
    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "quux"}
    path = write_gguf(tmp_path / "m.gguf", tiny.metadata() | vocabulary, tiny.tensors())
    found = json.loads(invoke("info", path, "--json").stdout)
    assert found["supported"] is True
    assert "'quux' is not known" in found["tokenizer_reason"]
    assert "--pre NAME" in " ".join(invoke("info", path).stdout.split())
    found = json.loads(invoke("info", path, "--json", "--pre", "qwen2").stdout)
    assert found["tokenizer"] == "gpt2, qwen2"
    assert found["tokenizer_reason"] is None
    result = invoke("info", path, "--pre", "quuz")
    assert result.exit_code == 1
    assert "pre='quuz' is not known" in result.stderr


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


ENVIRONMENT = "from kvcellar.cli.app import app; app(['info', '--environment'])"


def _rows(shown: str) -> dict[str, str]:
    """Names and values of a report; every line has both."""
    rows: dict[str, str] = {}
    for line in shown.splitlines():
        name, value = line[:20].rstrip(), line[20:]
        assert name
        assert value.strip()
        rows.setdefault(name, value)
    return rows


def test_a_report_names_what_a_bug_may_depend_on(invoke: Invoke) -> None:
    result = invoke("info", "--environment")
    assert result.exit_code == 0
    rows = _rows(result.stdout)
    assert rows["kvcellar"] == kvcellar.__version__
    assert rows["Python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert re.fullmatch(r"[1-9]\d*", rows["usable processors"])
    assert re.match(r"0\.20\.\d+ from \S", rows["libggml"])
    assert rows["attention kernel"] == "on" or rows["attention kernel"].startswith("off: ")
    assert {"system", "processor", "features", "memory", "libggml built for"} < rows.keys()
    assert set(environment.PACKAGES) < rows.keys()
    assert "\x1b" not in result.stdout


def test_machines_get_the_same_report(invoke: Invoke) -> None:
    result = invoke("info", "--environment", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["kvcellar"] == kvcellar.__version__
    assert set(found["packages"]) == set(environment.PACKAGES)
    assert found["libggml_problem"] is None
    assert found["why_no_attention_kernel"] == compiler.why_not()


@pytest.mark.parametrize("args", [(), ("absent.gguf", "--environment"), ("--json",)])
def test_a_model_or_the_environment_is_asked_for(invoke: Invoke, args: tuple[str, ...]) -> None:
    result = invoke("info", *args)
    assert result.exit_code == 2
    assert "name a model, or give --environment" in result.stderr


def test_a_kernel_that_is_off_says_why(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.ENV, "off")
    rows = _rows(invoke("info", "--environment").stdout)
    for kind in ("attention kernel", "product kernels"):
        assert rows[kind] == f"off: {compiler.ENV} turns it off"
    assert rows[compiler.ENV] == "off"


def test_a_libggml_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    result = run_python(ENVIRONMENT, **{ENV: str(tmp_path / "nowhere"), "HOME": str(tmp_path)})
    assert result.returncode == 0, result.stderr
    rows = _rows(result.stdout)
    assert rows["libggml"].startswith("cannot be loaded: ~/nowhere does not exist")
    assert rows[ENV] == "~/nowhere"
    assert "libggml built for" not in rows


def test_packages_that_are_absent_are_named(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("numpy", "no-such-package"))
    assert _rows(invoke("info", "--environment").stdout)["no-such-package"] == "not installed"


def test_what_the_system_does_not_say_is_unknown(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "CPUINFO", Path("/nowhere"))
    monkeypatch.setattr(environment, "processor_features", lambda: None)
    monkeypatch.setattr(environment, "available_bytes", lambda: None)
    monkeypatch.delattr(os, "sysconf", raising=False)
    rows = _rows(invoke("info", "--environment").stdout)
    assert rows["features"].startswith("unknown")
    assert rows["memory"] == "unknown, unknown available"


def test_the_home_folder_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ann"))
    for text, shown in (
        ("/home/ann", "~"),
        ("KVCELLAR_LIBGGML=/home/ann/ggml", "KVCELLAR_LIBGGML=~/ggml"),
        ("no libggml in /home/ann: reinstall", "no libggml in ~: reinstall"),
        ("/home/anna/x", "/home/anna/x"),
        ("/mnt/home/ann", "/mnt/home/ann"),
    ):
        assert environment.homeless(text) == shown
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert environment.homeless("/usr/lib") == "/usr/lib"


def test_the_processor_is_found_or_unknown(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nmodel name\t: A Processor 9\nflags\t\t: fpu avx2 avx512_vnni amx_int8\n"
    )
    assert environment.processor_name(info) == "A Processor 9"
    assert environment.processor_features(info) == ("AVX2", "AVX-512VNNI", "AMX-INT8")
    info.write_text("processor\t: 0\nFeatures\t: fp asimd asimdhp asimddp i8mm\n")
    assert environment.processor_features(info) == ("NEON", "FP16", "DotProd", "I8MM")
    assert environment.processor_name(tmp_path / "absent")


def test_names_of_instructions_agree_whoever_gives_them() -> None:
    """Linux and LLVM, where both tell, name alike what the kernels need."""
    features, told = compiler.host_features(), environment.processor_features()
    if features is None or told is None or platform.machine() != "x86_64":
        pytest.skip("one of the two does not tell")
    needed = {"AVX2", "FMA", "F16C", "AVX-512F", "AVX-512VL", "AVX-512BW", "AVX-512VNNI"}
    assert needed & {*told} == needed & {*environment.feature_names(features)}
