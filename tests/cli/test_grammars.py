"""``run`` and ``chat`` with a grammar: what is answered fits it, what is wrong is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.helpers import Invoke

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2, "x"]}}, "required": ["a"]}
COMMON = ("-n", "60", "--seed", "3", "--threads", "1")
HI = 'root ::= "hi" ("!" | "?")'


def test_a_schema_is_text_or_a_file(invoke: Invoke, talker: Path, tmp_path: Path) -> None:
    text = json.dumps({**SCHEMA, "additionalProperties": False})
    (tmp_path / "schema.json").write_text(text)
    for given in (text, str(tmp_path / "schema.json")):
        result = invoke("run", talker, "hello", *COMMON, "--json-schema", given)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["a"] in (1, 2, "x")


def test_an_expression_or_a_grammar(invoke: Invoke, talker: Path, tmp_path: Path) -> None:
    (tmp_path / "hi.gbnf").write_text(HI)
    (tmp_path / "hi.lark").write_text('start: "hi" ("!" | "?")')
    for option, value in (
        ("--regex", "hi[!?]"),
        ("--grammar", HI),
        ("--grammar-file", tmp_path / "hi.gbnf"),
        ("--grammar-file", tmp_path / "hi.lark"),
    ):
        result = invoke("run", talker, "hello", *COMMON, option, str(value))
        assert re.fullmatch(r"hi[!?]\n", result.stdout), result.stderr


def test_every_answer_of_a_chat_fits(invoke: Invoke, talker: Path) -> None:
    result = invoke("chat", talker, *COMMON, "--regex", "hi[!?]", stdin="hello\nand?\n/retry\n")
    assert result.exit_code == 0, result.stderr
    assert re.fullmatch(r"(hi[!?]\n+){3}", result.stdout)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--json-schema", '{"nto": 1}'], "nto: this keyword is not supported"),
        (["--json-schema", "{"], "no JSON"),
        (["--json-schema", "absent.json"], "absent.json cannot be read"),
        (["--grammar", 'root = "a"'], "line 1"),
        (["--grammar-file", "."], "cannot be read"),
        (["--regex", "("], "unclosed group"),
        (["--regex", "a", "--grammar", HI], "--regex and --grammar: give one of them"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    invoke: Invoke, talker: Path, args: list[str], named: str
) -> None:
    result = invoke("run", talker, "hello", *COMMON, *args)
    assert result.exit_code == 1
    assert named in result.stderr
    assert result.stdout.strip() == ""
