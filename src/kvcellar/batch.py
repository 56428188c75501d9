"""Batches to decode: tokens or embeddings, their positions and their owners.

A :class:`Batch` is built up and holds what the caller said. :meth:`Batch.resolve` checks it
against what a cache holds and gives :class:`Rows`, plain arrays in which nothing is left open:

* every sequence id is in range, and no token names one twice;
* the positions of a sequence rise strictly, and start above what the sequence holds.

The ``split_*`` functions take the owners of a batch's rows and say which rows each microbatch has:
every row once, the rows of a sequence in their order, at most ``n_ubatch`` rows a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcellar.cellsets import owner_words, pack_owners
from kvcellar.errors import (
    BatchError,
    OptionError,
    PositionError,
    SequenceIdError,
    check_bool,
    check_callable,
    check_integers,
    check_kind,
    check_range,
    shown,
    whole,
)
from kvcellar.types import MAX_POSITION, BoolArray, Float32Array, Int32Array, Int64Array, OwnerBits

Logits: TypeAlias = "Literal['last', 'all', 'none'] | Sequence[bool] | BoolArray"


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch in which nothing is left open."""

    tokens: Int32Array | None  # [n]
    embeddings: Float32Array | None  # [n, n_embd]
    positions: Int32Array  # [n]
    owners: OwnerBits  # [n_words, n]
    wanted: BoolArray  # [n], whose logits are wanted

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(slots=True)
class Batch:
    """Tokens to decode; ``Batch.of(...)`` at once, or ``add`` one by one as in llama.cpp."""

    _tokens: list[int] = field(default_factory=list, init=False)
    _embeddings: list[Float32Array] = field(default_factory=list, init=False)
    _positions: list[int | None] = field(default_factory=list, init=False)
    _owners: list[tuple[int, ...]] = field(default_factory=list, init=False)
    _wanted: list[bool] = field(default_factory=list, init=False)

    def __copy__(self) -> Batch:
        """Return a batch that can be added to without changing this one."""
        return _filled_batch(*(list(getattr(self, each.name)) for each in fields(self)))

    def __reduce__(self) -> tuple[Callable[..., Batch], tuple[object, ...]]:
        return _filled_batch, tuple(getattr(self, each.name) for each in fields(self))

    @classmethod
    def of(
        cls,
        tokens: Iterable[int] | npt.NDArray[np.integer],
        seq_id: int | Sequence[int] = 0,
        positions: Iterable[int] | npt.NDArray[np.integer] | None = None,
        logits: Logits = "last",
    ) -> Batch:
        """Tokens of one sequence, or shared by several.

        Args:
            tokens: their ids.
            seq_id: the sequence, or those that share every token.
            positions: where they stand; None continues after what the sequence holds.
            logits: which tokens' logits are wanted.

        Raises:
            BatchError: the arguments do not fit together.
        """
        batch = cls()
        batch._tokens = check_integers("tokens", tokens, BatchError)
        batch._describe(len(batch._tokens), seq_id, positions, logits)
        return batch

    @classmethod
    def of_embeddings(
        cls,
        embeddings: npt.ArrayLike,
        seq_id: int | Sequence[int] = 0,
        positions: Iterable[int] | npt.NDArray[np.integer] | None = None,
        logits: Logits = "last",
    ) -> Batch:
        """Input embeddings ``[n, n_embd]`` in place of tokens; the rest as in :meth:`of`."""
        try:
            array = np.asarray(embeddings, np.float32)
        except (TypeError, ValueError, OverflowError):
            raise BatchError(
                f"embeddings must be numbers [n, n_embd], not {shown(embeddings)}"
            ) from None
        if array.ndim != 2:
            raise BatchError(f"embeddings have shape {array.shape}; [n, n_embd] is needed")
        finite = np.isfinite(array).all(axis=1)
        if not finite.all():
            raise BatchError(f"embedding {int(finite.argmin())} holds NaN or infinity")
        batch = cls()
        batch._embeddings = list(array.copy())
        batch._describe(len(array), seq_id, positions, logits)
        return batch

    def _describe(
        self,
        n: int,
        seq_id: int | Sequence[int],
        positions: Iterable[int] | npt.NDArray[np.integer] | None,
        logits: Logits,
    ) -> None:
        self._owners = [_owner_ids(seq_id)] * n
        self._positions = [None] * n
        if positions is not None:
            self._positions = [*check_integers("positions", positions, BatchError)]
        if len(self._positions) != n:
            raise BatchError(f"{n} tokens but {len(self._positions)} positions")
        self._wanted = _wanted(logits, n)

    def add(
        self,
        token: int,
        pos: int | None = None,
        seq_ids: int | Sequence[int] = 0,
        *,
        logits: bool = False,
    ) -> Batch:
        """Append a token; returns the batch, so that calls can be chained.

        Raises:
            BatchError: no such token, position or owner can be.
        """
        if self._embeddings:
            raise BatchError("a token cannot be added to a batch of embeddings")
        owners, wanted = _owner_ids(seq_ids), check_bool("logits", logits)
        place = None if pos is None else _integer("pos", pos)
        self._tokens.append(_integer("token", token))
        self._positions.append(place)
        self._owners.append(owners)
        self._wanted.append(wanted)
        return self

    def extend(self, other: Batch) -> Batch:
        """Append another batch's tokens; returns this batch.

        Raises:
            BatchError: one of them has embeddings and the other tokens.
        """
        check_kind("other", other, Batch)
        if (self._embeddings and other._tokens) or (self._tokens and other._embeddings):
            raise BatchError("tokens and embeddings cannot be in one batch")
        for each in fields(self):
            getattr(self, each.name).extend(list(getattr(other, each.name)))
        return self

    def clear(self) -> None:
        """Drop every token, so that the batch can be filled again."""
        for part in (
            self._tokens,
            self._embeddings,
            self._positions,
            self._owners,
            self._wanted,
        ):
            part.clear()

    def __len__(self) -> int:
        return len(self._owners)

    @property
    def n_tokens(self) -> int:
        """How many tokens (or embeddings) there are."""
        return len(self._owners)

    @property
    def n_seqs(self) -> int:
        """How many sequences own a token of the batch."""
        return len(set[int]().union(*self._owners))

    def check_model(self, n_vocab: int | None = None, n_embd: int | None = None) -> None:
        """Raise BatchError if a token or an embedding does not fit the model."""
        for name, n in (("n_vocab", n_vocab), ("n_embd", n_embd)):
            if n is not None:
                check_range(name, n, 0, MAX_POSITION)
        if n_vocab is not None and self._tokens and max(self._tokens) >= n_vocab:
            raise BatchError(f"token {max(self._tokens)} is outside the vocabulary of {n_vocab}")
        if n_embd is not None and self._embeddings and len(self._embeddings[0]) != n_embd:
            raise BatchError(f"embeddings of {len(self._embeddings[0])} values, not {n_embd}")

    def resolve(self, n_seq_max: int, held: Callable[[int], int]) -> Rows:
        """Check the batch against a cache and fill in what was left open.

        Args:
            n_seq_max: ids must be below it.
            held: the largest position that a sequence holds, -1 if none.

        Raises:
            BatchError: no tokens, or a negative one.
            SequenceIdError: an id out of range.
            PositionError: a position that repeats, goes back or is out of range.
        """
        check_range("n_seq_max", n_seq_max, 1, MAX_POSITION)
        check_callable("held", held)
        n = len(self._owners)
        if n == 0:
            raise BatchError("the batch is empty: add a token first")
        if self._tokens and not 0 <= min(self._tokens) <= max(self._tokens) < 2**31:
            bad = next(t for t in self._tokens if not 0 <= t < 2**31)
            raise BatchError(f"token {bad}: ids are not negative and below 2**31")
        pairs = [(row, seq) for row, owners in enumerate(self._owners) for seq in owners]
        rows, seq_ids = np.array(pairs, np.int64).T
        if not 0 <= int(seq_ids.min()) <= int(seq_ids.max()) < n_seq_max:
            bad = next(s for s in seq_ids.tolist() if not 0 <= s < n_seq_max)
            raise SequenceIdError(f"seq_id {bad} is outside [0, {n_seq_max})")
        positions = np.array(_filled(self._positions, self._owners, held), np.int32)
        owners = pack_owners(rows, seq_ids, n, owner_words(n_seq_max))
        return Rows(
            np.array(self._tokens, np.int32) if self._tokens else None,
            np.stack(self._embeddings) if self._embeddings else None,
            positions,
            owners,
            np.array(self._wanted, np.bool_),
        )


