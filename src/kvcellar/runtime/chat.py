"""A conversation over one sequence: only what is new is tokenized, and only that is computed.

What a chat knows is what was said, turn by turn, and the tokens of each answer as they were
sampled. Before each answer all of it is rendered through the chat template, and compared with the
tokens that the sequence holds: what both begin with stays in the cache. So whatever happened to the
sequence in between, also an exception from outside, costs time and nothing else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import asdict, dataclass, replace
from functools import partial
from inspect import GEN_RUNNING, getgeneratorstate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvcellar.errors import (
    AllocationError,
    CacheFull,
    KVCellarError,
    OptionError,
    SnapshotFileError,
    TemplateError,
    check_bool,
    check_callable,
    check_choice,
    check_integers,
    check_kind,
    check_path,
    check_range,
    check_text,
    not_copied,
    shown,
)
from kvcellar.runtime.context import Context
from kvcellar.runtime.generation import checked_limit, merge_options
from kvcellar.runtime.model import Model
from kvcellar.runtime.sequence import Sequence
from kvcellar.snapshot.container import read_description
from kvcellar.text.chat_prompt import Answer, ChatPrompt, check_tools
from kvcellar.text.chat_template import ChatTemplate, Message, check_messages
from kvcellar.text.grammar import Grammar
from kvcellar.text.sampler import Sampler, SamplerOptions
from kvcellar.types import MAX_POSITION

if TYPE_CHECKING:
    from kvcellar.text.tokenizer import Tokenizer

WhenFull = Literal["grow", "drop", "refuse"]
"""How a chat makes room in a full context, or does not; see :class:`Chat`."""

Said = str | Message | List[Message]
"""What somebody says: text of the user, a message, or several, such as the results of tools."""

_FORMAT = 1
_NOTE = "chat"
_NUMBERS = ("gap", "n_prompt", "n_reused")
_MARGIN = 256  # cells that a cache grows by beyond what is needed, at least
_log = logging.getLogger("kvcellar")


@dataclass(frozen=True, slots=True)
class Turn:
    """What was said to a model, and its answer.

    Attributes:
        messages: what was said, most often one message.
        answer: the answer's text, complete or not; without bytes that end within a character.
        ids: its tokens as they were sampled; None: the text was given by somebody else.
        gap: :attr:`~kvcellar.text.chat_prompt.ChatPrompt.gap` of the prompt that it follows.
        finish_reason: why it ended; None: it did not end by itself, or was given.
        n_prompt: tokens of the prompt that it follows.
        n_reused: of those, how many did not have to be computed.
        seed: of the random numbers, also where none was given; None: nothing was sampled.
    """

    messages: tuple[Message, ...]
    answer: str
    ids: tuple[int, ...] | None = None
    gap: int = 0
    finish_reason: str | None = None
    n_prompt: int = 0
    n_reused: int = 0
    seed: int | None = None

    @property
    def said(self) -> list[Message]:
        """The messages and the answer as one."""
        return [*self.messages, {"role": "assistant", "content": self.answer}]


class Chat:
    """A conversation with a model.

    ::

        chat = Chat(Model.from_gguf("model.gguf"), system="Be brief.")
        print(chat.ask("What is the capital of France?"))
        for piece in chat.stream("And of Spain?"):
            print(piece, end="", flush=True)

    Texts of messages are text: they cannot spell a control token, and so not end a turn.

    One stream runs at a time. An answer that is interrupted is kept as far as it came; if nothing
    of it was sampled yet, the message that it answers is dropped.

    Args:
        context: where it takes a sequence; or a model, of which it makes a context of its own.
        system: the system message.
        tools: descriptions of functions, as OpenAI's API has them.
        template: another template than the model's: its name, its Jinja source, its file, or a
            :class:`~kvcellar.text.chat_template.ChatTemplate`; see :meth:`Model.chat`.
        variables: further names for the template, such as ``{"enable_thinking": False}``.
        parse_special: let messages spell control tokens.
        when_full: what happens when the context is full. "grow": it becomes larger, up to what the
            model was trained for; then, and at once with "drop", the oldest turns are dropped as
            wholes, the system message stays, and ``dropped`` has them. "refuse": CacheFull.
        append: appends token ids to a sequence and computes them, in place of
            :meth:`Sequence.append`; for example with a prompt cache.
        options: how to sample; greedy when None.
        **sampling: single fields of :class:`SamplerOptions`.

    Attributes:
        sequence: holds the tokens.
        system: the system message, None if there is none; may be set.
        dropped: the turns that the context had no room for, oldest first.

    Raises:
        TemplateError: the model has no template, or it does not compile.
        TokenizerError: it has no tokenizer.
        SequenceIdError: the context has no sequence left.
        OptionError: an argument outside its range.
    """

    __reduce_ex__ = not_copied("a Chat", "use fork(), or save() and Chat.load()")

    def __init__(
        self,
        context: Context | Model,
        *,
        system: str | None = None,
        tools: List[Mapping[str, Any]] | None = None,
        template: str | Path | ChatTemplate | None = None,
        variables: Mapping[str, Any] | None = None,
        parse_special: bool = False,
        when_full: WhenFull = "grow",
        append: Callable[[Sequence, list[int]], object] | None = None,
        options: SamplerOptions | None = None,
        **sampling: Any,
    ) -> None:
        check_kind("context", context, Context, Model)
        self.system = None if system is None else check_text("system", system)
        self.dropped: tuple[Turn, ...] = ()
        self._turns: tuple[Turn, ...] = ()
        self._open: _OpenTurn | None = None
        self._stream: Generator[str, None, None] | None = None
        self._tools = check_tools(tools)
        self._variables = dict(
            check_kind("variables", {} if variables is None else variables, dict)
        )
        self._parse_special = check_bool("parse_special", parse_special)
        check_choice("when_full", when_full, ("grow", "drop", "refuse"))
        self._when_full: WhenFull = when_full
        self._append = Sequence.append if append is None else check_callable("append", append)
        self._options = merge_options(options, sampling)
        model = context if isinstance(context, Model) else context.model
        self._format = model.chat_format(template, has_tools=bool(tools))
        self._render(())  # fails now rather than at the first turn
        self.sequence = (context.context() if isinstance(context, Model) else context).sequence()

    # -- what was said

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was said and answered, oldest first; turns that were dropped are not here."""
        return (*self._turns, *self._begun())

    @property
    def messages(self) -> list[Message]:
        """The conversation as OpenAI's API has it, dropped turns left out."""
        return self._messages(self.turns)

    @property
    def finish_reason(self) -> str | None:
        """Why the last answer ended; None before, and if it did not end by itself."""
        return self.turns[-1].finish_reason if self.turns else None

    # -- saying

    def ask(self, message: Said | None, max_tokens: int | None = None, **arguments: Any) -> str:
        """Say something and return the answer; see :meth:`stream` for arguments and errors."""
        return "".join(self.stream(message, max_tokens, **arguments))

    def stream(
        self,
        message: Said | None,
        max_tokens: int | None = None,
        *,
        turn: int | None = None,
        stop: str | Iterable[str] | None = (),
        stop_tokens: Iterable[int] = (),
        ignore_eos: bool = False,
        options: SamplerOptions | None = None,
        grammar: Grammar | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """Say something and yield the answer as it comes.

        The prompt is computed before the first piece is asked for.

        Args:
            message: text, a message, or several; None: what ``turn`` says already.
            max_tokens: the most tokens of the answer; None: until it ends.
            turn: say it in place of this turn, an index of ``turns``; it and all behind it are
                dropped. None: say it last.
            stop: one or several strings to stop at.
            stop_tokens: further tokens to stop at.
            ignore_eos: never draw the model's own stop tokens.
            options: how to sample this answer; the chat's when None.
            grammar: what this answer may be.
            **sampling: single fields of :class:`SamplerOptions`.

        Raises:
            TemplateError: the template refuses the messages; no turn was added.
            CacheFull: the conversation has no room, nor can any be made; what was answered stays.
            OptionError: an argument outside its range, or there is no such turn.
            GrammarError: the grammar is wrong; no turn was added. Or it cannot be followed.
        """
        chosen = merge_options(self._options if options is None else options, sampling)
        limit = checked_limit(max_tokens)
        self._settle()
        before, said = self._turns, None if message is None else _as_messages(message)
        if turn is not None:
            before, old = self._split(turn)
            said = old.messages if said is None else said
        if said is None:
            raise OptionError("message=None: give text or messages, or a turn to answer again")
        tokenizer = self._tokenizer
        matcher = None
        if grammar is not None:
            check_kind("grammar", grammar, Grammar, made="Grammar.json_schema(...)")
            matcher = grammar.matcher(tokenizer)
        sampler = Sampler(chosen, constraint=matcher, tokenizer=tokenizer)
        self._begin(before, said, (), _wanted(limit), seed=sampler.seed)
        stream = partial(
            self.sequence.stream,
            sampler=sampler,
            stop=stop,
            stop_tokens=stop_tokens,
            ignore_eos=ignore_eos,
        )
        return self._answer(limit, stream)

    def retry(self, turn: int = -1, max_tokens: int | None = None, **arguments: Any) -> str:
        """Answer a turn again; it and all behind it are dropped. Return the new answer.

        With the same seed an answer is the same again: give another, or none.
        """
        turn = check_range("turn", turn, -MAX_POSITION, MAX_POSITION)
        return self.ask(None, max_tokens, turn=turn, **arguments)

    def edit(
        self, turn: int, message: Said, max_tokens: int | None = None, **arguments: Any
    ) -> str:
        """Say something else in a turn, and return the answer; all behind it is dropped."""
        turn = check_range("turn", turn, -MAX_POSITION, MAX_POSITION)
        return self.ask(message, max_tokens, turn=turn, **arguments)

    def undo(self, n_turns: int = 1) -> tuple[Turn, ...]:
        """Take back the last turns; return them.

        Raises:
            OptionError: there are fewer.
        """
        self._settle()
        n = len(self._turns) - check_range("n_turns", n_turns, 0, len(self._turns))
        taken, self._turns = self._turns[n:], self._turns[:n]
        self._keep_prefix(self._render(self._turns).ids if self._turns else ())
        return taken

    def reset(self) -> None:
        """Drop all turns, and free all cells."""
        self._settle()
        self._turns = self.dropped = ()
        self.sequence.trim(len(self.sequence))

    def add(self, message: Said, answer: str) -> None:
        """Add a turn that was answered elsewhere; its text is computed with the next one."""
        said = _as_messages(message)
        turn = Turn(said, check_text("answer", answer))
        self._settle()
        self._render((*self._turns, turn))  # refused now, not in the next turn
        self._turns = (*self._turns, turn)

    # -- copies

    def fork(self) -> Chat:
        """Return a second conversation that goes on from here; no byte is copied.

        Raises:
            SequenceIdError: the context has no sequence left.
        """
        self._settle()
        return self._twin(self.sequence.fork())

    def save(self, path: str | Path) -> int:
        """Write the conversation and its sequence to a file; return its bytes.

        It is a snapshot of the sequence that has the turns beside it: :meth:`Context.load` takes
        it too, and then has the tokens.

        Raises:
            OptionError: messages or variables are not JSON.
            SnapshotFileError: the file cannot be written.
        """
        self._settle()
        about = {
            "version": _FORMAT,
            "system": self.system,
            "tools": self._tools,
            "variables": self._variables,
            "template": self._format.template.source,
            "turns": [_turn_json(turn) for turn in self._turns],
            "dropped": [_turn_json(turn) for turn in self.dropped],
        }
        try:
            text = json.dumps(about, ensure_ascii=True)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"this conversation cannot be written as JSON: {error}") from None
        path, sequence = check_path("path", path), self.sequence
        n_pending = len(sequence) - sequence.context.cache.seq_count(sequence.seq_id)
        if n_pending > sequence.context.cache.n_free():
            sequence.trim(n_pending)  # the turns have these tokens, too
        return sequence.save(path, note={_NOTE: text})

    @classmethod
    def load(cls, context: Context | Model, path: str | Path, **arguments: Any) -> Chat:
        """Go on with a conversation from a file that :meth:`save` wrote.

        Args:
            context: where it goes on; the model must be the same.
            path: the file.
            **arguments: those of :class:`Chat` that are not saved, or shall be others.

        Raises:
            SnapshotFileError: the file is missing or damaged, or has no conversation.
            SnapshotMismatch: it belongs to another model.
            CacheFull, SequenceIdError: there is no room for it.
        """
        about = _read_note(check_path("path", path))
        chat = cls(check_kind("context", context, Context, Model), **{**about.options, **arguments})
        try:
            chat._restore(path, about)
        except BaseException:
            chat.close()
            raise
        return chat

    def restore(self, path: str | Path) -> None:
        """Become the conversation of a file that :meth:`save` wrote.

        If that fails the conversation is what it was, and is computed again in its next turn.

        Raises:
            SnapshotFileError, SnapshotMismatch, CacheFull, TemplateError: as :meth:`load`.
        """
        about = _read_note(check_path("path", path))
        self._settle()
        self._restore(path, about)

    def _restore(self, path: str | Path, about: _Saved) -> None:
        model, options = self.sequence.context.model, about.options
        n_vocab = model.spec.n_vocab
        if any(not 0 <= i < n_vocab for turn in about.turns for i in turn.ids or ()):
            raise SnapshotFileError(f"the conversation in {path} has tokens of another vocabulary")
        chosen = model.chat_format(options["template"], has_tools=bool(options["tools"]))
        self.sequence.trim(len(self.sequence)).load(path)
        self.system, self._tools, self._variables, self._format, self._turns, self.dropped = (
            options["system"],
            options["tools"],
            options["variables"] or {},
            chosen,
            about.turns,
            about.dropped,
        )

    def close(self) -> None:
        """Free the sequence; what was said can still be read. Closing twice is fine."""
        if not self.sequence.is_closed:
            self._settle()
        self.sequence.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Chat: {len(self._turns)} turns on {self.sequence!r}>"

    # -- steps

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.sequence.context.model.tokenizer

    def _messages(self, turns: tuple[Turn, ...], said: List[Message] = ()) -> list[Message]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *(one for turn in turns for one in turn.said), *said]

    def _render(self, turns: tuple[Turn, ...], said: List[Message] | None = None) -> ChatPrompt:
        """Render turns, and up to where the answer to what is said begins."""
        messages = self._messages(turns, said or ())
        if not messages or (said is None and not turns):  # some templates refuse to have no user
            messages.append({"role": "user", "content": "hello"})
        answers: dict[int, Answer] = {}
        at = 0 if self.system is None else 1
        for turn in turns:
            at += len(turn.messages) + 1
            if turn.ids is not None:
                answers[at - 1] = Answer(turn.ids, turn.gap)
        return self._format.prompt(
            messages,
            tools=self._tools,
            add_generation_prompt=said is not None,
            parse_special=self._parse_special,
            answers=answers,
            variables=self._variables,
        )

    def _begin(
        self,
        turns: tuple[Turn, ...],
        said: tuple[Message, ...],
        ids: tuple[int, ...],
        wanted: int,
        dropped: tuple[Turn, ...] | None = None,
        seed: int | None = None,
    ) -> None:
        """Compute everything up to an answer, of which ``ids`` are sampled already."""
        dropped = self.dropped if dropped is None else dropped
        prompt, n_reused = self._render(turns, said), -1
        while n_reused < 0:
            tokens = [*prompt.ids, *ids]
            try:
                n_reused = self._compute(tokens)
            except CacheFull as error:
                if self._grow(error.needed - error.free):
                    continue
                if not (n := self._n_to_drop(turns, prompt, len(tokens), wanted)):
                    raise
                turns, dropped = turns[n:], (*dropped, *turns[:n])
                prompt = self._render(turns, said)
        n_reused = min(n_reused, len(prompt))
        turn = Turn(said, "", (), prompt.gap, None, len(prompt), n_reused, seed)
        if n := len(dropped) - len(self.dropped):
            _log.warning("the context is full: dropped the oldest turns of the chat (%d)", n)
        self._turns, self.dropped, self._open = turns, dropped, _OpenTurn(turn, len(prompt))

    def _compute(self, ids: list[int]) -> int:
        """Make the sequence hold these tokens; return how many needed no computing."""
        sequence = self.sequence
        size = sequence.context.spec.size
        if len(ids) > size:
            raise CacheFull(len(ids), size, "a larger n_ctx, or a shorter conversation")
        n_kept = self._keep_prefix(ids)
        n_reused = min(n_kept, sequence.context.cache.seq_count(sequence.seq_id))
        if n_kept < len(ids):
            self._append(sequence, ids[n_kept:])
        return n_reused

    def _keep_prefix(self, ids: List[int]) -> int:
        """Trim the sequence to what it has in common with tokens; return how many those are."""
        held = self.sequence.tokens
        pairs = zip(held, ids, strict=False)
        n_kept = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(held), len(ids)))
        self.sequence.trim(len(held) - n_kept)
        return n_kept

    def _answer(
        self, limit: int | None, stream: Callable[[int | None], Iterator[str]]
    ) -> Iterator[str]:
        """Yield the answer that was begun."""
        self._stream = self._pieces(stream, stream(limit), limit)
        return self._stream

    def _pieces(
        self,
        stream: Callable[[int | None], Iterator[str]],
        pieces: Iterator[str],
        limit: int | None,
    ) -> Generator[str, None, None]:
        while (begun := self._open) is not None:
            try:
                for piece in pieces:
                    begun.shown += piece
                    yield piece
                begun.finish_reason = self.sequence.finish_reason
                return
            except CacheFull:
                ids = tuple(self.sequence.tokens[begun.start :])
                if not self._make_room(begun, ids, limit):
                    raise
            pieces = stream(None if limit is None else limit - len(ids))

    def _make_room(self, begun: _OpenTurn, ids: tuple[int, ...], limit: int | None) -> bool:
        """Grow the context, or begin the answer again behind fewer turns."""
        if self._grow(1):
            return True
        said, wanted = begun.turn.messages, _wanted(limit)
        n_tokens = begun.start + len(ids)
        n = self._n_to_drop(self._turns, self._render(self._turns, said), n_tokens, wanted)
        if n:
            dropped = (*self.dropped, *self._turns[:n])
            self._begin(self._turns[n:], said, ids, wanted, dropped, begun.turn.seed)
            if self._open is not None:
                self._open.shown = begun.shown
        return n > 0

    def _settle(self) -> None:
        """Make a turn of the answer that was begun last, as far as it came."""
        stream = self._stream
        if stream is not None and getgeneratorstate(stream) != GEN_RUNNING:
            stream.close()
        turns = self.turns
        self._turns, self._open = turns, None

    def _begun(self) -> tuple[Turn, ...]:
        """Return the turn of the answer that was begun last, if anything was answered."""
        if (begun := self._open) is None:
            return ()
        tokens = self.sequence.tokens
        before, ids = tokens[: begun.start], tokens[begun.start :]
        if not ids and begun.finish_reason is None:
            return ()
        if begun.finish_reason == "stop_string":
            ids = self._cut(before, ids, begun.shown)
        answer, reason = _answered(self._tokenizer, before, ids), begun.finish_reason
        return (replace(begun.turn, answer=answer, ids=tuple(ids), finish_reason=reason),)

    def _cut(self, before: list[int], ids: list[int], shown: str) -> list[int]:
        """Return the tokens of an answer without the stop string that it ended in."""
        text = partial(_answered, self._tokenizer, before, is_whole=True)
        n = len(ids)
        while n and not shown.startswith(text(ids[:n])):
            n -= 1
        rest, goes_on = shown[len(text(ids[:n])) :], self._tokenizer.ends_in_text(before + ids[:n])
        return [*ids[:n], *self._tokenizer.encode(rest, add_special=False, continuing=goes_on)]

    def _split(self, turn: int) -> tuple[tuple[Turn, ...], Turn]:
        """Return the turns before one, and that one."""
        n = len(self._turns)
        if not n:
            raise OptionError(f"turn={shown(turn)}: nothing was said yet")
        i = check_range("turn", turn, -n, n - 1) % n
        return self._turns[:i], self._turns[i]

    # -- room

    def _grow(self, n_more: int) -> bool:
        """Give the context more cells, if that is wanted and possible."""
        context = self.sequence.context
        size, most = context.spec.size, context.model.spec.n_ctx_train
        if self._when_full != "grow" or size >= most:
            return False
        try:
            context.resize(min(most, max(2 * size, size + n_more + _MARGIN)))
        except AllocationError:
            return False
        return True

    def _n_to_drop(
        self, turns: tuple[Turn, ...], prompt: ChatPrompt, n_tokens: int, wanted: int
    ) -> int:
        """Return how many turns have to go so that there is room for ``wanted`` more tokens."""
        if self._when_full == "refuse" or not turns:
            return 0
        context = self.sequence.context
        free = context.cache.n_free() + context.cache.seq_count(self.sequence.seq_id)
        size = min(context.spec.size, free)
        excess = n_tokens + min(wanted, size // 4) - size
        counts = [0] * (max(prompt.message_of, default=0) + 1)
        for number in prompt.message_of:
            if number >= 0:
                counts[number] += 1
        at = 0 if self.system is None else 1
        n = 0
        while n < len(turns) and (excess > 0 or not n):
            n_messages = len(turns[n].messages) + 1
            excess -= sum(counts[at : at + n_messages])
            at += n_messages
            n += 1
        return n

    def _twin(self, sequence: Sequence) -> Chat:
        twin = Chat.__new__(Chat)
        vars(twin).update(vars(self))
        vars(twin).update(sequence=sequence, _stream=None)
        return twin


@dataclass(slots=True)
class _OpenTurn:
    """A turn whose answer is being sampled.

    Attributes:
        turn: without its answer.
        start: where the answer begins in the sequence.
        shown: what was yielded of it.
        finish_reason: why it ended, once it did.
    """

    turn: Turn
    start: int
    shown: str = ""
    finish_reason: str | None = None


def _wanted(limit: int | None) -> int:
    """Return how many tokens an answer may need room for."""
    return 2**31 - 1 if limit is None else limit


def _as_messages(message: object) -> tuple[Message, ...]:
    """Return what is said as messages of the user, unless it is messages already."""
    if isinstance(message, str):
        return ({"role": "user", "content": message},)
    messages = [message] if isinstance(message, Mapping) else message
    check_messages(messages)
    if not isinstance(messages, list | tuple) or not messages:
        raise TemplateError("nothing is said: give text, a message, or a list of messages")
    return tuple(dict(one) for one in messages)


def _answered(
    tokenizer: Tokenizer, before: List[int], ids: List[int], *, is_whole: bool = False
) -> str:
    """Return the text of an answer behind other tokens, as a stream gives it.

    Bytes of a character that does not end are left out, or U+FFFD if it is the whole text.
    """
    detokenizer = tokenizer.detokenizer()
    detokenizer.follow(before)
    text = "".join(map(detokenizer.push, ids))
    return text + detokenizer.finish() if is_whole else text


def _turn_json(turn: Turn) -> dict[str, Any]:
    values = asdict(turn)
    return {**values, "messages": [dict(message) for message in turn.messages]}


class _Saved(NamedTuple):
    """What :meth:`Chat.save` wrote beside the tokens."""

    options: dict[str, Any]
    turns: tuple[Turn, ...]
    dropped: tuple[Turn, ...]


def _read_note(path: Path) -> _Saved:
    note = read_description(path).get("note")
    text = note.get(_NOTE) if isinstance(note, dict) else None
    if not isinstance(text, str):
        raise SnapshotFileError(f"{path} has no conversation: load it with Context.load")
    try:
        about = json.loads(text)
        if about["version"] != _FORMAT:
            raise SnapshotFileError(
                f"{path} has a conversation of version {shown(about['version'])}; "
                f"this kvcellar reads {_FORMAT}"
            )
        turns, dropped = (tuple(map(_read_turn, about[name])) for name in ("turns", "dropped"))
        options = {name: about[name] for name in ("system", "tools", "variables", "template")}
        for name, kind in (("system", str), ("tools", list), ("variables", dict)):
            if options[name] is not None and not isinstance(options[name], kind):
                raise SnapshotFileError(f"the conversation in {path} is damaged: {name}")
        check_tools(options["tools"])
        check_text("template", options["template"])
        return _Saved(options, turns, dropped)
    except (KVCellarError, ValueError, TypeError, LookupError, RecursionError) as error:
        if isinstance(error, SnapshotFileError):
            raise
        raise SnapshotFileError(f"the conversation in {path} is damaged: {error!r}") from error


def _read_turn(about: Mapping[str, Any]) -> Turn:
    messages, answer = about["messages"], about["answer"]
    check_messages(messages)
    ids = None if about["ids"] is None else check_integers("ids", about["ids"], SnapshotFileError)
    reason = about["finish_reason"]
    numbers = [check_range(name, about[name], 0, MAX_POSITION) for name in _NUMBERS]
    if reason is not None:
        check_text("finish_reason", reason)
    if (seed := about["seed"]) is not None:
        check_range("seed", seed, 0, 2**64 - 1)
    return Turn(
        tuple(messages),
        check_text("answer", answer),
        None if ids is None else tuple(ids),
        numbers[0],
        reason,
        numbers[1],
        numbers[2],
        seed,
    )
