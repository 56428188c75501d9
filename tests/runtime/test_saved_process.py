"""Save, new process, load, go on: the same logits, bit for bit.

For every tiny model, K/V types, ways V lies, with the attention kernel and without, and for texts
longer than windows. Where the cells were scattered and are not any more, what was loaded is equal
bit for bit, and what follows but for the order of sums.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.batch import Batch
from kvcellar.cache.attention import AttentionCache
from kvcellar.runtime.context import Context
from kvcellar.runtime.sequence import Sequence
from kvcellar.testing.golden import nmse
from kvcellar.types import Float32Array
from tests.runtime.archs import ARCHS, F32, HYBRID, PLAIN, SAME, WINDOWED, opened, text
from tests.runtime.saved_process import go_on

STEPS = [text(2, 1), text(3, 1), text(4, 9), text(5, 1)]
SIZES: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 4, "n_ubatch": 16}


@dataclass(frozen=True)
class Case:
    """A model, options of its context, and whether its cells are scattered."""

    arch: str
    options: dict[str, Any]
    scattered: bool = False
    n: int = 60

    @property
    def by_position(self) -> bool:
        """Whether our kernel attends, which takes cells by position, wherever they lie."""
        types = {self.options.get(name, "f16") for name in ("type_k", "type_v")}
        has_kernel = find_spec("llvmlite") is not None and self.options.get("kernel") is not False
        return has_kernel and self.arch != "deepseek2-moe" and types <= {"f16", "q8_0", "q4_0"}

    def __str__(self) -> str:
        said = [f"{name}={value}" for name, value in self.options.items()]
        return " ".join([self.arch, *said, *(["scattered"] if self.scattered else []), str(self.n)])


def _types(k: str, v: str) -> dict[str, Any]:
    return {"type_k": k, "type_v": v}


CASES = [
    *(Case(arch, {}) for arch in ARCHS),
    *(Case(arch, _types("f32", "f32")) for arch in ("llama-dense", "gemma3-dense", "jamba-dense")),
    *(
        Case(arch, _types("q8_0", "q4_0"))
        for arch in ("llama-dense", "gemma3-dense", "jamba-dense", "lfm2-dense")
    ),
    Case("llama-dense", _types("q4_0", "q8_0")),
    Case("deepseek2-moe", _types("q8_0", "q8_0")),
    *(
        Case(arch, {"flash_attn": False, "kernel": False})
        for arch in ("llama-dense", "gemma2-dense", "falcon-h1-dense", "gpt2-dense")
    ),
    *(Case(arch, {"flash_attn": True, "kernel": False}) for arch in ("llama-dense", "gpt-oss-moe")),
    Case("gemma3-dense", {"swa_full": True}),
    *(Case(arch, {"n_ctx": 512}, n=400) for arch in WINDOWED),  # only 256 cells see a window
    Case("gemma3-dense", {"n_ctx": 512, "type_k": "q8_0", "flash_attn": False}, n=400),
    *(Case(arch, F32, True) for arch in (*PLAIN[:3], *WINDOWED, *HYBRID)),
    *(Case(arch, {}, True) for arch in ("llama-dense", *WINDOWED, *HYBRID)),
    Case("llama-dense", _types("q8_0", "q4_0"), True),
    Case("llama-dense", {"flash_attn": True, "kernel": False, **F32}, True),
    Case("llama-dense", {"flash_attn": False, "kernel": False, **F32}, True),
]


def scatter(context: Context) -> None:
    """Leave single free cells: two texts are decoded in turn, then one of them is closed."""
    first, second = context.sequence(), context.sequence()
    for start in range(0, 110, 10):
        batch = Batch()
        for token in text(start, 10):
            batch.add(token, seq_ids=first.seq_id)
            batch.add(token, seq_ids=second.seq_id)
        context.decode(batch)
    first.close()


def n_runs(context: Context, sequence: Sequence) -> int:
    """How many runs of neighbouring cells hold a text, in the order of its tokens."""
    cache = context.cache.parts[0]
    assert isinstance(cache, AttentionCache)
    cells = cache.table.cells_of(sequence.seq_id)
    return 1 + int(np.count_nonzero(np.diff(cells) != 1))


def uninterrupted(case: Case, shared: Path, path: Path) -> Float32Array:
    """Save a text and go on with it."""
    with opened(shared, case.arch, **{**SIZES, **case.options}) as context:
        if case.scattered:
            scatter(context)
        sequence = context.sequence(text(1, case.n))
        assert n_runs(context, sequence) > 5 if case.scattered else True
        sequence.save(path)
        return go_on(sequence, STEPS)


@pytest.fixture(scope="module")
def outcomes(
    shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Float32Array, Float32Array]]:
    """Of each case the logits of a run that went on, and of one that another process did."""
    folder = tmp_path_factory.mktemp("saved")
    wanted, jobs = {}, []
    for i, case in enumerate(CASES):
        path, out = folder / f"{i}.safetensors", folder / f"{i}.npy"
        wanted[str(case)] = uninterrupted(case, shared, path)
        model = shared / "models" / f"{case.arch}.gguf"
        options = {**SIZES, **case.options}
        job = {"model": str(model), "options": options, "path": str(path), "steps": STEPS}
        jobs.append({**job, "out": str(out)})
    listed = folder / "jobs.json"
    listed.write_text(json.dumps(jobs))
    script = Path(__file__).with_name("saved_process.py")
    result = subprocess.run([sys.executable, script, listed], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {
        str(case): (wanted[str(case)], np.load(folder / f"{i}.npy")) for i, case in enumerate(CASES)
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_another_process_goes_on_with_the_same_logits(
    outcomes: dict[str, tuple[Float32Array, Float32Array]], case: Case
) -> None:
    wanted, got = outcomes[str(case)]
    assert np.isfinite(wanted).all()
    assert np.array_equal(wanted[0], got[0])
    if case.scattered and not case.by_position:  # sums go over cells in another order there
        assert max(nmse(a, b) for a, b in zip(got, wanted, strict=True)) < SAME
    else:
        assert [np.array_equal(a, b) for a, b in zip(wanted, got, strict=True)] == [True] * 5
