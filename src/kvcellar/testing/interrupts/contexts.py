"""A context of a tiny model as a stage: what is asked of it after every interrupt.

There is a text ``base``, a text ``other`` that shares nothing, and a ``subject`` that shares the
cells of ``base`` and has a tail of its own: operations are done on the subject. The open sequences
with their tokens and positions, and from where on these are inexact, are the context's *picture*.
`ContextStage.learn` does the operation uninterrupted and step by step, each time in a new context,
and keeps each picture with the logits that every sequence has in it, and those behind one more
token. After an interrupt:

1. No thread has the context's lock, ``cache.check()`` holds, no transaction is open, and no batch
   is being decoded.
2. The picture is one of those kept.
3. Every sequence has the logits kept with it, and goes on with those kept.
4. Sequences can be closed, twice; cells and ids come back, all of them.
5. A new sequence computes what it does in a new context, and the cache can be resized.

Logits are the same within what another order of sums makes of them; of exact texts they are
compared once with a context that never held anything else.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvcellar.batch import Batch
from kvcellar.errors import CacheError, CacheFull, ClosedError, KVCellarError, SequenceIdError
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.runtime.sequence import Sequence
from kvcellar.testing.golden import nmse
from kvcellar.testing.interrupts.trials import Fault, Happened, NotApplicable, Stage
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.text.tokenizer import Tokenizer
from kvcellar.types import Float32Array

N_SEQ_MAX = 6
PROBE = 7
NEW = 3
"""Tokens that sequences go on with, and that new ones begin with."""

WAIT = 5.0
"""Seconds that another thread waits for a lock."""

EVERY = 16
"""Trials after which another thread asks for the lock."""

Logits: TypeAlias = "Float32Array | str"
"""Logits, or the name of the error that asking for them raises."""


class Text(NamedTuple):
    """A sequence as a picture shows it."""

    seq_id: int
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    inexact_from: int | None

    def __str__(self) -> str:
        at = "" if self.positions == tuple(range(len(self.tokens))) else f" at {self.positions}"
        rough = "" if self.inexact_from is None else f" inexact from {self.inexact_from}"
        return f"{self.seq_id}: {list(self.tokens)}{at}{rough}"


class Picture(NamedTuple):
    """What can be seen of a context."""

    size: int
    texts: tuple[Text, ...]

    @classmethod
    def of(cls, context: Context) -> Picture:
        """Look at a context."""
        texts = [
            Text(s.seq_id, tuple(s.tokens), tuple(s.positions.tolist()), s.inexact_from)
            for s in context.sequences
        ]
        return cls(context.spec.size, tuple(texts))

    def __sub__(self, other: Picture) -> str:
        """What is not in the other one, as text."""
        size = [f"{self.size} cells"] if self.size != other.size else []
        return "; ".join([*size, *(str(t) for t in self.texts if t not in other.texts)]) or "less"


@dataclass(slots=True)
class Known:
    """What goes with a picture: the logits of each sequence, and those behind one more token."""

    happened: Happened
    logits: dict[int, Logits] = field(default_factory=dict)
    further: dict[int, Logits] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scene:
    """A model and how its context is made.

    Attributes:
        name: what the command line calls it.
        file: the GGUF file's name; "": a model that is made here.
        backend: the backend's name.
        options: those of the context.
        tolerance: how far logits may differ, as mean squared error over mean square.
    """

    name: str
    file: str
    backend: str
    options: Mapping[str, Any]
    tolerance: float = 1e-10


@dataclass(frozen=True, slots=True)
class Operation:
    """What is interrupted.

    Attributes:
        name: what the command line calls it.
        act: the operation.
        steps: does the same step by step, for one that may stop in between.
        n_steps: how many.
        before: brings the stage to where it begins, when there is a subject.
        after: proves what only this one has to leave in order; raises Fault.
        closes: whether it closes the context.
    """

    name: str
    act: Callable[[ContextStage], object]
    steps: Callable[[ContextStage], Iterator[object]] | None = None
    n_steps: int = 1
    before: Callable[[ContextStage], object] | None = None
    after: Callable[[ContextStage], object] | None = None
    closes: bool = False


def letters(n: int) -> Tokenizer:
    """A vocabulary of single bytes: the tiny models have none."""
    codes = [i if 0x20 < i < 0x7F else 0x100 + i for i in range(n)]
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [chr(code) for code in codes],
            "tokenizer.ggml.token_type": np.ones(n, np.int32),
            "tokenizer.ggml.merges": [],
        }
    )


def text_of(seed: int, n: int) -> list[int]:
    """Tokens that nobody chose."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, 40, n).tolist()
    return tokens


