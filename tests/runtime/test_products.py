"""Whole models with products of our own: against NumPy, against ggml's, alone and side by side."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from gguf import GGUFReader

from kvcellar.backends.ggml import model_memory
from kvcellar.backends.ggml.jit.product import why_no_products
from kvcellar.backends.ggml.jit.product_formats import FORMATS
from kvcellar.backends.ggml.model_file import GgmlModelFile
from kvcellar.backends.ggml.store import to_rows
from kvcellar.batch import Batch
from kvcellar.runtime.model import Model
from kvcellar.testing.gguf_writer import RawTensor, Tensor, Value, write_gguf
from kvcellar.testing.golden import nmse
from kvcellar.types import Float32Array, KVType
from tests.backends.ggml.jit.weights import random_rows
from tests.runtime.archs import ARCHS, text

REASON = why_no_products()
compiled = pytest.mark.skipif(REASON is not None, reason=str(REASON))
ORACLE = 1e-6
"""Of real models, whose logits by ggml's products are 1e-3 from NumPy's."""
TOKENS = [504, 3575, 282, 4649, 314, 260, 2470, 30, 1116, 314, 624, 1123]


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[Model]:
    with Model.from_gguf(smollm2_path, n_threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def exact(smollm2_path: Path) -> Float32Array:
    with Model.from_gguf(smollm2_path, backend="numpy") as loaded:
        return decoded(loaded)


def decoded(model: Model, step: int = len(TOKENS), **options: Any) -> Float32Array:
    """Logits of all tokens, so many at a time."""
    with model.context(n_ctx=64, n_seq_max=1, type_k="f32", type_v="f32", **options) as context:
        parts = [TOKENS[i : i + step] for i in range(0, len(TOKENS), step)]
        return np.concatenate(
            [np.array(context.decode(Batch.of(part, logits="all"))) for part in parts]
        )


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("step", [1, 5, len(TOKENS)])
def test_a_real_model_gives_the_logits_of_numpy(
    model: Model, exact: Float32Array, step: int
) -> None:
    for row, wanted in zip(decoded(model, step), exact, strict=True):
        assert nmse(row, wanted) < ORACLE


@pytest.mark.slow
@compiled
def test_ggml_alone_is_further_from_numpy(
    model: Model, exact: Float32Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nmse(decoded(model), exact) < ORACLE < nmse(decoded(model, kernel=False), exact) < 1e-2
    ours = decoded(model)
    monkeypatch.setattr(model_memory, "why_no_products", lambda: "this processor lacks it")
    without = decoded(model)
    assert ORACLE < nmse(without, ours) < 1e-2


@pytest.mark.slow
@compiled
@pytest.mark.alone
def test_two_threads_give_the_same_bits(model: Model, smollm2_path: Path) -> None:
    with Model.from_gguf(smollm2_path, n_threads=2) as other:
        np.testing.assert_array_equal(decoded(other, 4), decoded(model, 4))


@pytest.mark.slow
@compiled
def test_contexts_of_one_model_may_take_turns(model: Model) -> None:
    expected = decoded(model, 1)
    with (
        model.context(n_ctx=64, n_seq_max=1, type_k="f32", type_v="f32") as one,
        model.context(n_ctx=64, n_seq_max=1, type_k="f32", type_v="f32") as other,
    ):
        other.decode(Batch.of(TOKENS[::-1]))
        for token, wanted in zip(TOKENS, expected, strict=True):
            got = np.array(one.decode(Batch.of([token], logits="all")))
            other.decode(Batch.of([token]))
            np.testing.assert_array_equal(got[0], wanted)


@pytest.mark.slow
@compiled
@pytest.mark.alone
def test_models_may_compute_at_the_same_time(model: Model, smollm2_path: Path) -> None:
    expected = decoded(model, 3)
    found: list[Float32Array] = []

    def work() -> None:
        with Model.from_gguf(smollm2_path, n_threads=1) as own:
            found.append(decoded(own, 3))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for got in found:
        np.testing.assert_array_equal(got, expected)


PARTLY = ("deepseek2-moe", "gpt-oss-moe", "llama-moe", "mamba-dense", "mamba2-dense")
"""Experts are products of another kind, and some of Mamba's rows are no multiple of 16."""
NOT_MULTIPLIED = ("conv", "ssm_a", "ssm_d", "position_embd", "norm")


