"""Prompts: text and messages to tokens, and tokens computed into a sequence.

A prompt is computed in the microbatches that one call would be split into, so the logits are the
same bit for bit; between them Ctrl-C is checked, and a progress bar moves once it takes longer than
a moment.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcellar.cli.console import clean, console_for, is_plain, one_line
from kvcellar.errors import BatchError, CacheFull, OptionError

if TYPE_CHECKING:
    from kvcellar.cli.interrupt import Interrupt
    from kvcellar.prompts.cache import CacheHit, PromptCache
    from kvcellar.runtime.sequence import Sequence as Text

_template = partial(typer.Option, rich_help_panel="Chat template")


@dataclass(frozen=True, slots=True)
class Templates:
    """Which chat template, and what it is given."""

    name: Annotated[
        str | None,
        _template(
            "--chat-template",
            metavar="NAME",
            help="Another template of the model's file by its name, or chatml.",
            show_default="the model's",
        ),
    ] = None
    file: Annotated[
        Path | None,
        _template("--chat-template-file", metavar="FILE", help="A template of your own, in Jinja."),
    ] = None
    variables: Annotated[
        str | None,
        _template(
            "--chat-template-kwargs",
            metavar="JSON",
            help="Variables for the template, such as '{\"enable_thinking\": false}'.",
        ),
    ] = None

    def chosen(self) -> tuple[str | Path | None, dict[str, Any]]:
        """Return the template that is asked for, if any, and the variables.

        Raises:
            OptionError: two templates, or variables that are no JSON object.
        """
        if self.name is not None and self.file is not None:
            raise OptionError("--chat-template and --chat-template-file: give one of them")
        try:
            variables = json.loads(self.variables or "{}")
        except (ValueError, RecursionError) as error:
            raise OptionError(f"--chat-template-kwargs is no JSON: {error}") from None
        if not isinstance(variables, dict):
            raise OptionError(f"--chat-template-kwargs must be an object, found {self.variables}")
        return self.file if self.name is None else self.name, variables


PATIENCE = 0.8  # seconds before the progress bar appears


def read_prompt(prompt: str | None, file: str | None = None) -> str:
    """Return the prompt as given, what is in the file, or all of stdin when it is ``-`` or absent.

    A single line break at the end of the file or of stdin is dropped.

    Raises:
        typer.BadParameter: nothing was given and stdin is a terminal, both a prompt and a file
            were given, or the file cannot be read.
    """
    if file is not None:
        return _read_file(prompt, file)
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
    if prompt is None or prompt == "-":
        return sys.stdin.read().removesuffix("\n")
    return clean(prompt)


def _read_file(prompt: str | None, file: str) -> str:
    if prompt is not None:
        raise typer.BadParameter("give a prompt or a file, not both", param_hint="--file")
    try:
        return Path(file).read_bytes().decode("utf-8").removesuffix("\n")
    except OSError as error:
        why = error.strerror or error
    except ValueError:
        why = "it is not UTF-8"
    raise typer.BadParameter(f"{one_line(file)}: {why}", param_hint="--file")


def messages_of(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Return a conversation that begins with a prompt."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def read_tokens(
    sequence: Text, ids: list[int], interrupt: Interrupt, prompts: PromptCache | None = None
) -> CacheHit | None:
    """Append tokens to a sequence and compute those that the prompt cache does not have.

    Returns:
        How many of them the prompt cache had; None without one.

    Raises:
        BatchError: there are none.
        CacheFull: they do not fit; nothing has changed.
        KeyboardInterrupt: Ctrl-C was pressed; what was computed stays.
    """
    if not ids:
        raise BatchError("the prompt is empty")
    context = sequence.context
    pending = len(sequence) - context.cache.seq_count(sequence.seq_id)
    needed, free = len(ids) + pending, context.cache.n_free()
    if needed > free:
        raise CacheFull(needed, free, "use a larger --n-ctx or a shorter prompt")
    with _progress("reading the prompt", len(ids)) as advance:
        if prompts is None:
            _compute(sequence, ids, pending, advance, interrupt)
            return None

        def on_piece(n: int) -> None:
            advance(n)
            interrupt.check()

        interrupt.check()
        return prompts.append(sequence, ids, on_piece=on_piece)


def _compute(
    sequence: Text,
    ids: list[int],
    pending: int,
    advance: Callable[[int], None],
    interrupt: Interrupt,
) -> None:
    """Append pieces that end where a microbatch does; pending tokens are part of the first."""
    size = sequence.context.n_ubatch
    done, end = 0, size - pending if pending < size else len(ids)
    while done < len(ids):
        interrupt.check()
        piece = ids[done:end]
        sequence.append(piece)
        advance(len(piece))
        done, end = end, end + size


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr after ``PATIENCE``; it leaves nothing behind."""
    if is_plain(sys.stderr):
        yield lambda _n: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn(title), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, console=console_for(sys.stderr), transient=True)
    task = progress.add_task(title, total=total)
    timer = Timer(PATIENCE, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda n: progress.advance(task, n)
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
