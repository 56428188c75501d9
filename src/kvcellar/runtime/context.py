"""A cache, the graphs that run over it, and the sequences that live in it.

Transactions of the cache take sequences along: after a rollback those that were closed meanwhile
are open again, and those that were made are closed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvcellar.backends.base import KVStore, OpenMemory
from kvcellar.backends.turns import Turn
from kvcellar.batch import Batch, MicroBatch
from kvcellar.cache.attention import AttentionCache
from kvcellar.cache.base import Cache, CheckpointBudget, CheckpointPolicy
from kvcellar.cache.changes import Undo
from kvcellar.cache.hybrid import HybridCache
from kvcellar.cache.recurrent import RecurrentCache
from kvcellar.cache.sliding import SlidingCache
from kvcellar.cache.transfer import put_content, state_get
from kvcellar.cache.view import CacheView
from kvcellar.errors import (
    BatchError,
    CacheFull,
    ClosedError,
    ComputeError,
    OptionError,
    SequenceIdError,
    TokenizerError,
    check_bool,
    check_choice,
    check_kind,
    check_path,
    check_range,
    not_copied,
    shown,
)
from kvcellar.runtime.llama_files import is_llama_file, read_state, write_state
from kvcellar.runtime.options import (
    MAX_CELLS,
    ContextOptions,
    LoadOptions,
    SaveOptions,
)
from kvcellar.runtime.profile import Profile
from kvcellar.runtime.saving import (
    ContextFacts,
    Ready,
    prepare,
    read_wanted,
    require_single,
    take_snapshot,
)
from kvcellar.runtime.sequence import HeldSequence, Sequence, prompt_ids
from kvcellar.snapshot.container import write_snapshot
from kvcellar.snapshot.llama.from_content import Target
from kvcellar.snapshot.llama.layout import VERSION, FileGeneration, Kind
from kvcellar.snapshot.snapshot import Json, fingerprint
from kvcellar.types import CacheSpec, Float32Array, KVType, MemorySpec

if TYPE_CHECKING:
    from kvcellar.runtime.model import Model


R = TypeVar("R")


class Context:
    """The cache of one model, its sequences and what computes them; made by :meth:`Model.context`.

    Calls from several threads take turns, those on its sequences too; :meth:`exclusive` makes
    several calls one. ``cache`` knows no threads: use it inside :meth:`exclusive`.

    Attributes:
        model: the model.
        cache: the cells, with llama.cpp's verbs (``seq_rm``, ``seq_cp``, …) and ``view()``.
        timings: how long decoding took.
        profile: where the time went, None unless :meth:`start_profile` was called.
        n_ubatch: how many tokens are computed at once.

    Raises:
        OptionError: an option outside its range.
        AllocationError: the K/V buffer cannot be allocated; nothing is left behind.
    """

    __reduce_ex__ = not_copied(
        "a Context",
        "make another with model.context(), and Context.save() and load() move what is in it",
    )

    def __init__(self, model: Model, options: ContextOptions) -> None:
        spec = options.memory_spec(model.spec, model.why_no_kernel)
        self.model = model
        self._model_spec = model.spec
        self.timings = Timings()
        self.profile: Profile | None = None
        self.n_ubatch = options.n_ubatch
        use_kernel = options.use_kernel(spec.groups, model.why_no_kernel)
        products = options.kernel is not False
        self._memory = model.open_memory(spec, kernel=use_kernel, products=products)
        self._executor = self._memory.executor
        try:
            self.cache: Cache = make_cache(spec, self._memory, options, options.n_cells(model.spec))
        except BaseException:
            self._memory.close()
            raise
        self.memory_spec = spec
        self._sequences: dict[int, HeldSequence] = {}
        self._lock = Turn()
        self._closed = False
        self.cache.watch(partial(remember_sequences, self._sequences))
        self.cache.changes.join(partial(remember_ids, self._sequences))

    @property
    def spec(self) -> CacheSpec:
        """The shape of the cache."""
        return self.cache.spec

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The open sequences, by id; also those that nobody else refers to."""
        with self._lock:
            return tuple(self._handle(self._sequences[i]) for i in sorted(self._sequences))

    def sequence(self, prompt: str | Iterable[int] | None = None) -> Sequence:
        """Make a new sequence, with a prompt computed into it if one is given.

        Raises:
            SequenceIdError: all ``n_seq_max`` ids are taken.
            BatchError, CacheFull: the prompt cannot be computed; no sequence is made.
        """
        with self._lock:
            self.check_open()
            if prompt is None:
                return self.change(self._new_sequence)
            ids = prompt_ids(self.model, prompt)
            return self.change(lambda: self._new_sequence().append(ids))

    def decode(self, batch: Batch) -> Float32Array:
        """Compute a batch: write K and V, return the logits asked for.

        Positions that the batch leaves open follow what each sequence has. If anything fails,
        Ctrl-C included, the cells placed for the batch are released.

        Returns:
            ``[n_wanted, n_vocab]``, in the order of the batch's tokens.

        Raises:
            BatchError, PositionError, SequenceIdError: the batch is wrong; the message says how.
            CacheFull: not enough free cells.
            ComputeError: the graph failed, or the logits are not finite.
        """
        if not isinstance(batch, Batch):
            raise BatchError(f"batch {shown(batch)}: make one, for example Batch.of([1, 2])")
        with self._lock:
            self.check_open()
            return self.change(partial(self._decode, batch))

    def compute(self, sequences: Iterable[Sequence]) -> list[int]:
        """Compute what is pending in several sequences in one batch, so that ``logits`` are known.

        It happens to all of them or to none.

        Returns:
            How many tokens were computed for each; 0 where the logits were known.

        Raises:
            OptionError: a sequence is empty, named twice or of another context.
            CacheFull: not enough free cells for all of them.
            ComputeError: as :meth:`decode`.
        """
        with self._lock:
            self.check_open()
            chosen = self.own(sequences)
            if len({sequence.seq_id for sequence in chosen}) < len(chosen):
                raise OptionError("sequences: one of them is named twice")
            return self.change(partial(self._compute, chosen))

    def resize(self, n_ctx: int) -> None:
        """Change the number of cells, whatever sequences are open; they stay as they are.

        A smaller cache is compacted if used cells would not fit otherwise. Old and new buffers
        exist side by side for a moment.

        Raises:
            OptionError: ``n_ctx`` outside its range.
            CacheFull: more cells are used; nothing has changed.
            AllocationError: the new buffers cannot be allocated; nothing has changed.
            CacheError: a transaction is open.
        """
        with self._lock:
            self.check_open()
            size = check_range("n_ctx", n_ctx, 1, MAX_CELLS)
            self.change(partial(self.cache.resize, size))

    def view(self, n_seq_max: int | None = None) -> CacheView:
        """Return ``cache.view`` with the tokens' texts where the model has a tokenizer."""
        with self._lock:
            view = self.cache.view(n_seq_max)
        tokenizer = self.model.tokenizer
        try:
            return view.with_texts(lambda t: tokenizer.token_bytes(t).decode("utf-8", "replace"))
        except TokenizerError:  # there is no vocabulary
            return view

    @cached_property
    def facts(self) -> ContextFacts:
        """What saving and loading need of this context, the fingerprint included."""
        model = self.model
        return ContextFacts(
            self.cache,
            self.memory_spec,
            self.fingerprint,
            model.convert_rows,
            model.spec.n_vocab,
        )

    @cached_property
    def fingerprint(self) -> Mapping[str, Json]:
        """Facts that a snapshot must share with this context; hashes the weights of a new file."""
        model = self.model
        return fingerprint(model.spec.arch, model.weights_hash, self.memory_spec)

    def save(
        self,
        path: str | Path,
        sequences: Iterable[Sequence] | None = None,
        *,
        type_k: str | KVType | None = None,
        type_v: str | KVType | None = None,
        compress: bool = False,
        checkpoints: bool = True,
    ) -> int:
        """Write sequences (None: all, by id) to a file, shared cells once; return its bytes.

        The other arguments, and errors, are those of :meth:`Sequence.save`.
        """
        with self._lock:
            self.check_open()
            path = check_path("path", path)
            chosen = self.sequences if sequences is None else self.own(sequences)
            options = SaveOptions(type_k, type_v, compress, checkpoints)
            for sequence in chosen:
                sequence.compute_pending()
            ids = [sequence.seq_id for sequence in chosen]
            texts = [sequence.saved_text() for sequence in chosen]
            snapshot = take_snapshot(self.facts, ids, texts, options)
            return write_snapshot(path, snapshot, compress=options.compress)

    def load(
        self,
        path: str | Path,
        *,
        start: int = 0,
        stop: int | None = None,
        positions: int | None = None,
        convert: bool = False,
    ) -> Sequence:
        """Load a file of one sequence into a new one; it goes on where it was saved.

        K, V, states and the next logits are the same bit for bit; later logits are with our
        attention kernel, and within rounding without (``docs/format.md``). The file may come from a
        context of another size, with other sequences, in other cells, with V transposed or not. If
        anything fails, this context is unchanged.

        Args:
            path: a file that :meth:`Sequence.save` wrote, or one of llama.cpp (all of it).
            start: the first token that is loaded.
            stop: the first one that is not; None: all.
            positions: where the first token shall stand, K being rotated; None: where it stood.
            convert: whether K and V may be stored in other types there than here.

        Raises:
            SnapshotFileError: the file is missing, damaged or no snapshot.
            SnapshotMismatch: it belongs to another model or kind of cache; names what differs.
            SequenceIdError, CacheFull: there is no room for it.
            NotSupported: a range of states or windows.
        """
        with self._lock:
            self.check_open()
            options = LoadOptions(start, stop, positions, convert)
            return self._load(path, options, single=True)[0]

    def load_all(self, path: str | Path, *, convert: bool = False) -> tuple[Sequence, ...]:
        """Load all sequences of a file into new ones, or none; see :meth:`load`."""
        with self._lock:
            self.check_open()
            return tuple(self._load(path, LoadOptions(convert=convert), single=False))

    def put(self, ready: Ready, sequences: Iterable[Sequence]) -> None:
        """Add content that was checked behind what sequences have, to all or none of them.

        Raises:
            CacheError: there is no room, or it cannot be put there; see ``state_set``.
        """
        chosen = tuple(sequences)
        with self._lock:
            for sequence in chosen:
                sequence.compute_pending()
            self.change(partial(self._put, ready, chosen))

    def exclusive(self) -> AbstractContextManager[object]:
        """Hold off other threads for the length of a ``with`` block, to make several calls one."""
        return self._lock

    def start_profile(self) -> Profile:
        """Record from now on where the time goes, which makes decoding slower.

        Raises:
            NotSupported: the backend has no profile.
        """
        with self._lock:
            self.check_open()
            self.profile = Profile.of(self._executor)
            return self.profile

    def change(self, step: Callable[[], R]) -> R:
        """Do something to the cache and to sequences as a whole or not at all.

        If there is no room for it, what unreachable sequences hold is freed, and it is tried again.
        """
        changes = self.cache.changes
        if changes.is_open:
            return step()
        try:
            return changes.run(step)
        except CacheFull:
            if not self.reclaim(thoroughly=True):
                raise
        return changes.run(step)

    def reclaim(self, *, thoroughly: bool = False) -> bool:
        """Free the ids and cells of sequences that nobody refers to; whether there were any.

        Args:
            thoroughly: also look for those that only refer to each other.
        """
        gone = self._unreachable()
        if not gone and check_bool("thoroughly", thoroughly) and gc.collect():
            gone = self._unreachable()
        if gone:
            self.cache.changes.run(self._free, gone)
        return bool(gone)

    def own(self, sequences: Iterable[Sequence]) -> tuple[Sequence, ...]:
        """Return the sequences that an argument lists.

        Raises:
            OptionError: something else, or one of another context.
        """
        listed = tuple(check_kind("sequences", sequences, Iterable, made="a list of sequences"))
        for sequence in listed:
            if check_kind("sequences", sequence, Sequence).context is not self:
                raise OptionError("sequences: one of them belongs to another context")
        return listed

    def release(self, held: HeldSequence) -> None:
        """Free a sequence's cells and its id; what :meth:`Sequence.close` calls."""
        self._free([held])

    @property
    def is_closed(self) -> bool:
        """Whether the context was closed."""
        return self._closed

    def close(self) -> None:
        """Free graphs, K and V; open sequences cannot be used afterwards. Closing twice is fine."""
        with self._lock:
            self._closed = True
            for held in self._sequences.values():
                held.is_closed = True
            self._sequences.clear()
            self._memory.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        used = f"{self.cache.used} of {self.spec.size} cells used"
        return f"<Context of {self.model.path.name}: {'closed' if self._closed else used}>"

    def check_open(self) -> None:
        """Raise ClosedError if the context was closed."""
        if self._closed:
            raise ClosedError("the context is closed")

    def _load(self, path: str | Path, options: LoadOptions, *, single: bool) -> list[Sequence]:
        """Load a file into new sequences; if anything fails, there are none."""
        path = check_path("path", path)
        if is_llama_file(path):
            if options != LoadOptions(convert=options.convert):
                raise OptionError(f"{path} is a file of llama.cpp: load all of it, then edit it")
            model = self.model.spec
            ready = read_state(path, self.memory_spec, model.arch, model.n_vocab)
            if single:
                require_single(ready.content.n_seqs)
        else:
            snapshot = read_wanted(lambda: self.facts, path, options, single=single)
            ready = prepare(self.facts, snapshot, options)
        return self.change(partial(self._put_into_new, ready))

    def _put_into_new(self, ready: Ready) -> list[Sequence]:
        made = [self._new_sequence() for _ in range(ready.content.n_seqs)]
        self._put(ready, made)
        return made

    def _put(self, ready: Ready, chosen: Iterable[Sequence]) -> None:
        chosen = tuple(chosen)
        before = [len(sequence) for sequence in chosen]
        for sequence in chosen:
            self.cache.changes.remember(sequence.held.remember())
        ids = [sequence.seq_id for sequence in chosen]
        put_content(self.cache, ready.content, ids, shift=ready.shift)
        for sequence, text, n_before in zip(chosen, ready.texts, before, strict=True):
            sequence.adopt(text, n_before)
            if ready.n_dropped:
                sequence.trim(ready.n_dropped)

    def _new_sequence(self) -> Sequence:
        n_seq_max = self.spec.n_seq_max
        if len(self._sequences) == n_seq_max:
            self.reclaim(thoroughly=True)
        seq_id = next((i for i in range(n_seq_max) if i not in self._sequences), None)
        if seq_id is None:
            raise SequenceIdError(
                f"all {n_seq_max} sequences are taken: close one or use a larger n_seq_max"
            )
        held = self._sequences[seq_id] = HeldSequence(seq_id)
        return self._handle(held)

    def _handle(self, held: HeldSequence) -> Sequence:
        known = None if held.handle is None else held.handle()
        return Sequence(self, held) if known is None else known

    def _unreachable(self) -> list[HeldSequence]:
        return [held for held in self._sequences.values() if not held.is_reachable]

    def _free(self, sequences: Iterable[HeldSequence]) -> None:
        for held in sequences:
            self.cache.changes.remember(held.remember())
            self.cache.seq_rm(held.seq_id, -1, -1)
            del self._sequences[held.seq_id]
            held.is_closed = True

    def _compute(self, sequences: Iterable[Sequence]) -> list[int]:
        batch, computed, counts = Batch(), list[Sequence](), list[int]()
        for sequence in sequences:
            self.cache.changes.remember(sequence.held.remember())
            pending = sequence.to_compute()
            counts.append(len(pending))
            if pending:
                batch.extend(sequence.batch(pending))
                computed.append(sequence)
        if computed:
            logits = self._decode(batch)
            for sequence, row in zip(computed, logits, strict=True):
                # A copy, as one row would keep those of all sequences.
                sequence.computed(row.copy() if len(logits) > 1 else row)
        return counts

    def _decode(self, batch: Batch) -> Float32Array:
        start = perf_counter()
        pieces: list[Float32Array] = []
        micros: list[MicroBatch] = []
        in_graphs, compiling = 0.0, self._executor.compile_seconds
        spec = self._model_spec
        with self.cache.place(
            batch, self.n_ubatch, n_vocab=spec.n_vocab, n_embd=spec.n_embd
        ) as placement:
            for plan in placement.plans(lists=self._executor.takes_lists):
                before = perf_counter()
                logits = self._executor.run(plan)
                in_graphs += perf_counter() - before
                if len(logits):
                    pieces.append(_checked_copy(logits))
                    micros.append(plan.micro)
        seconds = perf_counter() - start
        compiling = self._executor.compile_seconds - compiling
        self.timings.add(batch.n_tokens, batch.n_seqs, seconds, in_graphs, compiling)
        if self.profile is not None:
            self.profile.add(batch.n_tokens, batch.n_seqs, start, seconds, in_graphs)
        if len(pieces) == 1 and len(pieces[0]) == 1:
            return pieces[0]
        return _in_order(pieces, micros) if pieces else np.empty((0, spec.n_vocab), np.float32)


