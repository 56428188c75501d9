"""Fixtures of the backends' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.ops_bench import AnyBench, Bench, NumpyBench


@pytest.fixture(params=["ggml", "numpy"])
def bench(request: pytest.FixtureRequest) -> Iterator[AnyBench]:
    """A bench without memory, of each backend."""
    made: AnyBench = Bench() if request.param == "ggml" else NumpyBench()
    yield made
    made.close()
