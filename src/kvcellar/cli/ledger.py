"""What each step of the tour cost, measured from outside.

Bytes are not taken from any counter: all K and V rows are read before and after a step, and a row
that differs was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.hybrid import parts_of
from kvcellar.cli.console import human_bytes
from kvcellar.types import ByteArray

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from kvcellar.backends.base import Part
    from kvcellar.runtime.context import Context

    T = TypeVar("T")


PARTS: tuple[Part, ...] = ("k", "v")


@dataclass(slots=True)
class Cost:
    """What a step took. ``cells`` is how many more are used, negative where some became free."""

    name: str
    n_tokens: int = 0
    seconds: float = 0.0
    cells: int = 0
    bytes_written: int = 0

    def timed(self, action: Callable[[], T]) -> T:
        """Do something and count its time."""
        start = perf_counter()
        try:
            return action()
        finally:
            self.seconds += perf_counter() - start

    @property
    def ms(self) -> str:
        """Milliseconds, as many digits as mean something."""
        ms = self.seconds * 1e3
        return f"{ms:.2f}" if ms < 10 else f"{ms:.0f}"

    def __str__(self) -> str:
        return (
            f"{self.ms} ms, {self.n_tokens} tokens computed, {self.cells:+d} cells, "
            f"{human_bytes(self.bytes_written)} of K and V written"
        )


class Ledger:
    """The costs of all steps over one context."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.costs: list[Cost] = []

    @contextmanager
    def entry(self, name: str) -> Iterator[Cost]:
        """Measure what happens inside; the time only of what ``Cost.timed`` is given."""
        cost, times, cache = Cost(name), self._context.timings, self._context.cache
        tokens, used, rows = times.prefill_tokens + times.decode_tokens, cache.used, self._rows()
        yield cost
        cost.n_tokens = times.prefill_tokens + times.decode_tokens - tokens
        cost.cells = cache.used - used
        cost.bytes_written = sum(map(_bytes_changed, rows, self._rows()))
        self.costs.append(cost)

    def table(self) -> Table:
        """All steps, a row each."""
        from rich import box

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("step")
        for head in ("tokens", "ms", "ms a token", "cells", "K/V written"):
            table.add_column(head, justify="right")
        for cost in self.costs:
            each = f"{cost.seconds * 1e3 / cost.n_tokens:.1f}" if cost.n_tokens else "-"
            table.add_row(
                cost.name,
                str(cost.n_tokens),
                cost.ms,
                each,
                f"{cost.cells:+d}" if cost.cells else "0",
                human_bytes(cost.bytes_written),
            )
        return table

    def _rows(self) -> list[ByteArray]:
        rows = []
        for cache in parts_of(self._context.cache):
            if isinstance(cache, AttentionCache):
                cells, layers = np.arange(cache.spec.size), range(len(cache.spec.layers))
                rows += [cache.store.read_raw(i, part, cells) for i in layers for part in PARTS]
        return rows


def _bytes_changed(before: ByteArray, after: ByteArray) -> int:
    row_bytes: int = before.shape[1]
    return row_bytes * int(np.count_nonzero((before != after).any(axis=1)))
