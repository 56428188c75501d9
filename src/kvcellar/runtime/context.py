"""A cache, the graphs that run over it, and the sequences that live in it."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from kvcellar.backends.ggml.graph import GgmlExecutor
from kvcellar.backends.ggml.kernel.attention import AttentionKernel
from kvcellar.backends.ggml.store import GgmlStore
from kvcellar.batch import Batch
from kvcellar.cache.attention import AttentionCache
from kvcellar.errors import ClosedError, ComputeError, SequenceIdError
from kvcellar.runtime.options import ContextOptions
from kvcellar.runtime.sequence import Sequence
from kvcellar.runtime.timings import Timings
from kvcellar.types import CacheSpec, Float32Array

if TYPE_CHECKING:
    from kvcellar.runtime.model import Model


class Context:
    """Where sequences of one model live and are computed; made by :meth:`Model.context`.

    Calls from several threads take turns.

    Attributes:
        model: the model.
        cache: the cells, with llama.cpp's verbs (``seq_rm``, ``seq_cp``, …) and ``view()``.
        timings: how long decoding took.
        n_ubatch: how many tokens are computed at once.

    Raises:
        OptionError: an option outside its range.
        AllocationError: the K/V buffer cannot be had; nothing is left behind.
    """

    def __init__(self, model: Model, options: ContextOptions) -> None:
        spec = options.cache_spec(model.spec)
        self.model = model
        self.timings = Timings()
        self.n_ubatch = options.n_ubatch
        self._store = GgmlStore(spec, model.backend)
        self.cache = AttentionCache(spec, self._store)
        kernel = (
            AttentionKernel(spec, model.backend.n_threads) if options.use_kernel(spec) else None
        )
        forward = model.architecture.forward
        self._executor = GgmlExecutor(model.backend, self._store, forward, kernel)
        self._free_ids = list(range(spec.n_seq_max))
        self._sequences: dict[int, Sequence] = {}
        self._lock = threading.RLock()
        self._closed = False

    @property
    def spec(self) -> CacheSpec:
        """The shape of the cache."""
        return self.cache.spec

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The open sequences, by id."""
        return tuple(self._sequences[i] for i in sorted(self._sequences))

    def sequence(self, prompt: str | Iterable[int] | None = None) -> Sequence:
        """A new sequence, with a prompt computed into it if one is given.

        Raises:
            SequenceIdError: all ``n_seq_max`` ids are taken.
            BatchError, CacheFull: the prompt cannot be computed; no sequence is made.
        """
        with self._lock:
            self._check_open()
            if not self._free_ids:
                raise SequenceIdError(
                    f"all {self.spec.n_seq_max} sequences are taken: "
                    "close one or use a larger n_seq_max"
                )
            sequence = Sequence(self, heapq.heappop(self._free_ids))
            self._sequences[sequence.seq_id] = sequence
        if prompt is not None:
            try:
                sequence.append(prompt)
            except BaseException:
                sequence.close()
                raise
        return sequence

    def decode(self, batch: Batch) -> Float32Array:
        """Compute a batch: K and V are written, the logits asked for are returned.

        Positions that the batch leaves open follow what each sequence holds. If anything fails,
        Ctrl-C included, the cells placed for the batch are released.

        Returns:
            ``[n_wanted, n_vocab]``, in the order of the batch's tokens.

        Raises:
            BatchError, PositionError, SequenceIdError: the batch is wrong; the message says how.
            CacheFull: not enough free cells.
            ComputeError: the graph failed, or the logits are not finite.
        """
        with self._lock:
            self._check_open()
            return self._decode(batch)

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's cells and its id; what :meth:`Sequence.close` calls."""
        with self._lock:
            if self._sequences.pop(sequence.seq_id, None) is None or self._closed:
                return
            self.cache.seq_rm(sequence.seq_id, -1, -1)
            heapq.heappush(self._free_ids, sequence.seq_id)

    def close(self) -> None:
        """Free graphs, K and V; open sequences are of no use afterwards. Twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for sequence in self.sequences:
                sequence.close()
            self._executor.close()
            self._store.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        used = f"{self.cache.used} of {self.spec.size} cells used"
        return f"<Context of {self.model.path.name}: {'closed' if self._closed else used}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the context is closed")

    def _decode(self, batch: Batch) -> Float32Array:
        start = perf_counter()
        pieces: list[Float32Array] = []
        in_graphs = 0.0
        spec = self.model.spec
        with self.cache.place(
            batch, self.n_ubatch, n_vocab=spec.n_vocab, n_embd=spec.n_embd
        ) as placement:
            for plan in placement.plans(lists_up_to=self._executor.lists_up_to):
                before = perf_counter()
                logits = self._executor.run(plan)
                in_graphs += perf_counter() - before
                if len(logits):
                    pieces.append(_checked_copy(logits))
        seconds = perf_counter() - start
        self.timings.add(batch.n_tokens, batch.n_seqs, seconds, in_graphs)
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty((0, spec.n_vocab), np.float32)


def _checked_copy(logits: Float32Array) -> Float32Array:
    """A copy that outlives the graph's buffer; NaN or infinity never leaves."""
    if not np.isfinite(logits).all():
        raise ComputeError("the logits are not finite: the weights or K/V rows are damaged")
    copy: Float32Array = logits.copy()
    return copy