def save_llama_file(
    source: Context | Sequence,
    path: str | Path,
    generation: FileGeneration = "2026-10",
    *,
    v_trans: bool = False,
) -> None:
    """Save a sequence, or all sequences of a context, as llama.cpp does.

    A session lists the tokens of its first sequence only, so its readers know no others. Pending
    tokens are computed before.

    Args:
        source: a sequence for a sequence file, a context for a session file.
        path: where to; an older file there stays until the new one is complete.
        generation: whose layout; "2026-10" is what llama.cpp of that month reads.
        v_trans: whether V is transposed. llama.cpp reads only files like its own contexts: V is
            transposed without flash attention, otherwise not.

    Raises:
        NotSupported: llama.cpp had no such files.
        OptionError: there is nothing to save, or v_trans does not suit the type of V.
        SnapshotFileError: the file cannot be written.
        ClosedError: the context is closed.
    """
    check_kind("source", source, Sequence, Context)
    path, v_trans = check_path("path", path), check_bool("v_trans", v_trans)
    check_choice("generation", generation, tuple(VERSION))
    kind: Kind = "sequence" if isinstance(source, Sequence) else "session"
    context = source.context if isinstance(source, Sequence) else source
    with context.exclusive():
        context.check_open()
        texts = (source,) if isinstance(source, Sequence) else source.sequences
        filled = [text for text in texts if len(text)]
        if not filled:
            raise OptionError("there is nothing to save: no sequence has tokens")
        for text in filled:
            text.compute_pending()
        ids = tuple(text.seq_id for text in filled)
        content = state_get(context.cache, ids, checkpoints=False)
        target, arch = Target(kind, generation, ids, v_trans), context.model.spec.arch
        write_state(path, content, context.memory_spec, arch, filled[0].tokens, target)


