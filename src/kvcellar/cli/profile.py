"""Where a run's time went: a table for prefill and one for decode, on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvcellar.cli.console import console_for, note, show

if TYPE_CHECKING:
    from rich.table import Table

    from kvcellar.runtime.profile import Profile, StepTimes


def print_profile(profile: Profile) -> None:
    """Print what was recorded; nothing for a kind of step that there was none of."""
    console = console_for(sys.stderr)
    for name, times in (("prefill", profile.prefill), ("decode", profile.decode)):
        if times.n_steps:
            show(console, "", _table(name, times))
            note(_how_measured(times))


def _table(name: str, times: StepTimes) -> Table:
    from rich.table import Table

    ms = 1e3 / times.n_tokens
    table = Table(
        box=None,
        title=f"{name}: {times.n_tokens} tokens, {times.seconds * ms:.3f} ms each",
        title_justify="left",
    )
    table.add_column("part", no_wrap=True)
    for head in ("nodes a graph", "ms a token", "share"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in times.rows():
        nodes = f"{row.n_nodes:.0f}" if row.n_nodes else ""
        share = f"{row.seconds / times.seconds:.1%}"
        table.add_row(row.name, nodes, f"{row.seconds * ms:.3f}", share)
    return table


def _how_measured(times: StepTimes) -> str:
    n_graphs = times.n_split + times.n_whole
    split = f"{times.n_split} of {n_graphs} graphs computed node by node; "
    if times.compared is None:
        return split + "too few to tell what that costs, which is in the figures"
    return split + f"that costs {times.node_cost * 1e6:.1f} µs a node, taken off"
