"""Finding and checking libggml."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import pytest

from kvcellar.backends.ggml.library import ENV, SUPPORTED, Library, _is_supported, _paths_in, load
from kvcellar.errors import LibraryError
from tests.backends.helpers import run_python

LOAD = f"""
from kvcellar.backends.ggml.library import load
from kvcellar.errors import LibraryError
try:
    print(load().origin)
except LibraryError as error:
    print("{LibraryError.__name__}:", error)
"""


def test_loading_happens_once() -> None:
    assert load() is load()
    assert load().version.startswith(".".join(map(str, SUPPORTED)))


def test_the_folder_of_the_wheel_may_be_named() -> None:
    folder = load().origin
    result = run_python(LOAD, **{ENV: folder})
    assert result.stdout.strip() == f"{ENV}={folder}", result.stderr


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    result = run_python(LOAD, **{ENV: str(tmp_path / "nowhere")})
    assert result.stdout.startswith("LibraryError:")
    assert "nowhere does not exist" in result.stdout


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    result = run_python(LOAD, **{ENV: str(tmp_path)})
    assert result.stdout.startswith("LibraryError: no libggml in")


def test_a_file_that_is_no_library_is_an_error(tmp_path: Path) -> None:
    fake = tmp_path / "libggml-base.so"
    fake.write_bytes(b"\x7fELF, or so it says")
    with pytest.raises(LibraryError, match="cannot load libggml"):
        Library([fake], "here")
    assert run_python(LOAD, **{ENV: str(tmp_path)}).stdout.startswith("LibraryError:")


def test_another_library_is_an_error() -> None:
    name = ctypes.util.find_library("m")
    if name is None:
        pytest.skip("no library of mathematics to mistake for ggml")
    with pytest.raises(LibraryError, match="is not a libggml"):
        Library([Path(name)], "libm")


def test_half_of_ggml_is_an_error() -> None:
    base = [path for path in _paths_in(Path(load().origin)) if "base" in path.name]
    with pytest.raises(LibraryError, match=r"lacks .*ggml_graph_compute"):
        Library(base, "half")


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.20.0", True),
        ("0.20.2", True),
        ("0.20.2-dev", True),
        ("0.21.0", False),
        ("0.2.0", False),
        ("1.20.0", False),
        ("0.200.1", False),
        ("", False),
        ("0", False),
    ],
)
def test_only_the_minor_version_the_structures_belong_to_fits(version: str, fits: bool) -> None:
    assert _is_supported(version) is fits


def test_another_version_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = _paths_in(Path(load().origin))
    monkeypatch.setattr("kvcellar.backends.ggml.library.SUPPORTED", (0, 99))
    with pytest.raises(LibraryError, match=r"is ggml 0\.20.* needs 0\.99\.x: install"):
        Library(paths, "old")


def test_tensors_of_another_size_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = _paths_in(Path(load().origin))
    monkeypatch.setattr("kvcellar.backends.ggml.library.OBJECT_SIZE", 24)
    with pytest.raises(LibraryError, match="has tensors of"):
        Library(paths, "odd")


def test_the_absence_of_the_wheel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(LibraryError, match="pip install libggml-python"):
        load.__wrapped__()


def test_an_unknown_function_is_named() -> None:
    with pytest.raises(AttributeError, match="ggml_frobnicate"):
        load().api.ggml_frobnicate()
