"""Views as HTML and as JSON: complete, escaped, bounded."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from kvcellar.cache.view import CacheView
from kvcellar.cells import CellTable
from kvcellar.cellsets import pack_owners
from tests.cache.helpers import arrange, make, put

HOSTILE = "\"><script>alert(1)</script><i title='\x1b[31m\u202e\n\0\ud800&amp;"


class Reader(HTMLParser):
    """Collects tags and attributes as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.classes: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        if tag == "i":
            self.titles.append(found["title"] or "")
            self.classes.append(found["class"] or "")

    def handle_data(self, data: str) -> None:
        self.text += "" if "kvcellar-view" in data else data


def some_view() -> CacheView:
    cache, _ = make(6)
    arrange(cache, "001.2.")
    cache.seq_cp(0, 3, 1, -1)
    return cache.view()


def large_table(n: int) -> CellTable:
    table = CellTable(n, 64)
    for seq in range(64):
        cells = np.arange(seq * (n // 64), (seq + 1) * (n // 64) - 100)
        at = np.arange(len(cells), dtype=np.int32)
        bits = pack_owners(at.astype(np.int64), np.full(len(cells), seq), len(cells), 1)
        table.place(cells, at, bits, at)
    return table


class TestHtml:
    def test_each_cell_says_what_it_holds(self) -> None:
        page = Reader(some_view()._repr_html_())
        assert page.titles == [
            "cell 0: position 0, sequence 0, token 100",
            "cell 1: position 1, sequences 0, 3, token 101",
            "cell 2: position 0, sequence 1, token 100",
            "cell 3: free",
            "cell 4: position 0, sequence 2, token 100",
            "cell 5: free",
        ]
        assert page.classes == ["s0", "shared", "s1", "free", "s2", "free"]
        assert "4 of 6 cells used, 5 tokens, longest free run 1" in page.text
        assert page.text.endswith("0+1.2.")

    def test_it_stands_on_its_own(self) -> None:
        text = some_view()._repr_html_()
        assert set(Reader(text).tags) == {"figure", "style", "figcaption", "div", "i"}
        assert not re.search(r"https?:|<script|@import|url\(", text)
        assert 'role="list"' in text
        assert 'aria-label="cells of the cache"' in text

    def test_a_page_background_is_not_assumed(self) -> None:
        text = some_view()._repr_html_()
        assert ".free{color:inherit" in text  # what has no colour of its own takes the page's
        assert "i{font-style:normal;text-align:center;border-radius:2px;color:#000}" in text

    def test_token_texts_are_shown(self) -> None:
        view = some_view().with_texts({100: "Once", 101: " upon"}.__getitem__)
        titles = Reader(view._repr_html_()).titles
        assert titles[0] == "cell 0: position 0, sequence 0, token 100, “Once”"
        assert titles[1].endswith("“ upon”")

    def test_hostile_texts_stay_texts(self) -> None:
        text = some_view().with_texts(lambda _: HOSTILE)._repr_html_()
        page = Reader(text)
        assert set(page.tags) == {"figure", "style", "figcaption", "div", "i"}
        assert len(page.titles) == 6
        assert "script>alert(1)</script" in page.titles[0]
        assert all(character.isprintable() for title in page.titles for character in title)
        assert not set("\x1b\u202e\0\ud800") & set(text)
        text.encode("utf-8")

    def test_long_texts_are_cut(self) -> None:
        page = Reader(some_view().with_texts(lambda _: "x" * 10_000)._repr_html_())
        assert all(len(title) < 120 for title in page.titles)
        assert page.titles[0].endswith("x…”")

    def test_a_million_cells_are_shown_in_buckets(self) -> None:
        view = CacheView.of(large_table(1 << 20))
        text = view._repr_html_()
        assert len(text) < 200_000
        titles = Reader(text).titles
        assert len(titles) == 1024
        assert titles[0] == "cells 0 to 1023: 1024 of 1024 used, most of sequence 0"
        assert titles[15] == "cells 15360 to 16383: 924 of 1024 used, most of sequence 0"

    def test_the_last_bucket_may_be_short(self) -> None:
        cache, _ = make(2049)
        put(cache, 1, 2)
        titles = Reader(cache.view()._repr_html_()).titles
        assert titles[0] == "cells 0 to 2: 2 of 3 used, most of sequence 1"
        assert titles[-1] == "cells 2046 to 2048: 0 of 3 used, most free"


class TestJson:
    def test_figures_and_a_row_for_each_used_cell(self) -> None:
        view = some_view()
        assert json.loads(view.to_json()) == view.as_dict()
        assert view.as_dict() == {
            "n_cells": 6,
            "n_seq_max": 4,
            "token_count": 5,
            "used_cells": 4,
            "max_contiguous": 1,
            "max_contiguous_idx": 3,
            "cells": [
                {"cell": 0, "position": 0, "sequences": [0], "token": 100, "text": None},
                {"cell": 1, "position": 1, "sequences": [0, 3], "token": 101, "text": None},
                {"cell": 2, "position": 0, "sequences": [1], "token": 100, "text": None},
                {"cell": 4, "position": 0, "sequences": [2], "token": 100, "text": None},
            ],
        }

    def test_unknown_tokens_are_null(self) -> None:
        table = CellTable(2, 1)
        bits = pack_owners(np.array([0]), np.array([0]), 1, 1)
        table.place(np.array([1]), np.array([7], np.int32), bits, None)
        (row,) = CacheView.of(table).as_dict()["cells"]
        assert row == {"cell": 1, "position": 7, "sequences": [0], "token": None, "text": None}

    def test_texts_come_through_unharmed(self) -> None:
        view = some_view().with_texts(lambda _: HOSTILE)
        text = view.to_json(indent=2)
        assert text.isascii()
        assert "\x1b" not in text
        assert json.loads(text)["cells"][0]["text"] == HOSTILE


class TestValues:
    def test_equal_states_are_equal(self) -> None:
        assert some_view() == some_view()
        assert some_view() != some_view().with_texts(str)
        cache, _ = make(6)
        assert cache.view() != some_view()
        assert cache.view() != 6
        with pytest.raises(TypeError, match="unhashable"):
            hash(some_view())

    def test_texts_change_no_picture(self) -> None:
        view = some_view().with_texts(lambda _: HOSTILE)
        assert str(view) == str(some_view())
        assert "\x1b" not in str(view)
        assert view.__rich__().plain == str(view)

    @pytest.mark.parametrize("n_seq_max", [4, 64, 65, 200])
    def test_glyphs_are_owners_in_whatever_word_their_bits_lie(self, n_seq_max: int) -> None:
        cache, _ = make(8, n_seq_max)
        put(cache, n_seq_max - 1, 2)
        put(cache, 0, 3)
        cache.seq_cp(0, n_seq_max - 1, 2, 3)
        glyph = "3" if n_seq_max == 4 else {64: "1", 65: "2", 200: "d"}[n_seq_max]
        assert cache.view().glyphs == f"{glyph}{glyph}00+..."
