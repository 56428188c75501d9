"""The options of a context, checked before anything is allocated."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvcellar.errors import OptionError
from kvcellar.models.base import ModelSpec
from kvcellar.types import CacheSpec, KVType

MAX_CELLS = 2**31 - 1
MAX_SEQUENCES = 4096
DEFAULT_CELLS = 4096

WhyNot: TypeAlias = Callable[[CacheSpec], str | None]
"""Says why a cache of that shape cannot have something; None if it can."""


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """What :meth:`Model.context` takes, under llama.cpp's names.

    Attributes:
        n_ctx: cells of the cache, shared by all sequences; None: what the model was trained for,
            at most 4096.
        n_seq_max: how many sequences there may be.
        n_ubatch: how many tokens are computed at once.
        type_k: storage type of K, a GGUF name.
        type_v: storage type of V, a GGUF name.
        flash_attn: how attention runs over f16, bf16 or f32 V. True: V is kept a row a cell, which
            suits several sequences in one pool. False: V lies across, which suits one sequence.
            None: False for one sequence with such a V and without the kernel, else True.
        kernel: whether a few tokens attend through our own kernel, which reads nothing but the
            cells of their sequences. None: if it can be; it takes f16 and llvmlite.
        defrag_threshold: the share of holes beyond which the cache is compacted unasked, a few
            runs of cells a decode; None: never. Nothing depends on it but speed.
    """

    n_ctx: int | None = None
    n_seq_max: int = 8
    n_ubatch: int = 512
    type_k: str | KVType = KVType.F16
    type_v: str | KVType = KVType.F16
    flash_attn: bool | None = None
    kernel: bool | None = None
    defrag_threshold: float | None = None

    def cache_spec(self, model: ModelSpec, why_no_kernel: WhyNot) -> CacheSpec:
        """The cache that these options ask for.

        Raises:
            OptionError: one is outside its range; the message names it.
        """
        n_ctx = min(model.n_ctx_train, DEFAULT_CELLS) if self.n_ctx is None else self.n_ctx
        check_range("n_ubatch", self.n_ubatch, 1, MAX_CELLS)
        type_v = KVType.parse(self.type_v)
        spec = CacheSpec(
            size=check_range("n_ctx", n_ctx, 1, MAX_CELLS),
            n_seq_max=check_range("n_seq_max", self.n_seq_max, 1, MAX_SEQUENCES),
            layers=model.attention_layers,
            type_k=KVType.parse(self.type_k),
            type_v=type_v,
            flash_attn=self.flash_attn is not False,
        )
        across = self.n_seq_max == 1 and not type_v.is_quantized
        if self.flash_attn is None and across and not self.use_kernel(spec, why_no_kernel):
            return replace(spec, flash_attn=False, padding=0)
        return spec

    def use_kernel(self, spec: CacheSpec, why_no_kernel: WhyNot) -> bool:
        """Whether few tokens attend through our own kernel.

        Raises:
            OptionError: it is asked for and cannot run.
        """
        if self.kernel is False:
            return False
        reason = why_no_kernel(spec)
        if reason is not None and self.kernel:
            raise OptionError(f"kernel=True: {reason}")
        return reason is None


def check_range(name: str, value: int, low: int, high: int) -> int:
    """The value as an int in ``[low, high]``.

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
