"""kvcellar as the suite asks it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from _engine import CellEngine, Row
from _protocol import Measured, serve

if TYPE_CHECKING:
    import kvcellar as kv


class Kvcellar(CellEngine):
    """One model and one context."""

    model: kv.Model
    context: kv.Context

    def bring_in(self) -> None:
        """Import what is needed."""
        import numpy as np

        import kvcellar as kv

        self.np, self.kv = np, kv
        self.version = kv.__version__

    def load(self) -> None:
        """Load the model."""
        model, threads = self.settings["model"], self.settings["n_threads"]
        self.model = self.kv.Model.from_gguf(model, n_threads=threads)

    def open(self) -> None:
        """Make a context."""
        settings = self.settings
        self.context = self.model.context(
            n_ctx=settings["n_ctx"],
            n_seq_max=settings["n_seq_max"],
            n_ubatch=settings["n_ubatch"],
            type_k=settings["type_kv"],
            type_v=settings["type_kv"],
        )
        self.cache = self.context.cache
        self.kv_bytes = self.context.spec.n_bytes

    def read(self, seq_id: int, tokens: list[int], start: int) -> None:
        """See ``CellEngine``."""
        positions = range(start, start + len(tokens))
        self.context.decode(self.kv.Batch.of(tokens, seq_id, positions, logits="last"))

    def step(self, rows: list[Row]) -> None:
        """See ``CellEngine``."""
        batch = self.kv.Batch()
        for token, position, seq_id in rows:
            batch.add(token, position, seq_id, logits=True)
        for logits in self.context.decode(batch):
            self.np.argmax(logits)

    def decode(self, steps: int) -> Measured:
        """See ``CellEngine``; says what of it was outside the graph too."""
        self.context.timings.reset()
        measured = super().decode(steps)
        seconds = self.context.timings.overhead_seconds * steps
        return {**measured, "outside the graph": {"seconds": seconds, "count": steps}}

    def clear(self) -> None:
        """See ``CellEngine``."""
        self.cache.clear(data=False)

    def seq_rm(self, seq_id: int, start: int, stop: int) -> None:
        """See ``CellEngine``."""
        self.cache.seq_rm(seq_id, start, stop)

    def seq_cp(self, src: int, dst: int) -> None:
        """See ``CellEngine``."""
        self.cache.seq_cp(src, dst)

    def seq_add(self, seq_id: int, start: int, stop: int, delta: int) -> None:
        """See ``CellEngine``."""
        self.cache.seq_add(seq_id, start, stop, delta)

    def seq_pos_max(self, seq_id: int) -> int:
        """See ``CellEngine``."""
        return self.cache.seq_pos_max(seq_id)


if __name__ == "__main__":
    serve(Kvcellar)
