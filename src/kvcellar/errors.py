"""Every error that kvcellar raises on purpose, and the check of an argument's range.

One base to catch, :class:`KVCellarError`; the tree below is the whole of it. An operation that
raises one of these has changed nothing (invariant 5), unless its docstring says otherwise.

::

    KVCellarError
    ├── CacheError
    │   ├── CacheFull               no room for the tokens of a batch
    │   ├── SequenceIdError         a seq_id outside [0, n_seq_max), or no id left
    │   ├── PositionError           positions that repeat or go back, or are out of range
    │   ├── ShiftUnsupported        the cache cannot rotate K, so positions cannot move
    │   ├── NotSupported            a verb that this cache does not have (yet)
    │   └── InvariantError          the cache contradicts itself: a bug, please report it
    ├── BatchError                  a batch that cannot be computed (also a ValueError)
    ├── OptionError                 an argument outside its range (also a ValueError)
    ├── ModelError
    │   ├── ModelFileError          missing, truncated, damaged, or not a GGUF file
    │   ├── UnsupportedModel        an architecture, tensor type or hyper-parameter we lack
    │   ├── TokenizerError          a vocabulary, or text, that cannot be handled
    │   └── TemplateError           a chat template that is absent or fails
    ├── BackendError
    │   ├── LibraryError            a backend's library is absent or of another version
    │   ├── AllocationError         a buffer could not be had; names it and its bytes
    │   └── ComputeError            a graph failed to compute
    ├── SnapshotError
    │   ├── SnapshotFileError       missing, truncated, damaged, or not a snapshot
    │   ├── SnapshotMismatch        of another model, K/V type or shape; names what differs
    │   └── StoreError              a store of snapshots cannot be opened, read or written
    └── ClosedError                 a model, context, sequence or store used after close()
"""

from __future__ import annotations

import operator


class KVCellarError(Exception):
    """Base of all errors raised on purpose."""


class CacheError(KVCellarError):
    """The cache cannot do what was asked."""


class CacheFull(CacheError):
    """Fewer cells are free than the batch needs.

    Attributes:
        needed: cells asked for.
        free: cells without an owner.
    """

    def __init__(self, needed: int, free: int, hint: str = "") -> None:
        self.needed = needed
        self.free = free
        remedy = hint or "remove sequences or use a larger n_ctx"
        super().__init__(f"{needed} cells needed, {free} free: {remedy}")


class SequenceIdError(CacheError):
    """A sequence id outside ``[0, n_seq_max)``, or no id left to give."""


class PositionError(CacheError):
    """Positions that repeat, go back or leave the range."""


class ShiftUnsupported(CacheError):
    """Positions cannot move because this cache cannot rotate its K rows."""


class NotSupported(CacheError):
    """This cache does not have the verb that was asked for."""


class InvariantError(CacheError):
    """The cache contradicts itself; raised by ``check()``."""


class BatchError(KVCellarError, ValueError):
    """A batch that cannot be computed as it stands."""


class OptionError(KVCellarError, ValueError):
    """An argument outside its range; the message names it, its value and the range."""


class ModelError(KVCellarError):
    """A model that cannot be used."""


class ModelFileError(ModelError):
    """The file is missing, truncated, damaged, or not GGUF."""


class UnsupportedModel(ModelError):
    """The file is sound but needs something that kvcellar lacks; the message says what."""


class TokenizerError(ModelError):
    """A vocabulary that cannot be built, or text or tokens it cannot handle."""


class TemplateError(ModelError):
    """The chat template is absent, malformed, or refused the messages."""


class BackendError(KVCellarError):
    """The compute backend failed."""


class LibraryError(BackendError):
    """A backend's library cannot be loaded or is of another version."""


class AllocationError(BackendError):
    """A buffer could not be allocated.

    Attributes:
        buffer: what the buffer was for.
        n_bytes: how large it would have been.
    """

    def __init__(self, buffer: str, n_bytes: int, hint: str = "") -> None:
        self.buffer = buffer
        self.n_bytes = n_bytes
        remedy = hint or "use a smaller n_ctx, n_ubatch or K/V type"
        super().__init__(f"cannot allocate {n_bytes / 2**20:.1f} MiB for {buffer}: {remedy}")


class ComputeError(BackendError):
    """A graph failed to compute; the cells placed for it were released."""


class SnapshotError(KVCellarError):
    """A snapshot that cannot be saved or loaded; the cache is as it was."""


class SnapshotFileError(SnapshotError):
    """The file is missing, truncated, damaged, or no snapshot; nothing of it was used."""


class SnapshotMismatch(SnapshotError):
    """The snapshot belongs to another model or shape of cache.

    Attributes:
        field: what differs.
        stored: its value in the snapshot.
        wanted: its value here.
    """

    def __init__(self, field: str, stored: object, wanted: object, hint: str = "") -> None:
        self.field = field
        self.stored = stored
        self.wanted = wanted
        remedy = f": {hint}" if hint else ""
        super().__init__(f"the snapshot has {field} {stored}, here it is {wanted}{remedy}")


class StoreError(SnapshotError):
    """A store of snapshots cannot be opened, read or written."""


class ClosedError(KVCellarError):
    """A model, context, sequence or store was used after it was closed."""


def check_range(name: str, value: int, low: int, high: int) -> int:
    """Return an argument as an int in ``[low, high]``.

    Raises:
        OptionError: it is not a whole number, or outside the range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise OptionError(f"{name}={value!r}: must be a whole number") from None
    if isinstance(value, bool) or not low <= number <= high:
        raise OptionError(f"{name}={value!r}: must be in [{low}, {high}]")
    return number
