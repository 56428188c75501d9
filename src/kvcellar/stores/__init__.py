"""Stores of snapshots: in memory, on disk, in Redis; one protocol for all.

===============  ==============================  =============================================
store            is for                          limited by
===============  ==============================  =============================================
``MemoryStore``  one process                     bytes; the least recently used are evicted
``DiskStore``    processes of one machine        the same, across processes
``RedisStore``   several machines                the server's memory, and a time to live
===============  ==============================  =============================================

:func:`open_store` opens any of them by a path or URL.
"""

from __future__ import annotations

from kvcellar.stores.base import Entry, Store
from kvcellar.stores.opening import open_store

__all__ = ["Entry", "Store", "open_store"]
