"""Threads and computing."""

from __future__ import annotations

import gc
import re
from typing import Any

import numpy as np
import pytest

from kvcellar.backends.checks import MAX_THREADS
from kvcellar.backends.ggml.backend import GgmlBackend, default_threads
from kvcellar.backends.ggml.binding import ABORTED
from kvcellar.errors import ClosedError, ComputeError, OptionError
from kvcellar.runtime.model import Model
from kvcellar.testing.plans import causal_plan
from tests.backends.helpers import Rig

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("n_threads", [0, -1, MAX_THREADS + 1, True, False, 2**70])
def test_thread_counts_out_of_range_are_refused(n_threads: int) -> None:
    with pytest.raises(OptionError, match=rf"n_threads={n_threads}: must be in \[1, 512\]"):
        GgmlBackend(n_threads)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ggml", "numpy"])
@pytest.mark.parametrize("n_threads", [1.5, 2.0, "2", [1], np.float32(1)])
@pytest.mark.filterwarnings("error")  # what __del__ raises is but a warning
def test_what_is_no_whole_number_is_refused(rig: Rig, backend: str, n_threads: Any) -> None:
    named = re.escape(f"n_threads={n_threads!r}: must be a whole number")
    with pytest.raises(OptionError, match=named):
        Model.from_gguf(rig.file.path, n_threads=n_threads, backend=backend)
    gc.collect()


def test_whole_numbers_of_any_kind_are_taken() -> None:
    backend = GgmlBackend(np.int64(2))
    assert (backend.n_threads, type(backend.n_threads)) == (2, int)
    backend.close()


def test_no_more_threads_are_the_default_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(1000)), raising=False)
    assert default_threads() == MAX_THREADS
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert default_threads() == 1


def test_by_default_all_processors_are_used() -> None:
    backend = GgmlBackend()
    assert backend.n_threads == default_threads() >= 1
    backend.close()


def test_closing_twice_is_fine_and_computing_afterwards_is_not() -> None:
    backend = GgmlBackend(1)
    backend.close()
    backend.close()
    with pytest.raises(ClosedError, match="closed"):
        backend.compute(0)


@pytest.mark.parametrize(
    ("status", "message"), [(ABORTED, "was aborted"), (-1, "failed with status -1")]
)
def test_a_status_other_than_success_is_an_error(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, status: int, message: str
) -> None:
    _, executor = rig.executor()
    monkeypatch.setattr(rig.backend.api, "ggml_graph_compute", lambda *_: status)
    with pytest.raises(ComputeError, match=message):
        executor.run(causal_plan([1]))
    monkeypatch.undo()
    assert np.isfinite(executor.run(causal_plan([1]))).all()


def test_logits_do_not_depend_on_the_number_of_threads(rig: Rig) -> None:
    _, executor = rig.executor()
    expected = executor.run(causal_plan([1, 2, 3])).copy()
    for n_threads in (1, 3):
        other = Rig(rig.file.path, n_threads)
        got = other.executor()[1].run(causal_plan([1, 2, 3]))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
        other.close()
