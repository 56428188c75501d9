"""Options of contexts, saving, loading and context shift: numbers, checked before anything happens.

Nothing here touches a cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from kvcellar.cache.recurrent import state_rows
from kvcellar.cache.rows import check_threshold
from kvcellar.cache.sliding import sliding_size
from kvcellar.errors import (
    OptionError,
    check_bool,
    check_callable,
    check_kind,
    check_range,
)
from kvcellar.models.blocks import ModelSpec
from kvcellar.types import (
    MAX_POSITION,
    CacheSpec,
    Int32Array,
    KVType,
    MemorySpec,
    StateSpec,
    group_layers,
)

MAX_CELLS = 2**31 - 1
MAX_SEQ = 4096
DEFAULT_CELLS = 4096
MAX_CHECKPOINTS = 2**16
CHECKPOINT_BYTES = 256 * 2**20

WhyNot: TypeAlias = Callable[[CacheSpec], str | None]
"""Returns why a cache of that shape cannot have something; None if it can."""


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """What :meth:`Model.context` takes, under llama.cpp's names; checked when they are made.

    Attributes:
        n_ctx: cells of the cache, shared by all sequences; None: what the model was trained for,
            at most 4096.
        n_seq_max: how many sequences there may be.
        n_ubatch: how many tokens are computed at once.
        type_k: storage type of K, a GGUF name.
        type_v: storage type of V, a GGUF name.
        flash_attn: how attention runs over f16, bf16 or f32 V. True: V is kept a row a cell, which
            suits several sequences in one pool. False: V is transposed, which suits one sequence.
            None: False for one sequence with such a V and without the kernel, else True.
        kernel: whether attention runs in a kernel of our own, which reads only the cells of a
            token's sequences. None: if it can; it needs llvmlite, and K and V each as f16, q8_0 or
            q4_0. Unless False, products with quantised weights are computed by our own code too,
            with llvmlite on processors with AVX-512 VNNI; they are more exact than ggml's.
        defrag_threshold: the share of holes beyond which the cache is compacted by itself, a few
            runs of cells a decode; None: never. It only affects speed.
        swa_full: whether layers that attend within a window keep all tokens too. Without, they keep
            what the window needs, and an edit far back means decoding what follows again.
        checkpoints: how many older states and windows may be kept to go back to; 0: none, and an
            edit before them means decoding the whole text again.
        checkpoint_bytes: what those may take, states and each group of windows by itself; 0: there
            are none; None: 256 MiB.

    Raises:
        OptionError: one is outside its range; the message names it.
    """

    n_ctx: int | None = None
    n_seq_max: int = 8
    n_ubatch: int = 512
    type_k: str | KVType = KVType.F16
    type_v: str | KVType = KVType.F16
    flash_attn: bool | None = None
    kernel: bool | None = None
    defrag_threshold: float | None = None
    swa_full: bool = False
    checkpoints: int = 32
    checkpoint_bytes: int | None = None

    def __post_init__(self) -> None:
        self._set("n_ctx", _range, 1, MAX_CELLS)
        self._set("n_seq_max", check_range, 1, MAX_SEQ)
        self._set("n_ubatch", check_range, 1, MAX_CELLS)
        self._set("flash_attn", _bool)
        self._set("kernel", _bool)
        self._set("swa_full", check_bool)
        self._set("checkpoints", check_range, 0, MAX_CHECKPOINTS)
        self._set("checkpoint_bytes", _range, 0, 2**62)
        object.__setattr__(self, "defrag_threshold", check_threshold(self.defrag_threshold))
        for name in ("type_k", "type_v"):
            object.__setattr__(self, name, KVType.parse(getattr(self, name)))

    def _set(self, name: str, check: Callable[..., object], *limits: int) -> None:
        """Set an option to the plain value of what was given."""
        object.__setattr__(self, name, check(name, getattr(self, name), *limits))

    def memory_spec(self, model: ModelSpec, why_no_kernel: WhyNot) -> MemorySpec:
        """Return the shape of the memory that these options ask for.

        The widest group always has ``n_ctx`` cells, so that the cache has the whole text.

        Raises:
            OptionError: the kernel is asked for and cannot run.
        """
        check_callable("why_no_kernel", why_no_kernel)
        n_ctx, n_seq_max = self.n_cells(model), self.n_seq_max
        n_kept, n_bytes = self.checkpoint_budget
        layers, states, places = group_layers(model.layers)
        shape = CacheSpec(
            size=n_ctx,
            n_seq_max=n_seq_max,
            layers=(),
            type_k=KVType.parse(self.type_k),
            type_v=KVType.parse(self.type_v),
            flash_attn=self.flash_attn is not False,
        )
        groups = self._transposed([replace(shape, layers=part) for part in layers], why_no_kernel)
        sized = (*groups[:1], *map(self._in_window, groups[1:]))
        if not states:
            return MemorySpec(sized, None, places)
        n_kept = min(n_kept, n_bytes // StateSpec(1, 1, states).row_bytes)
        n_rows = state_rows(n_seq_max, n_kept)
        return MemorySpec(sized, StateSpec(n_rows, n_seq_max, states), places)

    def n_cells(self, model: ModelSpec) -> int:
        """Return the number of tokens that the context is for."""
        check_kind("model", model, ModelSpec, made="model.spec")
        return min(model.n_ctx_train, DEFAULT_CELLS) if self.n_ctx is None else self.n_ctx

    @property
    def checkpoint_budget(self) -> tuple[int, int]:
        """How many checkpoints each kind of memory may keep, and in how many bytes."""
        n_bytes = CHECKPOINT_BYTES if self.checkpoint_bytes is None else self.checkpoint_bytes
        return self.checkpoints, n_bytes

    def use_kernel(self, groups: Sequence[CacheSpec], why_no_kernel: WhyNot) -> bool:
        """Return whether attention runs in our own kernel, in the groups where it can.

        Raises:
            OptionError: it is asked for and cannot run in one.
        """
        if self.kernel is False:
            return False
        check_callable("why_no_kernel", why_no_kernel)
        for group in check_kind("groups", groups, list, tuple):
            check_kind("groups", group, CacheSpec)
        reasons = [why_no_kernel(group) for group in groups] or ["no layer attends"]
        if self.kernel and any(reasons):
            raise OptionError(f"kernel=True: {next(filter(None, reasons))}")
        return None in reasons

    def _transposed(self, groups: list[CacheSpec], why_no_kernel: WhyNot) -> tuple[CacheSpec, ...]:
        """Transpose V in all groups if that is left open and faster."""
        suits = self.flash_attn is None and self.n_seq_max == 1
        for group in groups:
            suits &= not group.type_v.is_quantized
            suits &= len({layer.n_embd_v for layer in group.layers}) == 1
            suits &= all(layer.v_offset is None for layer in group.layers)
        if not suits or self.use_kernel(groups, why_no_kernel):
            return tuple(groups)
        return tuple(replace(group, flash_attn=False, padding=0) for group in groups)

    def _in_window(self, group: CacheSpec) -> CacheSpec:
        """Give the group as many cells as its window needs, where those are fewer."""
        if self.swa_full or not group.window:
            return group
        sizes = (group.window, group.n_seq_max, self.n_ubatch, group.padding, group.size)
        return replace(group, size=sliding_size(*sizes))


def _range(name: str, value: int | None, low: int, high: int) -> int | None:
    return None if value is None else check_range(name, value, low, high)


def _bool(name: str, value: bool | None) -> bool | None:
    return None if value is None else check_bool(name, value)


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a snapshot is written; checked when they are made.

    Attributes:
        type_k: store K as another type than the cache's, a GGUF name; None: as it is.
        type_v: the same for V.
        compress: with zstd, which needs ``kvcellar[zstd]``; loading becomes slower.
        checkpoints: whether older states and windows are saved as well, to go back to.

    Raises:
        OptionError: there is no such type, or something else than True or False.
    """

    type_k: str | KVType | None = None
    type_v: str | KVType | None = None
    compress: bool = False
    checkpoints: bool = True

    def __post_init__(self) -> None:
        for name in ("type_k", "type_v"):
            if (kind := getattr(self, name)) is not None:
                object.__setattr__(self, name, KVType.parse(kind))
        for name in ("compress", "checkpoints"):
            object.__setattr__(self, name, check_bool(name, getattr(self, name)))

    @property
    def types(self) -> tuple[KVType | None, KVType | None]:
        """The types that are asked for."""
        k, v = (None if t is None else KVType.parse(t) for t in (self.type_k, self.type_v))
        return k, v


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Which part of a snapshot is loaded, and where it goes; checked when they are made.

    Attributes:
        start: the first token, of the one sequence that there is.
        stop: the first one that is not loaded; None: all.
        positions: where the first token shall stand, K being rotated; None: where it stood.
        convert: whether K and V may be stored in other types than the cache's.

    Raises:
        OptionError: a number that no text can have, or something else than True or False.
    """

    start: int = 0
    stop: int | None = None
    positions: int | None = None
    convert: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", check_range("start", self.start, 0, MAX_POSITION))
        object.__setattr__(self, "stop", _range("stop", self.stop, 0, MAX_POSITION))
        where = _range("positions", self.positions, 0, MAX_POSITION - 1)
        object.__setattr__(self, "positions", where)
        object.__setattr__(self, "convert", check_bool("convert", self.convert))


_ROOM = 4  # cells that llama.cpp's server never lets ``keep`` claim


@dataclass(frozen=True, slots=True)
class ContextShift:
    """What to discard when a text has no more room: tokens behind the first ``keep``.

    Attributes:
        keep: how many tokens at the start stay, for example those of a system prompt; clamped so
            that a few cells are left for the rest.
        discard: how many tokens behind them are discarded, at least one and never all; None: half.

    Raises:
        OptionError: one of them is outside its range.
    """

    keep: int = 0
    discard: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", check_range("keep", self.keep, 0, MAX_POSITION))
        object.__setattr__(self, "discard", _range("discard", self.discard, 1, MAX_POSITION))

    def clamped(self, n_tokens: int, n_ctx: int) -> tuple[int, int]:
        """Return which tokens are discarded, as a range; clamped as llama.cpp's server does.

        Raises:
            OptionError: there are fewer than two tokens.
        """
        check_range("n_tokens", n_tokens, 0, MAX_POSITION)
        check_range("n_ctx", n_ctx, 0, MAX_POSITION)
        if n_tokens < 2:
            raise OptionError(f"a context shift needs 2 tokens in the cache, there is {n_tokens}")
        keep = max(0, min(self.keep, n_ctx - _ROOM, n_tokens - 2))
        n_left = n_tokens - keep
        discard = n_left // 2 if self.discard is None else self.discard
        return keep, keep + min(discard, n_left - 1)

    def span(self, positions: Int32Array, n_ctx: int) -> tuple[int, int]:
        """Clamp for tokens at ascending positions: those that share one are discarded together.

        Raises:
            OptionError: nothing could be discarded, or nothing would be left.
        """
        check_kind("positions", positions, np.ndarray)
        n = len(positions)
        keep, stop = self.clamped(n, n_ctx)
        cuts = np.append(np.flatnonzero(np.diff(positions, prepend=-1)), n)
        first = int(np.searchsorted(cuts, keep))
        last = int(np.searchsorted(cuts, stop, side="right")) - 1
        last = max(last, first + 1)  # one that is larger than what was to go
        if last >= len(cuts) - 1:
            raise OptionError("nothing can be discarded: what follows keep shares one position")
        return int(cuts[first]), int(cuts[last])