def remember_ids(sequences: dict[int, HeldSequence]) -> Undo:
    """Return what makes a context's sequences those that it has now."""
    kept = dict(sequences)

    def undo() -> None:
        sequences.clear()
        sequences.update(kept)

    return undo


def remember_sequences(sequences: dict[int, HeldSequence]) -> Undo:
    """Return what puts a context's sequences back as they are now."""
    put_back = remember_ids(sequences)
    kept = list(sequences.values())
    undos = [held.remember() for held in kept]

    def undo() -> None:
        for held in sequences.values():
            held.is_closed = held not in kept or held.is_closed
        put_back()
        for restore in undos:
            restore()

    return undo


def make_cache(spec: MemorySpec, memory: OpenMemory, options: ContextOptions, n_ctx: int) -> Cache:
    """Make the cache over the stores of a memory of that shape, for ``n_ctx`` tokens.

    A part that is the only one is used as it is, so models of one kind pay for no other.
    """
    groups: list[AttentionCache] = []
    for group, store in zip(spec.groups, memory.groups, strict=True):
        groups.append(_make_group(group, store, n_ctx, options))
    if memory.states is None:
        return groups[0] if len(groups) == 1 else HybridCache(groups)
    policy = CheckpointPolicy(CheckpointBudget(*options.checkpoint_budget))
    states = RecurrentCache(memory.states, policy, size=n_ctx)
    return HybridCache(groups, states) if groups else states


