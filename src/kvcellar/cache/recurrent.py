"""The recurrent cache: one cell a sequence's state, over a store of states.

A state is never changed in its row as long as anything refers to it: a decode reads one row and
writes another. So sharing a state, keeping it as a checkpoint and taking back a transaction are
references to rows, and no byte is copied. There is no table of cells: sequences that share a state
may stand at different positions, and a state stands for many tokens, which a cell does not know.

* A state stands where its last token does: ``seq_pos_min`` is ``seq_pos_max``. An empty sequence
  may start anywhere; from there on positions follow on without a gap.
* ``seq_rm`` of a part is False, even if the range is empty, unless it reaches to the end and a
  checkpoint was made where it begins. ``rewind`` goes back as far as it has to.
* ``seq_add`` and ``seq_div`` change recorded positions, of this sequence only.
* A state absorbs any number of tokens: ``n_free`` is always ``spec.size``, what the context was
  made for, and refuses none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from kvcellar.backends.base import StateStore
from kvcellar.batch import MicroBatch, Rows
from kvcellar.cache.base import Cache, CheckpointPolicy, Coupled, Savepoint
from kvcellar.cache.changes import Remember, Undo, atomic
from kvcellar.cache.content import SequenceData, SequenceStateData, StateData
from kvcellar.cache.placement import CellPart
from kvcellar.cache.state_placement import StatePlacement, plan_rows
from kvcellar.cache.states import History, SequenceState, StateTable
from kvcellar.cache.view import CacheView
from kvcellar.cells import CellTable
from kvcellar.cellsets import (
    checked_id,
    clamp_delta,
    clamp_divisor,
    clamp_range,
    means_all,
    pack_owners,
    unpack_owners,
)
from kvcellar.errors import (
    BatchError,
    CacheFull,
    PositionError,
    check_bool,
    check_kind,
    check_range,
)
from kvcellar.types import MAX_POSITION, CacheSpec, Int32Array, Int64Array, StateSpec


class RecurrentCache(Cache):
    """States by llama.cpp's verbs.

    Args:
        store: where states lie; :func:`state_rows` says how many rows it should have.
        policy: which older states are kept to go back to.
        size: how many tokens the context was made for.
    """

    has_states = True
    keeps_every_token = False
    _nest: list[StateSavepoint]

    def __init__(
        self,
        store: StateStore,
        policy: CheckpointPolicy | None = None,
        *,
        size: int = MAX_POSITION,
    ) -> None:
        super().__init__()
        check_kind("store.spec", getattr(store, "spec", None), StateSpec, made="a store of states")
        if policy is not None:
            check_kind("policy", policy, CheckpointPolicy)
        self.store = store
        self.spec = CacheSpec(size, store.spec.n_seq_max, ())
        self.states = StateTable(store.spec, policy or CheckpointPolicy())
        self._nest = []
        self.join(self.changes)

    # -- questions

    @property
    def can_shift(self) -> bool:
        """Whether positions can be moved: they are only recorded, so they can."""
        return True

    @property
    def store_specs(self) -> tuple[StateSpec]:
        """The shape of the store."""
        return (self.store.spec,)

    @property
    def used(self) -> int:
        """How many rows are the state of a sequence; those of checkpoints do not count."""
        self.changes.settle()
        return len({held.row for held in self.states.of if held})

    @property
    def token_count(self) -> int:
        """The sum of owners over rows: how many sequences have a state."""
        self.changes.settle()
        return sum(held is not None for held in self.states.of)

    def seq_pos_min(self, seq_id: int) -> int:
        """The position of the last token, for which alone a state stands; -1 when empty."""
        return self.seq_pos_max(seq_id)

    def seq_pos_max(self, seq_id: int) -> int:
        """The position of the last token, -1 when the sequence is empty."""
        held = self._held(seq_id)
        return -1 if held is None else held.history.last

    def n_free(self) -> int:
        """How many more tokens fit: always as many as the context was made for."""
        return self.spec.size

    def seq_count(self, seq_id: int) -> int:
        """How many tokens the sequence's state has absorbed."""
        held = self._held(seq_id)
        return 0 if held is None else held.history.n

    def seq_tokens(self, seq_id: int) -> Int32Array:
        """Their ids in their order; -1 where an embedding was decoded."""
        tokens: Int32Array = self._history(seq_id).tokens.copy()
        return tokens

    def seq_positions(self, seq_id: int) -> Int32Array:
        """Where they stand, never descending."""
        at: Int32Array = self._history(seq_id).positions.copy()
        return at

    def checkpoints(self, seq_id: int) -> tuple[int, ...]:
        """The positions of the last tokens of older states that a sequence can go back to."""
        held = self._held(seq_id)
        if held is None:
            return ()
        return tuple(int(held.history.positions[one.n - 1]) for one in held.checkpoints)

    def view(self, n_seq_max: int | None = None) -> CacheView:
        """The rows as a value: the owners of each, and the last token of the first owner."""
        self.changes.settle()
        table = CellTable(self.store.spec.n_rows, self.spec.n_seq_max)
        owners: dict[int, list[int]] = {}
        for seq, held in enumerate(self.states.of):
            if held is not None:
                owners.setdefault(held.row, []).append(seq)
        for row, seqs in owners.items():
            text = self._history(seqs[0])
            bits = pack_owners(np.zeros(len(seqs), np.int64), np.array(seqs), 1, len(table.owners))
            table.place(np.array([row]), text.positions[-1:], bits, text.tokens[-1:])
        return CacheView.of(table, n_seq_max)

    def check(self) -> None:
        """Prove that all references to a row mean the same state."""
        self.changes.settle()
        self.states.check()

    # -- llama.cpp's verbs

    @atomic
    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Drop a sequence, or all of them (-1) or none, from the range; False if it cannot."""
        self.require_idle()
        seqs = range(self.spec.n_seq_max) if means_all(seq_id) else [self._checked(seq_id)]
        lo, hi = clamp_range(p0, p1)
        left = list(self.states.of)
        for seq in seqs:
            if held := left[seq]:
                done, left[seq] = held.removed(lo, hi)
                if not done:
                    return False
        self.states.of[:] = left
        return True

    @atomic
    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Share src's state with dst, in place of its own; the range cannot matter."""
        self.require_idle()
        clamp_range(p0, p1)
        a, b = self._checked(src), self._checked(dst)
        self.states.of[b] = self.states.of[a]

    @atomic
    def seq_keep(self, seq_id: int) -> None:
        """Drop every other sequence."""
        self.require_idle()
        seq = self._checked(seq_id)
        self.states.of[:] = [held if i == seq else None for i, held in enumerate(self.states.of)]

    @atomic
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move recorded positions; a sequence that falls below 0 as a whole is dropped.

        Raises:
            PositionError: one would pass the largest position, or tokens would change their order.
            NotSupported: some tokens would fall below 0, but not all.
        """
        self.require_idle()
        seq, delta = self._checked(seq_id), clamp_delta(delta)
        if held := self.states.of[seq]:
            self.states.of[seq] = held.shifted(*clamp_range(p0, p1), delta)

    @atomic
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide recorded positions by d, truncating.

        Raises:
            PositionError: tokens would change their order.
        """
        self.require_idle()
        seq, d = self._checked(seq_id), clamp_divisor(d)
        if held := self.states.of[seq]:
            self.states.of[seq] = held.divided(*clamp_range(p0, p1), d)

    @atomic
    def clear(self, data: bool = True) -> None:
        """Forget every state; ``data`` says whether rows are zeroed too.

        Rows that a transaction may want back are zeroed when the outermost one is committed.
        """
        self.require_idle()
        check_bool("data", data)
        self.states.of[:] = [None] * self.spec.n_seq_max
        if not data:
            return
        if self._nest:
            self._nest[-1].zero_later = True
        self.changes.afterwards(self.zero_unused)

    def zero_unused(self) -> None:
        """Zero the rows that nothing refers to."""
        self.store.wipe(np.array(self.states.unused(), np.int64))

    @atomic
    def defrag(self, max_moves: int | None = None) -> None:
        """Nothing to do: states are found by row, wherever they lie."""
        self.require_idle()
        if max_moves is not None:
            check_range("max_moves", max_moves, 1, MAX_POSITION)

    @atomic
    def update(self) -> None:
        """Nothing is ever pending."""
        self.require_idle()

    # -- beyond llama.cpp's

    @atomic
    def rewind(self, seq_id: int, p0: int) -> int:
        """Go back to the newest state without anything from p0 on; returns where to go on."""
        self.require_idle()
        seq, (p0, _) = self._checked(seq_id), clamp_range(p0, -1)
        if held := self.states.of[seq]:
            self.states.of[seq] = held.rewound(p0)
        return min(p0, self.seq_pos_max(seq) + 1)

    @atomic
    def checkpoint(self, seq_id: int) -> bool:
        """Keep a sequence's state to go back to; False: it is empty, or there is no budget."""
        self.require_idle()
        return self.states.keep(self._checked(seq_id))

    def export(
        self,
        seq_ids: Sequence[int],
        lo: int,
        hi: int,  # noqa: ARG002  (a state cannot be cut)
        checkpoints: bool,
    ) -> SequenceData:
        """Copy the states of sequences, and the texts from a position on that made them."""
        rows: dict[int, int] = {}  # the number of each row among the states
        held: list[SequenceStateData | None] = []
        for seq in seq_ids:
            mine = self.states.of[seq]
            if mine is None or (first := mine.history.n_before(lo)) == mine.history.n:
                held.append(None)
                continue
            kept = mine.checkpoints if checkpoints else ()
            state = rows.setdefault(mine.row, len(rows))
            pairs = tuple((one.n, rows.setdefault(one.row, len(rows))) for one in kept)
            at, tokens = mine.history.positions[first:], mine.history.tokens[first:]
            held.append(SequenceStateData(at.copy(), tokens.copy(), state, pairs))
        states = StateData(self.store.read(np.array(list(rows), np.int64)), tuple(held))
        return SequenceData(len(seq_ids), (), states, lo)

    @atomic
    def import_(self, content: SequenceData, seq_ids: Sequence[int], shift: int) -> None:
        """Put sound states into empty sequences; of checkpoints as many as there is room for.

        Raises:
            CacheFull: fewer rows are free than sequences need.
        """
        data = content.states
        assert data is not None  # a sound content of this shape has states
        wanted = [None if held is None else held.state for held in data.held]
        needed = list(dict.fromkeys(state for state in wanted if state is not None))
        free = self.states.unused()
        if len(needed) > len(free):
            hint = "all rows of states are in use: remove sequences or use a larger n_seq_max"
            raise CacheFull(len(needed), len(free), hint)
        n_kept = min(self.states.limit, len(free) - len(needed))
        chosen = [*needed, *_latest(data, needed, n_kept)]
        rows = dict(zip(chosen, free, strict=False))
        self._keep_rows(list(rows.values()))
        self.store.write(_array(list(rows.values())), data.states[_array(chosen)])
        self.states.adopt(data, seq_ids, rows, shift)

    # -- decoding

    def check_rows(self, rows: Rows, coupled: Coupled = "same") -> None:  # noqa: ARG002
        """Raise unless positions follow on and a token's owners share their state.

        Two states cannot be mixed, so ``coupled="any"`` allows nothing more.
        """
        last = [-1 if held is None else held.history.last for held in self.states.of]
        check_follows(rows, last, self.states.rows())

    def _take(self, micros: Sequence[MicroBatch]) -> tuple[list[CellPart], StatePlacement]:
        """Take rows for microbatches that were checked; the oldest checkpoints make room.

        Raises:
            BatchError: a microbatch has not equally many tokens of its sequences.
            CacheFull: that is not enough; nothing has changed.
        """
        states, before = self.states, list(self.states.of)
        spare = states.spare()
        kept = " but those that a transaction keeps" if self._nest else ""
        hint = f"all rows of states are in use{kept}; remove sequences or use a larger n_seq_max"
        rows = plan_rows(micros, states.rows(), [*states.unused(), *spare], hint)
        lost = [row for row in rows.taken if row in spare]
        write_back = self._keep_rows(rows.taken, lost)

        def forget() -> None:
            states.of[:] = before
            write_back()

        states.evict(lost)
        return [], StatePlacement(micros, rows, states.absorb, forget)

    # -- steps

    def _keep_rows(self, rows: Sequence[int], lost: Sequence[int] = ()) -> Undo:
        """Keep what rows hold that are to be filled, as far as it may have to be put back.

        Args:
            rows: those to be filled.
            lost: those of them that hold a state even now.
        """
        started = self.states.rows_at_start()
        kept = _array([row for row in rows if row in lost or row in started])
        if not len(kept):
            return lambda: None
        undo = partial(self.store.write, kept, self.store.read(kept))
        self.changes.log.append(undo)
        return undo

    def _remember(self) -> Undo:
        spec, states = self.spec, self.states.remember()
        nest = [(savepoint, savepoint.zero_later) for savepoint in self._nest]

        def undo() -> None:
            self.spec = spec
            states()
            self._nest[:] = [savepoint for savepoint, _ in nest]
            for savepoint, zero_later in nest:
                savepoint.zero_later = zero_later

        return undo

    def _begin(self, watchers: Sequence[Remember]) -> StateSavepoint:
        return StateSavepoint(self, self._nest, watchers)

    def _resize(self, size: int) -> None:
        """Say that the context is for ``size`` tokens; the rows stay as many as they are."""
        self.spec = replace(self.spec, size=size)

    def _history(self, seq_id: int) -> History:
        held = self._held(seq_id)
        return History.empty() if held is None else held.history

    def _held(self, seq_id: int) -> SequenceState | None:
        return self.states.of[checked_id(seq_id, self.spec.n_seq_max)]

    def _checked(self, seq_id: int) -> int:
        return checked_id(seq_id, self.spec.n_seq_max)


