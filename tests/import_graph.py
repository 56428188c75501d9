"""Which modules of a package import which, as their text says.

1. An import counts wherever it stands: in a function and for type checkers too.
2. A name that a package's ``__init__`` only passes on counts as imported from where it is written,
   so ``from package import name`` is an import of the module that defines it.
3. That importing a module runs the ``__init__`` of the packages around it does not count.
4. A module that is imported by its name as text (``import_module``) counts as imported, but makes
   no circle: that is how one is avoided.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Import(NamedTuple):
    """One import of a module, for type checkers only or by its name as text."""

    source: str
    target: str
    for_types: bool = False
    as_text: bool = False


class _Written(NamedTuple):
    """An import as it is written; no name for ``import module``."""

    module: str
    name: str | None
    for_types: bool


class ImportGraph:
    """The modules below a package's folder, by their full names, and the imports among them."""

    def __init__(self, package: Path) -> None:
        self.paths: dict[str, Path] = {}
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            self.paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        trees = {name: ast.parse(path.read_text("utf-8")) for name, path in self.paths.items()}
        self._written = {name: list(_written(tree)) for name, tree in trees.items()}
        self.imports = set[Import]()
        for source, tree in trees.items():
            found = [*self._direct(source), *self._as_text(source, tree)]
            self.imports.update(one for one in found if one.target != source)

    def n_lines(self, module: str) -> int:
        """How long its file is."""
        return self.paths[module].read_text("utf-8").count("\n")

    def with_one_importer(self, *, below: int) -> dict[str, str]:
        """Files of fewer lines than that which one other imports, and which that is.

        ``__init__`` and ``__main__`` have their names for other reasons.
        """
        found: dict[str, str] = {}
        for module, path in self.paths.items():
            named = path.name not in ("__init__.py", "__main__.py")
            if named and self.n_lines(module) < below:
                first, *others = sorted(self.importers(module)) or ("", "")
                if not others:
                    found[module] = first
        return found

    def importers(self, module: str) -> set[str]:
        """The modules that import it in any way."""
        return {one.source for one in self.imports if one.target == module}

    def circles(self, *, types_among: frozenset[str] = frozenset()) -> list[list[str]]:
        """Groups of modules that import one another, directly or not.

        Imports for type checkers among ``types_among`` do not count.
        """
        targets: dict[str, set[str]] = {name: set() for name in self.paths}
        for one in self.imports:
            excused = one.for_types and {one.source, one.target} <= types_among
            if not (one.as_text or excused):
                targets[one.source].add(one.target)
        reached = {name: _reached(name, targets) for name in targets}
        found = {
            tuple(sorted(other for other in reached[name] if name in reached[other]))
            for name in reached
            if name in reached[name]
        }
        return sorted(map(list, found))

    def _is_package(self, module: str) -> bool:
        return self.paths[module].name == "__init__.py"

    def _direct(self, source: str) -> Iterator[Import]:
        for module, name, for_types in self._written[source]:
            target = self._home(module, name)
            if target is not None:
                yield Import(source, target, for_types)

    def _home(self, module: str, name: str | None) -> str | None:
        """Where a name of a module is written; None if that is not in the package."""
        if f"{module}.{name}" in self.paths:
            return f"{module}.{name}"
        if module not in self.paths:
            return None
        if name is not None and self._is_package(module):
            for passed_on in self._written[module]:
                if passed_on.name == name and passed_on.module != module:
                    return self._home(passed_on.module, name) or module
        return module

    def _as_text(self, source: str, tree: ast.Module) -> Iterator[Import]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                target = node.value.partition(":")[0]  # also "module:name"
                if "." in target and target in self.paths:
                    yield Import(source, target, as_text=True)


def _written(tree: ast.AST, *, for_types: bool = False) -> Iterator[_Written]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Written(alias.name, None, for_types)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield _Written(node.module or "", alias.name, for_types)
        elif isinstance(node, ast.If) and _asks_for_types(node.test):
            for part in node.body:
                yield from _written(ast.Module([part], []), for_types=True)
            for part in node.orelse:
                yield from _written(ast.Module([part], []), for_types=for_types)
        else:
            yield from _written(node, for_types=for_types)


def _asks_for_types(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def _reached(start: str, targets: dict[str, set[str]]) -> set[str]:
    found, todo = set[str](), [start]
    while todo:
        new = targets[todo.pop()] - found
        found |= new
        todo += new
    return found
