"""Between ``place`` and its end a cache can neither be edited nor decode another batch."""

from __future__ import annotations

from typing import Protocol

from kvcellar.errors import CacheError


class Taken(Protocol):
    """What a batch took of a cache."""

    @property
    def is_open(self) -> bool:
        """Whether it can still be committed or released."""

    def release(self) -> None:
        """Let everything be as it was before; a second time does nothing."""


class Decoding:
    """Knows whether a batch is being decoded; whoever places one sets ``_open``."""

    _open: Taken | None = None

    @property
    def is_decoding(self) -> bool:
        """Whether a batch has been placed and neither committed nor released."""
        return self._open is not None and self._open.is_open

    def abandon(self) -> None:
        """Release what a batch that is being decoded took."""
        if self._open is not None:
            self._open.release()

    def _require_idle(self) -> None:
        if self.is_decoding:
            raise CacheError("a batch is being decoded: commit or release its placement first")
        self._open = None