class StateSavepoint(Savepoint):
    """States, positions and checkpoints as they are when it begins: a list of references.

    No state is changed in its row. Rows that were in use when a transaction began stay as they are
    until it ends, whatever was dropped inside; ``CacheFull`` counts them as not free.
    """

    def __init__(
        self,
        cache: RecurrentCache,
        nest: list[StateSavepoint],
        watchers: Sequence[Remember],
    ) -> None:
        super().__init__(cache, nest, watchers)
        self.zero_later = False
        self._states = cache.states
        self._all = nest
        self._zero_unused = cache.zero_unused
        nest.append(self)
        self._states.saved.append(list(self._states.of))

    def _take_back(self) -> None:
        self._states.of[:] = self._states.saved[-1]

    def _ended(self, *, kept: bool) -> None:
        self._all.pop()
        self._states.saved.pop()
        if kept and self.zero_later:
            if self._all:
                self._all[-1].zero_later = True
            else:
                self.changes.afterwards(self._zero_unused)


def state_rows(n_seq_max: int, n_checkpoints: int) -> int:
    """How many rows a store needs, so that a batch of all sequences always finds free ones.

    For each sequence, the state that it has, the one being decoded, and one that a transaction
    wants back, if there are fewer rows of checkpoints. Where transactions are nested, checkpoints
    make room, or ``CacheFull`` says that none is left.
    """
    return 2 * n_seq_max + max(n_checkpoints, n_seq_max)


