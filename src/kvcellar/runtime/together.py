"""Generate onto several sequences at once: a step computes one batch with a token of each.

Weights are read once a step instead of once a sequence, which is most of what a token costs. What
each sequence gets is what it would get alone, from its own options, seed and random numbers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import fields
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcellar.errors import CacheFull, OptionError, check_kind, shown
from kvcellar.runtime.generation import Generation, GenerationArguments
from kvcellar.runtime.results import Result, Token

if TYPE_CHECKING:
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence


class SequenceToken(NamedTuple):
    """A token that was generated, and onto which of the sequences.

    Attributes:
        place: the sequence's place in the list.
        token: the token.
    """

    place: int
    token: Token


class Generations:
    """Generations onto sequences of one context, a batch a step; all are checked beforehand.

    Attributes:
        each: a generation a sequence, in their order.
    """

    def __init__(
        self, context: Context, sequences: Iterable[Sequence], arguments: list[dict[str, Any]]
    ) -> None:
        self._context = context
        self.each: list[Generation] = []
        names = {field.name for field in fields(GenerationArguments)}
        for sequence, given in zip(sequences, arguments, strict=True):
            asked = {name: given.pop(name) for name in names & given.keys()}
            self.each.append(sequence.begin(GenerationArguments(**asked), given))
        self._texts = [""] * len(self.each)
        self._begin = perf_counter()
        self._is_first = True

    def run(self) -> Generator[SequenceToken, None, None]:
        """Yield tokens, until all have ended.

        The sequences are taken for as long as this generator is not closed, which an exception
        does, even while its traceback is kept.
        """
        while active := [one for one in enumerate(self.each) if one[1].finish_reason is None]:
            with self._context.exclusive():
                active = self._computed(active)
            for place, generation in active:
                token = generation.step()
                self._texts[place] += generation.take_text()
                generation.publish()
                if token is not None:
                    yield SequenceToken(place, token)
        for generation in self.each:
            generation.publish()

    def results(self) -> list[Result]:
        """Return what each gave, in the order of the sequences."""
        pairs = zip(self.each, self._texts, strict=True)
        return [one.result(text + one.take_text()) for one, text in pairs]

    def _computed(self, active: list[tuple[int, Generation]]) -> list[tuple[int, Generation]]:
        """Compute the logits of all in a batch; return those for which there was room.

        Where there is not room for all, the last ones end.
        """
        active = self._with_room(active)
        while active:
            try:
                counts = self._context.compute([one.sequence for _, one in active])
            except CacheFull:
                active.pop()[1].end_full()
                continue
            if self._is_first:
                seconds = perf_counter() - self._begin
                for (_, one), n_tokens in zip(active, counts, strict=True):
                    one.computed(n_tokens, len(one.sequence), seconds)
                self._is_first = False
            return active
        return active

    def _with_room(self, active: list[tuple[int, Generation]]) -> list[tuple[int, Generation]]:
        """Shift contexts, where that was asked for, until all fit; return those that go on."""
        fitting, reserved = [], 0
        for place, generation in active:
            try:
                generation.make_room(reserved)
            except CacheFull:
                generation.end_full()
                continue
            fitting.append((place, generation))
            reserved += len(generation.sequence.held.state.pending)
        return fitting


def generate_all(
    sequences: Iterable[Sequence],
    max_tokens: int | None = None,
    *,
    each: Iterable[Mapping[str, object]] | None = None,
    **arguments: object,
) -> list[Result]:
    """Generate onto several sequences of a context, a batch a step; return a result for each.

    With the same seeds the results are those of :meth:`Sequence.complete` for one after the other.
    A sequence that ends leaves the batch. If there is not a free cell for all that go on, those
    with ``shift`` discard, and the last of the others end with ``finish_reason`` "cache_full".
    After any other error, and Ctrl-C, each sequence has what was generated onto it.

    Args:
        sequences: they have a prompt each; what is pending is computed in the first batch.
        max_tokens: the most tokens to generate onto each; None or -1: no limit.
        each: a mapping a sequence, with arguments that are its own.
        **arguments: those of :meth:`Sequence.generate_tokens`, for all.

    Raises:
        OptionError: an argument outside its range, a sequence that is empty or named twice, or
            sequences of several contexts; nothing was computed.
        SequenceBusy: a stream runs on one of them.
    """
    generations, tokens = _begun(sequences, {**arguments, "max_tokens": max_tokens}, each)
    for _ in tokens:
        pass
    return [] if generations is None else generations.results()


def stream_all(
    sequences: Iterable[Sequence],
    max_tokens: int | None = None,
    *,
    each: Iterable[Mapping[str, object]] | None = None,
    **arguments: object,
) -> Iterator[SequenceToken]:
    """Do the same, and yield the tokens as they come; see :func:`generate_all`.

    ``finish_reason`` of a sequence says why it ended.
    """
    return _begun(sequences, {**arguments, "max_tokens": max_tokens}, each)[1]


def _begun(
    sequences: Iterable[Sequence],
    arguments: dict[str, object],
    each: Iterable[Mapping[str, object]] | None,
) -> tuple[Generations | None, Iterator[SequenceToken]]:
    """Check what generations are asked for and begin them; None: there are no sequences."""
    listed = list(check_kind("sequences", sequences, Iterable, made="a list of sequences"))
    if not listed:
        return None, iter(())
    context = getattr(listed[0], "context", None)
    if context is None:
        raise OptionError(f"sequences: a list of sequences is needed, not of {shown(listed[0])}")
    chosen = context.own(listed)
    if len({sequence.seq_id for sequence in chosen}) < len(chosen):
        raise OptionError("sequences: one of them is named twice")
    if each is None:
        own: list[Mapping[str, object]] = [{}] * len(chosen)
    else:
        own = list(check_kind("each", each, Iterable, made="a list of mappings"))
    for mapping in own:
        check_kind("each", mapping, Mapping, made="a mapping for each sequence")
    if len(own) != len(chosen):
        raise OptionError(f"each: {len(own)} mappings for {len(chosen)} sequences")
    with context.exclusive():
        made = Generations(context, chosen, [{**arguments, **mapping} for mapping in own])
        tokens = made.run()
        for sequence in chosen:
            sequence.take(tokens)
    return made, tokens
