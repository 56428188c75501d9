"""An engine that computes nothing: it answers with what its settings say, or comes to grief."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from _protocol import Measured, Unsupported, serve


class Fake:
    """Its settings say how each question is answered."""

    def __init__(self, settings: dict[str, Any]) -> None:
        if settings.get("missing"):
            raise ModuleNotFoundError("No module named 'nothing'")
        if settings.get("broken"):
            raise ValueError("no such model")
        self.settings = settings
        self.asked: list[str] = []

    def hello(self) -> dict[str, Any]:
        return {"version": "1.0", "seconds": {"import": 0.25, "load": 0.5}}

    def rewind(self, n: int) -> Measured:
        return self._record(f"rewind {n}", 0.0)

    def decode(self, steps: int) -> Measured:
        return self._record(f"decode {steps}", self.settings.get("seconds", 1.0), steps)

    def log(self) -> dict[str, Any]:
        return {"log": self.asked}

    def die(self) -> Measured:
        print("first words", *range(20), "last words", sep="\n", file=sys.stderr, flush=True)
        raise SystemExit(3)

    def fail(self) -> Measured:
        raise RuntimeError("cannot compute")

    def refuse(self) -> Measured:
        raise Unsupported("several sequences")

    def chatter(self) -> Measured:
        print(json.dumps({"this is": "no answer"}), flush=True)
        return self._record("chatter", 1.0)

    def _record(self, what: str, seconds: float, count: int = 1) -> Measured:
        self.asked.append(what)
        return {"": {"seconds": seconds, "count": count}}


if __name__ == "__main__":
    serve(Fake)
