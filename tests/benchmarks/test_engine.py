"""What is asked of engines, over one that only keeps positions."""

from __future__ import annotations

from typing import Any

import pytest
from _engine import CellEngine, Row, memory_now

SETTINGS = {"n_seqs": 3, "n_vocab": 50}


class Positions(CellEngine):
    """Keeps the positions of each sequence, and every token that it was given."""

    def bring_in(self) -> None:
        self.version = "1"

    def load(self) -> None:
        self.clear()

    def read(self, seq_id: int, tokens: list[int], start: int) -> None:
        held = self.held.setdefault(seq_id, {})
        assert start == len(held)
        held.update(enumerate(tokens, start))

    def step(self, rows: list[Row]) -> None:
        for token, position, seq_id in rows:
            held = self.held.setdefault(seq_id, {})
            assert position == max(held, default=-1) + 1
            held[position] = token

    def clear(self) -> None:
        self.held: dict[int, dict[int, int]] = {}

    def seq_rm(self, seq_id: int, start: int, stop: int) -> None:
        end = 2**31 if stop < 0 else stop
        held = self.held.pop(seq_id, {})
        kept = {p: token for p, token in held.items() if not max(start, 0) <= p < end}
        if kept:
            self.held[seq_id] = kept

    def seq_cp(self, src: int, dst: int) -> None:
        assert dst not in self.held
        self.held[dst] = dict(self.held[src])

    def seq_add(self, seq_id: int, start: int, stop: int, delta: int) -> None:
        assert stop == -1
        held = self.held[seq_id]
        moved = {p + delta if p >= start else p: token for p, token in held.items()}
        assert len(moved) == len(held)
        self.held[seq_id] = moved

    def seq_pos_max(self, seq_id: int) -> int:
        return max(self.held[seq_id])


def engine(**settings: Any) -> Positions:
    return Positions({**SETTINGS, **settings})


def lengths(made: Positions) -> dict[int, int]:
    for seq_id in made.held:
        assert sorted(made.held[seq_id]) == list(range(len(made.held[seq_id])))
    return {seq_id: len(held) for seq_id, held in made.held.items()}


def test_filling_gives_every_sequence_its_own_tokens() -> None:
    made = engine()
    answer = made.fill(20)
    assert lengths(made) == {0: 20, 1: 20, 2: 20}
    assert answer[""]["count"] == 60
    assert made.held[0] != made.held[1]
    assert all(4 <= token < 50 for held in made.held.values() for token in held.values())
    assert made.fill(5)[""]["count"] == 15
    assert lengths(made) == {0: 5, 1: 5, 2: 5}


def test_a_shared_prefix_is_computed_once() -> None:
    made = engine()
    assert made.fill(20, own=4)[""]["count"] == 20 + 3 * 4
    assert lengths(made) == {0: 24, 1: 24, 2: 24}
    starts = [[held[p] for p in range(20)] for held in made.held.values()]
    ends = [[held[p] for p in range(20, 24)] for held in made.held.values()]
    assert starts[0] == starts[1] == starts[2]
    assert ends[0] != ends[1] != ends[2]


def test_decoding_and_rewinding_bring_it_back() -> None:
    made = engine()
    made.fill(20)
    before = {seq_id: dict(held) for seq_id, held in made.held.items()}
    for _ in range(3):
        made.rewind(20)
        assert made.decode(5)[""]["count"] == 15
        assert lengths(made) == {0: 25, 1: 25, 2: 25}
    made.rewind(20)
    assert made.held == before


def test_rewinding_ever_further_works() -> None:
    made = engine(n_seqs=1)
    made.fill(8)
    assert made.extend(30)[""]["count"] == 22
    for n in (30, 20, 10):
        made.rewind(n)
        made.decode(2)
        assert lengths(made) == {0: n + 2}


def test_extending_to_what_is_there_does_nothing() -> None:
    made = engine(n_seqs=1)
    made.fill(8)
    assert made.extend(5)[""]["count"] == 0
    assert made.extend(8)[""]["count"] == 0
    assert lengths(made) == {0: 8}


def test_forks_are_gone_afterwards() -> None:
    made = engine(n_seqs=1)
    made.fill(8)
    for _ in range(2):
        answer = made.fork(4)
        assert lengths(made) == {0: 8}
        assert 0 < answer["the copies alone"]["seconds"] <= answer[""]["seconds"]


def test_a_shift_can_be_repeated_when_it_is_filled_up() -> None:
    made = engine(n_seqs=1)
    made.fill(20)
    for _ in range(3):
        made.extend(20)
        first = [made.held[0][p] for p in range(2)]
        made.shift(keep=2, discard=6)
        assert lengths(made) == {0: 20 - 6 + 1}
        assert [made.held[0][p] for p in range(2)] == first


def test_verbs_leave_everything_as_it_was() -> None:
    made = engine()
    made.fill(20)
    before = {seq_id: dict(held) for seq_id, held in made.held.items()}
    answer = made.verbs(3)
    assert made.held == before
    assert set(answer) == {"seq_cp", "seq_rm", "seq_add", "seq_pos_max"}
    assert all(part["count"] == 3 and part["seconds"] > 0 for part in answer.values())


def test_it_tells_how_long_starting_took_and_what_it_holds() -> None:
    made = engine()
    assert made.hello()["version"] == "1"
    assert set(made.hello()["seconds"]) == {"import", "load"}
    figures = made.memory()
    assert figures["peak"]["bytes"] > 2**20
    assert "K/V" not in figures  # it does not know


def test_resident_bytes_grow_with_what_is_held() -> None:
    before = memory_now()
    if before == 0:
        pytest.skip("the system does not tell")
    held = bytearray(b"x") * (32 << 20)
    assert memory_now() - before > 16 << 20
    del held
