"""A forked process computes with what no other thread was using, and is told of the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcellar.testing.gguf_writer import gguf_bytes
from kvcellar.testing.tiny_llama import TinyLlama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
]

PROGRAM = """
import os, sys, threading
from kvcellar import Model
from kvcellar.errors import ClosedError

model = Model.from_gguf(sys.argv[1], n_threads=1)
used, idle = model.context(n_ctx=64, n_seq_max=4), model.context(n_ctx=64, n_seq_max=4)
text, quiet = used.sequence([1, 2, 3]), idle.sequence([1, 2, 3])
expected = quiet.fork().append([4]).logits.tolist()
inside, done = threading.Event(), threading.Event()

def hold():
    with used.exclusive():
        inside.set()
        done.wait()

threading.Thread(target=hold, daemon=True).start()
inside.wait()
if os.fork() == 0:
    try:
        for call in (lambda: text.append([4]), text.fork, used.sequence, lambda: len(text)):
            try:
                call()
            except ClosedError as error:
                assert "forked" in str(error), error
            else:
                raise AssertionError("nothing was said")
        assert quiet.append([4]).logits.tolist() == expected
        new = model.context(n_ctx=64)
        assert new.sequence([1, 2, 3, 4]).logits.tolist() == expected
        new.close()
        model.close()
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
_, status = os.wait()
done.set()
assert text.append([4]).logits.tolist() == expected
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_what_another_thread_used_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    tiny, path = TinyLlama(), tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(tiny.metadata(), tiny.tensors()))
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
