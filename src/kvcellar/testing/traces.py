"""Replays of recorded traces of llama.cpp's caches: every result, and the state after every step.

A trace is ``{"size", "padding", "steps"}``; a step has an ``op``, its arguments, and ``expect``.

1. :class:`TraceReplay` plays those of the attention cache, with ``on_shared="move"``, since the
   reference moves a shared cell for every owner. The naive cache plays along and says which content
   each cell holds, rotated to which position (invariants 6 and 7); a
   :class:`~kvcellar.testing.signs.SignedStore` proves that its bytes are those.
2. :class:`RecurrentReplay` plays those of the recurrent cache, without checkpoints, as the
   reference has none. States carry their history, so every step proves that each sequence has its
   own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvcellar.batch import Batch
from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.base import CheckpointBudget, CheckpointPolicy
from kvcellar.cache.recurrent import RecurrentCache, state_rows
from kvcellar.cache.rows import plan_moves
from kvcellar.errors import CacheFull
from kvcellar.testing.naive import NaiveCache, NaiveToken
from kvcellar.testing.recurrent_duel import shared_groups
from kvcellar.testing.signs import SignedStore, signed_spec
from kvcellar.testing.state_conformance import HistoryStore
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import MAX_POSITION, CacheSpec

Step: TypeAlias = Mapping[str, Any]


def load_traces(path: Path) -> list[dict[str, Any]]:
    """The traces of a file, one a line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]


class TraceReplay:
    """Play a trace on an attention cache and raise AssertionError where they differ.

    Args:
        trace: what to play.
        n_seq_max: how many sequences the cache has.
        make_store: from a spec of f32 rows; a store without bytes by default.
        flash_attn: which layout of V the spec has.
    """

    def __init__(
        self,
        trace: Mapping[str, Any],
        n_seq_max: int = 8,
        make_store: Callable[[CacheSpec], SignatureStore] = SignatureStore,
        *,
        flash_attn: bool = True,
    ) -> None:
        spec = signed_spec(trace["size"], n_seq_max, trace["padding"], flash_attn)
        self.store = make_store(spec)
        self.cache = AttentionCache(spec, self.store, on_shared="move")
        self.naive = NaiveCache(spec.size, on_shared="move")
        self.n_decoded = 0
        self.steps: Sequence[Step] = trace["steps"]
        self.n_kv = 0
        self._plain: dict[str, Callable[[Step], object]] = {
            "decode": self._decode,
            "defrag": self._defrag,
            "view": self._view,
            "seq_pos_max": lambda s: self.cache.seq_pos_max(s["seq"]),
            "cell_max": lambda _: self.cache.cell_max(),
            "token_count": lambda _: self.cache.token_count,
        }

    def run(self) -> None:
        """Play every step, proving the cache's invariants after each."""
        for number, step in enumerate(self.steps):
            result = self._play(step)
            self.cache.check()
            self._check_rows()
            self._compare(f"step {number}, {step['op']}", step["expect"], result)

    def _play(self, step: Step) -> object:
        op = step["op"]
        if op in self._plain:
            return self._plain[op](step)
        arguments = [value for key, value in step.items() if key not in ("op", "expect")]
        bounds = [_closed(key, value) for key, value in step.items() if key not in ("op", "expect")]
        getattr(self.naive, op)(*bounds)
        return getattr(self.cache, op)(*arguments)

    def _check_rows(self) -> None:
        """Every cell with an owner holds what the naive cache says, and the bytes of that."""
        for i, cell in enumerate(self.naive.cells):
            held = (int(self.store.content[i]), int(self.store.rotation[i]))
            assert not cell.owners or held == (cell.content, cell.rotation), f"cell {i}: {held}"
        if isinstance(self.store, SignedStore):
            self.store.check_rows()

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
        numbers = np.arange(self.n_decoded, self.n_decoded + len(batch))
        self._place_naively(step, numbers.tolist())
        with placement:
            for plan in placement.plans():
                self.n_kv = plan.n_kv
                self.store.fill(plan.cells, numbers[plan.micro.rows], plan.micro.positions)
        cells = placement.cells.tolist()
        return [cells[0], cells[-1] + 1]

    def _place_naively(self, step: Step, numbers: list[int]) -> None:
        self.n_decoded += len(numbers)
        tokens = zip(step["tokens"], numbers, strict=True)
        self.naive.place(
            [NaiveToken(0, t["pos"], frozenset(t["seqs"]), number) for t, number in tokens],
            len(numbers),
        )

    def _defrag(self, step: Step) -> list[list[int]]:
        table = self.cache.table
        moves = plan_moves(table.positions[: table.cell_max()] >= 0, step["max_moves"])
        self.cache.defrag(step["max_moves"])
        self.cache.update()
        self.naive.update()
        self.naive.defrag(step["max_moves"])
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


