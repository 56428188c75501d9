"""Decoding with recurrent states, until the runtime does so: a new row for every decode.

A sequence is the row of its state and the position that it has reached; layers that attend have
their caches beside it, which are given the same microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvcellar.backends.numpy.model_file import NumpyModelFile
from kvcellar.batch import Batch, MicroBatch, micro_batches, split_equal
from kvcellar.cache.attention import AttentionCache
from kvcellar.cellsets import unpack_owners
from kvcellar.models.blocks import Decoder
from kvcellar.models.registry import load_architecture
from kvcellar.plan import Plan, StatePlan
from kvcellar.testing.golden import nmse
from kvcellar.types import CacheSpec, Float32Array, KVType, MemorySpec, StateSpec, group_layers

N_SEQ = 4
N_ROWS = 2 * N_SEQ  # those that are read and those that are written


class Recurrent:
    """A model with recurrent layers on the NumPy backend."""

    def __init__(self, path: Path, kind: KVType = KVType.F16, size: int = 256) -> None:
        file = self.file = NumpyModelFile(path)
        self.model: Decoder[Float32Array] = load_architecture(file.metadata, file.weights)
        groups, states, places = group_layers(self.model.spec.layers)
        specs = tuple(CacheSpec(size, N_SEQ, layers, kind, kind) for layers in groups)
        spec = MemorySpec(specs, StateSpec(N_ROWS, N_SEQ, states), places)
        self.memory = file.open_memory(spec, self.model.forward)
        pairs = zip(specs, self.memory.groups, strict=True)
        self.caches = [AttentionCache(spec, store) for spec, store in pairs]
        self._rows: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def decode(self, batch: Batch, n_ubatch: int = 512) -> Float32Array:
        """Logits of the rows that the batch wants, in their order."""
        rows = batch.resolve(N_SEQ, lambda seq_id: self._last.get(seq_id, -1))
        micros = micro_batches(rows, split_equal(rows.owners, n_ubatch))
        placements = [cache.take(micros) for cache in self.caches]
        logits: dict[int, Float32Array] = {}
        for i, micro in enumerate(micros):
            groups = tuple(placement.groups[0].plan(i, None, False) for placement in placements)
            plan = Plan(micro, groups, self._plan_states(micro))
            wanted = micro.rows[micro.outputs].tolist()
            logits.update(zip(wanted, self.memory.executor.run(plan).copy(), strict=True))
        for placement in placements:
            placement.commit()
        return np.array([logits[row] for row in sorted(logits)])

    def _plan_states(self, micro: MicroBatch) -> StatePlan:
        """New rows for all that take part, which are theirs at once."""
        tokens, owners = unpack_owners(micro.owners)
        assert len(tokens) == micro.n_tokens, "a token has one owner here"
        seq_ids = list(dict.fromkeys(owners.tolist()))
        sources = [self._rows.get(seq_id, N_ROWS) for seq_id in seq_ids]
        free = sorted(set(range(N_ROWS)) - set(self._rows.values()))
        self._rows.update(zip(seq_ids, free, strict=False))
        self._last.update(zip(owners.tolist(), micro.positions.tolist(), strict=True))
        targets = free[: len(seq_ids)]
        return StatePlan(np.array(sources, np.int32), np.array(targets, np.int64))

    def seq_cp(self, src: int, dst: int) -> None:
        """Let dst share src's state."""
        self._rows[dst], self._last[dst] = self._rows[src], self._last[src]
        for cache in self.caches:
            cache.seq_cp(src, dst)

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Drop the whole sequence; a part of it cannot be dropped."""
        last = self._last.get(seq_id, -1)
        if 0 < p0 <= last or 0 < p1 <= last:
            return False
        if p0 <= last:
            self._rows.pop(seq_id, None)
            self._last.pop(seq_id, None)
        for cache in self.caches:
            cache.seq_rm(seq_id, p0, p1)
        return True

    def play(self, step: Mapping[str, Any]) -> dict[int, float]:
        """Play one step of ``archs/*.json``; the error of each row of logits that it lists."""
        if step["op"] == "decode":
            return self._play_decode(step)
        if step["op"] == "seq_cp":
            assert step["p0"] == step["p1"] == -1
            self.seq_cp(step["src"], step["dst"])
        else:
            assert step["op"] == "seq_rm"
            assert self.seq_rm(step["seq"], step["p0"], step["p1"]) == step["ret"]
        return {}

    def _play_decode(self, step: Mapping[str, Any]) -> dict[int, float]:
        wanted = {int(row): values for row, values in step["logits"].items()}
        batch = Batch()
        for i, (token, position, seq_ids) in enumerate(step["tokens"]):
            batch.add(token, position, seq_ids, logits=i in wanted)
        rows = zip(sorted(wanted), self.decode(batch), strict=True)
        return {row: nmse(got, wanted[row]) for row, got in rows}
