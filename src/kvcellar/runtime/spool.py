"""Blocks that were taken out of a cache and wait until they may be stored.

They are stored from the last to the first, so all of them wait for the last. A state a block may
be megabytes, and a text hundreds of blocks: beyond some size they wait in a file.
"""

from __future__ import annotations

from tempfile import SpooledTemporaryFile

from kvcellar.errors import StoreError

IN_MEMORY = 64 << 20
"""How many bytes wait in memory."""


class Spool:
    """Bytes by number. Gives its file back at the end of a ``with`` block."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._file = SpooledTemporaryFile(max_size=in_memory)  # noqa: SIM115  (closed with it)
        self._places: dict[int, tuple[int, int]] = {}
        self._end = 0
        self._failed: OSError | None = None

    def add(self, i: int, data: bytes) -> None:
        """Keep them. What does not fit on the disk is dropped; :meth:`check` tells."""
        try:
            self._file.seek(self._end)
            self._file.write(data)
        except OSError as error:
            self._failed = error
            return
        self._places[i] = self._end, len(data)
        self._end += len(data)

    def get(self, i: int) -> bytes | None:
        """What was kept; None if nothing was."""
        if (place := self._places.get(i)) is None:
            return None
        start, size = place
        self._file.seek(start)
        data = self._file.read(size)
        return data if len(data) == size else None

    def check(self) -> None:
        """Raise StoreError if something was dropped."""
        if self._failed is not None:
            raise StoreError(
                f"blocks could not wait to be stored: {self._failed}; make room in the folder for "
                "temporary files, or name another with TMPDIR"
            ) from self._failed

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
