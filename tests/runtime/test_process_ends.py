"""Ends that a process must survive: of Python while a thread decodes, of memory, of patience."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcellar.testing.gguf_writer import gguf_bytes
from kvcellar.testing.tiny_llama import TinyLlama

pytestmark = pytest.mark.slow

DAEMON = """
import sys, threading, time
from kvcellar import Model

model = Model.from_gguf(sys.argv[1], n_threads=int(sys.argv[4]), backend=sys.argv[2])
context = model.context(n_ctx=256, n_ubatch=16)
begun = threading.Event()

def decode():
    while True:
        sequence = context.sequence(range(64))
        begun.set()
        sequence.append([1])
        sequence.close()

threading.Thread(target=decode, daemon=True).start()
begun.wait()
time.sleep(float(sys.argv[3]))
"""

SHORT = """
import resource, sys
from kvcellar import Model
from kvcellar.errors import KVCellarError

held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = held + int(sys.argv[2]) * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    with Model.from_gguf(sys.argv[1], n_threads=1) as model, model.context(n_ctx=4096) as context:
        context.sequence(range(100)).fork().append([1])
except (KVCellarError, MemoryError) as error:
    print(type(error).__name__)
else:
    print("done")
"""

PREFILL = """
import signal, sys, time
from kvcellar import Model

model = Model.from_gguf(sys.argv[1], n_threads=1)
context = model.context(n_ctx=8192, n_ubatch=8192)
sequence = context.sequence([1])
sent = []

def ring(*_):
    sent.append(time.perf_counter())
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, ring)
start = time.perf_counter()
signal.setitimer(signal.ITIMER_REAL, 1.0)
try:
    sequence.append([7] * 8000)
except KeyboardInterrupt:
    took = time.perf_counter() - start
    assert took < 4, f"it came after {took} s"
else:
    raise AssertionError("8000 tokens in a second?")
assert sequence.tokens == [1] and context.cache.used == 1
context.cache.check()
assert len(sequence.append([2, 3]).logits) == model.spec.n_vocab
print("fine")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tiny, path = TinyLlama(n_vocab=256), tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(tiny.metadata(), tiny.tensors()))
    return path


def run(program: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("backend", "n_threads", "delay"),
    [
        *(("ggml", 1, delay) for delay in (0.0, 0.01, 0.2)),
        ("ggml", 2, 0.05),
        *(("numpy", 1, delay) for delay in (0.0, 0.05)),
    ],
)
def test_python_ends_while_a_daemon_thread_decodes(
    path: Path, backend: str, n_threads: int, delay: float
) -> None:
    result = run(DAEMON, path, backend, delay, n_threads)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
def test_little_memory_is_an_error_and_no_signal(path: Path) -> None:
    found = set()
    for mib in (1, 16, 48, 80, 112, 160, 256, 2048):
        result = run(SHORT, path, mib)
        assert result.returncode == 0, (mib, result.returncode, result.stderr[-300:])
        found.add(result.stdout.strip())
    assert "done" in found
    assert len(found) > 1


def test_an_alarm_ends_a_prefill_of_one_large_microbatch(smollm2_path: Path) -> None:
    result = run(PREFILL, smollm2_path)
    assert (result.stdout.strip(), result.stderr) == ("fine", "")
