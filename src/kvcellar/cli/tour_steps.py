"""The steps of ``kvcellar tour``: read, answer, fork, go on, roll back, go on differently."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from kvcellar.cli.cellmap import badge, cell_map, legend
from kvcellar.cli.console import harmless, human_bytes
from kvcellar.cli.ledger import Cost, Ledger
from kvcellar.cli.stage import ShowFrame, Stage
from kvcellar.cli.tour_code import TEN_LINES

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence

N_ANSWER, N_BRANCH, N_AGAIN = 40, 36, 32
N_KEPT = 12  # of the fork that goes back
TURN = " -- no. One night,"
WAYS = (("greedy", 0.0, 0), ("cautious", 0.7, 2), ("daring", 1.1, 4))
"""Name, temperature and seed of each fork."""
PATIENCE = 10.0
"""Seconds after which a text is cut, so that the tour ends within a minute on any machine."""


class Tour:
    """The demonstration.

    Args:
        context: an empty one for four sequences.
        stage: where to show it.
        prompt: what the model continues.
    """

    def __init__(self, context: Context, stage: Stage, prompt: str) -> None:
        self._context = context
        self._stage = stage
        self._prompt = prompt
        self._ledger = Ledger(context)
        self._trunk = context.sequence()
        self._branches: list[Sequence] = []
        self._texts: dict[int, Text] = {}
        self._names = {self._trunk.seq_id: "the answer"}

    def run(self) -> None:
        """Show everything, then what it cost and how it is written in Python."""
        self._introduce()
        self._answer()
        self._fork()
        self._go_on()
        self._roll_back()
        self._go_on_differently()
        self._sum_up()

    # -- the steps

    def _introduce(self) -> None:
        context = self._context
        spec, n_layers = context.spec, len(context.model.spec.layers)
        self._stage.say(
            Text.assemble(
                ("kvcellar tour", "bold"),
                f": {context.model.path.name}, {n_layers} layers; a cache of {spec.size} "
                f"cells, {human_bytes(spec.bytes_per_cell)} of K and V each ({spec.type_k.label}).",
            )
        )

    def _answer(self) -> None:
        with self._stage.step("1 of 5  The model goes on with a prompt") as show:
            seq = self._trunk
            self._texts[seq.seq_id] = Text.assemble((harmless(self._prompt), "bold"))
            with self._ledger.entry("read the prompt") as cost:
                cost.timed(lambda: seq.append(self._prompt))
                show(self._frame())
            with self._ledger.entry("answer") as cost:
                self._stream({seq: seq.stream(N_ANSWER)}, cost, show)
        self._report(cost)

    def _fork(self) -> None:
        with self._stage.step("2 of 5  The answer is forked three times") as show:
            with self._ledger.entry("fork three ways") as cost:
                self._branches = cost.timed(lambda: [self._trunk.fork() for _ in WAYS])
            ids = [branch.seq_id for branch in self._branches]
            self._names |= dict(zip(ids, [name for name, _, _ in WAYS], strict=True))
            show(self._frame())
        one = human_bytes(len(self._trunk) * self._context.spec.bytes_per_cell)
        self._report(cost, f"Four sequences, one set of cells; three copies would take 3 x {one}.")

    def _go_on(self) -> None:
        self._texts = {branch.seq_id: Text.assemble(("... ", "dim")) for branch in self._branches}
        with (
            self._stage.step("3 of 5  The forks go on, each in its own way") as show,
            self._ledger.entry("three ways on") as cost,
        ):
            streams = {
                branch: branch.stream(N_BRANCH, temperature=temperature, seed=seed)
                for branch, (_, temperature, seed) in zip(self._branches, WAYS, strict=True)
            }
            self._stream(streams, cost, show)
        self._report(
            cost,
            "A new token takes one cell; what was there before stays shared. Greedy",
            "takes the best token, cautious samples at temperature 0.7, daring at 1.1.",
        )

    def _roll_back(self) -> None:
        branch = self._branches[1]
        n_back = max(0, len(branch) - len(self._trunk) - N_KEPT)
        with self._stage.step(f"4 of 5  Fork c goes back {n_back} tokens") as show:
            with self._ledger.entry("roll back") as cost:
                cost.timed(lambda: branch.trim(n_back))
            self._texts = {branch.seq_id: Text.assemble(("... ", "dim"))}
            self._write(branch, branch.text[len(self._trunk.text) :])
            show(self._frame())
        self._report(
            cost,
            "The cells are free for whoever comes next; shared ones stay as they are.",
        )

    def _go_on_differently(self) -> None:
        branch = self._branches[1]
        with (
            self._stage.step("5 of 5  Fork c goes on differently, in the freed cells") as show,
            self._ledger.entry("go on differently") as cost,
        ):
            cost.timed(lambda: branch.append(TURN))
            self._write(branch, TURN, "bold")
            self._stream({branch: branch.stream(N_AGAIN)}, cost, show)
        self._report(cost)

    def _sum_up(self) -> None:
        self._stage.heading("What it cost")
        self._stage.say(self._ledger.table())
        self._stage.heading("The same in Python")
        self._stage.say_code(TEN_LINES.rstrip())

    # -- what they are made of

    def _stream(self, streams: dict[Sequence, Iterator[str]], cost: Cost, show: ShowFrame) -> None:
        """Take a piece of each stream in turn until all have ended, or time is up."""
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
        """Add to the text that is shown, in which paragraphs run on."""
        text = self._texts[sequence.seq_id]
        piece = harmless(re.sub(r"\s+", " ", piece))
        text.append(piece.lstrip() if text.plain.endswith(" ") else piece, style)

    def _frame(self) -> RenderableType:
        """The texts, the cells, and how many there are."""
        view, width = self._context.cache.view(), self._stage.width
        texts = [line for seq_id in self._texts for line in self._paragraph(seq_id)]
        total = human_bytes(view.used_cells * self._context.spec.bytes_per_cell)
        counts = (
            f"     {view.token_count} tokens held in {view.used_cells} of {view.n_cells} cells, "
            f"{total} of K and V"
        )
        return Group(*texts, "", cell_map(view, width), legend(view, self._names), Text(counts))

    def _paragraph(self, seq_id: int) -> Iterator[Text]:
        """A sequence's text in lines, the first begun with its letter."""
        text = self._texts[seq_id]
        lines = text.wrap(self._stage.console, self._stage.width - 4)
        for i, line in enumerate(lines):
            line.rstrip()
            yield (badge(seq_id).append("  ") if i == 0 else Text("   ")).append_text(line)

    def _report(self, cost: Cost, *remarks: str) -> None:
        for line in (str(cost), *remarks):
            self._stage.say(Padding(Text(line, "italic"), (0, 0, 0, 5), expand=False))
        self._stage.pause()
