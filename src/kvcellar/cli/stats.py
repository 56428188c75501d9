"""The cost of a run: speed, cells and bytes; and with ``--profile`` where the time went."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvcellar.cli.console import columns_table, console_for, note, show
from kvcellar.cli.units import human_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from kvcellar.prompts.cache import CacheHit
    from kvcellar.runtime.chat import Turn
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.profile import Profile, StepTimes
    from kvcellar.runtime.sequence import Sequence


def print_stats(
    sequence: Sequence, seed: int, seconds_to_first: float | None, hit: CacheHit | None = None
) -> None:
    """Print everything about a run to stderr, a line each.

    Args:
        sequence: what was computed.
        seed: what random numbers were drawn with, also where it was drawn itself.
        seconds_to_first: until the first text came; None: none did.
        hit: what the prompt cache had; None: there is no prompt cache.
    """
    context = sequence.context
    times, spec = context.timings, context.spec
    first = "none" if seconds_to_first is None else f"after {seconds_to_first:.2f} s"
    used, size = map(human_bytes, _memory(context))
    types = f"K {spec.type_k.label}, V {spec.type_v.label}"
    rows = (
        *(() if hit is None else (("prompt", str(hit)),)),
        ("prefill", _rate(times.prefill_tokens, times.prefill_seconds)),
        ("decode", _rate(times.decode_tokens, times.decode_seconds)),
        *((("compile", f"{times.compile_seconds:.2f} s"),) if times.compile_seconds else ()),
        ("first token", first),
        ("seed", str(seed)),
        ("finish", sequence.finish_reason or "interrupted"),
        ("overhead", f"{times.overhead_seconds * 1e3:.2f} ms a decode outside the graph"),
        ("cells", f"{context.cache.used} of {spec.size} used"),
        ("memory", f"{used} of {size} ({types})"),
    )
    for name, value in rows:
        note(f"{name:<12}{value}")


def turn_stats(context: Context, turn: Turn, n_restored: int) -> str:
    """Return a turn of a conversation in one line; so many of its tokens were restored."""
    times = context.timings
    compiled = f" | compile {times.compile_seconds:.2f} s" if times.compile_seconds else ""
    return (
        f"{turn.n_reused + n_restored} of {turn.n_prompt} tokens reused"
        f" | prefill {times.prefill_tokens} at {times.prefill_rate:.0f}/s"
        f" | decode {times.decode_tokens} at {times.decode_rate:.0f}/s"
        f"{compiled} | {context.cache.used} of {context.spec.size} cells"
        f" | finish {turn.finish_reason or 'interrupted'} | seed {turn.seed}"
    )


def print_profile(profile: Profile) -> None:
    """Print a table for prefill and one for decode to stderr, unless there was none of it."""
    console = console_for(sys.stderr)
    for name, times in (("prefill", profile.prefill), ("decode", profile.decode)):
        if times.n_steps:
            show(console, "", _profile_table(name, times))
            note(_how_measured(times))


def _profile_table(name: str, times: StepTimes) -> Table:
    ms = 1e3 / times.n_tokens
    title = f"{name}: {times.n_tokens} tokens, {times.seconds * ms:.3f} ms each"
    heads = ("nodes a graph", "ms a token", "share")
    table = columns_table(("part",), heads, no_wrap=True, box=None, title=title)
    for row in times.lines():
        nodes = f"{row.n_nodes:.0f}" if row.n_nodes else ""
        share = f"{row.seconds / times.seconds:.1%}"
        table.add_row(row.name, nodes, f"{row.seconds * ms:.3f}", share)
    return table


def _how_measured(times: StepTimes) -> str:
    n_graphs = times.n_split + times.n_whole
    split = f"{times.n_split} of {n_graphs} graphs computed node by node; "
    if times.compared is None:
        return split + "too few to measure what that costs, so the figures include it"
    return split + f"its cost of {times.node_cost * 1e6:.1f} µs a node is subtracted"


def _rate(n_tokens: int, seconds: float) -> str:
    if n_tokens == 0:
        return "nothing"
    return f"{n_tokens} tokens in {seconds:.2f} s, {n_tokens / seconds:.1f} tokens/s"


def _memory(context: Context) -> tuple[int, int]:
    """Return the bytes of K, V and states that are used, and those allocated."""
    states = context.memory_spec.states
    used, size = 0, 0 if states is None else states.n_bytes
    for part in context.cache.parts:
        if part.spec.layers:
            used += part.used * part.spec.bytes_per_cell
            size += part.spec.n_bytes
        elif states is not None:
            used += part.used * states.row_bytes
    return used, size
