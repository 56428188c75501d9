"""Reading numbers from bytes that nobody vouches for.

Nothing is allocated or cut out before it is known to be there.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from kvcellar.errors import SnapshotFileError
from kvcellar.types import AnyArray, ByteArray

_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")
_U64: Final = struct.Struct("<Q")


class Cursor:
    """A place in a file; each read names what it expects there.

    Raises:
        SnapshotFileError: from any read that would pass the end.
    """

    def __init__(self, data: bytes) -> None:
        self.offset = 0
        self._bytes = np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)

    @property
    def n_left(self) -> int:
        """How many bytes follow."""
        return len(self._bytes) - self.offset

    def u32(self, what: str) -> int:
        """An unsigned number of 4 bytes."""
        return self._number(_U32, what)

    def i32(self, what: str) -> int:
        """A number of 4 bytes."""
        return self._number(_I32, what)

    def u64(self, what: str) -> int:
        """An unsigned number of 8 bytes."""
        return self._number(_U64, what)

    def array(self, dtype: str, n: int, what: str) -> AnyArray:
        """So many numbers of a NumPy type."""
        taken: AnyArray = self.take(n * np.dtype(dtype).itemsize, what).copy().view(dtype)
        return taken

    def take(self, n: int, what: str) -> ByteArray:
        """So many bytes, as they lie in the file."""
        self.require(n <= self.n_left, f"{what} of {n} bytes, of which {self.n_left} are there")
        taken = self._bytes[self.offset : self.offset + n]
        self.offset += n
        return taken

    def expect(self, what: str, found: int, *allowed: int) -> None:
        """See that the number read last is one of those."""
        wanted = " or ".join(map(str, allowed))
        self.require(found in allowed, f"{what} is {found}, not {wanted}")

    def require(self, holds: bool, what: str) -> None:
        """Refuse the file unless something holds."""
        if not holds:
            raise SnapshotFileError(f"llama.cpp's file at offset {self.offset}: {what}")

    def _number(self, layout: struct.Struct, what: str) -> int:
        number: int = layout.unpack(self.take(layout.size, what).tobytes())[0]
        return number
