"""What the checker of imports finds in packages that are made to have a fault each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.import_graph import Import, ImportGraph

Make = Callable[[dict[str, str]], ImportGraph]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """The graph of a package ``p`` with these files."""

    def write(files: dict[str, str]) -> ImportGraph:
        for name, text in {"__init__": "", **files}.items():
            path = tmp_path / "p" / f"{name}.py"
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(text)
        return ImportGraph(tmp_path / "p")

    return write


@pytest.mark.parametrize(
    "statement",
    [
        "import p.b",
        "import p.b as other",
        "from p import b",
        "from p import b as other",
        "from p.b import x",
        "from p.b import x as y",
        "def f():\n    from p.b import x",
        "class C:\n    def f(self):\n        import os, p.b",
        "try:\n    import p.b\nexcept ImportError:\n    pass",
        "with f():\n    import p.b",
        "if True:\n    pass\nelse:\n    import p.b",
    ],
)
def test_an_import_is_found_however_it_is_written(make: Make, statement: str) -> None:
    graph = make({"a": statement, "b": "x = 1"})
    assert graph.imports == {Import("p.a", "p.b")}
    assert graph.importers("p.b") == {"p.a"}
    assert graph.importers("p.a") == set()


@pytest.mark.parametrize("test", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_imports_for_types_are_told_apart(make: Make, test: str) -> None:
    text = f"if {test}:\n    from p.b import x\nelse:\n    import p.c\nimport p.d"
    graph = make({"a": text, "b": "x = 1", "c": "", "d": ""})
    assert graph.imports == {
        Import("p.a", "p.b", for_types=True),
        Import("p.a", "p.c"),
        Import("p.a", "p.d"),
    }


@pytest.mark.parametrize("value", ["p.b", "p.b:x"])
def test_a_module_imported_by_its_name_as_text(make: Make, value: str) -> None:
    graph = make({"a": f"names = {{'b': {value!r}}}", "b": "import p.a", "c": "'p is a word'"})
    assert Import("p.a", "p.b", as_text=True) in graph.imports
    assert graph.importers("p.b") == {"p.a"}
    assert graph.importers("p") == set()
    assert graph.circles() == []


def test_what_an_init_passes_on_is_imported_from_where_it_is_written(make: Make) -> None:
    graph = make(
        {
            "__init__": "from p.q import x",
            "q/__init__": "from p.q.deep import x\nfrom os import path\nhere = 1",
            "q/deep": "x = 1",
            "a": "from p import x",
            "b": "from p.q import x",
            "c": "from p.q import here",
            "d": "from p.q import path",
        }
    )
    found = {
        name: {one.target for one in graph.imports if one.source == f"p.{name}"} for name in "abcd"
    }
    assert found == {"a": {"p.q.deep"}, "b": {"p.q.deep"}, "c": {"p.q"}, "d": {"p.q"}}
    assert graph.importers("p.q.deep") == {"p", "p.q", "p.a", "p.b"}
    assert graph.circles() == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a": "import p.b", "b": "import p.c", "c": ""}, []),
        ({"a": "import p.b", "b": "import p.a"}, [["p.a", "p.b"]]),
        ({"a": "import p.b", "b": "def f():\n    import p.a"}, [["p.a", "p.b"]]),
        ({"a": "import p.b", "b": "if TYPE_CHECKING:\n    import p.a"}, [["p.a", "p.b"]]),
        (
            {"a": "import p.b", "b": "import p.c", "c": "from p import a", "d": "import p.a"},
            [["p.a", "p.b", "p.c"]],
        ),
        (
            {"a": "import p.b", "b": "import p.a", "c": "import p.a, p.d", "d": "import p.c"},
            [["p.a", "p.b"], ["p.c", "p.d"]],
        ),
        ({"q/__init__": "from p.q.a import x", "q/a": "import p.q\nx = 1"}, [["p.q", "p.q.a"]]),
        ({"q/__init__": "from p.q.a import x", "q/a": "from p.q.b import y", "q/b": ""}, []),
        ({"a": "import p.a"}, []),
    ],
)
def test_circles(make: Make, files: dict[str, str], expected: list[list[str]]) -> None:
    assert make(files).circles() == expected


def test_some_modules_may_name_each_other_as_types(make: Make) -> None:
    for_types = "if TYPE_CHECKING:\n    import p."
    graph = make({"a": "import p.b", "b": f"{for_types}a", "c": f"{for_types}a", "d": "import p.c"})
    assert graph.circles() == [["p.a", "p.b"]]
    assert graph.circles(types_among=frozenset({"p.a", "p.b"})) == []
    assert graph.circles(types_among=frozenset({"p.a", "p.c"})) == [["p.a", "p.b"]]
    real = make({"b": "import p.a"})
    assert real.circles(types_among=frozenset({"p.a", "p.b"})) == [["p.a", "p.b"]]


def test_small_files_with_one_importer(make: Make) -> None:
    graph = make(
        {
            "one": "from p import small, large, shared",
            "two": "import p.shared",
            "small": "x = 1\n" * 59,
            "large": "x = 1\n" * 60,
            "shared": "x = 1\n",
            "unused": "x = 1\n",
            "__main__": "import p.q",
            "q/__init__": "from p import one, two",
        }
    )
    assert graph.n_lines("p.small") == 59
    assert graph.with_one_importer(below=60) == {"p.one": "p.q", "p.small": "p.one", "p.two": "p.q"}
