"""The entry point: which commands there are, and how every one of them ends.

Exit codes: 0 done, 1 an error (one line on stderr, no traceback), 2 a wrong command line,
130 interrupted.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvcellar.cli import cache, chat, info, run, tour
from kvcellar.cli.console import complain
from kvcellar.errors import KVCellarError

INTERRUPTED = 130


class Guarded(TyperGroup):
    """A group of commands whose errors end in one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except KVCellarError as error:
            if ctx.params.get("debug"):
                raise
            complain(error)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            # What is still buffered would fail again when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from error
        return result


app = typer.Typer(
    cls=Guarded,
    name="kvcellar",
    help="Run GGUF models on a KV cache that you can see, fork and edit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(run.run)
app.command()(chat.chat)
app.command()(info.info)
app.command()(tour.tour)
app.add_typer(cache.app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvcellar import __version__

        typer.echo(f"kvcellar {__version__}")
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="KVCELLAR_DEBUG", help="Show the traceback of errors.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say which it is."),
    ] = False,
) -> None:
    """Run GGUF models on a KV cache that you can see, fork and edit."""
    del debug, version  # the first is read where commands end


def main() -> None:
    """Run the command line; never returns."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # A character that the terminal cannot show must not end the program.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(prog_name="kvcellar")
