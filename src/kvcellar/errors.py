"""Every error that kvcellar raises on purpose, and the checks of arguments.

One base to catch, :class:`KVCellarError`; the tree below is the whole of it. An operation that
raises one of these has changed nothing (invariant 5), unless its docstring says otherwise. Errors
are values: they can be copied and pickled, with their fields, their notes and their cause.

There is one check for each kind of argument (``check_range``, ``check_bool``, …), which returns
the argument as a plain value of Python. It is called once, at the public border; what lies behind
it relies on that.

::

    KVCellarError
    ├── CacheError
    │   ├── CacheFull               no room for the tokens of a batch
    │   ├── SequenceIdError         a seq_id outside [0, n_seq_max), or no id left
    │   ├── PositionError           positions that repeat or go back, or are out of range
    │   ├── ShiftUnsupported        the cache cannot rotate K, so positions cannot move
    │   ├── NotSupported            a verb that this cache does not have (yet)
    │   ├── SequenceBusy            a second stream on a sequence, while the first one runs
    │   └── InvariantError          the cache contradicts itself: a bug, please report it
    ├── BatchError                  a batch that cannot be computed (also a ValueError)
    ├── OptionError                 an argument outside its range (also a ValueError)
    ├── GrammarError                a grammar that is refused, or that refuses (also a ValueError)
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
    ├── ClosedError                 a model, context, sequence or store used after close()
    └── HandleError                 a live object that was to be copied (also a TypeError)
"""

from __future__ import annotations

import operator
import os
import sys

TYPE_CHECKING = False  # as in typing, which would be most of what the import takes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Any, NoReturn, SupportsIndex, TypeVar

    T = TypeVar("T")


class KVCellarError(Exception):
    """Base of all errors raised on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild it without ``__init__``, whose arguments need not be those of the message."""
        state: dict[str, object] = {**vars(self)}
        if self.__cause__ is not None and _can_be_pickled(self.__cause__):
            state["__cause__"] = self.__cause__
        state["__suppress_context__"] = self.__suppress_context__
        return _rebuilt, (type(self), self.args), state


def _rebuilt(kind: type[KVCellarError], args: tuple[object, ...]) -> KVCellarError:
    return kind.__new__(kind, *args)  # which sets args


def _can_be_pickled(error: BaseException) -> bool:
    """Whether another process would see the error: many cannot be rebuilt from what they give."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the error's class raises
        return False
    return True


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
        cells = "cell" if needed == 1 else "cells"
        super().__init__(f"{needed} {cells} needed, {free} free: {remedy}")


class SequenceIdError(CacheError):
    """A sequence id outside ``[0, n_seq_max)``, or no id left to give."""


class PositionError(CacheError):
    """Positions that repeat, go back or leave the range."""


class ShiftUnsupported(CacheError):
    """Positions cannot move because this cache cannot rotate its K rows."""


class NotSupported(CacheError):
    """This cache does not have the verb that was asked for."""


class SequenceBusy(CacheError):
    """A second stream on a sequence, while the first one runs."""


class InvariantError(CacheError):
    """The cache contradicts itself; raised by ``check()``."""


class BatchError(KVCellarError, ValueError):
    """A batch that cannot be computed as it stands."""


class OptionError(KVCellarError, ValueError):
    """An argument outside its range; the message names it, its value and the range."""


class GrammarError(KVCellarError, ValueError):
    """A grammar that cannot be compiled or followed, or a token that it does not allow."""


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


class HandleError(KVCellarError, TypeError):
    """A live object, which cannot be copied or pickled; the message says what to do instead."""


# -- handles


def not_copied(what: str, remedy: str) -> Callable[[object, SupportsIndex], NoReturn]:
    """Return a ``__reduce_ex__`` that refuses: it is what copy, deepcopy and pickle all ask.

    Args:
        what: the kind of object, with its article.
        remedy: what to do instead.
    """

    def refuse(_self: object, _protocol: SupportsIndex, /) -> NoReturn:
        raise HandleError(f"{what} cannot be copied or pickled: {remedy}")

    return refuse


# -- arguments


def check_range(name: str, value: object, low: int, high: int) -> int:
    """Return an argument as an int in ``[low, high]``.

    Raises:
        OptionError: it is not a whole number, or outside the range.
    """
    number = whole(value)
    if number is None:
        raise OptionError(f"{name}={shown(value)}: must be a whole number")
    if not low <= number <= high:
        raise OptionError(f"{name}={shown(value)}: must be in [{low}, {high}]")
    return number


def whole(value: object) -> int | None:
    """Return a whole number of Python or NumPy as an int; None for others, True and False too."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_integers(
    name: str, values: object, error: type[KVCellarError] = OptionError
) -> list[int]:
    """Return the whole numbers in a list, an array ``[n]`` or whatever yields them in order.

    Bytes, dicts and sets are refused: they hold numbers, but no list of them.

    Raises:
        OptionError, or ``error``: it holds anything else, True and False too.
    """
    from collections.abc import Iterable, Mapping, Set

    numpy = _numpy()
    if isinstance(values, (str, bytes, bytearray, memoryview, Mapping, Set)):
        raise error(f"{name} must be a flat list of integers, not {shown(values)}")
    if numpy is not None and isinstance(values, numpy.ndarray):
        if values.ndim == 1 and (values.dtype.kind in "iu" or not values.size):
            found: list[int] = values.tolist()
            return found
    elif isinstance(values, Iterable):
        items = list(values)
        if set(map(type, items)) <= {int}:
            return items
        numbers = [number for item in items if (number := whole(item)) is not None]
        if len(numbers) == len(items):
            return numbers
        values = items
    raise error(f"{name} must be a flat list of integers, not {shown(values)}")


