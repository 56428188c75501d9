"""``kvcellar cache``: list, inspect, check, clean and move the entries of a prompt cache.

A prompt cache is the folder or the Redis server that ``--prompt-cache`` named. Results go to
stdout.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvcellar.cli.console import console_for, note, print_json, say, show
from kvcellar.cli.options import AsJson
from kvcellar.cli.units import human_bytes, parse_age, parse_size
from kvcellar.errors import OptionError

app = typer.Typer(
    help="Manage a prompt cache: list, inspect, verify, clean, export and import entries.",
    no_args_is_help=True,
)


class Order(str, Enum):
    """Sort order of a list."""

    USED = "used"
    CREATED = "created"
    BYTES = "bytes"


Where = Annotated[
    str, typer.Argument(metavar="DIR_OR_URL", help="Folder, or redis://HOST:PORT/NUMBER.")
]
WhereOrFile = Annotated[
    str,
    typer.Argument(
        metavar="DIR_URL_OR_FILE", help="Prompt cache, snapshot file or llama.cpp state file."
    ),
]
Key = Annotated[str, typer.Argument(metavar="KEY", help="Key of an entry, or how it begins.")]
MaybeKey = Annotated[
    str | None,
    typer.Argument(metavar="KEY", help="Key of an entry of a cache, or how it begins."),
]
OfModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="GGUF model that the llama.cpp state file was saved from.",
    ),
]
Sort = Annotated[Order, typer.Option("--sort", help="Sort by this, latest or largest first.")]
MaxBytes = Annotated[
    str | None,
    typer.Option(
        "--max-bytes",
        metavar="SIZE",
        help="Remove least recently used entries until the rest fits: 500M, 20G.",
    ),
]
OlderThan = Annotated[
    str | None,
    typer.Option(
        "--older-than", metavar="AGE", help="Remove entries not used for this long: 12h, 7d."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")]
OutFile = Annotated[Path, typer.Argument(metavar="OUT_FILE", help="File to write.")]
Files = Annotated[list[Path], typer.Argument(metavar="FILE", help="Files that cache export wrote.")]


@app.command("list")
def list_(where: Where, as_json: AsJson = False, sort: Sort = Order.USED) -> None:
    """List the stored texts, a line for each part that the same texts share.

    KEY is that of the part's last block, MODEL the start of the weights'
    hash, TEXTS the number of texts that share it, and BEGINS WITH its first
    words, or token ids where the entry does not tell. --json lists every entry.
    """
    from kvcellar.cli.blocks import Forest
    from kvcellar.cli.cache_list import list_data, list_table, totals
    from kvcellar.cli.store_tools import existing, shown

    with existing(where) as store:
        forest = Forest(store.entries())
    if as_json:
        print_json(list_data(shown(where), forest, sort.value))
        return
    parts = [list_table(forest, sort.value, time.time())] if forest.blocks else []
    show(console_for(sys.stdout), *parts, *totals(forest))


@app.command()
def inspect(
    where: WhereOrFile, key: MaybeKey = None, as_json: AsJson = False, model: OfModel = None
) -> None:
    """Show what an entry, a snapshot file or a llama.cpp state file holds.

    Snapshot files are those of Sequence.save and Context.save. A llama.cpp
    state file needs --model, because it does not describe its own layout.
    """
    from kvcellar.cli.cache_inspect import inspect_entry, inspect_file
    from kvcellar.cli.store_tools import shown

    if key is not None:
        inspect_entry(where, key, as_json=as_json)
        return
    path = Path(where)
    if not path.is_file():
        raise OptionError(
            f"{shown(where)} is no file: name one, or a cache and a KEY that kvcellar cache list "
            "shows"
        )
    inspect_file(path, model, as_json=as_json)


@app.command()
def verify(where: Where) -> None:
    """Read and check every entry; exit with 1 if any is damaged."""
    from kvcellar.cli.store_tools import check_store

    found = check_store(where)
    for key, fault in found.faults.items():
        say(f"{key}: {fault}")
    n_bad = len(found.faults)
    verdict = f"{n_bad} damaged" if n_bad else "all intact"
    say(f"{found.n_entries} entries, {human_bytes(found.n_bytes)}: {verdict}")
    if found.n_strays:
        say(f"{found.n_strays} files belong to no entry: kvcellar cache gc removes them")
    if n_bad:
        note("damaged entries are never used: their text is computed again")
        raise typer.Exit(1)


@app.command()
def gc(
    where: Where,
    max_bytes: MaxBytes = None,
    older_than: OlderThan = None,
    dry_run: DryRun = False,
) -> None:
    """Remove entries that cannot be used, and those over the given limits.

    An entry cannot be used if a block before it is missing. Files that
    interrupted writers left are removed too. Texts are removed from their
    ends inward.
    """
    from kvcellar.cli.store_tools import clean_folder

    size = None if max_bytes is None else parse_size(max_bytes, "--max-bytes")
    age = None if older_than is None else parse_age(older_than, "--older-than")
    for line in clean_folder(where, size, age, dry_run=dry_run):
        say(line)


@app.command()
def export(where: Where, key: Key, out_file: OutFile) -> None:
    """Write a text, up to and including block KEY, to a file for import elsewhere."""
    from kvcellar.cli.blocks import Forest
    from kvcellar.cli.store_tools import existing, find
    from kvcellar.prompts.archive import export_blocks

    with existing(where, read_only=True) as store:
        entry = find(store, key)
        chain = Forest(store.entries()).chain(entry.key)
        if chain is None:
            raise OptionError(
                f"{entry.key}: a block before it is missing, so it cannot be used anywhere: "
                "kvcellar cache gc removes it"
            )
        n_bytes = export_blocks(store, [block.entry for block in chain], out_file)
    say(f"{len(chain)} blocks, {chain[-1].end} tokens: {human_bytes(n_bytes)} in {out_file}")


@app.command("import")
def import_(where: Where, files: Files) -> None:
    """Import exported files into a cache, which is created if there is none.

    All files are checked before anything is imported. The check cannot tell
    whether K and V belong to the text: import only files from people whose
    answers you would trust.
    """
    from kvcellar.cli.store_tools import open_or_make
    from kvcellar.prompts.archive import check_export, import_blocks

    for path in files:
        check_export(path)
    with closing(open_or_make(where)) as store:
        for path in files:
            done = import_blocks(store, path)
            held = f"; {done.n_held} already stored" if done.n_held else ""
            lost = f"; {done.n_lost} did not fit" if done.n_lost else ""
            say(f"{path}: {done.n_new} blocks, {human_bytes(done.n_bytes)}{held}{lost}")
