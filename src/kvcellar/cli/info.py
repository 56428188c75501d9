"""``kvcellar info``: a model's properties and the size of its cache, or the environment."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.cli.console import columns_table, console_for, facts_table, print_json, say, show
from kvcellar.cli.options import MODEL_HELP, AsJson, Pre
from kvcellar.cli.units import human_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from kvcellar.cli.environment import Environment
    from kvcellar.cli.model_info import ModelInfo

OptionalModel = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
ShowEnvironment = Annotated[
    bool,
    typer.Option(
        "--environment",
        help="Show versions, processor, memory, libggml and kernels, for a bug report.",
    ),
]


def info(
    model: OptionalModel = None,
    environment: ShowEnvironment = False,
    as_json: AsJson = False,
    pre: Pre = None,
) -> None:
    """Show a model's properties, the cache of each layer, and how many cells fit in memory.

    With --environment: show what kvcellar runs on.
    """
    if (model is not None) == environment:
        raise typer.BadParameter("name a model, or give --environment", param_hint="MODEL")
    if model is None:
        _show_environment(as_json)
    else:
        _show_model(model, pre, as_json)


def _show_environment(as_json: bool) -> None:
    from kvcellar.cli.environment import Environment

    found = Environment.current()
    if as_json:
        print_json(asdict(found))
        return
    for name, value in _environment_rows(found):
        say(f"{name:<20}{value}")


def _show_model(model: str, pre: str | None, as_json: bool) -> None:
    from kvcellar.cli.model_info import read_model_info
    from kvcellar.runtime.demo import find_model

    found = read_model_info(find_model(model), pre)
    if as_json:
        print_json(asdict(found))
        return
    console = console_for(sys.stdout)
    show(console, _facts(found))
    if found.caches:
        show(console, "", _layer_table(found))
    if found.kv_types:
        show(console, "", _kv_table(found))


def _environment_rows(found: Environment) -> Iterator[tuple[str, str]]:
    """Lines that stand alone: a report is pasted, so nothing is wrapped or coloured."""
    yield "kvcellar", found.kvcellar
    yield "Python", found.python
    yield "system", found.system
    yield "processor", found.processor
    yield "features", _listed(found.processor_features, unknown="llvmlite would tell")
    yield "usable processors", str(found.usable_cpus)
    total, free = map(_bytes_or_unknown, (found.memory_total, found.memory_available))
    yield "memory", f"{total}, {free} available"
    for name, version in found.packages.items():
        yield name, version or "not installed"
    if found.libggml is None:
        yield "libggml", f"cannot be loaded: {found.libggml_problem}"
    else:
        yield "libggml", f"{found.libggml} from {found.libggml_origin}"
        yield "libggml built for", _listed(found.libggml_features)
    yield "attention kernel", _on(found.why_no_attention_kernel)
    yield "product kernels", _on(found.why_no_product_kernels)
    yield from found.variables.items()


def _listed(names: Sequence[str] | None, unknown: str = "") -> str:
    return f"unknown ({unknown})" if names is None else ", ".join(names) or "none that matter"


def _bytes_or_unknown(n: int | None) -> str:
    return "unknown" if n is None else human_bytes(n)


def _on(why_not: str | None) -> str:
    return "on" if why_not is None else f"off: {why_not}"


def _facts(found: ModelInfo) -> Table:
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
        "no text": found.tokenizer_reason,
    }
    said = [(name, str(value)) for name, value in rows.items() if value is not None]
    return facts_table(found.path.rpartition("/")[2], said)


def _heads(found: ModelInfo) -> str | None:
    if found.n_head is None:
        return None
    kv = "" if found.n_head_kv is None else f", {found.n_head_kv} of K and V"
    size = "" if found.head_dim_k is None else f", {found.head_dim_k} values each"
    return f"{found.n_head}{kv}{size}"


def _weights(found: ModelInfo) -> str:
    types = ", ".join(f"{n} {kind}" for kind, n in found.tensor_types.items())
    return f"{human_bytes(found.weight_bytes)}; tensors: {types}"


def _layer_table(found: ModelInfo) -> Table:
    heads = ("bytes a token", "bytes a sequence")
    table = columns_table(("layers", "cache"), heads, title="Cache by layer, K and V as f16")
    table.columns[0].overflow, table.columns[0].max_width = "fold", 36
    for cache in found.caches:
        n = len(cache.layers)
        sizes = (n * cache.bytes_per_token, n * cache.bytes_per_sequence)
        table.add_row(cache.numbers, cache.kind, *(f"{size:,}" if size else "-" for size in sizes))
    return table


def _kv_table(found: ModelInfo) -> Table:
    table = columns_table(
        ("type",),
        ("bytes a token", "relative to f16", f"{found.n_ctx_train} tokens", "cells that fit"),
        title="K/V cache, K and V of the same type",
        caption=_caption(found),
        caption_justify="left",
    )
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


def _caption(found: ModelInfo) -> str:
    free = found.memory_available
    memory = "" if free is None else f"{human_bytes(free)} of memory is free beside the weights. "
    if all(kind.bytes_per_token is not None for kind in found.kv_types.values()):
        return memory
    return f"{memory}The size of the heads is no multiple of the blocks of some types."
