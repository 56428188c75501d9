"""docs/prompt-cache.md runs as it stands and prints what it says; it explains every cause."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import get_args

import pytest

from kvcellar.prompts.cache import MAX_BLOCK, PromptCache
from kvcellar.prompts.misses import MAX_ENTRIES, Cause

PAGE = Path(__file__).resolve().parents[1] / "docs" / "prompt-cache.md"
STEP = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text("utf-8")


def test_the_example_prints_what_it_says(page: str, shared: Path, tmp_path: Path) -> None:
    [(code, told)] = STEP.findall(page)
    assert page.count("```") == 4
    path = shared / "models" / "llama-dense.gguf"
    rules = [i % 128 for i in range(1, 101)]
    with redirect_stdout(io.StringIO()) as printed:
        exec(code, {"path": path, "folder": tmp_path / "store", "rules": rules})
    assert printed.getvalue() == told


def test_every_cause_is_explained(page: str) -> None:
    section = page.partition("## Why not more")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z ,]+) \|", section, re.MULTILINE)
    named = [cause for row in rows[1:] for cause in row.split(", ")]
    assert sorted(named) == sorted(get_args(Cause))


def test_every_verb_and_number_is_right(page: str) -> None:
    public = {name: value for name, value in vars(PromptCache).items() if name[0] != "_"}
    verbs = {name for name, value in public.items() if callable(value)}
    assert set(re.findall(r"^\| `(\w+)\(", page, re.MULTILINE)) == verbs
    assert f"at most {MAX_ENTRIES} blocks" in page
    assert f"{MAX_BLOCK} is the largest" in page
