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


class Generations:
    """Generations onto sequences of one context, a batch a step.

    Each sequence is taken, as by a stream, for as long as this is referred to.

    Attributes:
        each: a generation a sequence, in their order.
    """

    def __init__(
        self, context: Context, sequences: Iterable[Sequence], arguments: list[dict[str, Any]]
    ) -> None:
        self._context = context
        self._streams: list[Iterator[None]] = []
        self.each: list[Generation] = []
        names = {field.name for field in fields(GenerationArguments)}
        with context.exclusive():
            for sequence, given in zip(sequences, arguments, strict=True):
                asked = {name: given.pop(name) for name in names & given.keys()}
                generation = sequence.begin(GenerationArguments(**asked), given)
                self._streams.append(sequence.take(_until_dropped()))
                self.each.append(generation)
        self._texts = [""] * len(self.each)
        self._begin = perf_counter()
        self._is_first = True

    def step(self) -> Iterator[tuple[int, Token]]:
        """Yield a token of each sequence that has not ended, with the sequence's place."""
        active = [(i, one) for i, one in enumerate(self.each) if one.finish_reason is None]
        with self._context.exclusive():
            active = self._computed(active)
        for i, generation in active:
            token = generation.step()
            self._texts[i] += generation.take_text()
            if token is not None:
                yield i, token

    @property
    def has_ended(self) -> bool:
        """Whether all have."""
        return all(one.finish_reason is not None for one in self.each)

    def results(self) -> list[Result]:
        """Return what each gave, in the order of the sequences."""
        for generation in self.each:
            generation.publish()
        pairs = zip(self.each, self._texts, strict=True)
        return [one.result(text + one.take_text()) for one, text in pairs]

    def _computed(self, active: list[tuple[int, Generation]]) -> list[tuple[int, Generation]]:
        """Compute the logits of all in a batch; return those for which there was room.

        Where there is not room for all, the last ones end.
        """
        for _, one in active:
            one.make_room()
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


class SequenceToken(NamedTuple):
    """A token that was generated, and onto which of the sequences.

    Attributes:
        place: the sequence's place in the list.
        token: the token.
    """

    place: int
    token: Token


def generate_all(
    sequences: Iterable[Sequence],
    max_tokens: int | None = None,
    *,
    each: Iterable[Mapping[str, object]] | None = None,
    **arguments: object,
) -> list[Result]:
    """Generate onto several sequences of a context, a batch a step; return a result for each.

    With the same seeds the results are those of :meth:`Sequence.complete` for one after the other.
    A sequence that ends leaves the batch. If there is not a free cell for all that go on, the last
    of them end with ``finish_reason`` "cache_full". After any other error, and Ctrl-C, each
    sequence has what was generated onto it.

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
    generations = _begun(sequences, {**arguments, "max_tokens": max_tokens}, each)
    if generations is None:
        return []
    while not generations.has_ended:
        for _ in generations.step():
            pass
    return generations.results()


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
    generations = _begun(sequences, {**arguments, "max_tokens": max_tokens}, each)
    return iter(()) if generations is None else _streamed(generations)


def _streamed(generations: Generations) -> Iterator[SequenceToken]:
    while not generations.has_ended:
        for place, token in generations.step():
            yield SequenceToken(place, token)
    generations.results()


def _begun(
    sequences: Iterable[Sequence],
    arguments: dict[str, object],
    each: Iterable[Mapping[str, object]] | None,
) -> Generations | None:
    """Check what generations are asked for and begin them; None: there are no sequences."""
    listed = list(check_kind("sequences", sequences, Iterable, made="a list of sequences"))
    if not listed:
        return None
    context = getattr(listed[0], "context", None)
    if context is None:
        raise OptionError(f"sequences: a list of sequences is needed, not of {shown(listed[0])}")
    chosen = context.own(listed)
    if each is None:
        own: list[Mapping[str, object]] = [{}] * len(chosen)
    else:
        own = list(check_kind("each", each, Iterable, made="a list of mappings"))
    for mapping in own:
        check_kind("each", mapping, Mapping, made="a mapping for each sequence")
    if len(own) != len(chosen):
        raise OptionError(f"each: {len(own)} mappings for {len(chosen)} sequences")
    return Generations(context, chosen, [{**arguments, **mapping} for mapping in own])


def _until_dropped() -> Generator[None, None, None]:
    """Stand for a stream until nobody refers to it."""
    yield
