"""The tour: read a prompt, answer, fork, continue, roll back, continue differently.

A map shows a small cache, a character a cell: the letter of the only sequence that owns it, ``a``
for sequence 0; the number of owners of a shared cell; a dot for a free one. Colours repeat that, so
nothing is lost without them.

Costs are measured from outside and not taken from counters: all K and V rows are read before and
after a step, and a row that differs was written.

In a terminal each frame replaces the one before and stays for a moment; elsewhere only the last
frame of a step is printed, and nothing waits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from kvcellar.cache.attention import AttentionCache
from kvcellar.cli.console import columns_table, show, visible, visible_line
from kvcellar.cli.units import human_bytes
from kvcellar.types import ByteArray

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvcellar.backends.base import Part
    from kvcellar.cache.view import CacheView
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence

T = TypeVar("T")
ShowFrame: TypeAlias = Callable[[RenderableType], None]

TEN_LINES = """\
import kvcellar as kv

model = kv.Model.from_gguf(kv.find_model("smollm2"))
ctx = model.context(n_ctx=256, n_seq_max=4)
a = ctx.sequence("Deep in the cellar, behind the oldest barrel,")
print(a.generate(40))
b, c, d = a.fork(), a.fork(), a.fork()    # every cell is shared, no byte copied
print(b.generate(36), d.generate(36, temperature=1.1, seed=4), sep="\\n")
print(c.generate(36, temperature=0.7, seed=2))
c.trim(24).append(" -- no. One night,")   # roll back 24, continue differently
print(c.generate(32), ctx.cache.view(), sep="\\n")    # who owns which cell
"""
"""The tour as a program; a test runs it."""

N_ANSWER, N_BRANCH, N_AGAIN = 40, 36, 32
N_KEPT = 12  # tokens that the fork keeps which is rolled back
TURN = " -- no. One night,"
WAYS = (("greedy", 0.0, 0), ("cautious", 0.7, 2), ("daring", 1.1, 4))
"""Name, temperature and seed of each fork."""
PATIENCE = 10.0
"""Seconds of generation in a step, so that the tour ends within a minute on any machine."""


class Tour:
    """The demonstration.

    Args:
        context: an empty context for four sequences.
        screen: where to show it.
        prompt: the text that the model continues.
    """

    def __init__(self, context: Context, screen: LiveView, prompt: str) -> None:
        self._context = context
        self._screen = screen
        self._prompt = prompt
        self._costs = Costs(context)
        self._trunk = context.sequence()
        self._branches: list[Sequence] = []
        self._texts: dict[int, Text] = {}
        self._names = {self._trunk.seq_id: "the answer"}

    def run(self) -> None:
        """Show every step, then a table of costs and the same in Python."""
        self._introduce()
        self._answer()
        self._fork()
        self._continue()
        self._roll_back()
        self._continue_differently()
        self._sum_up()

    # -- the steps

    def _introduce(self) -> None:
        context = self._context
        spec, n_layers = context.spec, len(context.model.spec.layers)
        self._screen.say(
            Text.assemble(
                ("kvcellar tour", "bold"),
                f": {visible_line(context.model.path.name)}, {n_layers} layers; "
                f"a cache of {spec.size} cells, {human_bytes(spec.bytes_per_cell)} of K and V each "
                f"({spec.type_k.label}).",
            )
        )

    def _answer(self) -> None:
        with self._screen.step("1 of 5  The model continues a prompt") as show:
            seq = self._trunk
            self._texts[seq.seq_id] = Text.assemble((visible(self._prompt), "bold"))
            with self._costs.measure("read the prompt") as cost:
                cost.timed(lambda: seq.append(self._prompt))
                show(self._frame())
            with self._costs.measure("answer") as cost:
                self._stream({seq: seq.stream(N_ANSWER)}, cost, show)
        self._report(cost)

    def _fork(self) -> None:
        with self._screen.step("2 of 5  The answer is forked three times") as show:
            with self._costs.measure("fork three ways") as cost:
                self._branches = cost.timed(lambda: [self._trunk.fork() for _ in WAYS])
            ids = [branch.seq_id for branch in self._branches]
            self._names |= dict(zip(ids, [name for name, _, _ in WAYS], strict=True))
            show(self._frame())
        one = human_bytes(len(self._trunk) * self._context.spec.bytes_per_cell)
        self._report(cost, f"Four sequences share their cells; three copies would take 3 x {one}.")

    def _continue(self) -> None:
        self._texts = {branch.seq_id: Text.assemble(("... ", "dim")) for branch in self._branches}
        with (
            self._screen.step("3 of 5  The forks continue, each in its own way") as show,
            self._costs.measure("continue three ways") as cost,
        ):
            streams = {
                branch: branch.stream(N_BRANCH, temperature=temperature, seed=seed)
                for branch, (_, temperature, seed) in zip(self._branches, WAYS, strict=True)
            }
            self._stream(streams, cost, show)
        self._report(
            cost,
            "Each new token takes one cell; the cells from before stay shared. Greedy",
            "takes the best token, cautious samples at temperature 0.7, daring at 1.1.",
        )

    def _roll_back(self) -> None:
        branch = self._branches[1]
        n_back = max(0, len(branch) - len(self._trunk) - N_KEPT)
        with self._screen.step(f"4 of 5  Fork c is rolled back by {n_back} tokens") as show:
            with self._costs.measure("roll back") as cost:
                cost.timed(lambda: branch.trim(n_back))
            self._texts = {branch.seq_id: Text.assemble(("... ", "dim"))}
            self._write(branch, branch.text[len(self._trunk.text) :])
            show(self._frame())
        self._report(cost, "The cells are free for new tokens; shared ones stay as they are.")

    def _continue_differently(self) -> None:
        branch = self._branches[1]
        with (
            self._screen.step("5 of 5  Fork c continues differently, in the freed cells") as show,
            self._costs.measure("continue differently") as cost,
        ):
            cost.timed(lambda: branch.append(TURN))
            self._write(branch, TURN, "bold")
            self._stream({branch: branch.stream(N_AGAIN)}, cost, show)
        self._report(cost)

    def _sum_up(self) -> None:
        self._screen.heading("What it cost")
        self._screen.say(self._costs.table())
        self._screen.heading("The same in Python")
        self._screen.say_code(TEN_LINES.rstrip())

    # -- their parts

    def _stream(self, streams: dict[Sequence, Iterator[str]], cost: Cost, show: ShowFrame) -> None:
        """Take a piece of each stream in turn until all have ended or time is up."""
        running = list(streams.items())
        while running and cost.seconds < PATIENCE:
            sequence, stream = running.pop(0)
            piece = cost.timed(partial(next, stream, None))
            if piece is not None:
                running.append((sequence, stream))
                self._write(sequence, piece)
                show(self._frame())
        for sequence in streams:
            cost.timed(partial(getattr, sequence, "logits"))  # gives the last token its cell
        show(self._frame())

    def _write(self, sequence: Sequence, piece: str, style: str = "") -> None:
        """Append to the text that is shown, with blanks in place of line breaks."""
        text = self._texts[sequence.seq_id]
        piece = visible(re.sub(r"\s+", " ", piece))
        text.append(piece.lstrip() if text.plain.endswith(" ") else piece, style)

    def _frame(self) -> RenderableType:
        """Return the texts, the map of cells, and how many are used."""
        view, width = self._context.cache.view(), self._screen.width
        texts = [line for seq_id in self._texts for line in self._paragraph(seq_id)]
        total = human_bytes(view.used_cells * self._context.spec.bytes_per_cell)
        counts = (
            f"     {view.token_count} tokens cached in {view.used_cells} of {view.n_cells} cells, "
            f"{total} of K and V"
        )
        return Group(*texts, "", cell_map(view, width), legend(view, self._names), Text(counts))

    def _paragraph(self, seq_id: int) -> Iterator[Text]:
        """Yield a sequence's text in lines, the first with its letter."""
        text = self._texts[seq_id]
        lines = text.wrap(self._screen.console, self._screen.width - 4)
        for i, line in enumerate(lines):
            line.rstrip()
            yield (badge(seq_id).append("  ") if i == 0 else Text("   ")).append_text(line)

    def _report(self, cost: Cost, *remarks: str) -> None:
        for line in (str(cost), *remarks):
            self._screen.say(Padding(Text(line, "italic"), (0, 0, 0, 5), expand=False))
        self._screen.pause()