def _make_group(
    spec: CacheSpec, store: KVStore, n_ctx: int, options: ContextOptions
) -> AttentionCache:
    threshold = options.defrag_threshold
    if spec.size == n_ctx:  # every token fits, so nothing is evicted
        return AttentionCache(spec, store, defrag_threshold=threshold)
    budget = CheckpointBudget(*options.checkpoint_budget)
    return SlidingCache(spec, store, defrag_threshold=threshold, checkpoints=budget)


@dataclass(slots=True)
class Timings:
    """Counts since the context was made or :meth:`reset`.

    A decode of one token a sequence counts as "decode", any larger one as "prefill".
    ``graph_seconds`` is the part of both that was spent computing graphs; the rest is Python's.
    ``compile_seconds`` is in none of them: kernels are compiled once a process, at first use.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    n_decodes: int = 0
    graph_seconds: float = 0.0
    compile_seconds: float = 0.0

    def __reduce__(self) -> tuple[type[Timings], tuple[object, ...]]:
        return Timings, astuple(self)

    def add(
        self,
        n_tokens: int,
        n_seqs: int,
        seconds: float,
        graph_seconds: float,
        compile_seconds: float = 0.0,
    ) -> None:
        """Count one call of decode; both times are given with the compilation in them."""
        self.n_decodes += 1
        self.graph_seconds += graph_seconds - compile_seconds
        self.compile_seconds += compile_seconds
        seconds -= compile_seconds
        if n_tokens > n_seqs:
            self.prefill_tokens += n_tokens
            self.prefill_seconds += seconds
        else:
            self.decode_tokens += n_tokens
            self.decode_seconds += seconds

    def reset(self) -> None:
        """Count from zero again."""
        self.__init__()  # type: ignore[misc]

    @property
    def prefill_rate(self) -> float:
        """Prefilled tokens a second; 0 before the first."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_tokens else 0.0

    @property
    def decode_rate(self) -> float:
        """Decoded tokens a second, 0 before the first."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else 0.0

    @property
    def overhead_seconds(self) -> float:
        """Seconds outside the graphs per call of decode."""
        total = self.prefill_seconds + self.decode_seconds - self.graph_seconds
        return total / self.n_decodes if self.n_decodes else 0.0


def _in_order(pieces: list[Float32Array], micros: list[MicroBatch]) -> Float32Array:
    """Return logits in the order of the batch; with states a microbatch has another."""
    logits = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    rows = np.concatenate([micro.rows[micro.outputs] for micro in micros])
    return logits if (rows[1:] > rows[:-1]).all() else logits[rows.argsort()]


def _checked_copy(logits: Float32Array) -> Float32Array:
    """Return a copy that outlives the graph's buffer; refuse NaN and infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = logits.sum()  # finite only if every term is
    if not np.isfinite(total) and not np.isfinite(logits).all():
        raise ComputeError("the logits are not finite: the weights or K/V rows are damaged")
    copy: Float32Array = logits.copy()
    return copy
