"""What sequences hold, as a snapshot: what ``Sequence.save`` and ``Context.save`` write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvcellar.backends.checks import check_types
from kvcellar.cache.porting import state_get
from kvcellar.errors import OptionError
from kvcellar.runtime.options import check_range
from kvcellar.snapshot.container import write_file
from kvcellar.snapshot.native import describe
from kvcellar.snapshot.snapshot import Plain, Snapshot, converted, digest, stored_as
from kvcellar.types import CacheSpec, Int32Array, KVType

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence as Text


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a snapshot is written.

    Attributes:
        type_k: store K as another type than the cache's, a GGUF name; None: as it is.
        type_v: the same for V.
        compress: with zstd, which needs ``kvcellar[zstd]``. Loading is slower then.
        checkpoints: whether older states and windows are saved as well, to go back to.
    """

    type_k: str | KVType | None = None
    type_v: str | KVType | None = None
    compress: bool = False
    checkpoints: bool = True

    @property
    def types(self) -> tuple[KVType | None, KVType | None]:
        """The types that are asked for.

        Raises:
            OptionError: there is no such type.
        """
        k, v = (None if t is None else KVType.parse(t) for t in (self.type_k, self.type_v))
        return k, v


def save_file(
    context: Context, texts: Sequence[Text], path: str | Path, options: SaveOptions
) -> int:
    """Write sequences to a file; returns its bytes."""
    snapshot = take_snapshot(context, texts, options)
    return write_file(Path(path), describe(snapshot), compress=options.compress)


def save_part(text: Text, path: str | Path, start: int, stop: int | None, how: SaveOptions) -> int:
    """Write tokens ``[start, stop)`` of a sequence to a file; returns its bytes."""
    snapshot = take_part(text, start, stop, how)
    return write_file(Path(path), describe(snapshot), compress=how.compress)


def take_snapshot(context: Context, texts: Sequence[Text], options: SaveOptions) -> Snapshot:
    """Whole sequences as a value; those that have waiting tokens compute them first.

    Raises:
        OptionError: a sequence of another context, or one twice.
    """
    if any(text.context is not context for text in texts):
        raise OptionError("sequences: one of them belongs to another context")
    for text in texts:
        text.compute_waiting()
    ids = [text.seq_id for text in texts]
    content = state_get(context.cache, ids, checkpoints=options.checkpoints)
    saved = tuple(text.saved_text() for text in texts)
    return stored(context, Snapshot(context.fingerprint, content, saved), options)


def take_part(text: Text, start: int, stop: int | None, options: SaveOptions) -> Snapshot:
    """Tokens ``[start, stop)`` of a sequence as a value.

    Raises:
        OptionError: a range outside the sequence, or one that would part grouped tokens.
        NotSupported: the cache has states or windows, and they do not begin or end there.
    """
    context, size = text.context, len(text)
    stop = size if stop is None else check_range("stop", stop, 0, size)
    start = check_range("start", start, 0, stop)
    if (start, stop) == (0, size):
        return take_snapshot(context, [text], options)
    text.compute_waiting()
    p0, p1 = check_cuts(text.positions, start, stop)
    first, last = (p0 if start else 0, p1) if start < stop else (0, 0)
    content = state_get(context.cache, [text.seq_id], first, last, checkpoints=options.checkpoints)
    saved = text.saved_text().part(start, stop, size, p1)
    return stored(context, Snapshot(context.fingerprint, content, (saved,)), options)


def check_cuts(at: Int32Array, start: int, stop: int) -> tuple[int, int]:
    """The positions that tokens ``[start, stop)`` of a text span.

    Args:
        at: where all its tokens stand, at least one.
        start: the first.
        stop: the first one behind them.

    Raises:
        OptionError: tokens that share a position would be parted.
    """
    for cut in (start, stop):
        if 0 < cut < len(at) and at[cut] == at[cut - 1]:
            raise OptionError(f"tokens {cut - 1} and {cut} share position {at[cut]}: take both")
    ends = [*at.tolist(), int(at[-1]) + 1]
    return ends[start], ends[stop]


def stored(context: Context, snapshot: Snapshot, options: SaveOptions) -> Snapshot:
    """The snapshot with K and V in the types that are asked for."""
    if options.types == (None, None):
        return snapshot
    specs = [as_type(spec, options) for spec in context.memory_spec.groups]
    other = converted(snapshot, specs, context.model.convert_rows)
    if other is snapshot:
        return snapshot
    were = digest(snapshot.fingerprint)
    texts = tuple(replace(text, rounded=text.rounded or were) for text in other.texts)
    return replace(other, texts=texts)


def stored_fingerprint(context: Context, options: SaveOptions) -> dict[str, Plain]:
    """The fingerprint that :func:`stored` gives a snapshot."""
    specs = [as_type(spec, options) for spec in context.memory_spec.groups]
    return stored_as(context.fingerprint, specs)


def as_type(spec: CacheSpec, options: SaveOptions) -> CacheSpec:
    """The shape of a cache that would store rows that way."""
    k, v = options.types
    other = replace(
        spec,
        type_k=k or spec.type_k,
        type_v=v or spec.type_v,
        flash_attn=True,  # which way V lies does not matter in a file
    )
    check_types(other)
    return other
