"""Every recorded trace of llama.cpp's attention cache replays exactly."""

from __future__ import annotations

from pathlib import Path

from kvcellar.testing.traces import TraceReplay, load_traces


def test_attention_traces_replay(shared: Path) -> None:
    traces = load_traces(shared / "golden" / "attention_traces.jsonl")

    assert len(traces) == 200
    for trace in traces:
        TraceReplay(trace).run()
