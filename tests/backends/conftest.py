"""Fixtures of the backends' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcellar.types import MemorySpec
from tests.backends.ops_bench import NO_MEMORY, AnyBench, Bench, NumpyBench, OpenBench


@pytest.fixture(params=[Bench, NumpyBench], ids=["ggml", "numpy"])
def open_bench(request: pytest.FixtureRequest) -> Iterator[OpenBench]:
    """Opens benches of each backend, which are closed in the end."""
    made: list[AnyBench] = []

    def opened(spec: MemorySpec = NO_MEMORY) -> AnyBench:
        made.append(request.param(spec))
        return made[-1]

    yield opened
    for bench in made:
        bench.close()


@pytest.fixture
def bench(open_bench: OpenBench) -> AnyBench:
    """A bench without memory, of each backend."""
    return open_bench()
