"""Every recorded trace of llama.cpp's recurrent cache replays exactly."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest

from kvcellar.testing.recurrent_traces import RecurrentReplay
from kvcellar.testing.traces import load_traces


@pytest.mark.slow
@pytest.mark.parametrize("n_ubatch", [512, 3])
def test_recurrent_traces_replay(shared: Path, n_ubatch: int) -> None:
    traces = load_traces(shared / "golden" / "recurrent_traces.jsonl")

    assert len(traces) == 120
    for trace in traces:
        RecurrentReplay(trace, n_ubatch=n_ubatch).run()


@pytest.mark.parametrize("what", ["ret", "used", "pos", "shared", "history_len"])
def test_a_replay_notices_every_difference(shared: Path, what: str) -> None:
    trace = load_traces(shared / "golden" / "recurrent_traces.jsonl")[0]
    changed = deepcopy(trace)
    step = next(step for step in changed["steps"] if what in step["expect"])
    step["expect"][what] = "another"

    RecurrentReplay(trace).run()
    with pytest.raises(AssertionError, match="another"):
        RecurrentReplay(changed).run()
