"""Code of docs/generation.md and docs/chat.md runs as it stands; reasons to stop are named."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, get_args

import pytest

from kvcellar.runtime.results import FinishReason

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def page() -> str:
    return (DOCS / "generation.md").read_text("utf-8")


def test_the_examples_run(page: str, smollm2_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert page.count("```") == 2 * len(blocks) == 6
    names: dict[str, Any] = {"path": smollm2_path}
    with redirect_stdout(io.StringIO()) as printed:
        for code in blocks:
            exec(code, names)
    names["model"].close()
    assert "tokens reused" in printed.getvalue()
    assert [len(result.ids) <= 4 for result in names["results"]] == [True, True]


def test_every_reason_to_stop_is_explained(page: str) -> None:
    section = page.partition("## Where it stops")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)[1:] == list(get_args(FinishReason))


def test_the_examples_of_chats_run(smollm2_path: Path) -> None:
    page = (DOCS / "chat.md").read_text("utf-8")
    names: dict[str, Any] = {"path": smollm2_path}
    with redirect_stdout(io.StringIO()) as printed:
        for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(code, names)
    names["model"].close()
    assert [len(turn.ids) > 2 for turn in names["chat"].turns] == [True, True]
    assert len(printed.getvalue()) > 50
