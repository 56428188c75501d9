"""The recurrent cache: one cell a sequence's state, over a store of states.

A state is never changed in its row as long as anybody refers to it: a decode reads one row and
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

import operator
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvcellar.backends.base import StateStore
from kvcellar.batch import Batch, MicroBatch, Rows, split_equal
from kvcellar.cache.base import Coupled
from kvcellar.cache.checkpoints import CheckpointPolicy
from kvcellar.cache.decoding import Decoding
from kvcellar.cache.held_states import HeldStates
from kvcellar.cache.placement import Placement, micro_batch
from kvcellar.cache.recorded import Recorded
from kvcellar.cache.state_checks import check_follows
from kvcellar.cache.state_placement import StatePlacement, plan_rows
from kvcellar.cache.state_porting import PortsStates
from kvcellar.cache.state_transaction import StateTransaction
from kvcellar.cache.undoable import Remember, Undoable
from kvcellar.cellsets import checked_id, clamp_range
from kvcellar.errors import CacheError, OptionError
from kvcellar.types import MAX_POSITION, CacheSpec


def state_rows(n_seq_max: int, n_checkpoints: int) -> int:
    """How many rows a store needs, so that a batch of all sequences always finds free ones.

    Of each sequence the state that it has, the one being decoded, and one that a transaction wants
    back, if rows of checkpoints are not as many. Where transactions are nested, checkpoints make
    room, or ``CacheFull`` says that none is left.
    """
    return 2 * n_seq_max + max(n_checkpoints, n_seq_max)


class RecurrentCache(Recorded, PortsStates, Decoding):
    """States by llama.cpp's verbs; see :class:`kvcellar.cache.base.Cache`.

    Args:
        store: where states lie; :func:`state_rows` says how many rows it should have.
        policy: which older states are kept to go back to.
        size: how many tokens the context was made for.
    """

    def __init__(
        self,
        store: StateStore,
        policy: CheckpointPolicy | None = None,
        *,
        size: int = MAX_POSITION,
    ) -> None:
        self.store = store
        self.spec = CacheSpec(size, store.spec.n_seq_max, ())
        self.states = HeldStates(store.spec, policy or CheckpointPolicy())
        self._nest: list[StateTransaction] = []
        self._watchers: list[Remember] = []

    # -- llama.cpp's verbs

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Drop a sequence, or all of them (-1) or none, from the range; False if it cannot."""
        self._require_idle()
        seqs = range(self.spec.n_seq_max) if seq_id == -1 else [self._checked(seq_id)]
        lo, hi = clamp_range(p0, p1)
        left = list(self.states.of)
        for seq in seqs:
            if held := left[seq]:
                done, left[seq] = held.removed(lo, hi)
                if not done:
                    return False
        self.states.of[:] = left
        return True

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Let dst share src's state in place of its own; the range cannot matter."""
        self._require_idle()
        clamp_range(p0, p1)
        a, b = self._checked(src), self._checked(dst)
        self.states.of[b] = self.states.of[a]

    def seq_keep(self, seq_id: int) -> None:
        """Drop every other sequence."""
        self._require_idle()
        seq = self._checked(seq_id)
        self.states.of[:] = [held if i == seq else None for i, held in enumerate(self.states.of)]

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move recorded positions; a sequence that falls below 0 as a whole is dropped.

        Raises:
            PositionError: one would pass the largest position, or tokens would change their order.
            NotSupported: some tokens would fall below 0, but not all.
        """
        self._require_idle()
        seq, delta = self._checked(seq_id), operator.index(delta)
        if held := self.states.of[seq]:
            self.states.of[seq] = held.shifted(*clamp_range(p0, p1), delta)

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide recorded positions by d, truncating.

        Raises:
            PositionError: tokens would change their order.
        """
        self._require_idle()
        if d < 1:
            raise OptionError(f"seq_div by {d}: the divisor must be at least 1")
        seq = self._checked(seq_id)
        if held := self.states.of[seq]:
            self.states.of[seq] = held.divided(*clamp_range(p0, p1), d)

    def clear(self, data: bool = True) -> None:
        """Forget every state; ``data`` says whether rows are zeroed too.

        Rows that a transaction may want back are zeroed when the outermost one is committed.
        """
        self._require_idle()
        self.states.of[:] = [None] * self.spec.n_seq_max
        if not data:
            return
        if self._nest:
            self._nest[-1].zero_later = True
            self.zero_unused()
        else:
            self.store.zero()

    def defrag(self, max_moves: int | None = None) -> None:  # noqa: ARG002
        """Nothing to do: states are found by row, wherever they lie."""
        self._require_idle()

    def update(self) -> None:
        """Nothing is ever pending."""
        self._require_idle()

    # -- beyond llama.cpp's

    def rewind(self, seq_id: int, p0: int) -> int:
        """Go back to the newest state without anything from p0 on; returns where to go on."""
        self._require_idle()
        seq, p0 = self._checked(seq_id), max(operator.index(p0), 0)
        if held := self.states.of[seq]:
            self.states.of[seq] = held.rewound(p0)
        return min(p0, self.seq_pos_max(seq) + 1)

    def checkpoint(self, seq_id: int) -> bool:
        """Keep a sequence's state to go back to; False: it is empty, or there is no budget."""
        self._require_idle()
        return self.states.keep(self._checked(seq_id))

    def transaction(self) -> Undoable:
        """What happens from here on can be taken back: states, positions and checkpoints."""
        self._require_idle()
        return StateTransaction(self, self.states, self._nest, self._watchers)

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return bool(self._nest)

    def watch(self, remember: Remember) -> None:
        """Let transactions take back what belongs to the cache but lies outside of it."""
        self._watchers.append(remember)

    def resize(self, size: int) -> None:
        """Say that the context is for so many tokens; the rows stay as many as they are.

        Raises:
            OptionError: size is below 1.
            CacheError: a transaction is open, or a batch is being decoded.
        """
        self._require_idle()
        if self._nest:
            raise CacheError("a transaction is open: end it before resizing")
        if size < 1:
            raise OptionError(f"size is {size}: it must be at least 1")
        self.spec = replace(self.spec, size=size)

    # -- decoding

    def place(
        self,
        batch: Batch,
        n_ubatch: int,
        *,
        n_vocab: int | None = None,
        n_embd: int | None = None,
        coupled: Coupled = "same",
    ) -> Placement:
        """Take a row for each sequence of a batch, or raise and take none.

        Arguments are those of ``AttentionCache.place``; microbatches have equally many tokens of
        each of their sequences.

        Raises:
            BatchError, SequenceIdError: the batch is wrong; the message says how.
            PositionError: positions do not follow on.
            CacheFull: fewer rows are free than states have to be written.
        """
        self._require_idle()
        batch.check_model(n_vocab, n_embd)
        rows = batch.resolve(self.spec.n_seq_max, self.seq_pos_max)
        self.check_rows(rows, coupled)
        micros = [micro_batch(rows, part) for part in split_equal(rows.owners, n_ubatch)]
        return Placement(micros, [], self.take(micros))

    # -- as a part of a cache of several kinds

    def check_rows(self, rows: Rows, coupled: Coupled = "same") -> None:  # noqa: ARG002
        """Raise unless positions follow on and a token's owners share their state.

        Two states cannot be mixed, so ``coupled="any"`` allows nothing more.
        """
        self._require_idle()
        last = [self.seq_pos_max(seq) for seq in range(self.spec.n_seq_max)]
        check_follows(rows, last, self.states.rows())

    def take(self, micros: Sequence[MicroBatch]) -> StatePlacement:
        """Take rows for microbatches that were checked; the oldest checkpoints make room.

        Raises:
            BatchError: a microbatch has not equally many tokens of its sequences.
            CacheFull: that is not enough; nothing has changed.
        """
        self._require_idle()
        states, before = self.states, list(self.states.of)
        spare = states.spare()
        kept = " but those that a transaction keeps" if self._nest else ""
        hint = f"all rows of states are in use{kept}; remove sequences or use a larger n_seq_max"
        rows = plan_rows(micros, states.rows(), [*states.unused(), *spare], hint)
        lost = np.array([row for row in rows.taken if row in spare], np.int64)
        bytes_lost = self.store.read(lost) if len(lost) else None

        def forget() -> None:
            states.of[:] = before
            if bytes_lost is not None:
                self.store.write(lost, bytes_lost)

        states.give_up(lost.tolist())
        taken = StatePlacement(micros, rows, states.absorb, forget)
        self._open = taken
        return taken

    # -- what transactions need to know

    def zero_unused(self) -> None:
        """Zero the rows that nobody refers to."""
        self.store.wipe(np.array(self.states.unused(), np.int64))

    # -- steps

    def _checked(self, seq_id: int) -> int:
        return checked_id(seq_id, self.spec.n_seq_max)
