"""Replays recorded traces of llama.cpp's cache: each step's result and the state after it.

A trace is ``{"size", "padding", "steps"}``; a step has an ``op``, its arguments, and ``expect``.
Caches replay with ``on_shared="move"``, since the reference moves a shared cell for every owner.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from kvcellar.batch import Batch
from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.compaction import plan_moves
from kvcellar.errors import CacheFull
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import CacheSpec, LayerSpec, RopeSpec

Step: TypeAlias = Mapping[str, Any]

_LAYER = LayerSpec(n_head_kv=1, head_dim_k=2, head_dim_v=2, rope=RopeSpec("normal", 2))


def load_traces(path: Path) -> list[dict[str, Any]]:
    """The traces of a file, one a line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]


class TraceReplay:
    """Plays a trace on an attention cache and raises AssertionError where they part."""

    def __init__(self, trace: Mapping[str, Any], n_seq_max: int = 8) -> None:
        spec = CacheSpec(trace["size"], n_seq_max, (_LAYER,), padding=trace["padding"])
        self.store = SignatureStore(spec)
        self.cache = AttentionCache(spec, self.store, on_shared="move")
        self.steps: Sequence[Step] = trace["steps"]
        self.n_kv = 0
        self._plain: dict[str, Callable[[Step], object]] = {
            "decode": self._decode,
            "defrag": self._defrag,
            "view": self._view,
            "seq_rm": lambda s: self.cache.seq_rm(s["seq"], s["p0"], s["p1"]),
            "seq_cp": lambda s: self.cache.seq_cp(s["src"], s["dst"], s["p0"], s["p1"]),
            "seq_keep": lambda s: self.cache.seq_keep(s["seq"]),
            "seq_add": lambda s: self.cache.seq_add(s["seq"], s["p0"], s["p1"], s["delta"]),
            "seq_div": lambda s: self.cache.seq_div(s["seq"], s["p0"], s["p1"], s["d"]),
            "seq_pos_max": lambda s: self.cache.seq_pos_max(s["seq"]),
            "clear": lambda _: self.cache.clear(),
            "cell_max": lambda _: self.cache.cell_max(),
            "token_count": lambda _: self.cache.token_count,
        }

    def run(self) -> None:
        """Play every step, proving the cache's invariants after each."""
        for number, step in enumerate(self.steps):
            result = self._plain[step["op"]](step)
            self.cache.check()
            self._compare(f"step {number}, {step['op']}", step["expect"], result)

    def _compare(self, where: str, expect: Step, result: object) -> None:
        if expect.get("fragmented"):
            # The reference failed here although there was room; what follows is ours alone.
            assert result is not False, f"{where}: there are {expect['free']} free cells"
            return
        assert result == expect["ret"], f"{where}: {result} != {expect['ret']}"
        if "cells" in expect:
            state = {key: value for key, value in expect.items() if key != "ret"}
            assert self.state() == state, f"{where}: {self.state()} != {state}"

    def state(self) -> dict[str, object]:
        """What traces record of a cache."""
        table = self.cache.table
        cells = [
            [cell, int(table.positions[cell]), int(table.pending[cell]), [*table.owners_of(cell)]]
            for cell in range(table.size)
            if table.positions[cell] >= 0
        ]
        return {"head": table.head, "used": table.used, "n_kv": self.n_kv, "cells": cells}

    def _decode(self, step: Step) -> list[int] | bool:
        batch = Batch()
        for token in step["tokens"]:
            batch.add(0, token["pos"], token["seqs"])
        before, free = self.state(), self.cache.spec.size - self.cache.used
        try:
            placement = self.cache.place(batch, len(batch), coupled="any")
        except CacheFull:
            assert free == step["expect"]["free"]
            assert self.state() == before
            return False
        with placement:
            for plan in placement.plans():
                self.n_kv = plan.n_kv
        cells = placement.cells.tolist()
        return [cells[0], cells[-1] + 1]

    def _defrag(self, step: Step) -> list[list[int]]:
        table = self.cache.table
        moves = plan_moves(table.positions[: table.cell_max()] >= 0, step["max_moves"])
        self.cache.defrag(step["max_moves"])
        self.cache.update()
        return [[int(a), int(b)] for a, b in zip(moves.src, moves.dst, strict=True)]

    def _view(self, step: Step) -> dict[str, object]:
        view = self.cache.view(step["n_seq_max"])
        return {
            "n_cells": view.n_cells,
            "token_count": view.token_count,
            "used_cells": view.used_cells,
            "max_contiguous": view.max_contiguous,
            "max_contiguous_idx": view.max_contiguous_idx,
            "sequences": [list(owners) for owners in view.sequences],
        }
