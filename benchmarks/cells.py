"""Each verb of the cell table at several sizes, beside the reference and beside a naive model.

    python benchmarks/cells.py [--sizes 4096 32768 …] [--sequences 16 64] [--repeats 15]

A full table is shared out among the sequences: each in a block of its own ("blocks"), a token a
turn ("turns": no set of cells is a range), or so behind a start that is a quarter of the table and
belongs to all ("shared"). Before each call the table is put back
to that state; figures are the least of the repeats.

The reference is llama.cpp's cache of January 2025, compiled C++: its figures at 32k cells were
measured on a machine of this kind, are known as "8 to 22 ms" at 1M (between verbs: interpolated),
and are scaled with the number of cells elsewhere. It cannot be run here, so its ratios say only
whether a target is met. The naive model (``kvcellar.testing.naive``: a Python object with a set of
owners a cell, as in C++) is run, in the same process and on the same table, where that does not
take too long.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from kvcellar.cache.placement import find_cells
from kvcellar.cache.view import CacheView
from kvcellar.cells import CellTable
from kvcellar.cellsets import pack_owners
from kvcellar.testing.naive import NaiveCache, NaiveCell

K32, M1 = 32 << 10, 1 << 20
REFERENCE_32K = {  # µs
    "rm": 112.0,
    "cp": 176.0,
    "add": 140.0,
    "div": 136.0,
    "keep": 442.0,
    "pos_max": 133.0,
    "clear": 443.0,
    "view": 253.0,
    "find 1": 38.0,
}
LARGEST_NAIVE = 32 << 10
WANTED = ((M1, 8.0), (K32, 4.0), (0, 1.0))  # from so many cells on, so many times faster


@dataclass(frozen=True)
class Verb:
    """What is timed, on our table and on the naive model."""

    name: str
    ours: Callable[[CellTable, int], object]
    naive: Callable[[NaiveCache, int], object] | None = None
    prepare: Callable[[CellTable], object] | None = None


def verbs(seq: int, per_seq: int) -> list[Verb]:
    """Every verb, on a sequence of so many tokens; the last sequence is left empty for cp."""
    half, end = per_seq // 2, 2**31
    return [
        Verb("rm", lambda t, _: t.seq_rm(seq, half, -1), lambda n, _: n.seq_rm(seq, half, end)),
        Verb("cp", lambda t, free: t.seq_cp(seq, free), lambda n, f: n.seq_cp(seq, f, 0, end)),
        Verb(
            "add", lambda t, _: t.seq_add(seq, 16, -1, 5), lambda n, _: n.seq_add(seq, 16, end, 5)
        ),
        Verb(
            "div", lambda t, _: t.seq_div(seq, 16, -1, 4), lambda n, _: n.seq_div(seq, 16, end, 4)
        ),
        Verb("keep", lambda t, _: t.seq_keep(seq), lambda n, _: n.seq_keep(seq)),
        Verb("pos_max", lambda t, _: t.seq_pos_max(seq), lambda n, _: n.pos_max(seq)),
        Verb(
            "pos_max after an edit",
            lambda t, _: t.seq_pos_max(seq),
            prepare=lambda t: t.seq_rm(seq, half, -1),
        ),
        Verb("clear", lambda t, _: t.clear()),
        Verb("view", lambda t, _: CacheView.of(t)),
    ]


def filled(size: int, n_seqs: int, layout: str, share: float = 1.0) -> CellTable:
    """A table of which that share is used; sequence ``n_seqs`` is empty."""
    table = CellTable(size, n_seqs + 1)
    n = int(size * share) // n_seqs * n_seqs
    at = np.arange(n)
    seq_ids, positions = (at // (n // n_seqs), at % (n // n_seqs))
    if layout != "blocks":
        seq_ids, positions = at % n_seqs, at // n_seqs
    bits = pack_owners(at, seq_ids, n, len(table.owners))
    if layout == "shared":
        common = n // 4
        positions = np.where(at < common, at, common + (at - common) // n_seqs)
        bits[:, :common] = pack_owners(
            np.zeros(n_seqs, np.int64), np.arange(n_seqs), 1, len(table.owners)
        )
    table.place(at, positions.astype(np.int32), bits, positions.astype(np.int32))
    return table


def half_full(size: int, n_seqs: int) -> CellTable:
    """Every other cell of the first three quarters is free, the rest is too; head is at 1."""
    table = filled(size, n_seqs, "turns", 0.75)
    table.release(np.arange(0, int(size * 0.75) - n_seqs, 2))
    return table


def naive_of(table: CellTable) -> NaiveCache:
    """The same state as Python objects."""
    naive = NaiveCache(table.size, on_shared="move")
    owners = CacheView.of(table).sequences
    rows = zip(table.positions.tolist(), table.tokens.tolist(), owners, strict=True)
    naive.cells = [NaiveCell(pos, 0, token, set(held)) for pos, token, held in rows]
    return naive


def timed(verb: Verb, table: CellTable, free: int, repeats: int) -> float:
    """Least µs of a call on the table as it is now, which it is afterwards too."""
    saved = table.save()
    times = []
    for _ in range(repeats):
        if verb.prepare:
            verb.prepare(table)
        start = perf_counter()
        result = verb.ours(table, free)
        times.append(perf_counter() - start)
        del result
        table.load(saved)
    return min(times) * 1e6


def timed_naive(verb: Verb, table: CellTable, free: int) -> float | None:
    """µs of one call on the naive model, None where it has no such verb or takes too long."""
    if verb.naive is None or table.size > LARGEST_NAIVE:
        return None
    naive = naive_of(table)
    start = perf_counter()
    verb.naive(naive, free)
    return (perf_counter() - start) * 1e6


def reference(name: str, size: int) -> float | None:
    """µs that the reference takes, None where that is not known."""
    if name not in REFERENCE_32K:
        return None
    if size >= M1:
        at_1m = 3e3 if name == "find 1" else 8e3 + 14e3 * (REFERENCE_32K[name] - 112) / 331
        return at_1m * size / M1
    return REFERENCE_32K[name] * size / K32


def show(size: int, layout: str, verb: Verb, us: float, naive: float | None) -> None:
    """A line of the table."""
    known = reference(verb.name, size)
    wanted = next(times for least, times in WANTED if size >= least)
    columns = f"{size:>8} {layout:12} {verb.name:22} {us:9.1f}"
    columns += f" {known:9.0f} {known / us:7.1f}x" if known else " " * 19
    missed = " misses" if known and known / us < wanted else ""
    columns += f" {naive / us:8.0f}x" if naive else " " * 10
    print(columns + missed)


def measure(size: int, n_seqs: int, repeats: int) -> None:
    """All verbs at one size."""
    print(f"\n{n_seqs} sequences")
    print(f"{'cells':>8} {'layout':12} {'verb':22} {'µs':>9} {'C++ µs':>9} {'C++':>8} {'naive':>9}")
    for layout in ("blocks", "turns", "shared"):
        table = filled(size, n_seqs, layout)
        held = table.seq_count(n_seqs // 2)
        for verb in verbs(n_seqs // 2, held):
            us = timed(verb, table, n_seqs, repeats)
            show(size, layout, verb, us, timed_naive(verb, table, n_seqs))
    table = half_full(size, n_seqs)
    for n in (1, 16):
        find = Verb(f"find {n}", partial(lambda n, t, _: find_cells(t, n), n))
        show(size, "half full", find, timed(find, table, n_seqs, repeats), None)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, K32, 128 << 10, M1])
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--repeats", type=int, default=25)
    args = parser.parse_args()
    for size in args.sizes:
        for n_seqs in args.sequences:
            measure(size, n_seqs, args.repeats)


if __name__ == "__main__":
    main()
