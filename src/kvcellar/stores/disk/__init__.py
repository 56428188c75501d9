"""A store in a directory: an index in SQLite and a file a value."""

from __future__ import annotations

from kvcellar.stores.disk.store import DiskStore

__all__ = ["DiskStore"]