def by_turns(_: str, values: Float32Array, i: int) -> RawTensor:
    """Values as q4_1, q5_0 or q8_0."""
    kind = (KVType.Q4_1, KVType.Q5_0, KVType.Q8_0)[i % 3]
    return RawTensor(kind.ggml_id, values.shape, to_rows(values, kind).tobytes())


def any_k(name: str, values: Float32Array, i: int) -> Tensor:
    """Any weights of a K type, where a row has room for them."""
    kind, form = [(kind, form) for kind, form in FORMATS.items() if form.n_blocks > 1][i % 3]
    if values.shape[1] % 256 or name.startswith("token_embd"):
        return values
    rows = random_rows(form, len(values), values.shape[1] // 256, size=3e-4)
    return RawTensor(kind, values.shape, rows.tobytes())


def quantised(source: Path, path: Path, quantise: Callable[..., Tensor] = by_turns) -> Path:
    """A model of f32 weights with those of its products as other types."""
    file = GgmlModelFile(source, 1)
    tensors: dict[str, Tensor] = {}
    for i, tensor in enumerate(GGUFReader(source).tensors):
        values = np.array(tensor.data, np.float32)
        tensors[tensor.name] = values
        suits = values.ndim == 2 and values.shape[1] % 32 == 0
        if suits and not any(part in tensor.name for part in NOT_MULTIPLIED):
            tensors[tensor.name] = quantise(tensor.name, values, i)
    write_gguf(path, cast("dict[str, Value]", dict(file.metadata)), tensors)
    file.close()
    return path


def tiny_logits(path: Path, backend: str = "ggml", **options: Any) -> Float32Array:
    """Of a prompt, a few tokens together and one alone."""
    with (
        Model.from_gguf(path, n_threads=1, backend=backend) as model,
        model.context(n_ctx=64, n_seq_max=1, type_k="f32", type_v="f32", **options) as context,
    ):
        parts = (text(1, 20), text(2, 3), text(3, 1))
        return np.concatenate(
            [np.array(context.decode(Batch.of(part, logits="all"))) for part in parts]
        )


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_gives_the_logits_of_numpy(
    shared: Path, arch: str, tmp_path: Path
) -> None:
    path = quantised(shared / "models" / f"{arch}.gguf", tmp_path / "quantised.gguf")
    wanted = tiny_logits(path, "numpy")
    assert nmse(tiny_logits(path), wanted) < (2e-3 if arch in PARTLY else 1e-7)
    assert 1e-5 < nmse(tiny_logits(path, kernel=False), wanted) < 2e-3


@pytest.mark.slow
@compiled
def test_k_types_give_the_logits_of_numpy(shared: Path, tmp_path: Path) -> None:
    path = quantised(shared / "models" / "llama-dense.gguf", tmp_path / "k.gguf", any_k)
    kinds = {tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert kinds == {"F32", "Q4_K", "Q5_K", "Q6_K"}
    wanted = tiny_logits(path, "numpy")
    assert nmse(tiny_logits(path), wanted) < ORACLE
    assert ORACLE < nmse(tiny_logits(path, kernel=False), wanted) < 5e-2


def test_without_llvmlite_a_model_runs_all_the_same(shared: Path) -> None:
    code = f"""
        import sys
        sys.modules["llvmlite"] = None  # imports of it fail
        from importlib import util
        find = util.find_spec
        util.find_spec = lambda name, *rest: None if name == "llvmlite" else find(name, *rest)
        from kvcellar.batch import Batch
        from kvcellar.runtime.model import Model
        with Model.from_gguf({str(shared / "models" / "llama-dense.gguf")!r}, n_threads=1) as model:
            with model.context(n_ctx=32) as context:
                print(context.decode(Batch.of([1, 2, 3])).shape)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == "(1, 128)", ran.stderr
