"""docs/worked-example.md runs as it stands and prints what it says."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from kvcellar.cache import AttentionCache
from kvcellar.testing.stores import SignatureStore

PAGE = Path(__file__).resolve().parents[1] / "docs" / "worked-example.md"
STEP = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
VERBS = ("seq_cp", "seq_rm", "seq_add", "defrag", "update", "transaction", "rollback")


def steps(text: str) -> list[tuple[str, str]]:
    """Each block of code with the block of output behind it."""
    return STEP.findall(text)


def run(code: str, names: dict[str, Any]) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    return printed.getvalue()


def check(cache: AttentionCache, store: SignatureStore) -> None:
    """Invariants 1 to 4, and those that concern rows: 6 and 7."""
    cache.check()
    table = cache.table
    used = table.positions >= 0
    assert (store.content[used] == table.tokens[used]).all()
    assert (store.rotation[used] == (table.positions - table.pending)[used]).all()


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text("utf-8")


def test_the_story_happens_as_told(page: str) -> None:
    names: dict[str, Any] = {}
    for code, told in steps(page):
        assert run(code, names) == told, code
        check(names["cache"], names["store"])


def test_no_code_is_left_out(page: str) -> None:
    assert len(steps(page)) == page.count("```python") == page.count("```text")
    code = "".join(code for code, _ in steps(page))
    assert all(f".{verb}(" in code for verb in VERBS)


def test_every_chapter_draws_a_state_of_16_cells(page: str) -> None:
    chapters = page.split("\n## ")[1:]
    titles = [chapter.partition("\n")[0] for chapter in chapters]
    story = ["Fill", "Share", "Fork", "Diverge", "Remove", "Shift", "Compact", "Roll back"]
    assert titles == ["Setup", *story]
    for chapter in chapters:
        first = steps(chapter)[0][1].splitlines()
        assert "of 16 cells used" in first[0]
        assert re.fullmatch(r"[0-3+.]{16}", first[1])


def test_a_rollback_ends_where_it_began(page: str) -> None:
    *_, (_, compacted), (_, rolled_back) = steps(page)
    assert compacted.splitlines()[:2] == rolled_back.splitlines()[2:4]