_FRAME, _PAUSE = 0.05, 1.5  # seconds that a frame and the end of a step stay
_MAX_WIDTH = 100


class LiveView:
    """A console that shows frames at a pace that can be followed.

    Args:
        console: where to show.
        fast: never wait.
    """

    def __init__(self, console: Console, *, fast: bool) -> None:
        self.console = console
        self.width = min(console.width, _MAX_WIDTH)
        self._waits = console.is_terminal and not fast

    @contextmanager
    def step(self, title: str) -> Iterator[ShowFrame]:
        """Begin a step; yield the function that shows a frame in place of the one before."""
        self.heading(title)
        if self.console.is_terminal:
            with self._moving() as show_frame:
                yield show_frame
        else:
            with self._still() as show_frame:
                yield show_frame

    def heading(self, title: str) -> None:
        """Print a title, ruled to the right."""
        line = "-" if self.console.options.ascii_only else "─"
        rest = max(3, self.width - len(title) - 4)
        self.console.print(Text(f"\n{line * 2} {title} ", "bold").append(line * rest, "dim"))

    def say(self, text: RenderableType) -> None:
        """Print below the last frame."""
        show(self.console, text)

    def say_code(self, code: str) -> None:
        """Print Python, in colours where there are any."""
        if not self.console.is_terminal:
            self.say(Text(code))
            return
        from rich.syntax import Syntax

        self.say(Syntax(code, "python", theme="ansi_dark", background_color="default"))

    def pause(self) -> None:
        """Wait at the end of a step."""
        if self._waits:
            time.sleep(_PAUSE)

    @contextmanager
    def _moving(self) -> Iterator[ShowFrame]:
        from rich.live import Live

        last = time.perf_counter()
        with Live(console=self.console, auto_refresh=False) as live:

            def show_frame(frame: RenderableType) -> None:
                nonlocal last
                if self._waits:
                    time.sleep(max(0.0, last + _FRAME - time.perf_counter()))
                last = time.perf_counter()
                live.update(frame, refresh=True)

            yield show_frame

    @contextmanager
    def _still(self) -> Iterator[ShowFrame]:
        frames: list[RenderableType] = []
        yield lambda frame: frames.__setitem__(slice(None), [frame])
        show(self.console, *frames)


