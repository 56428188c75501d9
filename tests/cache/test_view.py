"""Views are values, and print plainly or in colour."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from rich.console import Console

from kvcellar.errors import OptionError
from tests.cache.helpers import arrange, make, put


def test_what_it_counts() -> None:
    cache, _ = make(8)
    put(cache, 0, 3)
    cache.seq_cp(0, 1, 0, 2)

    view = cache.view()

    assert (view.n_cells, view.n_seq_max) == (8, 4)
    assert (view.token_count, view.used_cells) == (5, 3)
    assert (view.max_contiguous, view.max_contiguous_idx) == (5, 3)
    assert view.positions.tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    assert view.tokens[:3].tolist() == [100, 101, 102]
    assert view.sequences[:4] == ((0, 1), (0, 1), (0,), ())


@pytest.mark.parametrize(
    ("picture", "longest", "start"),
    [("0000", 0, -1), ("....", 4, 0), ("0.0..0", 2, 3), ("..0..", 2, 0), ("0..00...", 3, 5)],
)
def test_the_longest_free_run_is_the_first_of_them(picture: str, longest: int, start: int) -> None:
    cache, _ = make(len(picture))
    arrange(cache, picture)
    view = cache.view()
    assert (view.max_contiguous, view.max_contiguous_idx) == (longest, start)


def test_owners_are_limited_the_smallest_first() -> None:
    cache, _ = make(4)
    put(cache, 3, 1)
    for seq in (2, 0, 1):
        cache.seq_cp(3, seq)
    assert cache.view(2).sequences[0] == (0, 1)
    assert cache.view().sequences[0] == (0, 1, 2, 3)
    with pytest.raises(OptionError, match="n_seq_max=0"):
        cache.view(0)


def test_it_does_not_follow_the_cache() -> None:
    cache, _ = make(4)
    put(cache, 0, 2)
    view = cache.view()
    text = str(view)

    cache.clear()

    assert str(view) == text
    assert view.positions.tolist() == [0, 1, -1, -1]
    with pytest.raises(FrozenInstanceError):
        view.n_cells = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        view.positions[0] = 4


def test_the_plain_text_has_no_escape_codes() -> None:
    cache, _ = make(8)
    arrange(cache, "00.1..2.")
    cache.seq_cp(1, 3)

    assert str(cache.view()) == ("4 of 8 cells used, 5 tokens, longest free run 2\n00.+..2.")


def test_long_caches_break_into_lines_and_very_long_ones_into_buckets() -> None:
    cache, _ = make(100)
    assert [len(line) for line in str(cache.view()).split("\n")[1:]] == [64, 36]

    cache, _ = make(4096)
    put(cache, 2, 1000)
    summary, *lines = str(cache.view()).split("\n")
    assert "4 cells a glyph" in summary
    assert "".join(lines) == "2" * 250 + "." * 774


def test_colours_tell_the_owners_apart() -> None:
    cache, _ = make(4)
    arrange(cache, "01..")
    console = Console(force_terminal=True, color_system="standard", width=80)
    with console.capture() as capture:
        console.print(cache.view())
    out = capture.get()
    assert "\x1b[36m0" in out
    assert "\x1b[32m1" in out
    assert "\x1b[2m" in out

    plain = Console(force_terminal=False, width=80)
    with plain.capture() as capture:
        plain.print(cache.view())
    assert capture.get().rstrip("\n") == str(cache.view())


def test_rich_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, kvcellar.cache.view; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_positions_do_not_count_a_pending_shift_twice() -> None:
    cache, _ = make(8)
    put(cache, 0, 4)
    cache.seq_rm(0, 0, 2)
    cache.seq_add(0, 2, -1, -2)
    positions = cache.view().positions
    assert positions[np.flatnonzero(positions >= 0)].tolist() == [0, 1]
