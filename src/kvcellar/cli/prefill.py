"""Reading a prompt into a sequence, with a progress bar once it takes longer than a moment.

The prompt is computed in the pieces that one call would be split into, so the logits are the same
bit for bit; between pieces the bar moves and Ctrl-C is heard.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING

from kvcellar.cli.console import console_for, is_plain
from kvcellar.errors import BatchError, CacheFull

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcellar.cli.console import Interrupt
    from kvcellar.prompts.cache import CacheHit, PromptCache
    from kvcellar.runtime.sequence import Sequence

PATIENCE = 0.8  # seconds without a bar


def read_tokens(
    sequence: Sequence,
    ids: list[int],
    n_ubatch: int,
    interrupt: Interrupt,
    prompts: PromptCache | None = None,
) -> CacheHit | None:
    """Append tokens to a sequence and compute them, as far as no prompt cache has them.

    Returns:
        What the prompt cache had of them.

    Raises:
        BatchError: there are none.
        CacheFull: they do not fit; nothing has changed.
        KeyboardInterrupt: Ctrl-C was pressed; what was computed stays.
    """
    if not ids:
        raise BatchError("the prompt is empty")
    cache = sequence.context.cache
    pending = len(sequence) - cache.seq_count(sequence.seq_id)
    needed, free = len(ids) + pending, cache.n_free()
    if needed > free:
        raise CacheFull(needed, free, "use a larger --n-ctx or a shorter prompt")
    if prompts is not None:
        return _read_through(prompts, sequence, ids, interrupt)
    ends = range(n_ubatch - pending, len(ids) + n_ubatch, n_ubatch) if n_ubatch > pending else ()
    with _progress("reading the prompt", len(ids)) as advance:
        done = 0
        for end in (*ends, len(ids)):
            interrupt.check()
            if piece := ids[done:end]:
                sequence.append(piece)
                advance(len(piece))
                done += len(piece)
    return None


def _read_through(
    prompts: PromptCache, sequence: Sequence, ids: list[int], interrupt: Interrupt
) -> CacheHit:
    with _progress("reading the prompt", len(ids)) as advance:

        def on_piece(n: int) -> None:
            advance(n)
            interrupt.check()

        interrupt.check()
        return prompts.append(sequence, ids, on_piece=on_piece)


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that appears after ``PATIENCE`` and leaves nothing behind."""
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