def _closed(key: str, bound: int) -> int:
    """An open bound of a range as a number."""
    if key == "p0":
        return max(bound, 0)
    return MAX_POSITION if key == "p1" and bound < 0 else bound


class RecurrentReplay:
    """Play a trace on a recurrent cache and raise AssertionError where they differ.

    Args:
        trace: what to play.
        n_seq_max: how many sequences the cache has; at least as many as the trace names.
        n_ubatch: how many tokens are computed at once.
    """

    def __init__(self, trace: Mapping[str, Any], n_seq_max: int = 8, n_ubatch: int = 512) -> None:
        self.store = HistoryStore(state_rows(n_seq_max, 0), n_seq_max)
        self.cache = RecurrentCache(self.store, CheckpointPolicy(CheckpointBudget(0)))
        self.texts: dict[int, list[int]] = {}  # by sequence: what its state should have absorbed
        self._steps: Sequence[Step] = trace["steps"]
        self._n_ubatch = n_ubatch
        self._n_tokens = 0

    def run(self) -> None:
        """Play every step, proving after each that the states are those of their tokens."""
        for number, step in enumerate(self._steps):
            where = f"step {number}, {step['op']}"
            got: dict[str, object] = {"ret": self._play(step), **self.state()}
            if step["op"] == "decode":
                got["history_len"] = self._history_len(step)
            assert got == step["expect"], f"{where}: {got} != {step['expect']}"
            self.cache.check()
            self._check_texts(where)

    def state(self) -> dict[str, object]:
        """What traces record of a cache."""
        cache = self.cache
        ends = {seq: cache.seq_pos_max(seq) for seq in range(cache.spec.n_seq_max)}
        pos = {str(seq): end for seq, end in ends.items() if end >= 0}
        return {"used": cache.used, "pos": pos, "shared": shared_groups(cache)}

    def _play(self, step: Step) -> object:
        if step["op"] == "decode":
            return self._decode(step)
        arguments = [value for key, value in step.items() if key not in ("op", "expect")]
        result = getattr(self.cache, step["op"])(*arguments)
        if step["op"] == "seq_cp":
            self.texts[step["dst"]] = list(self.texts.get(step["src"], []))
        return result

    def _decode(self, step: Step) -> bool:
        batch = Batch()
        for token in step["tokens"]:
            batch.add(self._n_tokens, token["pos"], token["seqs"])
            for seq in token["seqs"]:
                empty = self.cache.seq_pos_max(seq) < 0 and token["pos"] == 0
                text = [] if empty else self.texts[seq]
                self.texts[seq] = [*text, self._n_tokens]
            self._n_tokens += 1
        with self.cache.place(batch, self._n_ubatch) as placement:
            for plan in placement.plans():
                self.store.absorb(plan)
        return True

    def _history_len(self, step: Step) -> dict[str, int]:
        decoded = {seq for token in step["tokens"] for seq in token["seqs"]}
        return {str(seq): self.cache.seq_count(seq) for seq in sorted(decoded)}

    def _check_texts(self, where: str) -> None:
        for seq, held in enumerate(self.cache.states.of):
            if held is not None:
                text = tuple(self.texts[seq])
                assert self.store.text(held.row) == text, f"{where}: not the state of {seq}"
                assert tuple(self.cache.seq_tokens(seq).tolist()) == text
