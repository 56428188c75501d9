"""``kvcellar cache``: what a prompt cache holds, whether it is sound, what can go, moving it.

A prompt cache is a folder, or a Redis server, that ``--prompt-cache`` named. Results go to stdout.
"""

from __future__ import annotations

import json
import sys
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvcellar.cli.console import console_for, human_bytes, note, parse_age, parse_size, show
from kvcellar.errors import OptionError

app = typer.Typer(
    help="Look after a cache of prompts: see, check, clean and move what it holds.",
    no_args_is_help=True,
)


class Order(str, Enum):
    """What a list is sorted by."""

    USED = "used"
    CREATED = "created"
    BYTES = "bytes"


Where = Annotated[
    str, typer.Argument(metavar="DIR_OR_URL", help="A folder, or redis://HOST:PORT/NUMBER.")
]
WhereOrFile = Annotated[
    str, typer.Argument(metavar="DIR_URL_OR_FILE", help="A cache, or a file of Sequence.save.")
]
Key = Annotated[str, typer.Argument(metavar="KEY", help="A key, or how it begins.")]
MaybeKey = Annotated[str | None, typer.Argument(metavar="[KEY]", help="Which entry of a cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]
OfModel = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="Whose file of llama.cpp it is.")
]
Sort = Annotated[Order, typer.Option("--sort", help="What comes first: the latest or largest.")]
MaxBytes = Annotated[
    str | None, typer.Option("--max-bytes", metavar="SIZE", help="Keep so much: 500M, 20G.")
]
OlderThan = Annotated[
    str | None, typer.Option("--older-than", metavar="AGE", help="Remove what is unused: 12h, 7d.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")]
OutFile = Annotated[Path, typer.Argument(metavar="OUT_FILE", help="Where to write.")]
Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="What export wrote.")]


@app.command("list")
def list_(where: Where, as_json: AsJson = False, sort: Sort = Order.USED) -> None:
    """Show what is stored, a line for each stretch of text, its last key first.

    A stretch is as much of a text as the same TEXTS have in common. MODEL is how the hash of the
    model's weights begins; BEGINS WITH are ids of tokens. --json lists every entry.
    """
    from kvcellar.cli.blocks import Forest, list_data, list_table, totals
    from kvcellar.cli.store_tools import existing, shown

    with existing(where) as store:
        forest = Forest(store.entries())
    if as_json:
        _print_json(list_data(shown(where), forest, sort.value))
        return
    parts = [list_table(forest, sort.value, time.time())] if forest.blocks else []
    show(console_for(sys.stdout), *parts, *totals(forest))


@app.command()
def inspect(
    where: WhereOrFile, key: MaybeKey = None, as_json: AsJson = False, model: OfModel = None
) -> None:
    """Read one entry, or a file that Sequence.save or Context.save wrote, and say what it is.

    State files of llama.cpp too; these need --model, because they do not say how they go on.
    """
    from kvcellar.cli.inspect import inspect_entry, inspect_file

    if key is not None:
        inspect_entry(where, key, as_json=as_json)
        return
    path = Path(where)
    if not path.is_file():
        raise OptionError(
            f"{_shown(where)} is no file: name one, or a cache and a KEY that kvcellar cache list "
            "shows"
        )
    inspect_file(path, model, as_json=as_json)


@app.command()
def verify(where: Where) -> None:
    """Read every entry and check it; the exit code is 1 if one is damaged."""
    from kvcellar.cli.store_tools import check_store

    found = check_store(where)
    for key, fault in found.faults.items():
        print(f"{key}: {fault}")
    n_bad = len(found.faults)
    verdict = f"{n_bad} damaged" if n_bad else "all sound"
    print(f"{found.n_entries} entries, {human_bytes(found.n_bytes)}: {verdict}")
    if found.n_strays:
        print(f"{found.n_strays} files belong to no entry: kvcellar cache gc removes them")
    if n_bad:
        note("damaged entries are never used: the text is computed again")
        raise typer.Exit(1)


@app.command()
def gc(
    where: Where,
    max_bytes: MaxBytes = None,
    older_than: OlderThan = None,
    dry_run: DryRun = False,
) -> None:
    """Remove what is of no use: blocks that lack one before them, and what dead writers left.

    With --older-than also what was not used for so long, with --max-bytes what was not used for
    longest until the rest fits. Texts go from their ends inward.
    """
    from kvcellar.cli.store_tools import clean_folder

    size = None if max_bytes is None else parse_size(max_bytes, "--max-bytes")
    age = None if older_than is None else parse_age(older_than, "--older-than")
    for line in clean_folder(where, size, age, dry_run=dry_run):
        print(line)


@app.command()
def export(where: Where, key: Key, out_file: OutFile) -> None:
    """Write a text up to the block KEY to one file, to be imported elsewhere."""
    from kvcellar.cli.blocks import Forest
    from kvcellar.cli.store_tools import existing, find
    from kvcellar.prompts.archive import export_blocks

    with existing(where, read_only=True) as store:
        entry = find(store, key)
        chain = Forest(store.entries()).chain(entry.key)
        if chain is None:
            raise OptionError(
                f"{entry.key}: a block before it is not there, so it is of no use anywhere: "
                "kvcellar cache gc removes it"
            )
        n_bytes = export_blocks(store, [block.entry for block in chain], out_file)
    print(f"{len(chain)} blocks, {chain[-1].end} tokens: {human_bytes(n_bytes)} in {out_file}")


@app.command("import")
def import_(where: Where, files: Files) -> None:
    """Put what export wrote into a cache, which is made if it is not there.

    All files are checked as a whole before any of them goes in. That K and V belong to the text
    cannot be checked: import only from those whose answers you would trust.
    """
    from contextlib import closing

    from kvcellar.cli.store_tools import open_or_make
    from kvcellar.prompts.archive import check_export, import_blocks

    for path in files:
        check_export(path)
    with closing(open_or_make(where)) as store:
        for path in files:
            done = import_blocks(store, path)
            held = f"; {done.n_held} were there" if done.n_held else ""
            lost = f"; {done.n_lost} did not fit" if done.n_lost else ""
            print(f"{path}: {done.n_new} blocks, {human_bytes(done.n_bytes)}{held}{lost}")


def _shown(where: str) -> str:
    from kvcellar.cli.store_tools import shown

    return shown(where)


def _print_json(data: object) -> None:
    json.dump(data, sys.stdout, indent=2)
    sys.stdout.write("\n")
