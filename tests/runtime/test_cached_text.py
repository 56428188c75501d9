"""A text in the cache against a plain list of tokens and positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcellar.batch import Batch
from kvcellar.cache import AttentionCache
from kvcellar.cache.base import Cache
from kvcellar.errors import CacheFull, NotSupported, OptionError, ShiftUnsupported
from kvcellar.runtime.cached_text import CachedText, Gap, PendingTokens, TextState
from kvcellar.runtime.options import ContextShift
from kvcellar.testing.stores import SignatureStore
from kvcellar.types import Int32Array
from tests.cache.helpers import make, put, snapshot

SIZE = 24


@dataclass
class Plain:
    """The oracle: each token with its position, in the order of the text."""

    text: list[tuple[int, int]] = field(default_factory=list)
    self_extended_end: int = 0

    @property
    def end(self) -> int:
        return max((at for _, at in self.text), default=-1) + 1

    def parts_a_group(self, cut: int) -> bool:
        return 0 < cut < len(self.text) and self.text[cut][1] == self.text[cut - 1][1]

    def remove(self, start: int, stop: int, gap: Gap) -> None:
        tail = self.text[stop:]
        if gap == "close" and tail:
            first, delta = self.text[start][1], self.text[start][1] - tail[0][1]
            tail = [(token, at + delta) for token, at in tail]
            if self.self_extended_end > first:
                self.self_extended_end = max(first, self.self_extended_end + delta)
        self.text[start:] = tail

    def self_extend(self, group: int, width: int) -> None:
        while group > 1 and self.end >= self.self_extended_end + width:
            low, new = self.self_extended_end, []
            for token, at in self.text:
                if low <= at < low + width:
                    at = low + (at - low) // group
                elif at >= low + width:
                    at -= width - width // group
                new.append((token, at))
            self.text, self.self_extended_end = new, low + width // group


class Edited:
    """A text that is fetched for each question and edit, as a sequence does."""

    def __init__(self, cache: Cache, seq_id: int) -> None:
        self.cache = cache
        self.seq_id = seq_id
        self.state = TextState()

    def fetch(self) -> CachedText:
        return CachedText(self.cache, self.seq_id, self.state)

    @property
    def tokens(self) -> list[int]:
        return self.fetch().tokens

    @property
    def positions(self) -> Int32Array:
        return self.fetch().positions

    @property
    def end(self) -> int:
        return self.fetch().end

    def remove(self, start: int, stop: int, gap: Gap) -> PendingTokens:
        return self._take(self.fetch().remove(start, stop, gap))

    def go_back(self, n_left: int) -> PendingTokens:
        return self._take(self.fetch().go_back(n_left))

    def self_extend(self, group: int, width: int) -> None:
        self._take(self.fetch().self_extend(group, width))

    def _take(self, state: TextState) -> PendingTokens:
        """Drop what would be computed again: what is decoded here comes from elsewhere."""
        self.state = state._replace(pending=PendingTokens())
        return state.pending


def decode(text: Edited, tokens: list[int]) -> None:
    """Put tokens behind a text, each with itself as the content of its cell."""
    assert isinstance(text.cache, AttentionCache)
    store = text.cache.store
    assert isinstance(store, SignatureStore)
    with text.cache.place(Batch.of(tokens, text.seq_id), 512) as placement:
        for plan in placement.plans():
            content = np.array(tokens, np.int64)
            store.fill(plan.cells, content, plan.micro.positions)


class Texts(RuleBasedStateMachine):
    """Two texts in one cache, edited in every way."""

    @initialize()
    def start(self) -> None:
        self.cache, self.store = make(SIZE, 2)
        self.texts = [Edited(self.cache, 0), Edited(self.cache, 1)]
        self.plain = [Plain(), Plain()]
        self.next_token = 100

    @rule(which=st.integers(0, 1), n=st.integers(1, 8))
    def append(self, which: int, n: int) -> None:
        plain, tokens = self.plain[which], list(range(self.next_token, self.next_token + n))
        if self.cache.used + n > SIZE:
            return
        decode(self.texts[which], tokens)
        plain.text += [(token, plain.end + i) for i, token in enumerate(tokens)]
        self.next_token += n

    @rule(which=st.integers(0, 1), data=st.data(), gap=st.sampled_from(["close", "keep"]))
    def remove(self, which: int, data: st.DataObject, gap: Gap) -> None:
        text, plain = self.texts[which], self.plain[which]
        if not plain.text:
            return
        start = data.draw(st.integers(0, len(plain.text) - 1))
        stop = data.draw(st.integers(start + 1, len(plain.text)))
        if plain.parts_a_group(start) or plain.parts_a_group(stop):
            before = snapshot(self.cache)
            with pytest.raises(OptionError, match="share position"):
                text.remove(start, stop, gap)
            assert snapshot(self.cache) == before
        elif self.unless_full(lambda: text.remove(start, stop, gap)):
            plain.remove(start, stop, gap)

    @rule(which=st.integers(0, 1), keep=st.integers(0, 6), discard=st.none() | st.integers(1, 9))
    def shift(self, which: int, keep: int, discard: int | None) -> None:
        text, plain = self.texts[which], self.plain[which]
        try:
            start, stop = text.fetch().shift_span(ContextShift(keep, discard))
        except OptionError:
            keep = min(keep, len(plain.text) - 2)
            behind = {at for _, at in plain.text[max(keep, 0) :]}
            behind -= {at for _, at in plain.text[: max(keep, 0)]}  # the rest of a group stays
            assert len(behind) < 2
            return
        assert 0 <= start < stop < len(plain.text)
        if self.unless_full(lambda: text.remove(start, stop, "close")):
            plain.remove(start, stop, "close")

    @rule(which=st.integers(0, 1), group=st.integers(1, 3), times=st.integers(1, 2))
    def self_extend(self, which: int, group: int, times: int) -> None:
        if self.unless_full(lambda: self.texts[which].self_extend(group, group * times)):
            self.plain[which].self_extend(group, group * times)

    @rule(which=st.integers(0, 1), data=st.data())
    def go_back(self, which: int, data: st.DataObject) -> None:
        text, plain = self.texts[which], self.plain[which]
        if not plain.text:
            return
        n_left = data.draw(st.integers(0, len(plain.text) - 1))
        first = plain.text[n_left][1]
        again = [token for token, at in plain.text[:n_left] if at == first]
        pending = text.go_back(n_left)
        assert pending.tokens == again
        assert pending.positions(text.end) == list(range(first, first + len(again)))
        plain.text = plain.text[: n_left - len(again)]
        plain.self_extended_end = min(plain.self_extended_end, first)

    @precondition(lambda self: not self.plain[1].text)
    @rule()
    def share(self) -> None:
        self.cache.seq_cp(0, 1)
        self.texts[1].state = self.texts[0].state
        self.plain[1] = Plain(list(self.plain[0].text), self.plain[0].self_extended_end)

    @rule()
    def compact(self) -> None:
        self.cache.defrag()
        self.cache.update()

    @invariant()
    def they_agree(self) -> None:
        self.cache.check()
        for text, plain in zip(self.texts, self.plain, strict=True):
            assert text.tokens == [token for token, _ in plain.text]
            assert text.positions.tolist() == [at for _, at in plain.text]
            assert (len(text.tokens), text.end) == (len(plain.text), plain.end)
            cells = self.cache.table.cells_of(text.seq_id)
            tokens, pending = (
                a[cells] for a in (self.cache.table.tokens, self.cache.table.pending)
            )
            assert self.store.content[cells].tolist() == tokens.tolist()
            assert self.store.rotation[cells].tolist() == (text.positions - pending).tolist()

    def unless_full(self, edit: object) -> bool:
        before, states = snapshot(self.cache), [text.state for text in self.texts]
        try:
            edit()  # type: ignore[operator]
        except CacheFull:
            assert snapshot(self.cache) == before
            assert [text.state for text in self.texts] == states
            return False
        return True


Texts.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTextsFollowAPlainList = Texts.TestCase


def filled(n: int, size: int = 16, **options: bool) -> tuple[Edited, AttentionCache]:
    cache, _ = make(size, 4, **options)  # type: ignore[arg-type]
    put(cache, 0, n)
    return Edited(cache, 0), cache


def test_compaction_does_not_shuffle_tokens_that_share_a_position() -> None:
    cache, _ = make(16, 2)
    a, b = Edited(cache, 0), Edited(cache, 1)
    for i in range(4):
        decode(b, [200 + i])
        decode(a, [100 + i])
    a.self_extend(4, 4)
    cache.seq_rm(1)
    cache.defrag()
    cache.update()
    assert cache.table.tokens_of(0).tolist() != [100, 101, 102, 103]  # cells alone cannot tell
    assert a.tokens == [100, 101, 102, 103]


def test_edits_of_the_cells_below_are_believed() -> None:
    text, cache = filled(8)
    text.self_extend(2, 4)
    cache.seq_rm(0, 0, 1)
    assert text.tokens == [102, 103, 104, 105, 106, 107]


@pytest.mark.parametrize(("group", "width"), [(0, 4), (2, 3), (4, 2), (-1, -1), (2, 0)])
def test_windows_are_whole_groups(group: int, width: int) -> None:
    text, cache = filled(8)
    before = snapshot(cache)
    with pytest.raises(OptionError, match=r"group|width"):
        text.self_extend(group, width)
    assert snapshot(cache) == before


def test_self_extend_follows_the_recipe_of_llama_cpp() -> None:
    text, cache = filled(23, size=32)
    n_past, ga_i, ga_n, ga_w = 23, 0, 4, 8
    naive = list(range(23))
    while n_past >= ga_i + ga_w:
        ib, bd = ga_n * ga_i // ga_w, ga_w // ga_n * (ga_n - 1)
        dd = ga_w // ga_n - ib * bd - ga_w
        naive = [p + ib * bd if ga_i <= p < n_past else p for p in naive]
        low = ga_i + ib * bd
        naive = [p // ga_n if low <= p < low + ga_w else p for p in naive]
        naive = [p + dd if low + ga_w <= p < n_past + ib * bd else p for p in naive]
        n_past, ga_i = n_past - bd, ga_i + ga_w // ga_n
    text.self_extend(ga_n, ga_w)
    assert text.positions.tolist() == naive
    cache.check()


def test_what_cannot_shift_is_computed_again() -> None:
    text, cache = filled(8, can_shift=False)
    before = snapshot(cache)
    with pytest.raises(ShiftUnsupported):
        text.self_extend(2, 4)
    assert snapshot(cache) == before
    assert not text.remove(6, 8, "close")  # nothing has to move
    assert not text.remove(2, 4, "keep")
    assert text.positions.tolist() == [0, 1, 4, 5]
    again = text.remove(1, 2, "close")
    assert text.tokens == [100]
    assert (again.tokens, again.places) == ([104, 105], [1, 2])


def test_what_cannot_copy_refuses_before_anything_is_removed() -> None:
    text, cache = filled(8, can_copy=False)
    cache.seq_cp(0, 1, 4, -1)
    before = snapshot(cache)
    with pytest.raises(NotSupported, match="copy"):
        text.remove(2, 4, "close")
    assert snapshot(cache) == before


def test_removed_cells_make_room_for_the_copies() -> None:
    text, cache = filled(8, size=8)
    cache.seq_cp(0, 1, 6, -1)
    text.remove(2, 4, "close")
    assert text.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert cache.seq_pos_max(1) == 7
    cache.check()


def test_without_room_for_the_copies_nothing_is_removed() -> None:
    text, cache = filled(8, size=8)
    cache.seq_cp(0, 1, 4, -1)
    before = snapshot(cache)
    with pytest.raises(CacheFull, match="4 cells needed, 2 free"):
        text.remove(2, 4, "close")
    assert snapshot(cache) == before


@pytest.mark.parametrize(
    ("n_tokens", "n_max", "span"),
    [(0, 0, None), (4, 12, None), (1, 8, (2, 5)), (4, 11, (2, 5)), (9, 99, (2, 5))],
)
def test_room_is_free_cells_and_positions(
    n_tokens: int, n_max: int, span: tuple[int, int] | None
) -> None:
    text, _ = filled(8)
    text.state = TextState(pending=PendingTokens(range(n_tokens)))
    assert text.fetch().span_to_discard(n_max, ContextShift(2)) == span


def test_a_shift_that_would_free_nothing_is_refused() -> None:
    text, cache = filled(8, size=8)
    cache.seq_cp(0, 1)
    before = snapshot(cache)
    text.state = TextState(pending=PendingTokens([1]))
    with pytest.raises(CacheFull, match="would free none"):
        text.fetch().span_to_discard(99, ContextShift(2))
    assert snapshot(cache) == before
