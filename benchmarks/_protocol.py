"""How the benchmark talks to an engine: one process each, a JSON line a question.

Engines cannot share a process: each brings its own libggml under the same name. Only one is asked
at a time, and an idle one sleeps, so they do not slow each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Worker:
    """An engine in a process of its own.

    Args:
        script: the worker's file beside this one.
        settings: passed to it at the start.
        python: the interpreter it runs in.

    Raises:
        RuntimeError: it does not start; the message is its own.
    """

    def __init__(self, script: str, settings: dict[str, Any], python: str = sys.executable) -> None:
        self._process = subprocess.Popen(
            [python, str(HERE / script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.hello = self._read()

    def ask(self, question: str, **arguments: Any) -> dict[str, Any]:
        """Ask and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ask": question, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def serve(hello: dict[str, Any], answers: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """A worker's main loop: answer until the input ends."""
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(answers[question.pop("ask")](**question)), flush=True)