def check_follows(rows: Rows, last: Sequence[int], states: Sequence[int]) -> None:
    """Refuse a batch that states cannot absorb.

    Args:
        rows: the batch.
        last: for each sequence, its last position; -1 if it is empty and may start anywhere.
        states: for each sequence, a number that tells its state from others.

    Raises:
        PositionError: a position does not follow on; names both.
        BatchError: a token's owners have not the same state.
    """
    last, states = list(last), list(states)
    owners: list[list[int]] = [[] for _ in range(len(rows))]
    for row, seq in zip(*(ids.tolist() for ids in unpack_owners(rows.owners)), strict=True):
        owners[row].append(seq)
    for row, (at, seqs) in enumerate(zip(rows.positions.tolist(), owners, strict=True)):
        for seq in seqs:
            if last[seq] >= 0 and at != last[seq] + 1:
                raise PositionError(
                    f"token {row} of sequence {seq} stands at position {at}, but the sequence "
                    f"ends at {last[seq]}: a state has to absorb its tokens without a gap"
                )
            if states[seq] != states[seqs[0]]:
                raise BatchError(
                    f"token {row} is shared by sequences {seqs}, which do not share their state: "
                    "give each its own token, or seq_cp one to the others first"
                )
        for seq in seqs:
            last[seq], states[seq] = at, -1 - row  # a state that only these have


def _latest(content: StateData, taken: Sequence[int], n: int) -> list[int]:
    """At most n states of checkpoints alone, those after the most tokens first."""
    ends: dict[int, int] = {}
    for held in content.held:
        for end, state in () if held is None else held.checkpoints:
            ends[state] = max(end, ends.get(state, 0))
    alone = [state for state in ends if state not in taken]
    return sorted(alone, key=lambda state: -ends[state])[:n]


def _array(numbers: Sequence[int]) -> Int64Array:
    return np.array(numbers, np.int64)
