"""How long decoding took, split into prefill and decode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timings:
    """Counts since the context was made or :meth:`reset`.

    A decode of one token a sequence counts as "decode", any larger one as "prefill".
    ``graph_seconds`` is the part of both that was spent computing graphs; the rest is Python's.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    n_decodes: int = 0
    graph_seconds: float = 0.0

    def add(self, n_tokens: int, n_seqs: int, seconds: float, graph_seconds: float) -> None:
        """Count one call of decode."""
        self.n_decodes += 1
        self.graph_seconds += graph_seconds
        if n_tokens > n_seqs:
            self.prefill_tokens += n_tokens
            self.prefill_seconds += seconds
        else:
            self.decode_tokens += n_tokens
            self.decode_seconds += seconds

    def reset(self) -> None:
        """Count from zero again."""
        self.__init__()  # type: ignore[misc]

    @property
    def prefill_rate(self) -> float:
        """Prefilled tokens a second, 0 before the first."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_tokens else 0.0

    @property
    def decode_rate(self) -> float:
        """Decoded tokens a second, 0 before the first."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else 0.0

    @property
    def overhead_seconds(self) -> float:
        """Time outside the graphs, a call of decode."""
        total = self.prefill_seconds + self.decode_seconds - self.graph_seconds
        return total / self.n_decodes if self.n_decodes else 0.0
