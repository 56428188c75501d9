"""Replays recorded traces of llama.cpp's recurrent cache: results, positions, who shares what.

The states carry their history, so that every step proves that each sequence's is its own. Without
checkpoints, as the reference has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvcellar.batch import Batch
from kvcellar.cache.base import CheckpointBudget, CheckpointPolicy
from kvcellar.cache.recurrent import RecurrentCache, state_rows
from kvcellar.testing.recurrent_duel import shared_groups
from kvcellar.testing.states import HistoryStore
from kvcellar.testing.traces import Step


class RecurrentReplay:
    """Plays a trace and raises AssertionError where cache and trace part.

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
