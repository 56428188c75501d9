"""docs/generation.md runs as it stands, and names every verb and every reason to stop."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, get_args

import pytest

from kvcellar.runtime.results import FinishReason

PAGE = Path(__file__).resolve().parents[1] / "docs" / "generation.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text("utf-8")


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
