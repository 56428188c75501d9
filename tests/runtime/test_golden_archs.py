"""Tiny models of each architecture against logits recorded from llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcellar.runtime.model import Model
from kvcellar.testing.golden import play_step

TOLERANCE = 2e-5


@pytest.mark.parametrize("how", ["kernel", "flash", "products", "numpy", "numpy products"])
@pytest.mark.parametrize("arch", ["llama-dense", "llama-moe"])
def test_logits_equal_the_references(shared: Path, arch: str, how: str) -> None:
    golden = json.loads((shared / "golden" / "archs" / f"{arch}.json").read_text())
    options: dict[str, Any] = {"flash_attn": "products" not in how, "kernel": how == "kernel"}
    backend = "numpy" if how.startswith("numpy") else "ggml"
    if options["kernel"]:
        pytest.importorskip("llvmlite")
    n_compared = 0
    path = shared / "models" / golden["model"]
    with Model.from_gguf(path, n_threads=1, backend=backend) as model:
        context = model.context(n_ctx=256, n_seq_max=4, **options)
        for number, step in enumerate(golden["steps"]):
            errors = play_step(context, step)
            context.cache.check()
            assert all(error < TOLERANCE for error in errors.values()), (number, errors)
            n_compared += len(errors)
    assert n_compared == 11
