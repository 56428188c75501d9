"""A grammar that follows one text: which tokens may come next, computed beside the decode.

After :meth:`GrammarMatcher.accept` a worker thread computes the next mask, while the model
computes the next logits; llguidance releases the interpreter's lock meanwhile. Invariants:

1. A matcher is what its accepted tokens say. llguidance's state is taken away before it is
   changed and put back afterwards; one that is missing, after an exception in between, is made
   again from the tokens.
2. ``accept`` of a token that ``allowed()`` does not show changes nothing.
3. No mask is being computed while the process forks.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from kvcellar.errors import GrammarError, check_range, not_copied
from kvcellar.text.grammar_vocab import GrammarVocab
from kvcellar.types import BoolArray, ByteArray

_N_WORKERS = 2


class Compiled(NamedTuple):
    """A grammar compiled for a vocabulary.

    Attributes:
        vocab: the vocabulary.
        start: an ``LLMatcher`` that has seen nothing; it is only copied.
        usable: tokens that text or the grammar's own names can mean, a bit each.
        name: of the grammar, for messages.
    """

    vocab: GrammarVocab
    start: Any
    usable: ByteArray
    name: str


class _Step(NamedTuple):
    """What may follow a text, and whether it may end here or has to."""

    allowed: BoolArray
    is_accepting: bool
    is_stopped: bool


class _Live(NamedTuple):
    """An ``LLMatcher`` that has consumed the tokens, and what may follow them.

    A worker may be using the state until the step is there.
    """

    state: Any
    step: Future[_Step]


class GrammarMatcher:
    """A :class:`~kvcellar.text.constraint.Constraint`: the text so far, seen by a grammar.

    Made by :meth:`~kvcellar.text.grammar.Grammar.matcher`. Threads may share it.
    """

    def __init__(
        self,
        compiled: Compiled,
        tokens: Sequence[int] = (),
        stops: Sequence[int] = (),
        live: _Live | None = None,
    ) -> None:
        self._compiled = compiled
        self._lock = threading.Lock()
        self._text = (list(tokens), list(stops))  # llguidance does not see the second
        self._live = live  # without it, it is made again from the tokens
        if live is None:
            self._start(self._restored())

    def __repr__(self) -> str:
        return f"GrammarMatcher({self._compiled.name}, {len(self.tokens)} tokens)"

    __reduce_ex__ = not_copied("a GrammarMatcher", "use its copy(), or send the Grammar")

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that were accepted."""
        tokens, stops = self._text
        return (*tokens, *stops)

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here.

        Raises:
            GrammarError: as :meth:`allowed`.
        """
        with self._lock:
            return bool(self._text[1]) or self._current().is_accepting

    @property
    def is_finished(self) -> bool:
        """Whether nothing but a stop token can follow.

        Raises:
            GrammarError: as :meth:`allowed`.
        """
        with self._lock:
            return bool(self._text[1]) or self._current().is_stopped

    def allowed(self) -> BoolArray:
        """Return which tokens may come next: ``[n_vocab]``, read-only.

        All stop tokens are allowed where the text may end, and only they behind one. Where it has
        to end and the vocabulary has no stop token, nothing is: see :attr:`is_finished`.

        Raises:
            GrammarError: the grammar is too ambiguous at this place: the mask would cost more than
                its budget.
        """
        with self._lock:
            if self._text[1]:
                return _only(self._compiled, self._compiled.vocab.stop_ids)
            return self._current().allowed

    def accept(self, token: int) -> None:
        """Append a token to the text, and begin to compute what may follow it.

        Raises:
            GrammarError: it is not allowed here, or as :meth:`allowed`; nothing has changed.
            OptionError: no such token.
        """
        token = check_range("token", token, 0, self._compiled.vocab.n_vocab - 1)
        stops = self._compiled.vocab.stop_ids
        with self._lock:
            step = self._current()
            tokens, ended = self._text
            if not (token in stops if ended else step.allowed[token]):
                raise GrammarError(
                    f"token {token} is not allowed by {self._compiled.name} "
                    f"after {len(tokens) + len(ended)} tokens"
                )
            if token in stops and (ended or step.is_accepting):
                ended.append(token)
                return
            state = self._take()
            if not state.consume_token(token):
                raise GrammarError(f"{self._compiled.name}: {_message(state)}")
            tokens.append(token)
            self._start(state)

    def rollback(self, n_tokens: int) -> None:
        """Take the last tokens back.

        Raises:
            OptionError: fewer were accepted.
        """
        with self._lock:
            tokens, ended = self._text
            n_tokens = check_range("n_tokens", n_tokens, 0, len(tokens) + len(ended))
            n_text = max(n_tokens - len(ended), 0)
            kept = tokens[: len(tokens) - n_text], ended[: max(len(ended) - n_tokens, 0)]
            if not n_text:
                self._text = kept
                return
            state = self._take()
            self._text = kept
            if state.rollback(n_text):
                self._start(state)  # else it is made again

    def copy(self) -> GrammarMatcher:
        """Return an independent matcher in the same state."""
        with self._lock:
            live = self._settled()
            copied = _Live(live.state.deep_copy(), live.step)
            return GrammarMatcher(self._compiled, *self._text, copied)

    def _current(self) -> _Step:
        """Return what may follow; wait for it."""
        return self._settled().step.result()

    def _settled(self) -> _Live:
        """Return the state once no worker uses it; make it again from the tokens if it is lost."""
        if self._live is None:
            self._start(self._restored())
        assert self._live is not None
        if not self._live.step.done():
            self._live.step.exception()  # waits for it
        return self._live

    def _take(self) -> Any:
        """Return the state to be changed; it is lost unless :meth:`_start` gets it back."""
        state = self._settled().state
        self._live = None
        return state

    def _start(self, state: Any) -> None:
        """Begin to compute what may follow."""
        self._live = _Live(state, _WORKERS.submit(_compute, self._compiled, state))

    def _restored(self) -> Any:
        state = self._compiled.start.deep_copy()
        tokens = self._text[0]
        if state.try_consume_tokens(tokens) != len(tokens):
            raise GrammarError(f"{self._compiled.name}: {_message(state)}")
        return state


def _compute(compiled: Compiled, state: Any) -> _Step:
    mask = state.compute_bitmask()
    bits = np.frombuffer(mask, np.uint8, len(compiled.usable)) & compiled.usable
    if state.is_error():
        raise GrammarError(f"{compiled.name}: {_message(state)}")
    accepts, stops = state.is_accepting(), state.is_stopped()
    if not accepts and not stops and not bits.any():
        raise GrammarError(f"{compiled.name}: no token of the vocabulary can come next")
    n_vocab = compiled.vocab.n_vocab
    allowed = np.unpackbits(bits, count=n_vocab, bitorder="little").view(np.bool_)
    allowed.flags.writeable = False
    return _Step(allowed, accepts, stops)


def _only(compiled: Compiled, tokens: frozenset[int]) -> BoolArray:
    allowed = np.zeros(compiled.vocab.n_vocab, np.bool_)
    allowed[list(tokens)] = True
    allowed.flags.writeable = False
    return allowed


def _message(state: Any) -> str:
    return shorten(state.get_error() or "the text does not fit it") + _HINTS.get(
        state.stop_reason(), ""
    )


_HINTS = {
    "ParserTooComplex": "; it is too ambiguous here: say the same with fewer alternatives",
    "LexerTooComplex": "; an expression is too large here: use smaller repetitions",
}


def shorten(message: str, most: int = 240) -> str:
    """Return a message of llguidance on one line, without the grammar that it quotes."""
    plain = _QUOTED.split(message.replace("<non-verbose/>", ""))[0]
    line = " ".join(_PREFIX.sub("", plain).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


_QUOTED = re.compile(r"\n *\d+ \| ")
_PREFIX = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


class _Workers:
    """Threads that compute masks; none computes while the process forks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._running: WeakSet[Future[_Step]] = WeakSet()

    def submit(self, compute: Callable[..., _Step], *args: Any) -> Future[_Step]:
        """Return the future result; at the interpreter's end it is computed at once."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_N_WORKERS, "kvcellar-grammar")
            try:
                future = self._pool.submit(compute, *args)
            except RuntimeError:  # no new threads while the interpreter shuts down
                future = _computed(compute, *args)
            self._running.add(future)
            return future

    def before_fork(self) -> None:
        """Wait for what is computed, and begin nothing."""
        self._lock.acquire()
        wait(list(self._running))

    def after_in_parent(self) -> None:
        """Go on."""
        self._lock.release()

    def after_in_child(self) -> None:
        """Forget threads that only the parent has."""
        self.__init__()  # type: ignore[misc]


def _computed(compute: Callable[..., _Step], *args: Any) -> Future[_Step]:
    future: Future[_Step] = Future()
    try:
        future.set_result(compute(*args))
    except GrammarError as error:
        future.set_exception(error)
    return future


_WORKERS = _Workers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_WORKERS.before_fork,
        after_in_parent=_WORKERS.after_in_parent,
        after_in_child=_WORKERS.after_in_child,
    )
