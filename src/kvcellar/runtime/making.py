"""New sequences that are there only if all goes well with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence


@contextmanager
def new_sequences(context: Context, n: int) -> Iterator[list[Sequence]]:
    """So many empty sequences for a ``with`` block; closed again if it ends by an exception.

    Raises:
        SequenceIdError: there are not so many ids left.
    """
    made: list[Sequence] = []
    try:
        made.extend(context.sequence() for _ in range(n))
        yield made
    except BaseException:
        for sequence in made:
            sequence.close()
        raise
