"""Older states that are kept to go back to, and when.

A state cannot forget a token, so a sequence can only go back to where a state of it was kept. Since
no state is ever changed in its row, keeping one means not to fill its row again: it costs a row,
but no copy and no time.

Kept without being asked for are the states before and after every batch that had several tokens of
a sequence, as they are where prompts, turns and drafts begin and end; and, while tokens come one by
one, a state each ``every`` tokens. Beyond the budget the oldest goes first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcellar.errors import OptionError


@dataclass(frozen=True, slots=True)
class CheckpointBudget:
    """How many checkpoints a cache may keep, and in how many bytes; 0 of either: none at all."""

    n_max: int = 8
    max_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        for name, value in (("n_max", self.n_max), ("max_bytes", self.max_bytes)):
            if value < 0:
                raise OptionError(f"{name} is {value}: 0 for no checkpoints, or more")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A row that holds the state after the first ``n`` tokens of a sequence."""

    n: int
    row: int
    serial: int  # the later it was made, the larger


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """How many states may be kept, and after how many tokens one is.

    Attributes:
        budget: how many, and in how many bytes; 0 of either: none at all, so that a sequence can
            only be removed as a whole.
        every: how many tokens that come one by one lie between two.
    """

    budget: CheckpointBudget = field(default_factory=CheckpointBudget)
    every: int = 256

    def __post_init__(self) -> None:
        if self.every < 1:
            raise OptionError(f"every is {self.every}: it must be at least 1")

    def limit(self, row_bytes: int) -> int:
        """How many states of that size may be kept."""
        return min(self.budget.n_max, self.budget.max_bytes // max(row_bytes, 1))