def check_real(name: str, value: object, low: float, high: float) -> float:
    """Return an argument as a finite float in ``[low, high]``.

    Raises:
        OptionError: it is not a number, or NaN, or outside the range.
    """
    from numbers import Real

    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else None  # type: ignore[arg-type]
    except OverflowError:
        number = None
    if number is None or not low <= number <= high:
        raise OptionError(f"{name}={shown(value)}: must be a number in [{low:.12g}, {high:.12g}]")
    return number


def check_bool(name: str, value: object) -> bool:
    """Return an argument as a bool; 0, 1 and "no" are not taken for one.

    Raises:
        OptionError: it is neither True nor False, of Python or NumPy.
    """
    numpy = _numpy()
    if isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_)):
        return bool(value)
    raise OptionError(f"{name}={shown(value)}: must be True or False")


def check_text(name: str, value: object) -> str:
    """Return an argument that is a str.

    Raises:
        OptionError: it is none.
    """
    if not isinstance(value, str):
        raise OptionError(f"{name}={shown(value)}: must be a str")
    return str(value)


def check_path(name: str, value: object) -> Path:
    """Return an argument as a path that the system can be asked for; it need not exist.

    Raises:
        OptionError: it is neither a str nor an ``os.PathLike`` of one, or has a NUL in it or what
            file names cannot have.
    """
    from pathlib import Path

    text = value if isinstance(value, str) else _path_text(value)
    if text is None:
        raise OptionError(f"{name}={shown(value)}: must be a str or a path")
    try:
        is_name = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise OptionError(f"{name}={shown(value)}: no file can have such a name")
    return Path(text)


def _path_text(value: object) -> str | None:
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        return None
    return text if isinstance(text, str) else None


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Check an argument that is one of several strings.

    Raises:
        OptionError: it is none of them.
    """
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(map(repr, choices))
        raise OptionError(f"{name}={shown(value)}: must be one of {known}")


def check_kind(name: str, value: T, *kinds: type, made: str = "") -> T:
    """Return an argument that is an object of one of these classes.

    Args:
        name: the argument's name.
        value: the argument.
        kinds: the classes.
        made: how one is made; left out: by calling the class.

    Raises:
        OptionError: it is of another class.
    """
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        how = f": {made}" if made else ""
        raise OptionError(f"{name}={shown(value)}: must be a {wanted}{how}")
    return value


def check_callable(name: str, value: T) -> T:
    """Return an argument that can be called.

    Raises:
        OptionError: it cannot.
    """
    if not callable(value):
        raise OptionError(f"{name}={shown(value)}: must be a function")
    return value


def _numpy() -> Any:
    """NumPy, unless nothing has loaded it: then there are no values of its types."""
    return sys.modules.get("numpy")


def shown(value: object, most: int = 60) -> str:
    """Return a text of any value for a message, whatever its ``repr`` does, cut at ``most``."""
    try:
        text = repr(value)
    except Exception:  # numbers of many digits refuse; classes of others may do anything
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."
