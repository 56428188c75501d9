"""``kvcellar info``: what a model is and what its cache takes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.cli.console import console_for, human_bytes, show
from kvcellar.cli.options import ModelName

if TYPE_CHECKING:
    from rich.table import Table

    from kvcellar.cli.inspection import Inspection

AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]


def info(model: ModelName, as_json: AsJson = False) -> None:
    """Show what a model is, the cache each layer gets, what K and V take, and what fits."""
    from kvcellar.cli.inspection import inspect
    from kvcellar.runtime.demo import find_model

    found = inspect(find_model(model))
    if as_json:
        json.dump(asdict(found), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    console = console_for(sys.stdout)
    show(console, _facts(found))
    if found.caches:
        show(console, "", _layer_table(found))
    if found.kv_types:
        show(console, "", _kv_table(found))


def _facts(found: Inspection) -> Table:
    from rich.table import Table

    table = Table(
        box=None, show_header=False, title=found.path.rpartition("/")[2], title_justify="left"
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "name": found.name,
        "architecture": found.architecture + ("" if found.supported else " (not supported)"),
        "layers": found.n_layers,
        "heads": _heads(found),
        "embedding": found.n_embd,
        "vocabulary": found.n_vocab,
        "training context": found.n_ctx_train,
        "tokenizer": found.tokenizer,
        "chat template": "yes" if found.has_chat_template else "none",
        "parameters": f"{found.n_parameters / 1e6:.1f} million",
        "weights": _weights(found),
        "file": human_bytes(found.file_bytes),
        "why not": found.reason,
    }
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, str(value))
    return table


def _heads(found: Inspection) -> str | None:
    if found.n_head is None:
        return None
    kv = "" if found.n_head_kv is None else f", {found.n_head_kv} of K and V"
    size = "" if found.head_dim_k is None else f", {found.head_dim_k} values each"
    return f"{found.n_head}{kv}{size}"


def _weights(found: Inspection) -> str:
    types = ", ".join(f"{n} {kind}" for kind, n in found.tensor_types.items())
    return f"{human_bytes(found.weight_bytes)}; tensors: {types}"


def _layer_table(found: Inspection) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, title="What layers keep, K and V as f16", title_justify="left"
    )
    table.add_column("layers", overflow="fold", max_width=36)
    table.add_column("cache")
    for head in ("bytes a token", "bytes a sequence"):
        table.add_column(head, justify="right")
    for cache in found.caches:
        n = len(cache.layers)
        sizes = (n * cache.bytes_per_token, n * cache.bytes_per_sequence)
        table.add_row(cache.numbers, cache.kind, *(f"{size:,}" if size else "-" for size in sizes))
    return table


def _kv_table(found: Inspection) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        title="K/V cache, K and V of the same type",
        title_justify="left",
        caption=_caption(found),
        caption_justify="left",
    )
    table.add_column("type")
    for head in ("bytes a token", "against f16", f"{found.n_ctx_train} tokens", "cells that fit"):
        table.add_column(head, justify="right")
    whole = found.kv_types["f16"].bytes_per_token
    for name, kind in found.kv_types.items():
        if kind.bytes_per_token is None or whole is None:
            table.add_row(name, "does not fit", style="dim")
            continue
        total = "unknown" if kind.bytes_in_all is None else human_bytes(kind.bytes_in_all)
        share = f"{kind.bytes_per_token / whole:.0%}"
        cells = "unknown" if kind.cells_that_fit is None else f"{kind.cells_that_fit:,}"
        table.add_row(name, f"{kind.bytes_per_token:,}", share, total, cells)
    return table


def _caption(found: Inspection) -> str:
    free = found.memory_available
    memory = "" if free is None else f"{human_bytes(free)} of memory is free beside the weights. "
    if all(kind.bytes_per_token is not None for kind in found.kv_types.values()):
        return memory
    return f"{memory}The size of the heads is no multiple of the blocks of some types."
