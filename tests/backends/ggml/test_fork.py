"""A forked process computes with threads of its own, and leaves those of its parent alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.backends.helpers import run_python

pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here"),
]

SETUP = """
import gc, os, signal, sys, threading, warnings
from kvcellar import Model
warnings.simplefilter("ignore")  # forking beside threads is what this is about
model = Model.from_gguf({path!r}, n_threads=2)
context = model.context(n_ctx=64)
first = context.sequence([1, 2, 3])

def in_child(work):
    child = os.fork()
    if not child:
        signal.alarm(15)  # one that hangs ends
        work()
        sys.stdout.flush()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status
"""

DECODE = """
def work():
    second = context.sequence([1, 2, 3])
    assert (second.logits == expected).all()
    in_child(lambda: print(len(context.sequence([4, 5])), "in the grandchild"))

expected = first.logits.copy()
in_child(work)
print("kept" if (context.sequence([1, 2, 3]).logits == expected).all() else "changed")
"""

CLOSE = """
def work():
    global model, context, first
    context.close()
    model.close()
    del model, context, first
    gc.collect()
    print("closed")

in_child(work)
first.append([4])
in_child(lambda: (first.append([5]), work()))
model.close()
"""

BUSY = """
backend = model._file._backend
inside, go_on = threading.Event(), threading.Event()
compute = backend.api.ggml_graph_compute

def slow(*args):
    if threading.current_thread() is other:
        inside.set()
        go_on.wait()
    return compute(*args)

backend.api.ggml_graph_compute = slow
elsewhere = model.context(n_ctx=64)
other = threading.Thread(target=lambda: elsewhere.sequence([7, 8]))
other.start()
inside.wait()
in_child(lambda: print(len(context.sequence([4, 5, 6]))))
go_on.set()
other.join()
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (DECODE, "2 in the grandchild\nkept"),
        (CLOSE, "closed\nclosed"),
        (BUSY, "3"),
    ],
    ids=["decoding", "closing", "while another thread computes"],
)
def test_a_forked_process(shared: Path, code: str, said: str) -> None:
    path = str(shared / "models" / "llama-dense.gguf")
    result = run_python(SETUP.format(path=path) + code)
    assert (result.returncode, result.stdout.strip()) == (0, said), result.stderr
