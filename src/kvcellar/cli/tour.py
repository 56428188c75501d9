"""``kvcellar tour``: a demonstration of forks and rollback, with what each step costs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from kvcellar.cli import options as o
from kvcellar.cli.console import clean, console_for
from kvcellar.errors import CacheFull, OptionError
from kvcellar.runtime.demo import DEMO_NAME

N_CELLS = 256
PROMPT = "Deep in the cellar, behind the oldest barrel,"

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help=o.MODEL_HELP)]
Prompt = Annotated[str, typer.Option("--prompt", help="Text to continue.")]
Fast = Annotated[bool, typer.Option("--fast", help="Skip the pauses.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="Number of compute threads.", show_default="idle processors"),
]


def tour(
    model: ModelName = DEMO_NAME,
    prompt: Prompt = PROMPT,
    fast: Fast = False,
    threads: Threads = None,
    pre: o.Pre = None,
) -> None:
    """Show an answer, three forks of it and a rollback, and what each step costs."""
    from kvcellar.cli.tour_steps import LiveView, Tour
    from kvcellar.runtime.demo import find_model
    from kvcellar.runtime.model import Model

    if not prompt:
        raise OptionError("--prompt is empty: give the model a text to continue")
    screen = LiveView(console_for(sys.stdout), fast=fast)
    n_threads = idle_processors() if threads is None else threads
    with Model.from_gguf(find_model(model), n_threads=n_threads, pre=pre) as loaded:
        context = loaded.context(n_ctx=N_CELLS, n_seq_max=4)
        try:
            Tour(context, screen, clean(prompt)).run()
        except CacheFull as error:
            raise CacheFull(error.needed, error.free, "use a shorter --prompt") from error
        except KeyboardInterrupt:
            screen.say("")
            raise


def idle_processors() -> int:
    """Return the number of idle processors, at least one.

    Threads that compute a graph wait for each other after every operation: with more of them than
    idle processors a token takes a hundred times as long, and the tour should end within a minute.
    """
    from kvcellar.backends.ggml.backend import default_threads

    n_all = default_threads()
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, n_all - round(busy))
