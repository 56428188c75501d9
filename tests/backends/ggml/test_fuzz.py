"""Damaged models give errors of ours, never a crash or another exception."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the address space"),
]

N_MUTANTS = 600
ERRORS = {"ModelFileError", "UnsupportedModel", "OptionError", "AllocationError"}


def _fuzz(mode: str, scratch: Path, count: int, *model: str) -> dict[str, int]:
    command = [sys.executable, "-m", "kvcellar.testing.fuzz", mode, str(scratch), "0", str(count)]
    result = subprocess.run([*command, *model], capture_output=True, text=True, timeout=300)
    lines = result.stdout.splitlines()
    assert result.returncode == 0, f"{lines[-1:]} {result.stderr[-2000:]}"
    pairs = (pair.split("=") for pair in lines[-1].split()[1:])
    return {name: int(n) for name, n in pairs}


def test_flipped_bits_in_the_header(tmp_path: Path, shared: Path) -> None:
    model = str(shared / "models" / "llama-dense.gguf")
    outcomes = _fuzz("bits", tmp_path / "mutant.gguf", N_MUTANTS, model)
    assert set(outcomes) <= {*ERRORS, "decoded"}
    assert sum(outcomes.values()) == N_MUTANTS
    assert outcomes["decoded"] < 14 * N_MUTANTS // 15


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    outcomes = _fuzz("parts", tmp_path / "mutant.gguf", N_MUTANTS)
    assert set(outcomes) <= {*ERRORS, "ComputeError", "decoded"}  # factors may be NaN
    assert outcomes["decoded"] < N_MUTANTS // 2
