"""Fixtures of the ggml backend's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcellar.testing.tiny_llama import TinyLlama
from tests.backends.helpers import Rig
from tests.backends.ops_bench import Bench


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A llama of two layers."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    path.write_bytes(TinyLlama().to_bytes())
    made = Rig(path)
    yield made
    made.close()


@pytest.fixture
def opened() -> Iterator[list[Bench]]:
    """Benches put in here are closed in the end."""
    benches: list[Bench] = []
    yield benches
    for bench in benches:
        bench.close()


@pytest.fixture
def bench(opened: list[Bench]) -> Bench:
    """A bench without memory."""
    opened.append(Bench())
    return opened[0]
