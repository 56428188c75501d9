"""How the suite talks to an engine: one process each, a JSON line a question.

Engines cannot share a process: each brings its own libggml under the same name. Only one is asked
at a time, and an idle one sleeps, so they do not slow each other.

A worker first says hello, then answers each question with what it measured: for each part
("" is the whole) ``seconds`` and the ``count`` of tokens or calls, or ``bytes``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
PATIENCE = 20.0  # seconds to end in
TAIL = 6  # lines of stderr that are shown

Measured = dict[str, dict[str, float]]


class EngineFailed(Exception):
    """An engine ended, or could not do what it should; the message says why."""


class NotInstalled(EngineFailed):
    """The engine's package cannot be imported."""


class Unsupported(Exception):
    """The engine has no such operation."""


class Worker:
    """An engine in a process of its own, not reached by Ctrl-C.

    Args:
        script: the worker's file; a name is looked for beside this file.
        settings: passed to it at the start.
        python: the interpreter it runs in.
        source: a folder whose packages go before those that are installed.

    Attributes:
        started: when the process was started.
        hello: what it said first.

    Raises:
        NotInstalled: its package is not there.
        EngineFailed: it does not start; the message is its own.
    """

    def __init__(
        self,
        script: str | Path,
        settings: dict[str, Any],
        python: str = sys.executable,
        source: Path | None = None,
    ) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the process)
        self.started = perf_counter()
        self._process = subprocess.Popen(
            [python, str(HERE / script), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            start_new_session=True,
            env=_environment(source),
        )
        try:
            self.hello = self._read()
        except BaseException:
            self.kill()
            raise

    def ask(self, question: str, **arguments: Any) -> Measured:
        """Ask and wait for the answer.

        Raises:
            Unsupported: the engine has no such operation.
            EngineFailed: it failed at it; nothing more can be asked.
        """
        assert self._process.stdin is not None
        line = json.dumps({"ask": question, **arguments}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # it has ended, which reading tells
            self._process.stdin.write(line)
            self._process.stdin.flush()
        measured: Measured = self._read()
        return measured

    def close(self) -> None:
        """End the process, which may take its time; twice is fine."""
        with contextlib.suppress(BrokenPipeError, ValueError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=PATIENCE)
        self.kill()

    def kill(self) -> None:
        """End the process now; twice is fine."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise EngineFailed(f"the engine ended with status {status}{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        errors = {"missing": NotInstalled, "skip": Unsupported, "error": EngineFailed}
        for key, error in errors.items():
            if key in answer:
                raise error(answer[key])
        return answer

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()[-TAIL:]
        return "".join(f"\n    {line}" for line in lines)


def _environment(source: Path | None) -> dict[str, str] | None:
    if source is None:
        return None
    paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def serve(make: Callable[[dict[str, Any]], Any]) -> None:
    """A worker's main: make the engine of the settings, then answer until the input ends.

    The engine says ``hello()``; its other methods are the questions. What a library prints goes
    to stderr, so that it cannot be taken for an answer.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        engine = make(json.loads(sys.argv[1]))
    except ImportError as error:
        _say(out, {"missing": str(error)})
        return
    except Exception as error:
        _say(out, {"error": f"{type(error).__name__}: {error}"})
        return
    _say(out, engine.hello())
    for line in sys.stdin:
        _say(out, _answer(engine, json.loads(line)))


def _answer(engine: Any, question: dict[str, Any]) -> dict[str, Any]:
    name = question.pop("ask")
    method = getattr(engine, name, None)
    if method is None:
        return {"skip": name}
    try:
        answer: dict[str, Any] = method(**question)
    except Unsupported as error:
        return {"skip": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return answer


def _say(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()