def _filled_batch(*parts: object) -> Batch:
    batch = Batch()
    for each, part in zip(fields(Batch), parts, strict=True):
        setattr(batch, each.name, part)
    return batch


def _integer(what: str, value: object) -> int:
    if (number := whole(value)) is None:
        raise BatchError(f"{what} must be an integer, not {shown(value)}")
    if not -(2**63) <= number < 2**63:
        raise BatchError(f"{what} must be an integer of 64 bits, not {shown(number)}")
    return number


def _owner_ids(seq_ids: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seq_ids, (bytes, bytearray, memoryview, Mapping)):
        raise BatchError(f"seq_id must be an integer or a list of them, not {shown(seq_ids)}")
    if not isinstance(seq_ids, Iterable):
        return (_integer("seq_id", seq_ids),)
    ids = tuple(_integer("seq_id", seq) for seq in seq_ids)
    if not ids:
        raise BatchError("a token without an owner: give it at least one seq_id")
    if len(set(ids)) != len(ids):
        raise BatchError(f"a token names an owner twice: {list(ids)}")
    return ids


def _wanted(logits: Logits, n: int) -> list[bool]:
    if isinstance(logits, str):
        if logits not in ("last", "all", "none"):
            raise BatchError(f"logits={shown(logits)}: one of 'last', 'all', 'none', or a mask")
        wanted = [logits == "all"] * n
        if n and logits == "last":
            wanted[-1] = True
        return wanted
    if isinstance(logits, (bytes, Mapping)) or not isinstance(logits, Iterable):
        raise BatchError(f"logits={shown(logits)}: one of 'last', 'all', 'none', or a mask")
    try:
        mask = [check_bool("logits", value) for value in logits]
    except OptionError as error:
        raise BatchError(f"a mask of {error}") from None
    if len(mask) != n:
        raise BatchError(f"{n} tokens but a logits mask of {len(mask)}")
    return mask


