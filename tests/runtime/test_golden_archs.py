"""Tiny models of each architecture against logits recorded from llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcellar.runtime.backends import BACKENDS
from kvcellar.runtime.model import Model
from kvcellar.testing.golden import play_step

TOLERANCE = 2e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("arch", ["llama-dense", "llama-moe"])
def test_logits_equal_the_references(
    shared: Path, arch: str, flash_attn: bool, backend: str
) -> None:
    golden = json.loads((shared / "golden" / "archs" / f"{arch}.json").read_text())
    n_compared = 0
    path = shared / "models" / golden["model"]
    with Model.from_gguf(path, n_threads=1, backend=backend) as model:
        context = model.context(n_ctx=256, n_seq_max=4, flash_attn=flash_attn)
        for number, step in enumerate(golden["steps"]):
            errors = play_step(context, step)
            context.cache.check()
            assert all(error < TOLERANCE for error in errors.values()), (number, errors)
            n_compared += len(errors)
    assert n_compared == 11
