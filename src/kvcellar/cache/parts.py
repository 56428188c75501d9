"""What can be asked of a cache that is made of several: who answers, and whether they agree."""

from __future__ import annotations

from collections.abc import Sequence

from kvcellar.cache.base import Cache, CellCache, StateCache
from kvcellar.cache.recurrent import RecurrentCache
from kvcellar.cache.view import CacheView
from kvcellar.errors import InvariantError, OptionError
from kvcellar.types import CacheSpec, Int32Array


class Parts:
    """Caches of K and V, the widest first, and the cache of states, where there is one.

    Raises:
        OptionError: there is no part.
    """

    def __init__(self, groups: Sequence[CellCache], states: StateCache | None) -> None:
        self.groups = tuple(groups)
        self.states = states
        self.parts: tuple[CellCache | StateCache, ...] = (
            self.groups if states is None else (*self.groups, states)
        )
        if not self.parts:
            raise OptionError("a cache needs at least one part: a group of K and V, or states")
        self._primary = self.parts[0]

    @property
    def spec(self) -> CacheSpec:
        """The shape of the widest group."""
        return self._primary.spec

    @property
    def can_shift(self) -> bool:
        """Whether positions can be moved in every part."""
        return all(part.can_shift for part in self.parts)

    @property
    def used(self) -> int:
        """How many cells of the widest group have an owner."""
        return self._primary.used

    @property
    def token_count(self) -> int:
        """The sum of owners over its cells."""
        return self._primary.token_count

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position that every part holds, -1 when the sequence is empty."""
        return max(part.seq_pos_min(seq_id) for part in self.parts)

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position that every part holds, -1 when the sequence is empty."""
        ends = [part.seq_pos_max(seq_id) for part in self.parts]
        return min((end for end in ends if end >= 0), default=-1)

    def n_free(self) -> int:
        """How many cells of the widest group may be filled."""
        return self._primary.n_free()

    def seq_count(self, seq_id: int) -> int:
        """How many tokens of a sequence are held."""
        return self._primary.seq_count(seq_id)

    def seq_tokens(self, seq_id: int) -> Int32Array:
        """Their ids in the order of their positions; -1 where an embedding was decoded."""
        return self._primary.seq_tokens(seq_id)

    def seq_positions(self, seq_id: int) -> Int32Array:
        """Where they stand, ascending."""
        return self._primary.seq_positions(seq_id)

    def view(self, n_seq_max: int | None = None) -> CacheView:
        """The cells of the widest group; ask one of ``parts`` for others."""
        return self._primary.view(n_seq_max)

    def check(self) -> None:
        """Prove the invariants of every part, and that all hold the same sequences."""
        for part in self.parts:
            part.check()
        for seq_id in range(self.spec.n_seq_max):
            if not self._agree(seq_id):
                ends = [part.seq_pos_max(seq_id) for part in self.parts]
                raise InvariantError(f"the parts end sequence {seq_id} at different {ends}")

    # -- steps

    def _agree(self, seq_id: int) -> bool:
        return len({part.seq_pos_max(seq_id) for part in self.parts}) == 1

    def _knows_each_token(self, seq_id: int) -> bool:
        """Whether every part could forget or share any single token of a sequence."""
        counts = {group.seq_count(seq_id) for group in self.groups}
        return self.states is None and len(counts) == 1


def parts_of(cache: Cache) -> tuple[Cache, ...]:
    """The parts of a cache, the one that knows the most first; itself if it is of one piece."""
    return cache.parts if isinstance(cache, Parts) else (cache,)


def has_states(cache: Cache) -> bool:
    """Whether a cache holds recurrent states."""
    if isinstance(cache, Parts):
        return cache.states is not None
    return isinstance(cache, RecurrentCache)
