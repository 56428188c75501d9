"""Choosing what computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.errors import ModelFileError, OptionError, UnsupportedModel
from kvcellar.runtime.model import BACKENDS, Model
from kvcellar.testing.gguf_writer import write_gguf
from kvcellar.testing.golden import mean_nll
from kvcellar.testing.tiny_llama import TinyLlama


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_an_unknown_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="backend='torch': must be one of 'ggml', 'numpy'"):
        Model.from_gguf(tmp_path / "x.gguf", backend="torch")


def test_a_model_knows_its_backend_and_closes_twice(tmp_path: Path, backend: str) -> None:
    path = write_gguf(tmp_path / "x.gguf", TinyLlama().metadata(), TinyLlama().tensors())
    model = Model.from_gguf(path, backend=backend)
    assert (model.backend, model.path) == (backend, path)
    assert model.weight_bytes == sum(np.asarray(t).nbytes for t in TinyLlama().tensors().values())
    context = model.context(n_ctx=32)
    assert context.decode(Batch.of([1, 2])).shape == (1, 48)
    model.close()
    model.close()


@pytest.mark.parametrize("lacking", ["blk.1.ffn_up.weight", "output_norm.weight"])
def test_a_model_that_lacks_a_tensor_is_refused(tmp_path: Path, backend: str, lacking: str) -> None:
    tensors = TinyLlama().tensors()
    del tensors[lacking]
    path = write_gguf(tmp_path / "x.gguf", TinyLlama().metadata(), tensors)
    with pytest.raises(UnsupportedModel, match=lacking):
        Model.from_gguf(path, backend=backend)


def test_a_missing_file_is_named(tmp_path: Path, backend: str) -> None:
    with pytest.raises(ModelFileError, match=r"cannot open .*none\.gguf"):
        Model.from_gguf(tmp_path / "none.gguf", backend=backend)


@pytest.mark.parametrize("flash_attn", [False])
def test_quantised_v_needs_flash_attention(tmp_path: Path, backend: str, flash_attn: bool) -> None:
    path = write_gguf(tmp_path / "x.gguf", TinyLlama().metadata(), TinyLlama().tensors())
    with (
        Model.from_gguf(path, backend=backend) as model,
        pytest.raises(OptionError, match="quantised V needs flash_attn=True"),
    ):
        model.context(n_ctx=32, type_v="q8_0", flash_attn=flash_attn)


def test_the_numpy_backend_needs_no_ggml(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", TinyLlama().metadata(), TinyLlama().tensors())
    code = f"""
import json, sys
from kvcellar import Batch, Model
with Model.from_gguf({str(path)!r}, backend="numpy") as model:
    context = model.context(n_ctx=32, type_k="q8_0")
    context.decode(Batch.of([1, 2, 3]))
    context.cache.seq_add(0, 0, -1, 5)
    context.cache.update()
print(json.dumps([name for name in sys.modules if "ggml" in name]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == []


@pytest.mark.slow
def test_a_text_is_as_likely_on_either_backend(smollm2_path: Path, shared: Path) -> None:
    """Single tokens differ by what rounding activations to eight bits, as ggml does, comes to."""
    likelihoods = []
    for name in BACKENDS:
        with Model.from_gguf(smollm2_path, backend=name) as model, model.context(n_ctx=96) as made:
            tokens = model.tokenizer.encode((shared / "texts" / "alice.txt").read_text())
            likelihoods.append(mean_nll(made, tokens[:96]))
    assert likelihoods[0] == pytest.approx(likelihoods[1], rel=0.005)
