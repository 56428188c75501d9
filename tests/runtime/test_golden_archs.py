"""Tiny models of each architecture against logits recorded from llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcellar.testing.golden import play_step
from tests.runtime.archs import ARCHS, HYBRID, RECURRENT, TOLERANCE, WINDOWED, opened

HOW: dict[str, dict[str, Any]] = {
    "kernel": {"flash_attn": True, "kernel": None},  # where it can be used
    "flash": {"flash_attn": True, "kernel": False},
    "products": {"flash_attn": False, "kernel": False},
    "numpy": {"flash_attn": True},
    "numpy products": {"flash_attn": False},
}


def play(shared: Path, arch: str, how: str, **options: Any) -> None:
    golden = json.loads((shared / "golden" / "archs" / f"{arch}.json").read_text())
    backend = "numpy" if how.startswith("numpy") else "ggml"
    n_compared = 0
    with opened(shared, arch, backend, n_ubatch=512, **HOW[how], **options) as context:
        for number, step in enumerate(golden["steps"]):
            errors = play_step(context, step)
            context.cache.check()
            assert all(error < TOLERANCE for error in errors.values()), (number, errors)
            n_compared += len(errors)
    assert n_compared == (9 if arch in (*HYBRID, *RECURRENT) else 11)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("arch", ARCHS)
def test_logits_equal_the_references(shared: Path, arch: str, how: str) -> None:
    if how == "kernel":
        pytest.importorskip("llvmlite")
    play(shared, arch, how)


@pytest.mark.parametrize("arch", WINDOWED)
def test_windows_of_full_size_do_as_well(shared: Path, arch: str) -> None:
    play(shared, arch, "flash", swa_full=True)


@pytest.mark.parametrize("arch", [*WINDOWED, *HYBRID, *RECURRENT])
def test_without_checkpoints_too(shared: Path, arch: str) -> None:
    play(shared, arch, "flash", checkpoints=0)
