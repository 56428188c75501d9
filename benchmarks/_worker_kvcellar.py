"""kvcellar as the benchmark asks it."""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any

import numpy as np
from _protocol import serve

import kvcellar as kv


class Engine:
    """One model and one context of a shape."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.model = kv.Model.from_gguf(settings["model"], n_threads=settings["n_threads"])
        self.n_seqs: int = settings["n_seqs"]
        self.context = self.model.context(
            n_ctx=settings["n_ctx"], n_seq_max=self.n_seqs, n_ubatch=settings["n_ubatch"]
        )

    def fill(self, tokens: list[list[int]]) -> dict[str, Any]:
        """Prefill every sequence from nothing; seconds for all."""
        self.context.cache.clear(data=False)
        start = perf_counter()
        for seq_id, ids in enumerate(tokens):
            self.context.decode(kv.Batch.of(ids, seq_id=seq_id, logits="last"))
        return {"seconds": perf_counter() - start}

    def decode(self, n: int, token: int) -> dict[str, Any]:
        """N steps, one token a sequence each; seconds, and those outside the graphs a step."""
        self.context.timings.reset()
        start = perf_counter()
        for _ in range(n):
            batch = kv.Batch()
            for seq_id in range(self.n_seqs):
                batch.add(token, seq_ids=seq_id, logits=True)
            int(np.argmax(self.context.decode(batch)[0]))
        seconds = perf_counter() - start
        return {"seconds": seconds, "overhead": self.context.timings.overhead_seconds}


if __name__ == "__main__":
    engine = Engine(json.loads(sys.argv[1]))
    serve({"version": kv.__version__}, {"fill": engine.fill, "decode": engine.decode})