def _filled(
    positions: Sequence[int | None],
    owners: Sequence[tuple[int, ...]],
    held: Callable[[int], int],
) -> list[int]:
    """The positions, those left open filled in; raises unless each sequence's rise."""
    last: dict[int, int] = {}
    filled = []
    for row, (wanted, seq_ids) in enumerate(zip(positions, owners, strict=True)):
        for seq in seq_ids:
            if seq not in last:
                last[seq] = held(seq)
        end = last[seq_ids[0]]
        if len(seq_ids) > 1:
            before = [last[seq] for seq in seq_ids]
            end = max(before)
            if wanted is None and min(before) != end:
                raise PositionError(
                    f"token {row} is shared by sequences {list(seq_ids)}, which end at different "
                    f"positions {before}: say at which position it stands"
                )
        pos = end + 1 if wanted is None else wanted
        if not 0 <= pos < MAX_POSITION:
            raise PositionError(f"token {row} stands at position {pos}, outside [0, 2**31 - 1)")
        if pos <= end:
            seq = next(seq for seq in seq_ids if last[seq] == end)
            raise PositionError(
                f"token {row} of sequence {seq} stands at position {pos}, "
                f"but the sequence already reaches {end}: positions must rise"
            )
        for seq in seq_ids:
            last[seq] = pos
        filled.append(pos)
    return filled


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """At most ``n_ubatch`` tokens (or embeddings) that are computed together.

    ``rows`` says which token of the batch each one was; ``outputs`` are the places within this
    microbatch whose logits are wanted.
    """

    rows: Int32Array  # [n]
    tokens: Int32Array | None  # [n]
    embeddings: Float32Array | None  # [n, n_embd]
    positions: Int32Array  # [n]
    owners: OwnerBits  # [n_words, n]
    outputs: Int32Array  # [n_outputs], ascending

    @property
    def n_tokens(self) -> int:
        """How many tokens are computed."""
        return len(self.positions)


def micro_batches(rows: Rows, pieces: Sequence[Int64Array]) -> list[MicroBatch]:
    """The microbatches that have these rows of a batch."""
    micros = []
    for piece in pieces:
        micros.append(  # noqa: PERF401 - a comprehension would be a call of its own
            MicroBatch(
                rows=piece.astype(np.int32),
                tokens=None if rows.tokens is None else rows.tokens[piece],
                embeddings=None if rows.embeddings is None else rows.embeddings[piece],
                positions=rows.positions[piece],
                owners=rows.owners[:, piece],
                outputs=np.flatnonzero(rows.wanted[piece]).astype(np.int32),
            )
        )
    return micros


def split_simple(n_rows: int, n_ubatch: int) -> list[Int64Array]:
    """Neighbouring rows, as many as fit; what attention needs."""
    if 0 < n_rows <= n_ubatch:
        return [np.arange(n_rows)]
    _check_ubatch(n_ubatch)
    return [np.arange(i, min(i + n_ubatch, n_rows)) for i in range(0, n_rows, n_ubatch)]


def split_equal(owners: OwnerBits, n_ubatch: int) -> list[Int64Array]:
    """Equally many rows per owner set that takes part, set after set; for recurrent states."""
    _check_ubatch(n_ubatch)
    result = []
    for groups in _segments(owners):
        left = groups
        while left:
            part = left[:n_ubatch]
            n = min(min(map(len, part)), n_ubatch // len(part))
            result.append(np.array([row for rows in part for row in rows[:n]], np.int64))
            left = [rows[n:] for rows in part if len(rows) > n] + left[n_ubatch:]
    return result


def _check_ubatch(n_ubatch: int) -> None:
    if n_ubatch < 1:
        raise OptionError(f"n_ubatch is {n_ubatch}: it must be at least 1")


def _segments(owners: OwnerBits) -> list[list[list[int]]]:
    """Stretches of rows within which owner sets are equal or disjoint; in each, rows by set.

    Sets that overlap without being equal share a sequence, whose rows must stay in order: the
    second of them starts a new stretch.
    """
    segments: list[list[list[int]]] = []
    groups: dict[int, list[int]] = {}
    seen = 0
    for row, column in enumerate(owners.T.tolist()):
        bits = sum(word << (64 * i) for i, word in enumerate(column))
        if bits not in groups and bits & seen:
            segments.append(list(groups.values()))
            groups, seen = {}, 0
        groups.setdefault(bits, []).append(row)
        seen |= bits
    return [*segments, list(groups.values())] if groups else segments
