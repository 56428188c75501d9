"""Snapshots that version 0.1.0 wrote before its modules were moved load, and go on as they did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.testing.golden import nmse
from tests.runtime.archs import opened

RECORDED = Path(__file__).parent / "recorded"
TEXTS: dict[str, list[dict[str, Any]]] = json.loads((RECORDED / "texts.json").read_text("utf-8"))


@pytest.mark.parametrize("arch", TEXTS)
def test_recorded_snapshots_go_on(arch: str, shared: Path) -> None:
    with opened(shared, arch, type_k="q8_0", type_v="q8_0") as context:
        loaded = context.load_all(RECORDED / f"{arch}.safetensors")
        for sequence, text in zip(loaded, TEXTS[arch], strict=True):
            assert sequence.tokens == text["tokens"]
            assert sequence.positions.tolist() == text["positions"]
            assert sequence.inexact_from == text["inexact_from"]
            logits = sequence.append([1, 2, 3]).logits
            assert (
                nmse(logits, np.array(text["logits"], np.float32)) < 2e-5
            )  # as of recorded logits
