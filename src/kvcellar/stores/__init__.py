"""Where snapshots are kept: in memory, on disk, in Redis; one protocol for all.

===============  ==============================  =====================================
store            is for                          bounded by
===============  ==============================  =====================================
``MemoryStore``  one process                     bytes, those used longest ago leave
``DiskStore``    processes of one machine        the same, across processes
``RedisStore``   several machines                the server's memory, and time unused
===============  ==============================  =====================================

:func:`open_store` opens any of them by a path or URL.
"""

from __future__ import annotations

from kvcellar.stores.base import Entry, Store
from kvcellar.stores.opening import open_store

__all__ = ["Entry", "Store", "open_store"]
