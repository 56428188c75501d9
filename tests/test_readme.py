"""What the README shows runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def python_block() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


@pytest.mark.model
def test_the_python_example_runs(smollm2_path: Path) -> None:
    del smollm2_path  # only required to be there
    result = subprocess.run(
        [sys.executable, "-c", python_block()], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "cells hold" in result.stdout
    assert "\x1b" not in result.stdout


def test_the_example_is_about_ten_lines() -> None:
    code = [line for line in python_block().splitlines() if line.strip()]
    assert len(code) <= 12


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
