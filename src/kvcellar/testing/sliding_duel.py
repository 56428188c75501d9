"""A sliding cache and whole texts, driven side by side.

Every method does one thing to both and raises AssertionError where they differ. What a token
attends to is compared content by content, in every microbatch; what is refused must change nothing,
and what fails must leave everything as it was (invariant 5).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from kvcellar.batch import Batch
from kvcellar.cache.base import CheckpointBudget
from kvcellar.cache.placement import Placement
from kvcellar.cache.sliding import SlidingCache, sliding_size
from kvcellar.cellsets import cell_count
from kvcellar.errors import CacheError, CacheFull
from kvcellar.plan import Plan
from kvcellar.testing.duel import CacheDuel, Interrupted, closed_range, snapshot
from kvcellar.testing.naive_sliding import NaiveEntry, NaiveTexts
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import MAX_POSITION, CacheSpec, Int64Array, LayerSpec, RopeSpec

N_SEQ = 3


def sliding_spec(size: int, window: int, n_seq_max: int = N_SEQ, padding: int = 1) -> CacheSpec:
    """A cache of one tiny layer."""
    layer = LayerSpec(1, 2, 2, RopeSpec("normal", 2), window)
    return CacheSpec(size, n_seq_max, (layer,), padding=padding)


class SlidingDuel(CacheDuel[NaiveTexts]):
    """One cache, and what it should know; ``extra`` cells more than :func:`sliding_size`."""

    def __init__(
        self,
        window: int,
        n_ubatch: int,
        *,
        padding: int = 1,
        extra: int = 0,
        budget: CheckpointBudget | None = None,
        wrap: Callable[[CacheSpec], SignatureStore] = SignatureStore,
    ) -> None:
        super().__init__()
        size = max(1, sliding_size(window, N_SEQ, n_ubatch) + extra)
        spec = sliding_spec(size, window, padding=padding)
        self.store = wrap(spec)
        self.cache: SlidingCache = SlidingCache(spec, self.store, checkpoints=budget)
        self.naive = NaiveTexts(window, N_SEQ)
        self.n_ubatch = n_ubatch
        self.always_fits = extra >= 0
        self.has_checkpoints = budget is None or budget.n_max > 0
        self._contents = itertools.count()

    # -- decoding

    def decode(
        self, owners: Sequence[Sequence[int]], gaps: Sequence[int] = (), fail_at: int | None = None
    ) -> None:
        """Decode tokens with these owners, or be interrupted after a microbatch."""
        if fail_at is not None:
            self.cache.update()  # which an interruption does not take back
        before, held = self.state(), self.held()
        n_free = self.cache.table.n_free()
        batch, entries, after = self._batch(owners, gaps)
        try:
            with self.cache.place(batch, self.n_ubatch) as placement:
                foreseen = placement.cells.tolist()
                taken = self._compute(placement, entries, after, fail_at)
            assert foreseen == taken
            self.naive = after
        except Interrupted:
            assert self.state() == before
        except CacheFull:
            assert not self.always_fits, "a batch found no room"
            assert self.state() == before
        if len(owners) <= n_free:
            assert all(was <= now for was, now in zip(held, self.held(), strict=True))

    def _batch(
        self, owners: Sequence[Sequence[int]], gaps: Sequence[int]
    ) -> tuple[Batch, list[NaiveEntry], NaiveTexts]:
        batch, entries, after = Batch(), [], self.naive.copy()
        for group, gap in itertools.zip_longest(owners, gaps[: len(owners)], fillvalue=0):
            assert not isinstance(group, int)
            content = next(self._contents)
            pos = max(after.end(seq) for seq in group) + gap
            entries.append(NaiveEntry(pos, content % 7, content))
            batch.add(content % 7, pos, group)
            for seq in group:
                after.texts[seq].append(entries[-1])
        return batch, entries, after

    def _compute(
        self,
        placement: Placement,
        entries: Sequence[NaiveEntry],
        after: NaiveTexts,
        fail_at: int | None,
    ) -> list[int]:
        taken: list[int] = []
        for i, plan in enumerate(placement.plans(lists=(len(entries) % 2 == 1,))):
            taken += plan.cells.tolist()
            mine = [entries[row].content for row in plan.micro.rows]
            self.store.fill(plan.cells, np.array(mine, np.int64), plan.micro.positions)
            self._check_seen(plan, after)
            if i == fail_at:
                raise Interrupted
        return taken

    def _check_seen(self, plan: Plan, after: NaiveTexts) -> None:
        for row, pos in enumerate(plan.micro.positions.tolist()):
            if plan.lists is None:
                seen: Int64Array = np.flatnonzero(plan.mask[row] == 0)
            else:
                seen = plan.lists.of(row).astype(np.int64)
            bits = int(plan.micro.owners[0, row])
            owners = [seq for seq in range(N_SEQ) if bits >> seq & 1]
            assert sorted(self.store.content[seen].tolist()) == after.seen(owners, pos)
            stands = self.cache.table.positions[seen]
            assert self.store.rotation[seen].tolist() == stands.tolist()

    # -- verbs

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        """Remove a range; refused exactly if a window would get a hole nobody can fill."""
        lo, hi = closed_range(p0, p1)
        seqs = range(N_SEQ) if seq == -1 else [seq]
        held, before = self.held(), self.state()
        is_tail = seq != -1 and hi >= self.naive.end(seq)
        ends = self.cache.checkpoints(seq) if is_tail else ()
        can = lo >= hi or all(self.naive.can_lose(s, held[s], lo, hi) for s in seqs)
        done = self.cache.seq_rm(seq, p0, p1)
        if not done:
            assert not can
            assert self.state() == before
            assert not is_tail or lo not in ends or not self.always_fits
            return
        assert can or (is_tail and self.has_checkpoints)
        for s in seqs:
            self.naive.remove(s, lo, hi)

    def rewind(self, seq: int, p0: int) -> None:
        """Go back to a position, or as far as it has to be."""
        p0 = max(p0, 0)
        can = self.naive.can_lose(seq, self.held()[seq], p0, MAX_POSITION)
        found = self.cache.rewind(seq, p0)
        self.naive.remove(seq, p0 if can else found, MAX_POSITION)
        assert found == min(p0, self.naive.end(seq)) if can else found <= p0
        assert self.has_checkpoints or can or found == 0

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Share a range, if that leaves dst with all it needs."""
        lo, hi = closed_range(p0, p1)
        if src == dst or hi <= lo:
            self.cache.seq_cp(src, dst, p0, p1)
            return
        text, held = self.naive.joined(src, dst, lo, hi), self.held()
        kept = [e for e in text if e.pos in held[src if lo <= e.pos < hi else dst]]
        if self._done(
            self.naive.is_enough(text, kept), lambda: self.cache.seq_cp(src, dst, p0, p1)
        ):
            self.naive.texts[dst] = text

    def seq_keep(self, seq: int) -> None:
        """Keep one sequence."""
        self.cache.seq_keep(seq)
        self.naive.texts = [text if s == seq else [] for s, text in enumerate(self.naive.texts)]

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Move everything from p0 on, not onto what stays; p1 has to be open."""
        assert p1 < 0
        below = [e.pos for e in self.naive.texts[seq] if e.pos < p0]
        above = [e.pos for e in self.naive.texts[seq] if e.pos >= p0]
        if above and below:
            delta = max(delta, max(below) + 1 - min(above))

        def move(pos: int) -> int:
            return pos + delta if pos >= p0 else pos

        held = {move(pos) for pos in self.held()[seq]}
        text = self.naive.moved(seq, move)
        enough = self.naive.is_enough(text, [e for e in text if e.pos in held])
        if self._done(enough, lambda: self.cache.seq_add(seq, p0, -1, delta)):
            self.naive.texts[seq] = text

    def checkpoint(self, seq: int) -> None:
        """Make one, if there is something to keep and a budget."""
        assert self.cache.checkpoint(seq) in (True, False)

    def cut_out(self, seq: int, p0: int, p1: int) -> None:
        """Remove a range and close the gap, which a removal that succeeds makes possible."""
        if cell_count(self.cache.table.shared(self.cache.table.select(seq))):
            return
        length = len(self.naive.texts[seq])
        self.seq_rm(seq, p0, p1)
        if len(self.naive.texts[seq]) < length and self.naive.end(seq) > p1:
            self.cache.seq_add(seq, p1, -1, p0 - p1)
            self.naive.texts[seq] = self.naive.moved(seq, lambda p: p - (p1 - p0) * (p >= p1))

    def clear(self, data: bool = True) -> None:
        """Empty the cache."""
        self.cache.clear(data)
        self.naive = NaiveTexts(self.naive.window, N_SEQ)

    def _done(self, expected: bool, call: Callable[[], None]) -> bool:
        before = self.state()
        try:
            call()
        except CacheFull:  # copies of shared cells take free cells only
            assert self.state() == before
            return False
        except CacheError:
            assert not expected
            assert self.state() == before
            return False
        assert expected
        return True

    # -- checks

    def held(self) -> list[set[int]]:
        """For each sequence: the positions that the cache holds."""
        return [set(self.cache.seq_positions(seq).tolist()) for seq in range(N_SEQ)]

    def state(self) -> tuple[object, ...]:
        """Return what is held, and what has left the window."""
        evicted = [
            (self.cache.seq_evicted(s).tolist(), self.cache.seq_evicted_positions(s).tolist())
            for s in range(N_SEQ)
        ]
        return (*snapshot(self.cache, only_used=True), evicted)

    def check(self) -> None:
        """Every sequence is what it should be, held or evicted, and can be decoded on."""
        self.cache.check()
        table = self.cache.table
        for seq, text in enumerate(self.naive.texts):
            held, evicted = self.cache.seq_positions(seq), self.cache.seq_evicted_positions(seq)
            assert [*evicted, *held] == [entry.pos for entry in text]
            tokens = [*self.cache.seq_evicted(seq), *self.cache.seq_tokens(seq)]
            assert tokens == [entry.token for entry in text]
            assert self.cache.seq_pos_max(seq) == self.naive.end(seq) - 1
            kept = text[len(evicted) :]
            assert self.naive.is_enough(text, kept)
            cells = table.cells_of(seq)
            assert self.store.content[cells].tolist() == [entry.content for entry in kept]
            stands = table.positions[cells] - table.pending[cells]
            assert self.store.rotation[cells].tolist() == stands.tolist()
