"""What is measured, written once: a worker brings the primitives of its engine.

So that two engines do the same work, token counts, order of calls and clocks are the same code.
Every token is made from its place, which needs no model.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from _protocol import Measured

Row = tuple[int, int, int]  # token, position, sequence


class Engine:
    """A model, opened for one case; its methods are what can be asked.

    Attributes:
        version: of the engine.
        seconds: how long importing and loading took.
        loaded: resident bytes before there was a context.
        kv_bytes: bytes of K and V, 0 where the engine does not tell.
    """

    version = ""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.seconds: dict[str, float] = {}
        self.loaded = 0
        self.kv_bytes = 0
        start = perf_counter()
        self.bring_in()
        self.seconds["import"] = perf_counter() - start
        start = perf_counter()
        self.load()
        self.seconds["load"] = perf_counter() - start
        self.loaded = memory_now()
        self.open()

    def hello(self) -> dict[str, Any]:
        """The first line."""
        return {"version": self.version, "seconds": self.seconds}

    def bring_in(self) -> None:
        """Import what is needed."""
        raise NotImplementedError

    def load(self) -> None:
        """Load the model."""
        raise NotImplementedError

    def open(self) -> None:
        """Make a context."""

    def tokens(self, start: int, stop: int, stream: int = 0) -> list[int]:
        """Tokens [start, stop) of a stream of tokens."""
        n = self.settings["n_vocab"] - 8
        return [(i * 7919 + stream * 104729) % n + 4 for i in range(start, stop)]

    def memory(self) -> Measured:
        """Bytes: resident after loading, now, at most; of K and V where they are known."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        figures = {
            "after load": self.loaded,
            "now": memory_now(),
            "peak": peak * (1 if sys.platform == "darwin" else 1024),
            "K/V": self.kv_bytes,
        }
        return {part: {"bytes": n} for part, n in figures.items() if n}


class CellEngine(Engine):
    """An engine that is driven by batches and llama.cpp's verbs."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.n_seqs: int = settings["n_seqs"]
        self.length = 0  # of every sequence

    def read(self, seq_id: int, tokens: list[int], start: int) -> None:
        """Compute tokens of a sequence, the last one's logits too."""
        raise NotImplementedError

    def step(self, rows: list[Row]) -> None:
        """Compute rows and find each one's best token."""
        raise NotImplementedError

    def clear(self) -> None:
        """Drop everything."""
        raise NotImplementedError

    def seq_rm(self, seq_id: int, start: int, stop: int) -> None:
        """The verb."""
        raise NotImplementedError

    def seq_cp(self, src: int, dst: int) -> None:
        """The verb, of the whole sequence."""
        raise NotImplementedError

    def seq_add(self, seq_id: int, start: int, stop: int, delta: int) -> None:
        """The verb."""
        raise NotImplementedError

    def seq_pos_max(self, seq_id: int) -> int:
        """The verb."""
        raise NotImplementedError

    def fill(self, n: int, own: int = 0) -> Measured:
        """Compute ``n`` tokens a sequence, or ``n`` for all together and ``own`` for each."""
        shared = self.tokens(0, n)
        each = [
            self.tokens(n, n + own, s) if own else self.tokens(0, n, s) for s in range(self.n_seqs)
        ]
        self.clear()
        start = perf_counter()
        if own:
            self.read(0, shared, 0)
            for seq_id in range(1, self.n_seqs):
                self.seq_cp(0, seq_id)
        for seq_id, tokens in enumerate(each):
            self.read(seq_id, tokens, n if own else 0)
        seconds = perf_counter() - start
        self.length = n + own
        return one(seconds, sum(map(len, each)) + (n if own else 0))

    def extend(self, n: int) -> Measured:
        """Compute what the first sequence lacks to ``n`` tokens."""
        tokens = self.tokens(self.length, n)
        start = perf_counter()
        if tokens:
            self.read(0, tokens, self.length)
        self.length = max(n, self.length)
        return one(perf_counter() - start, len(tokens))

    def rewind(self, n: int) -> Measured:
        """Drop what every sequence has beyond ``n`` tokens."""
        start = perf_counter()
        for seq_id in range(self.n_seqs):
            self.seq_rm(seq_id, n, -1)
        self.length = min(n, self.length)
        return one(perf_counter() - start, self.n_seqs)

    def decode(self, steps: int) -> Measured:
        """Steps of one token a sequence."""
        (token,) = self.tokens(0, 1, stream=99)
        start = perf_counter()
        for _ in range(steps):
            self.step([(token, self.length, seq_id) for seq_id in range(self.n_seqs)])
            self.length += 1
        return one(perf_counter() - start, steps * self.n_seqs)

    def fork(self, ways: int) -> Measured:
        """Fork the first sequence, compute a first token for each fork, and drop the forks."""
        forks = range(1, ways + 1)
        start = perf_counter()
        for seq_id in forks:
            self.seq_cp(0, seq_id)
        copied = perf_counter() - start
        self.step([(4 + seq_id, self.length, seq_id) for seq_id in forks])
        done = perf_counter() - start
        for seq_id in forks:
            self.seq_rm(seq_id, -1, -1)
        return {**part("the copies alone", copied, 1), **one(done, 1)}

    def shift(self, keep: int, discard: int) -> Measured:
        """Discard tokens behind the first ``keep``, move up what follows, decode a token."""
        start = perf_counter()
        self.seq_rm(0, keep, keep + discard)
        self.seq_add(0, keep + discard, -1, -discard)
        self.length -= discard
        self.step([(4, self.length, 0)])
        self.length += 1
        return one(perf_counter() - start, 1)

    def verbs(self, calls: int) -> Measured:
        """Every verb so many times on a sequence in the middle, which is then as it was."""
        seq_id, spare, delta = self.n_seqs // 2, self.n_seqs, 5
        times = dict.fromkeys(("seq_cp", "seq_rm", "seq_add", "seq_pos_max"), 0.0)
        for _ in range(calls):
            stamps = [perf_counter()]
            self.seq_cp(seq_id, spare)
            stamps.append(perf_counter())
            self.seq_rm(spare, -1, -1)
            stamps.append(perf_counter())
            self.seq_add(seq_id, 16, -1, delta)
            stamps.append(perf_counter())
            self.seq_pos_max(seq_id)
            stamps.append(perf_counter())
            self.seq_add(seq_id, 16 + delta, -1, -delta)
            for i, name in enumerate(times):
                times[name] += stamps[i + 1] - stamps[i]
        return {name: {"seconds": seconds, "count": calls} for name, seconds in times.items()}


def one(seconds: float, count: int) -> Measured:
    """An answer of one figure."""
    return part("", seconds, count)


def part(name: str, seconds: float, count: int) -> Measured:
    """An answer's figure of that name."""
    return {name: {"seconds": seconds, "count": count}}


def memory_now() -> int:
    """Resident bytes of this process, 0 where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    lines = (line.split() for line in status.read_text().splitlines())
    return next(int(line[1]) * 1024 for line in lines if line and line[0] == "VmRSS:")
