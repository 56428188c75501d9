"""Loads snapshots in a process of its own and goes on with them: ``python saved_process.py JOBS``.

JOBS is a JSON file with a list of what to load into which model; what came of each is written into
``.npy`` files. A job: ``model``, ``options`` of the context, ``path``, ``steps`` (tokens to append,
a list a step) and ``out``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvcellar.runtime.model import Model
from kvcellar.runtime.sequence import Sequence
from kvcellar.types import Float32Array


def go_on(sequence: Sequence, steps: list[list[int]]) -> Float32Array:
    """The logits right now and after each step, ``[1 + n_steps, n_vocab]``."""
    rows = [sequence.logits.copy()]
    rows += [sequence.append(step).logits.copy() for step in steps]
    return np.stack(rows)


def run(job: dict[str, Any]) -> None:
    """Do one job."""
    with Model.from_gguf(job["model"], n_threads=1) as model:
        context = model.context(**job["options"])
        loaded = context.load(job["path"])
        assert loaded.logits is not None
        assert context.timings.n_decodes == 0, "logits were computed that the file has"
        np.save(job["out"], go_on(loaded, job["steps"]))


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text()):
        run(one)