PARTS: tuple[Part, ...] = ("k", "v")


@dataclass(slots=True)
class Cost:
    """The cost of a step; ``cells`` is the change of used cells, negative where some were freed."""

    name: str
    n_tokens: int = 0
    seconds: float = 0.0
    cells: int = 0
    bytes_written: int = 0

    def timed(self, action: Callable[[], T]) -> T:
        """Call the action and add its time."""
        start = perf_counter()
        try:
            return action()
        finally:
            self.seconds += perf_counter() - start

    @property
    def ms(self) -> str:
        """Milliseconds with as many digits as are significant."""
        ms = self.seconds * 1e3
        return f"{ms:.2f}" if ms < 10 else f"{ms:.0f}"

    def __str__(self) -> str:
        return (
            f"{self.ms} ms, {self.n_tokens} tokens computed, {self.cells:+d} cells, "
            f"{human_bytes(self.bytes_written)} of K and V written"
        )


class Costs:
    """The costs of the steps on one context."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.steps: list[Cost] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[Cost]:
        """Measure the block; its time is that of the calls through ``Cost.timed``."""
        cost, times, cache = Cost(name), self._context.timings, self._context.cache
        tokens, used, rows = times.prefill_tokens + times.decode_tokens, cache.used, self._rows()
        yield cost
        cost.n_tokens = times.prefill_tokens + times.decode_tokens - tokens
        cost.cells = cache.used - used
        cost.bytes_written = sum(map(_bytes_changed, rows, self._rows()))
        self.steps.append(cost)

    def table(self) -> Table:
        """Return a table with a row for each step."""
        heads = ("tokens", "ms", "ms a token", "cells", "K/V written")
        table = columns_table(("step",), heads, pad_edge=False)
        for cost in self.steps:
            each = f"{cost.seconds * 1e3 / cost.n_tokens:.1f}" if cost.n_tokens else "-"
            table.add_row(
                cost.name,
                str(cost.n_tokens),
                cost.ms,
                each,
                f"{cost.cells:+d}" if cost.cells else "0",
                human_bytes(cost.bytes_written),
            )
        return table

    def _rows(self) -> list[ByteArray]:
        rows = []
        for cache in self._context.cache.parts:
            if isinstance(cache, AttentionCache):  # only these have K and V rows
                cells, layers = np.arange(cache.spec.size), range(len(cache.spec.layers))
                rows += [cache.store.read_raw(i, part, cells) for i in layers for part in PARTS]
        return rows


def _bytes_changed(before: ByteArray, after: ByteArray) -> int:
    row_bytes: int = before.shape[1]
    return row_bytes * int(np.count_nonzero((before != after).any(axis=1)))


_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
_SHARED, _FREE = "bold black on white", "dim"
_INDENT = 5


def letter(seq_id: int) -> str:
    """Return the letter of a sequence."""
    return chr(ord("a") + seq_id % 26)


def colour(seq_id: int) -> str:
    """Return the colour of a sequence."""
    return _COLOURS[seq_id % len(_COLOURS)]


def badge(seq_id: int) -> Text:
    """Return the letter of a sequence in its cells' style."""
    return Text.assemble((letter(seq_id), _style((seq_id,))))


def cell_map(view: CacheView, width: int) -> Text:
    """Return the map: lines of cells, each after the number of its first cell."""
    per_row = next((n for n in (64, 32) if n + _INDENT <= width), 16)
    text = Text()
    for cell, owners in enumerate(view.sequences):
        if cell % per_row == 0:
            text.append("\n" if cell else "").append(f"{cell:>{_INDENT - 1}} ", "dim")
        text.append(_glyph(owners), _style(owners))
    return text


def legend(view: CacheView, names: Mapping[int, str]) -> Text:
    """Return the meaning of a map's characters: sequences by name, shared and free cells."""
    text = Text(" " * _INDENT)
    for seq_id, name in names.items():
        text.append_text(badge(seq_id)).append(f" {name}   ")
    for n in sorted({len(owners) for owners in view.sequences if len(owners) > 1}):
        text.append(str(n), _SHARED).append(f" shared by {n}   ")
    return text.append(".", _FREE).append(" free")


def _glyph(owners: tuple[int, ...]) -> str:
    if not owners:
        return "."
    return letter(owners[0]) if len(owners) == 1 else str(min(len(owners), 9))


def _style(owners: tuple[int, ...]) -> str:
    if not owners:
        return _FREE
    return f"black on {colour(owners[0])}" if len(owners) == 1 else _SHARED
