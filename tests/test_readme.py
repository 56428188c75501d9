"""What the README shows runs as it stands; links of all pages lead to files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


def python_blocks() -> list[str]:
    """The examples, each of which goes on with what the one before it made."""
    return re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
def test_the_python_examples_run(smollm2_path: Path, tmp_path: Path) -> None:
    del smollm2_path  # only required to be there
    code = "".join(python_blocks())
    for found in ("0 of", "256 of"):  # the second time it finds what the first one left
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert result.returncode == 0, result.stderr
        assert "cells hold" in result.stdout
        assert f"{found} " in result.stdout
        assert "\x1b" not in result.stdout
    assert (tmp_path / "story.kv").stat().st_size > 0


def test_the_examples_are_about_ten_lines() -> None:
    assert len(python_blocks()) == 3
    for block in python_blocks():
        assert len([line for line in block.splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target
