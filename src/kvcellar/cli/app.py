"""The commands, and how every one of them ends.

Exit codes: 0 success, 1 an error (one line on stderr, no traceback), 2 a wrong command line,
130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvcellar.cli import INTERRUPTED, cache, chat, info, run, tour
from kvcellar.cli.console import Warnings, complain, say, show_traceback, visible_line
from kvcellar.cli.options import expand_groups
from kvcellar.errors import KVCellarError


class Guarded(TyperGroup):
    """A group of commands whose errors end in one line and an exit code."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Parse the command line and run the command; never returns."""
        try:
            return super().main(*args, **options)
        except OSError as error:
            _abandon_stdout()
            with suppress(OSError):  # stderr may be what failed
                complain(f"input or output failed: {error}")
            sys.exit(1)

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse the options before the command."""
        with _safe_usage_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; map its errors to exit codes."""
        debug = ctx.params.get("debug")
        try:
            with Warnings(), _safe_usage_errors():
                result = super().invoke(ctx)
            sys.stdout.flush()
        except KVCellarError as error:
            if debug:
                raise
            complain(error)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            _abandon_stdout()
            raise typer.Exit(1) from error
        except OSError as error:
            if debug:
                show_traceback(error)
            raise
        return result


@contextmanager
def _safe_usage_errors() -> Iterator[None]:
    """Spell out control characters in the messages that Typer prints itself."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "message"):
            error.message = visible_line(str(error.message))
        raise


def _abandon_stdout() -> None:
    """Discard buffered output, which would fail again when the interpreter ends."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    cls=Guarded,
    name="kvcellar",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(expand_groups(run.run))
app.command()(expand_groups(chat.chat))
app.command()(info.info)
app.command()(tour.tour)
app.add_typer(cache.app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvcellar import __version__

        say(f"kvcellar {__version__}")
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="KVCELLAR_DEBUG", help="Print the traceback of an error."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Run GGUF models on a KV cache that you can inspect, fork and edit."""
    del debug, version  # debug is read where commands end
