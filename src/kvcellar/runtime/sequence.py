"""A token stream that lives in a context's cache: append, fork, trim, generate, close.

Tokens that were sampled but not yet computed wait in ``pending``; they are computed together with
whatever comes next. So ``tokens`` is what the cache holds followed by what is pending.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from kvcellar.batch import Batch
from kvcellar.errors import ClosedError, OptionError
from kvcellar.runtime.generation import FinishReason, Generation
from kvcellar.runtime.sampler import SamplerOptions
from kvcellar.types import Float32Array

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context


class Sequence:
    """One stream of tokens in a context; made by :meth:`Context.sequence` or :meth:`fork`.

    Attributes:
        context: where its cells are.
        seq_id: its id for llama.cpp's verbs on ``context.cache``.
        finish_reason: why the last generation ended, None before and while it runs.
    """

    def __init__(self, context: Context, seq_id: int) -> None:
        self.context = context
        self.seq_id = seq_id
        self.finish_reason: FinishReason | None = None
        self._pending: list[int] = []
        self._logits: Float32Array | None = None
        self._closed = False

    @property
    def tokens(self) -> list[int]:
        """All token ids, in order."""
        self._check_open()
        cells = self.context.cache.table
        return [*map(int, cells.tokens_of(self.seq_id)), *self._pending]

    @property
    def text(self) -> str:
        """All tokens as text, special tokens included."""
        return self.context.model.tokenizer.decode(self.tokens)

    @property
    def logits(self) -> Float32Array:
        """Logits of the next token, ``[n_vocab]``; computed if need be.

        Raises:
            OptionError: the sequence is empty.
        """
        self._check_open()
        if self._pending:
            self._compute(self._pending)
        if self._logits is None:
            self._compute_last_again()
        if self._logits is None:
            raise OptionError("the sequence is empty: append a prompt first")
        return self._logits

    def __len__(self) -> int:
        """How many tokens it has."""
        self._check_open()
        return self._n_held() + len(self._pending)

    def append(self, prompt: str | Iterable[int]) -> Sequence:
        """Add text or token ids and compute them; returns the sequence itself.

        Special tokens in text are not parsed; an empty sequence gets the BOS that the file asks
        for. Use ``model.tokenizer.encode(text, parse_special=True)`` for the rest.

        Raises:
            BatchError: nothing to add, or a token id outside the vocabulary.
            CacheFull: not enough free cells; nothing has changed.
        """
        self._check_open()
        self._compute([*self._pending, *self._to_ids(prompt)])
        return self

    def fork(self) -> Sequence:
        """A new sequence that shares every cell with this one; no byte is copied.

        Raises:
            SequenceIdError: all ``n_seq_max`` ids are taken.
        """
        self._check_open()
        child = self.context.sequence()
        self.context.cache.seq_cp(self.seq_id, child.seq_id, -1, -1)
        child._pending = list(self._pending)  # noqa: SLF001  (of the same class)
        child._logits = self._logits  # noqa: SLF001
        return child

    def trim(self, n_tokens: int) -> Sequence:
        """Drop the last ``n_tokens`` tokens; returns the sequence itself.

        Raises:
            OptionError: it is negative or more than there are.
        """
        size = len(self)
        if not 0 <= n_tokens <= size:
            raise OptionError(f"trim({n_tokens}): the sequence has {size} tokens")
        if n_tokens == 0:
            return self
        from_pending = min(n_tokens, len(self._pending))
        if from_pending:
            del self._pending[-from_pending:]
        if n_tokens > from_pending:
            self._remove_tail(n_tokens - from_pending)
            self._logits = None
        return self

    def generate(
        self,
        max_tokens: int | None = None,
        *,
        stop: str | Iterable[str] = (),
        options: SamplerOptions | None = None,
        **sampling: object,
    ) -> str:
        """Generate and return the text; see :meth:`stream` for arguments and errors."""
        return "".join(self.stream(max_tokens, stop=stop, options=options, **sampling))

    def stream(
        self,
        max_tokens: int | None = None,
        *,
        stop: str | Iterable[str] = (),
        options: SamplerOptions | None = None,
        **sampling: object,
    ) -> Iterator[str]:
        """Generate and yield text as it comes, whole characters only.

        Generation ends at one of the model's stop tokens (which is not added), at a stop string
        (cut from the text, its tokens stay), or after ``max_tokens``; ``finish_reason`` says
        which. Every token yielded is part of the sequence, also when the caller stops early.

        Args:
            max_tokens: at most so many tokens; None: until a stop or a full cache.
            stop: text, or several, at which to stop.
            options: how to sample; greedy when None.
            **sampling: single fields of :class:`SamplerOptions`, for example ``temperature=0.8``.

        Raises:
            OptionError: an argument outside its range, or an empty sequence.
            CacheFull: no cell for the next token; what was generated stays in the sequence.
        """
        self._check_open()
        return iter(Generation(self, max_tokens, stop, options, sampling))

    def close(self) -> None:
        """Free the cells that no other sequence shares; closing twice is fine."""
        if not self._closed:
            self._closed = True
            self.context.release(self)

    @property
    def is_closed(self) -> bool:
        """Whether the sequence was closed."""
        return self._closed

    def push(self, token: int) -> None:
        """Add one token without computing it yet."""
        self._check_open()
        self._pending.append(token)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self)} tokens"
        return f"<Sequence {self.seq_id}: {state}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"sequence {self.seq_id} is closed")

    def _to_ids(self, prompt: str | Iterable[int]) -> list[int]:
        if isinstance(prompt, str):
            is_first = len(self) == 0
            return self.context.model.tokenizer.encode(prompt, add_special=is_first)
        return list(prompt)

    def _compute(self, ids: list[int]) -> None:
        before, n_held = (self._pending, self._logits), self._n_held()
        self._pending, self._logits = [], None
        try:
            batch = Batch.of(ids, seq_id=self.seq_id, logits="last")
            self._logits = self.context.decode(batch)[-1]
        except BaseException:
            # Ctrl-C may come after the cells were filled: a token must not wait as well.
            if self._n_held() == n_held:
                self._pending, self._logits = before
            raise

    def _n_held(self) -> int:
        return self.context.cache.table.seq_count(self.seq_id)

    def _compute_last_again(self) -> None:
        """After a trim the last token's logits are gone: take it out and compute it once more."""
        ids = self.tokens
        if ids:
            self._remove_tail(1)
            self._compute(ids[-1:])

    def _remove_tail(self, n_tokens: int) -> None:
        cache = self.context.cache
        cells = cache.table.cells_of(self.seq_id)
        first = int(cache.table.positions[cells[-n_tokens]])
        cache.seq_rm(self.seq_id, first, -1)
