"""Whether anything can be compiled here, and what a model does where nothing can."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar.backends.ggml.jit.compiler import OLDEST, why_no_llvm, why_not
from kvcellar.backends.ggml.jit.product import why_no_products
from kvcellar.errors import OptionError
from kvcellar.runtime.model import Model

UNLOADABLE = 'raise OSError("libllvmlite.so: cannot open shared object file")'
AT_FIRST_CALL = f"def get_process_triple():\n    {UNLOADABLE}\n"
BROKEN = {
    "too old": ("__version__ = '0.43.0'", "", r"llvmlite 0\.43\.0 is too old: .*llvmlite>=0\.44"),
    "unloadable": ("__version__ = '0.50.0'", UNLOADABLE, r"cannot open shared object file\): pip"),
    "at the first call": ("", AT_FIRST_CALL, r"cannot be loaded \(libllvmlite"),
    "half installed": ("", "from llvmlite import nothing", "cannot be loaded .*--force-reinstall"),
    "wrong package": ("", "", "cannot be loaded .*get_process_triple"),
    "out of step": ("", "raise RuntimeError('LLVM 14')", r"cannot be loaded \(LLVM 14\)"),
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that was loaded or found out counts, neither before nor after."""
    for name in _loaded():
        monkeypatch.delitem(sys.modules, name)
    why_no_llvm.cache_clear()
    yield
    for name in _loaded():
        del sys.modules[name]
    why_no_llvm.cache_clear()


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]


@pytest.fixture(params=BROKEN)
def reason(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An llvmlite that is of no use, and why."""
    package, binding, why = BROKEN[request.param]
    (tmp_path / "llvmlite").mkdir()
    (tmp_path / "llvmlite/__init__.py").write_text(package + "\n")
    (tmp_path / "llvmlite/binding.py").write_text(binding + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    return why


def test_what_is_of_no_use_is_named_with_the_remedy(reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        assert (why_not(), why_no_products()) == (None, None)


def test_a_model_does_without(shared: Path, reason: str) -> None:
    with Model.from_gguf(shared / "models" / "llama-dense.gguf", n_threads=1) as model:
        with model.context(n_ctx=64) as context:
            assert len(context.sequence([1, 2, 3])) == 3
        with pytest.raises(OptionError, match=f"kernel=True: .*{reason}"):
            model.context(n_ctx=64, kernel=True)


def test_importing_the_backend_loads_no_llvmlite() -> None:
    code = "import sys, kvcellar.backends.ggml.model_file; print('llvmlite' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_without_llvmlite_the_reason_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    assert why_not() == "llvmlite is not installed: pip install 'kvcellar[fast]'"


def test_it_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = why_not()
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    assert why_not() == first


@pytest.mark.parametrize("version", ["0.44.0", "0.44.0rc2", "0.100.1", "1.0", "0+unknown"])
def test_others_are_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    (tmp_path / "llvmlite").mkdir()
    (tmp_path / "llvmlite/__init__.py").write_text(f"__version__ = {version!r}\n")
    (tmp_path / "llvmlite/binding.py").write_text("def get_process_triple():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert why_no_llvm() is None


def test_the_package_asks_for_what_is_needed() -> None:
    text = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    assert f'fast = ["llvmlite>={OLDEST[0]}.{OLDEST[1]}"]' in text
