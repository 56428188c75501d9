"""Parts of hybrid caches that refuse on purpose: states that are lists, and a stubborn group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvcellar.batch import MicroBatch, Rows
from kvcellar.cache import AttentionCache, CacheView
from kvcellar.cache.base import Cache, CheckpointBudget, Coupled, Savepoint
from kvcellar.cache.changes import Remember, Undo
from kvcellar.cache.hybrid import HybridCache
from kvcellar.cache.placement import CellPart
from kvcellar.cache.recurrent import RecurrentCache
from kvcellar.cache.sliding import SlidingCache, sliding_size
from kvcellar.cache.state_placement import StatePlacement
from kvcellar.cells import CellTable
from kvcellar.cellsets import clamp_range, unpack_owners
from kvcellar.errors import CacheError, OptionError, PositionError
from kvcellar.plan import StatePlan
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import MAX_POSITION, CacheSpec, Int32Array, LayerSpec, RopeSpec
from tests.cache.helpers import snapshot

Text = list[tuple[int, int]]  # tokens with their positions


class ToyStates(RecurrentCache):
    """States that are the texts they have absorbed.

    A state can go back to where a batch ended. ``broken`` names a method that fails.
    """

    def __init__(self, n_seq_max: int = 4) -> None:
        Cache.__init__(self)
        self.spec = CacheSpec(1, n_seq_max, ())
        self.texts: list[Text] = [[] for _ in range(n_seq_max)]
        self.kept: list[set[int]] = [set() for _ in range(n_seq_max)]  # numbers of tokens
        self.broken = ""
        self.plans = 0
        self.all_open: list[ToySavepoint] = []
        self._nest = self.all_open  # type: ignore[assignment]
        self.join(self.changes)

    used = token_count = 0

    def watch(self, remember: Remember) -> None:
        raise AssertionError(f"{remember} watches a part")

    def state(self) -> tuple[list[Text], list[set[int]]]:
        return [list(text) for text in self.texts], [set(kept) for kept in self.kept]

    def load(self, state: tuple[list[Text], list[set[int]]]) -> None:
        texts, kept = state
        self.texts, self.kept = [list(text) for text in texts], [set(one) for one in kept]

    def _remember(self) -> Undo:
        state, nest = self.state(), list(self.all_open)

        def undo() -> None:
            self.load(state)
            self.all_open[:] = nest

        return undo

    def fail(self, method: str) -> None:
        if self.broken == method:
            raise CacheError(f"{method} is broken")

    # -- questions

    def seq_pos_max(self, seq_id: int) -> int:
        return self.texts[seq_id][-1][1] if self.texts[seq_id] else -1

    def seq_pos_min(self, seq_id: int) -> int:
        return self.seq_pos_max(seq_id)  # a state is at one position

    def seq_count(self, seq_id: int) -> int:
        return len(self.texts[seq_id])

    def seq_tokens(self, seq_id: int) -> Int32Array:
        return np.array([token for token, _ in self.texts[seq_id]], np.int32)

    def seq_positions(self, seq_id: int) -> Int32Array:
        return np.array([at for _, at in self.texts[seq_id]], np.int32)

    def n_free(self) -> int:
        return MAX_POSITION

    def view(self, n_seq_max: int | None = None) -> CacheView:
        return CacheView.of(CellTable(1, self.spec.n_seq_max), n_seq_max)

    def check(self) -> None:
        for text, kept in zip(self.texts, self.kept, strict=True):
            assert all(0 < n <= len(text) for n in kept)

    # -- verbs

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        if seq_id == -1:
            saved = self.state()
            done = all(self.seq_rm(seq, p0, p1) for seq in range(self.spec.n_seq_max))
            if not done:
                self.load(saved)
            return done
        lo, hi = clamp_range(p0, p1)
        text = self.texts[seq_id]
        gone = [lo <= at < hi for _, at in text]
        if not any(gone):
            return True
        n_left = gone.index(True)
        if not all(gone[n_left:]) or (n_left and n_left not in self.kept[seq_id]):
            return False
        self._cut(seq_id, n_left)
        return True

    def seq_cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        assert (p0, p1) == (-1, -1), "a state can only be shared as a whole"
        if src != dst:
            self.texts[dst], self.kept[dst] = list(self.texts[src]), set(self.kept[src])

    def seq_keep(self, seq_id: int) -> None:
        for seq in range(self.spec.n_seq_max):
            if seq != seq_id:
                self._cut(seq, 0)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        self.fail("seq_add")
        lo, hi = clamp_range(p0, p1)
        if lo <= self.seq_pos_max(seq_id) < hi:
            moved = [(token, at + delta * (lo <= at < hi)) for token, at in self.texts[seq_id]]
            self.texts[seq_id] = moved if moved[-1][1] >= 0 else []
            self.kept[seq_id] = set()

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        if d < 1:
            raise OptionError(f"the divisor is {d}")
        lo, hi = clamp_range(p0, p1)
        moved = [(token, at // d if lo <= at < hi else at) for token, at in self.texts[seq_id]]
        self.texts[seq_id], self.kept[seq_id] = moved, set()

    def rewind(self, seq_id: int, p0: int) -> int:
        n_left = sum(at < p0 for _, at in self.texts[seq_id])
        if n_left < len(self.texts[seq_id]):
            self._cut(seq_id, max([0, *(n for n in self.kept[seq_id] if n <= n_left)]))
        return self.seq_pos_max(seq_id) + 1

    def clear(self, data: bool = True) -> None:  # noqa: ARG002
        self.seq_keep(-1)

    def defrag(self, max_moves: int | None = None) -> None:  # noqa: ARG002
        self.fail("defrag")

    def update(self) -> None:
        self.fail("update")

    def resize(self, size: int) -> None:
        raise AssertionError(f"states are not resized to {size} cells")

    def _cut(self, seq_id: int, n_left: int) -> None:
        del self.texts[seq_id][n_left:]
        self.kept[seq_id] = {n for n in self.kept[seq_id] if n <= n_left}

    def _begin(self, watchers: Sequence[Remember]) -> ToySavepoint:  # type: ignore[override]
        self.fail("transaction")
        return ToySavepoint(self, self.all_open, watchers)

    # -- decoding

    def check_rows(self, rows: Rows, coupled: Coupled = "same") -> None:  # noqa: ARG002
        last = {seq: self.seq_pos_max(seq) for seq in range(self.spec.n_seq_max)}
        for row, seq in zip(*unpack_owners(rows.owners), strict=True):
            at = int(rows.positions[row])
            if last[seq] >= 0 and at != last[seq] + 1:
                raise PositionError(f"position {at} does not follow on from {last[seq]}")
            last[seq] = at

    def _take(self, micros: Sequence[MicroBatch]) -> tuple[list[CellPart], StatePlacement]:
        self.fail("take")
        for micro in micros:
            rows, seqs = unpack_owners(micro.owners)
            counts = {seq: int((seqs == seq).sum()) for seq in set(seqs.tolist())}
            assert len(set(counts.values())) == 1, "a microbatch has equally many of each"
            assert len(rows) == micro.n_tokens
        return [], ToyPart(self, micros)


class ToyPart(StatePlacement):
    """A batch that states absorb when it is committed."""

    def __init__(self, states: ToyStates, micros: Sequence[MicroBatch]) -> None:
        self._all = states
        self._micros = tuple(micros)

    def plan(self, i: int) -> StatePlan:
        self._all.plans += 1
        n = len(set(unpack_owners(self._micros[i].owners)[1].tolist()))
        return StatePlan(np.zeros(n, np.int32), np.arange(n))

    def commit(self) -> None:
        touched = set()
        for micro in self._micros:
            assert micro.tokens is not None
            for row, seq in zip(*unpack_owners(micro.owners), strict=True):
                entry = (int(micro.tokens[row]), int(micro.positions[row]))
                self._all.texts[seq].append(entry)
                touched.add(int(seq))
        for seq in touched:
            self._all.kept[seq].add(len(self._all.texts[seq]))

    def release(self) -> None:
        """Nothing has changed yet."""


class ToySavepoint(Savepoint):
    """A copy of everything."""

    def __init__(
        self, states: ToyStates, nest: list[ToySavepoint], watchers: Sequence[Remember]
    ) -> None:
        super().__init__(states, nest, watchers)
        self._states, self._saved, self._all = states, states.state(), nest
        nest.append(self)

    def _take_back(self) -> None:
        self._states.load(self._saved)

    def _ended(self, *, kept: bool) -> None:  # noqa: ARG002
        self._all.pop()


class Stubborn(AttentionCache):
    """A group that cuts sequences only at multiples of three."""

    keeps_every_token = False

    def seq_rm(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        lo, hi = clamp_range(p0, p1)
        seqs = range(self.spec.n_seq_max) if seq_id == -1 else [seq_id]
        for seq in seqs:
            end = self.seq_pos_max(seq)
            if lo < hi and lo <= end and (lo % 3 or hi <= end):
                return False
        return super().seq_rm(seq_id, p0, p1)

    def rewind(self, seq_id: int, p0: int) -> int:
        p0 = max(p0, 0)
        return super().rewind(seq_id, p0 - p0 % 3 if p0 <= self.seq_pos_max(seq_id) else p0)


class BrokenStore(SignatureStore):
    """A store that cannot be resized while it is broken."""

    broken = False

    def resize(self, size: int, src: np.ndarray, dst: np.ndarray) -> None:
        if self.broken:
            raise MemoryError
        super().resize(size, src, dst)


def group(
    size: int = 24, *, window: int = 0, stubborn: bool = False, n_seq_max: int = 4, **can: bool
) -> AttentionCache:
    """A cache of K and V over a store that knows what is where."""
    layer = LayerSpec(1, 2, 2, RopeSpec("normal", 2), window)
    spec = CacheSpec(size, n_seq_max, (layer,), padding=1)
    return (Stubborn if stubborn else AttentionCache)(spec, BrokenStore(spec, **can))


def sliding(window: int = 4, n_seq_max: int = 4) -> SlidingCache:
    """A cache of a window with as few cells as it needs for microbatches of 4."""
    spec = group(sliding_size(window, n_seq_max, 4), window=window, n_seq_max=n_seq_max).spec
    return SlidingCache(spec, BrokenStore(spec), checkpoints=CheckpointBudget(6))


def hybrid(*groups: AttentionCache, states: bool = True) -> HybridCache:
    """A cache of these groups, and of toy states."""
    return HybridCache(groups or (group(), group(window=4)), ToyStates() if states else None)


@contextmanager
def unchanged(cache: HybridCache) -> Iterator[None]:
    """What happens inside may raise, but changes nothing."""
    before = everything(cache)
    yield
    assert everything(cache) == before


def everything(cache: HybridCache) -> list[object]:
    """All that the parts of a cache hold."""
    found: list[object] = []
    for part in cache.parts:
        if isinstance(part, AttentionCache):
            found.append(snapshot(part))
        else:
            assert isinstance(part, ToyStates)
            found.append(part.state())
    return found


def texts(cache: HybridCache, seq_id: int) -> list[Text]:
    """What each part knows of a sequence, that which slid out of a window included."""
    found = []
    for part in cache.parts:
        text = zip(
            part.seq_tokens(seq_id).tolist(), part.seq_positions(seq_id).tolist(), strict=True
        )
        evicted: Text = []
        if isinstance(part, SlidingCache):
            at = part.seq_evicted_positions(seq_id).tolist()
            evicted = list(zip(part.seq_evicted(seq_id).tolist(), at, strict=True))
        found.append([*evicted, *text])
    return found
