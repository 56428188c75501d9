"""``benchmarks/text.py``: what it measures, in turns with a peer that is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import text

import kvcellar as kv


class Peer:
    """Takes two seconds for everything."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, name: str) -> dict[str, dict[str, float]]:
        self.asked.append(name)
        return {"": {"seconds": 2.0, "count": 1}}


def test_every_part_is_measured_in_turns(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "N_BYTES", 2000)
    monkeypatch.setattr(text, "N_TURNS", 4)
    monkeypatch.setattr(text, "N_SAMPLES", 2)
    peer: Any = Peer()
    names = list(text.NAMES)
    with kv.Model.from_gguf(smollm2_path, n_threads=1) as model:
        found = text.measure(model, peer, names, repeats=3)
    assert peer.asked == [name for name in names for _ in range(4)]
    assert found["tokenise"]["peer"] == [2.0] * 3
    assert found["sample"]["peer"] == [1.0] * 3  # of one token
    assert found["mask"]["peer"][0] < 0.2
    lines = list(text.table(found))
    assert [line.split()[0] for line in lines[1:] if line[0] != " "] == names
    assert "Hugging Face" in lines[2]
    mine, ratio = float(lines[1].split()[1]), float(lines[1].split("]")[1].split()[1])
    assert ratio == pytest.approx(2000 / mine, rel=0.02)


def test_the_text_is_mixed_and_the_same_each_time() -> None:
    made = text.mixed_text(5000)
    assert made == text.mixed_text(5000)
    assert 5000 <= len(made.encode()) < 5500
    assert all(part in made for part in ("cellar", "int:", "🦊", "Где", "2026-05-04"))
