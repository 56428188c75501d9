"""docs/architecture.md holds: who may import whom, what importing costs, how files are cut."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

import kvcellar
from kvcellar.models.registry import ARCHITECTURES
from tests.import_graph import ImportGraph

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGE = "kvcellar"
SMALL = 60  # lines
MAX_FILES, MIN_MEDIAN = 240, 140
FAMILIES = frozenset(name.partition(":")[0] for name in ARCHITECTURES.values())
REGISTRIES_AND_DATA: dict[str, str] = {}
"""Small files with one importer that stand alone all the same, and why."""

NAME_EACH_OTHER = frozenset(
    f"{PACKAGE}.runtime.{name}" for name in ("model", "context", "sequence", "generation")
)
"""These may import one another for type checkers."""

ABOVE = "the rows above"
LAZY = ("tokenizers", "jinja2", "rich", "typer", "hypothesis", "ctypes", "libggml", "llvmlite")


class Row(NamedTuple):
    """A row of the import table; names are relative to the package."""

    modules: tuple[str, ...]
    allowed: tuple[str, ...]
    outside: tuple[str, ...]


def _codes(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


def _table() -> list[Row]:
    """The import table as docs/architecture.md gives it."""
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.split("## Import table", 1)[1].split("\n## ", 1)[0]
    rows: list[Row] = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) == 3 and _codes(cells[0]):
            above = tuple(name for row in rows for name in row.modules)
            allowed = (above if ABOVE in cells[1] else ()) + _codes(cells[1])
            rows.append(Row(_codes(cells[0]), allowed, _codes(cells[2])))
    return rows


def _row_of(module: str, names: tuple[str, ...]) -> str | None:
    """The longest of the names that is the module or a package around it."""
    fitting = [name for name in names if module == name or module.startswith(f"{name}.")]
    return max(fitting, key=len, default=None)


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 2:
            parts = parts[:-1]
        found[".".join(parts[1:])] = path
    return found


def _imports(path: Path) -> set[str]:
    """Full names that a file imports anywhere: in functions and for type checkers too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


TABLE = _table()
MODULES = _modules()
ALL_NAMES = tuple(name for row in TABLE for name in row.modules)
ROW_OF = {name: row for row in TABLE for name in row.modules}


def test_the_table_was_found() -> None:
    assert len(TABLE) > 5
    assert len(set(ALL_NAMES)) == len(ALL_NAMES)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_every_name_in_the_table_exists(name: str) -> None:
    assert any(_row_of(module, (name,)) for module in MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_only_what_their_row_allows(module: str) -> None:
    home = _row_of(module, ALL_NAMES)
    assert home is not None, f"{module} belongs to no row of docs/architecture.md"
    row = ROW_OF[home]
    for name in _imports(MODULES[module]):
        top, _, inner = name.partition(".")
        if top == PACKAGE:
            target = _row_of(inner, ALL_NAMES) or "__init__"  # a public name of the package
            assert target in row.modules + row.allowed, f"{module} may not import {name}"
        elif top not in sys.stdlib_module_names:
            assert top in row.outside, f"{module} may not import {name}"


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    return ImportGraph(SOURCE / PACKAGE)


@pytest.mark.parametrize("module", MODULES)
def test_files_say_what_they_are(module: str) -> None:
    if module != "_version":
        text = MODULES[module].read_text()
        assert ast.get_docstring(ast.parse(text)), f"{module} has no docstring"


def test_a_small_file_with_one_importer_is_a_part_of_it(graph: ImportGraph) -> None:
    """Unless it is a registry, data, or a family of models."""
    found = graph.with_one_importer(below=SMALL)
    assert REGISTRIES_AND_DATA.keys() <= found.keys(), "need no exception any more"
    assert FAMILIES & found.keys(), "no family was found: are they elsewhere?"
    allowed = FAMILIES | REGISTRIES_AND_DATA.keys()
    wrong = [f"{module} into {one}" for module, one in found.items() if module not in allowed]
    assert not wrong, "to be merged:\n" + "\n".join(wrong)


def test_no_modules_import_each_other(graph: ImportGraph) -> None:
    assert NAME_EACH_OTHER & graph.paths.keys(), "none was found: are they elsewhere?"
    circles = graph.circles(types_among=NAME_EACH_OTHER)
    assert not circles, "circles:\n" + "\n".join(map(", ".join, circles))


def test_files_are_few_and_hold_an_idea_each(graph: ImportGraph) -> None:
    lengths = [graph.n_lines(module) for module in graph.paths]
    assert len(lengths) <= MAX_FILES
    assert median(lengths) >= MIN_MEDIAN


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"""
import sys
before = set(sys.modules)
import {PACKAGE}
dir({PACKAGE})
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not set(result.stdout.split()) & {*LAZY, "numpy"}


def test_public_names_resolve_and_need_no_tokenizer_until_used() -> None:
    code = f"""
import sys
import {PACKAGE} as kv
for name in kv.__all__:
    getattr(kv, name)
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
maps = "/proc/self/maps"
import os
print("ggml" if os.path.exists(maps) and "libggml" in open(maps).read() else "")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not set(result.stdout.split()) & {"tokenizers", "jinja2", "rich", "typer", "ggml"}


def test_every_error_is_a_public_name_at_once() -> None:
    code = f"""
import sys
import {PACKAGE} as kv
print(*(name for name, value in vars(kv.errors).items() if isinstance(value, type)))
print(*(name for name, value in vars(kv).items() if isinstance(value, type)))
print(set(vars(kv)) >= {{"errors"}} <= set(kv.__all__))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    defined, given, known = result.stdout.splitlines()
    assert "CacheFull" in defined.split()
    assert set(defined.split()) == set(given.split()) <= set(kvcellar.__all__)
    assert known == "True"