class Opened:
    """A model that several stages share, and what a context says that never held anything else.

    Args:
        scene: how it is opened.
        models: the folder of its file.

    Attributes:
        scene: how it was opened.
        model: the model.
    """

    def __init__(self, scene: Scene, models: Path) -> None:
        self.scene = scene
        self._folder = tempfile.TemporaryDirectory(prefix="kvcellar-interrupts-")
        path = Path(self._folder.name) / "model.gguf"
        if scene.file:  # a hash is kept beside it, and reference data are not to change
            path.symlink_to((models / scene.file).resolve())
        else:
            path.write_bytes(TinyLlama().to_bytes())
        self.model = Model.from_gguf(path, n_threads=1, backend=scene.backend)
        self.model.tokenizer = letters(self.model.spec.n_vocab)
        self._fresh: dict[tuple[int, ...], Logits] = {}

    def fresh(self, tokens: tuple[int, ...]) -> Logits:
        """Return the logits after a text."""
        if tokens not in self._fresh:
            with self.model.context(**{**self.scene.options, "n_seq_max": 1}) as context:
                self._fresh[tokens] = logits_of(context.sequence(tokens))
        return self._fresh[tokens]


class ContextStage(Stage):
    """A context on which an operation is interrupted; see the module.

    Attributes:
        model: the model.
        context: the context, a new one after :meth:`renew`.
        base: a text.
        other: another one.
        subject: shares the cells of ``base``.
        folder: where files may be written; empty whenever the operation begins.
        kept: what the operation keeps from one time to the next.
    """

    context: Context
    base: Sequence
    other: Sequence
    subject: Sequence
    _resting: Picture

    def __init__(self, opened: Opened, operation: Operation) -> None:
        self._opened = opened
        self._scene = opened.scene
        self._operation = operation
        self.model = opened.model
        self.folder = Path(tempfile.mkdtemp(prefix="kvcellar-interrupts-"))
        self.kept: dict[str, Any] = {}
        self._known: dict[Picture, Known] = {}
        self._new: Logits = ""
        self._made: Context | None = None
        self._used = 0
        self._lock = LockWatch()

    # -- learning

    def learn(self) -> None:
        """Do the operation step by step, and keep what it leads to."""
        self._new = self._opened.fresh((NEW,))
        n_steps = 0 if self._operation.closes else self._operation.n_steps
        for i in range(n_steps + 1):
            self.prepare()
            steps = self._steps()
            for _ in range(i):
                self._step(steps)
            self._note("before" if i == 0 else "after" if i == n_steps else "between")
            self.renew(broken=True)  # its texts are gone

    def _steps(self) -> Iterator[object]:
        if self._operation.steps is not None:
            yield from self._operation.steps(self)
        else:
            yield self._operation.act(self)

    def _step(self, steps: Iterator[object]) -> None:
        try:
            next(steps)
        except CacheError as error:
            raise NotApplicable(str(error)) from error

    def _note(self, happened: Happened) -> None:
        """Keep the picture and what goes with it, which uses the context up."""
        picture, known = Picture.of(self.context), Known(happened)
        for sequence in self.context.sequences[::-1]:
            seq_id = sequence.seq_id
            known.logits[seq_id] = logits_of(sequence)
            known.further[seq_id] = further(sequence)
            sequence.close()
        for text in picture.texts:
            self._compare_with_fresh(text, known.logits[text.seq_id])
        self._known.setdefault(picture, known)

    def _compare_with_fresh(self, text: Text, logits: Logits) -> None:
        is_plain = text.positions == tuple(range(len(text.tokens)))
        if is_plain and text.inexact_from is None and not isinstance(logits, str):
            self.same(
                "wrong without an interrupt", str(text), logits, self._opened.fresh(text.tokens)
            )

    # -- a trial

    def prepare(self) -> None:
        """Make the subject."""
        if self._made is None:
            self._make()
        self.subject = self.base.fork()
        self.subject.append(text_of(3, 5))
        if self._operation.before is not None:
            self._operation.before(self)

    def act(self) -> object:
        """Do the operation."""
        return self._operation.act(self)

    def verify(self) -> Happened:
        """See the module."""
        if self._operation.closes and self._is_closed():
            self._check_closed()
            return "after"
        self._check_idle()
        known = self._find(Picture.of(self.context))
        try:
            if self._operation.after is not None:
                self._operation.after(self)
            self._check_texts(known)
            self._close_texts()
            self._check_rest(known)
        except Fault:
            raise
        except KVCellarError as error:
            raise Fault("unusable", f"{type(error).__name__}: {error}") from error
        return known.happened

    def renew(self, *, broken: bool = False) -> None:
        """Close the context; the next subject is made in a new one."""
        if (context := self._made) is None:
            return
        self._made = None
        if broken:
            with suppress(Exception):
                context.close()
        else:
            self._close_context(context)

    def _close_context(self, context: Context) -> None:
        """Close everything that is open, and see that all of it comes back."""
        for sequence in context.sequences:
            sequence.close()
            sequence.close()
        cache = context.cache
        for size in (cache.spec.size, cache.spec.size + 8):
            if size != cache.spec.size:
                context.resize(size)
            if (cache.used, cache.n_free()) != (0, size):
                raise Fault("cells lost", f"{cache.used} used, {cache.n_free()} free of {size}")
            if (n_ids := count_ids(context)) != N_SEQ_MAX:
                raise Fault("ids lost", f"{n_ids} of {N_SEQ_MAX} sequences can be made")
        cache.check()
        self.same(
            "wrong logits", "in an empty cache", logits_of(context.sequence([NEW])), self._new
        )
        context.close()
        context.close()

    def close(self) -> None:
        """Close the context and remove the folder; others may use the model."""
        self.renew(broken=True)
        self._lock.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- steps of these

    def _make(self) -> None:
        self.context = self._made = self.model.context(**self._scene.options)
        self.base = self.context.sequence(text_of(1, 16))
        self.other = self.context.sequence(text_of(2, 8))
        self._resting = Picture.of(self.context)
        self._used = self.context.cache.used

    def _is_closed(self) -> bool:
        try:
            self.context.check_open()
        except ClosedError:
            return True
        return False

    def _check_closed(self) -> None:
        """A context that was closed stays so, with its sequences; another one is not concerned."""
        self._made = None
        for _ in range(2):
            self.context.close()
            for sequence in (self.base, self.other, self.subject):
                sequence.close()
        made = (self.base, self.other, self.subject)
        left = {s.seq_id for s in (*made, *self.context.sequences) if not s.is_closed}
        left.update(s.seq_id for s in self.context.sequences)
        if left:
            raise Fault("close", f"a closed context still has sequences {sorted(left)}")
        with self.model.context(**self._scene.options) as context:
            what = "in another context"
            self.same("wrong logits", what, logits_of(context.sequence([NEW])), self._new)

    def _check_idle(self) -> None:
        context = self.context
        if not self._lock.is_free(context):
            raise Fault("lock held", "no other thread can use the context")
        try:
            context.cache.check()
        except CacheError as error:
            raise Fault("check()", error) from error
        if context.cache.in_transaction:
            raise Fault("transaction open", "a transaction stays open")
        if context.cache.is_decoding:
            raise Fault("decoding", "a batch that nobody decodes stays placed")

    def _find(self, picture: Picture) -> Known:
        if (known := self._known.get(picture)) is None:
            nearest = max(self._known, key=lambda one: len(set(one.texts) & set(picture.texts)))
            raise Fault("half done", f"is {picture - nearest} instead of {nearest - picture}")
        return known

    def _check_texts(self, known: Known) -> None:
        """The subject and what the operation made go on as they should."""
        for sequence in self.context.sequences[::-1]:
            if sequence not in (self.base, self.other):
                seq_id = sequence.seq_id
                what = f"sequence {seq_id}"
                self.same("wrong logits", what, logits_of(sequence), known.logits[seq_id])
                self.same(
                    "wrong logits",
                    f"{what}, one token further",
                    further(sequence),
                    known.further[seq_id],
                )

    def _close_texts(self) -> None:
        """Close them, twice, and see that cells and ids come back."""
        context = self.context
        rest = (self.base, self.other)
        for sequence in (*context.sequences, self.subject):
            if sequence not in rest:
                sequence.close()
                sequence.close()
                if not sequence.is_closed or sequence in context.sequences:
                    raise Fault("close", f"sequence {sequence.seq_id} was closed and is open")
        n_ids = count_ids(context)
        if n_ids != N_SEQ_MAX - len(context.sequences):
            raise Fault("ids lost", f"{len(context.sequences)} open, {n_ids} can be made")

    def _check_rest(self, known: Known) -> None:
        """What was not the operation's is as it was, and there is room for more."""
        context = self.context
        if Picture.of(context) != self._resting:
            self.renew()
            return
        if context.cache.used != self._used:
            raise Fault("cells lost", f"{context.cache.used} used, {self._used} were before")
        self._check_bystanders(known)

    def _check_bystanders(self, known: Known) -> None:
        """They and a new sequence compute what they should, all in one batch."""
        rest = (self.base, self.other)
        texts = [sequence.fork() for sequence in rest]
        texts.append(self.context.sequence())
        batch = Batch()
        for text, token in zip(texts, (PROBE, PROBE, NEW), strict=True):
            batch.add(token, seq_ids=text.seq_id, logits=True)
        logits = self.context.decode(batch)
        for sequence, got in zip(rest, logits, strict=False):
            what = f"sequence {sequence.seq_id}, a bystander"
            self.same("wrong logits", what, got, known.further[sequence.seq_id])
        self.same("wrong logits", "a new sequence", logits[-1], self._new)
        for text in texts:
            text.close()

    def same(self, kind: str, what: str, got: Logits, wanted: Logits) -> None:
        """Raise Fault unless logits are the same, or the same error stands for both."""
        if isinstance(got, str) or isinstance(wanted, str):
            if isinstance(got, str) and isinstance(wanted, str) and got == wanted:
                return
            got, wanted = (x if isinstance(x, str) else "logits" for x in (got, wanted))
            raise Fault("unusable", f"{what}: {got} instead of {wanted}")
        error = 0.0 if np.array_equal(got, wanted) else nmse(got, wanted)
        if not error < self._scene.tolerance:
            raise Fault(kind, f"{what}: nmse {error:.1e}")


