"""llama.cpp loads what we write, and we what it writes, with the same logits afterwards.

This asks a running llama.cpp, in the environment of ``KVCELLAR_PEER_PYTHON``, and is collected only
where that is named: llama-cpp-python has no wheels. What llama.cpp wrote and computed once is
recorded, and compared everywhere: files of SmolLM2 in ``test_llama_files.py``, logits of every
architecture in ``test_golden_archs.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.runtime.context import save_llama_file
from kvcellar.testing.golden import nmse
from kvcellar.types import Float32Array
from tests.runtime.archs import TOLERANCE, opened, text

PEER = Path(__file__).with_name("llama_peer.py")
TOKENS, THEN = text(1, 50), [5, 9, 77]  # longer than the windows, which are 32
CASES: list[tuple[str, str, bool]] = [
    ("llama-dense", "f16", True),
    ("llama-dense", "f16", False),
    ("llama-dense", "q8_0", True),
    ("qwen3-dense", "q4_0", True),
    ("gpt2-dense", "f16", True),
    ("deepseek2-moe", "f16", True),
    ("gemma3-dense", "f16", True),
    ("gemma3-dense", "q8_0", True),
    ("falcon-h1-dense", "f16", True),
    ("jamba-dense", "q8_0", True),
    ("mamba-dense", "f16", True),
    ("mamba2-dense", "f16", True),
]
FILES = [(*case, is_session) for case in CASES for is_session in (False, True)]
LOOSE = {"f16": TOLERANCE, "q8_0": 5e-5, "q4_0": 5e-5}
"""Rounding decides which of two neighbours a quantised value becomes."""


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter that has llama-cpp-python."""
    return os.environ["KVCELLAR_PEER_PYTHON"]


def named(folder: Path, arch: str, kind: str, flash_attn: bool, is_session: bool) -> str:
    return str(folder / f"{arch}.{kind}.{flash_attn}.{'session' if is_session else 'seq'}")


def ask(python: str, shared: Path, folder: Path, do: str) -> Mapping[str, Float32Array]:
    """Have the peer load or save a file for each case; logits by the name of the file."""
    jobs: list[dict[str, Any]] = [
        {
            "do": do,
            "model": str(shared / "models" / f"{arch}.gguf"),
            "type_kv": kind,
            "flash_attn": flash_attn,
            "is_session": is_session,
            "file": named(folder, arch, kind, flash_attn, is_session),
            "tokens": TOKENS,
            "then": THEN,
        }
        for arch, kind, flash_attn, is_session in FILES
    ]
    job = folder / "job.json"
    job.write_text(json.dumps(jobs))
    subprocess.run([python, str(PEER), str(job)], check=True, capture_output=True)
    with np.load(job.with_suffix(".npz")) as results:
        return dict(results)


def test_llama_cpp_loads_what_we_write(python: str, shared: Path, tmp_path: Path) -> None:
    wanted = {}
    for arch, kind, flash_attn, is_session in FILES:
        path = named(tmp_path, arch, kind, flash_attn, is_session)
        with opened(shared, arch, type_k=kind, type_v=kind) as context:
            sequence = context.sequence(TOKENS)
            save_llama_file(context if is_session else sequence, path, v_trans=not flash_attn)
            wanted[path] = (sequence.append(THEN).logits, LOOSE[kind])
    got = ask(python, shared, tmp_path, "load")
    assert set(got) == set(wanted)
    errors = {path: nmse(got[path], logits) for path, (logits, _) in wanted.items()}
    assert all(errors[path] < bound for path, (_, bound) in wanted.items()), errors


def test_we_load_what_llama_cpp_writes(python: str, shared: Path, tmp_path: Path) -> None:
    wanted = ask(python, shared, tmp_path, "save")
    errors, bounds = {}, {}
    for arch, kind, flash_attn, is_session in FILES:
        path = named(tmp_path, arch, kind, flash_attn, is_session)
        with opened(shared, arch, type_k=kind, type_v=kind) as context:
            (loaded,) = context.load_all(path)
            context.cache.check()
            assert loaded.tokens == TOKENS
            errors[path] = nmse(loaded.append(THEN).logits, wanted[path])
            bounds[path] = LOOSE[kind]
    assert all(errors[path] < bounds[path] for path in bounds), errors
