"""A store of states that are the tokens they have absorbed, for tests of caches.

A row holds the number of a text, as the one value of its state, so that states can be read and
written like any others; number 0, which zeros are, is the text of no tokens.
"""

from __future__ import annotations

import numpy as np

from kvcellar.cache.state_placement import members_of
from kvcellar.plan import Plan
from kvcellar.types import Float32Array, Int64Array, StateLayer, StateSpec


class HistoryStore:
    """States that carry their history; ``absorb`` stands for the computation of a plan.

    Attributes:
        spec: the shape.
        broken: the name of a method that fails.
    """

    def __init__(self, n_rows: int, n_seq_max: int) -> None:
        self.spec = StateSpec(n_rows, n_seq_max, (StateLayer(1),))
        self.broken: str | None = None
        self._numbers = np.zeros((n_rows + 1, 1), np.float32)
        self._texts: list[tuple[int, ...]] = [()]

    def text(self, row: int) -> tuple[int, ...]:
        """What the state in a row has absorbed; AssertionError if it was spoilt."""
        number = self._numbers[row, 0]
        assert np.isfinite(number), f"row {row} holds what a failed decode left"
        return self._texts[int(number)]

    def absorb(self, plan: Plan) -> None:
        """Do what a model would: read each sequence's source, write its target."""
        assert plan.states is not None
        sources, targets = plan.states.sources.tolist(), plan.states.targets.tolist()
        assert len(sources) == len(targets) == len(members_of(plan.micro))
        assert len(set(targets)) == len(targets), "two sequences leave their state in one row"
        assert all(0 <= row < self.spec.n_rows for row in targets), "a target that is no row"
        tokens = plan.micro.tokens
        ids = [-1] * plan.n_tokens if tokens is None else tokens.tolist()
        n = plan.n_tokens // len(sources)
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            others = sources[:i] + sources[i + 1 :]
            assert target not in others, f"row {target} is filled while another reads it"
            self._texts.append((*self.text(source), *ids[i * n : (i + 1) * n]))
            self._numbers[target] = len(self._texts) - 1

    def spoil(self, plan: Plan) -> None:
        """Fail in the middle: what the plan should have written is no state."""
        assert plan.states is not None
        self._numbers[plan.states.targets] = np.nan

    def read(self, rows: Int64Array) -> Float32Array:
        """The numbers of the texts in rows."""
        self._fail_if_broken("read")
        got: Float32Array = self._numbers[rows]
        return got

    def write(self, rows: Int64Array, states: Float32Array) -> None:
        """Put them back."""
        self._fail_if_broken("write")
        self._numbers[rows] = states

    def wipe(self, rows: Int64Array) -> None:
        """Let rows hold the text of no tokens."""
        self._fail_if_broken("wipe")
        self._numbers[rows] = 0

    def zero(self) -> None:
        """Let every row hold the text of no tokens."""
        self._fail_if_broken("zero")
        self._numbers.fill(0)

    def close(self) -> None:
        """Nothing to give back."""

    def _fail_if_broken(self, method: str) -> None:
        if self.broken == method:
            raise MemoryError(f"{method} is broken")