def logits_of(sequence: Sequence) -> Logits:
    """The logits of the next token, or why there are none."""
    try:
        return sequence.logits.copy() if len(sequence) else "empty"
    except CacheFull:
        return "CacheFull"


def further(sequence: Sequence) -> Logits:
    """Those behind one more token."""
    try:
        logits: Float32Array = sequence.append([PROBE]).logits.copy()
    except CacheFull:
        return "CacheFull"
    return logits


def count_ids(context: Context) -> int:
    """How many more sequences there can be."""
    made: list[Sequence] = []
    with suppress(SequenceIdError):
        while True:
            made.append(context.sequence())
    for sequence in made:
        sequence.close()
    return len(made)


class LockWatch:
    """Tells whether another thread could have a context's lock.

    One asks for it, which takes long; mostly Python's lock is asked whose it is.
    """

    def __init__(self) -> None:
        self._asked, self._told = threading.Semaphore(0), threading.Semaphore(0)
        self._context: Context | None = None
        self._n = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def is_free(self, context: Context) -> bool:
        """Whether another thread can have its lock."""
        self._n += 1
        is_ours: Callable[[], bool] | None = getattr(context.exclusive(), "_is_owned", None)
        if is_ours is not None and (is_ours() or self._n % EVERY):
            return not is_ours()
        self._context = context
        self._asked.release()
        return self._told.acquire(timeout=WAIT)

    def close(self) -> None:
        """End the thread."""
        self._context = None
        self._asked.release()

    def _watch(self) -> None:
        while True:
            self._asked.acquire()
            if (context := self._context) is None:
                return
            with context.exclusive():
                self._told.release()
