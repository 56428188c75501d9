"""A conversation in one sequence, of which only what is new is ever computed.

Before each answer the whole conversation is rendered through the chat template and compared with
the tokens that the sequence holds: what agrees stays in the cache, the rest is trimmed and the new
tokens are appended. So nothing has to be tracked, whatever happened in between.

Messages to token ids, through the chat template that a model comes with.

The loop of ``kvcellar chat``: read a line, obey or answer it.

Answers go to stdout, all else to stderr. An error ends a turn, never the conversation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcellar.cli.console import Interrupt, Output, clean, complain, console_for, note
from kvcellar.cli.prefill import read_tokens
from kvcellar.cli.stats import turn_stats
from kvcellar.errors import CacheFull, KVCellarError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvcellar.cli.options import Answering
    from kvcellar.prompts.cache import PromptCache
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.model import Model


def chat_ids(model: Model, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of a conversation, up to where the model's next answer begins.

    Raises:
        TemplateError: the model has no template, or it refuses the messages.
        TokenizerError: the model has no tokenizer.
    """
    text = clean(model.chat_template.render(messages))
    tokenizer = model.tokenizer
    bos = "" if tokenizer.bos_id is None else tokenizer.vocab.tokens[tokenizer.bos_id]
    has_bos = bool(bos) and text.startswith(bos)
    return tokenizer.encode(text, add_special=not has_bos, parse_special=True)


def messages_of(prompt: str, system: str | None) -> list[dict[str, str]]:
    """A prompt as a conversation that begins."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and what the model answered.

    Attributes:
        user: the message.
        answer: the answer, or as much of it as came.
        n_kept: how many tokens of the text before it it was built on.
        n_reused: how many tokens were in the cache, or came from a prompt cache; of those kept, a
            state may have to go further back.
        n_prompt: how many tokens the conversation had before the answer.
    """

    user: str
    answer: str
    n_kept: int
    n_reused: int
    n_prompt: int


class Conversation:
    """Messages and the sequence that holds them.

    Args:
        context: with room for one sequence.
        answering: how to answer.
        system: the system message, if any.
        prompts: where what was computed is stored, and looked for when a conversation begins.

    Raises:
        TemplateError: the model has no chat template.
        TokenizerError: it has no tokenizer.
    """

    def __init__(
        self,
        context: Context,
        answering: Answering,
        system: str | None = None,
        prompts: PromptCache | None = None,
    ) -> None:
        self.context = context
        self.sequence = context.sequence()
        self.turns: list[Turn] = []
        self._answering = answering
        self._system = system
        self._prompts = prompts
        chat_ids(context.model, self._messages("hello"))  # fails now, not at the first turn

    def ask(self, text: str, write: Callable[[str], None], interrupt: Interrupt) -> Turn:
        """Answer a message, piece by piece; Ctrl-C ends the answer early.

        Raises:
            CacheFull: no room for the message, and no turn was made; or none for the rest of
                the answer, and the turn has what came.
            TemplateError: the template refuses the message.
            KeyboardInterrupt: Ctrl-C was pressed before the answer began; no turn was made.
        """
        ids = chat_ids(self.context.model, self._messages(text))
        n_kept = self._keep_prefix(ids)
        n_reused = min(n_kept, self.context.cache.seq_count(self.sequence.seq_id))
        n_ubatch = self._answering.n_ubatch
        reuse = read_tokens(self.sequence, ids[n_kept:], n_ubatch, interrupt, self._prompts)
        n_reused += 0 if reuse is None else reuse.n_reused
        pieces: list[str] = []
        try:
            for piece in self._answering.stream(self.sequence):
                write(piece)
                pieces.append(piece)
                if interrupt.pressed:
                    break
        finally:
            self.turns.append(Turn(text, "".join(pieces), n_kept, n_reused, len(ids)))
        return self.turns[-1]

    def undo(self) -> int:
        """Take back the last turn; returns how many tokens were dropped from the cache."""
        turn = self.turns.pop()
        before = len(self.sequence)
        self.sequence.trim(max(0, before - turn.n_kept))
        return before - len(self.sequence)

    def reset(self) -> None:
        """Forget every turn and free all cells."""
        self.turns.clear()
        self.sequence.trim(len(self.sequence))

    def _messages(self, text: str) -> list[dict[str, str]]:
        messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.answer})
        return [*messages, {"role": "user", "content": text}]

    def _keep_prefix(self, ids: list[int]) -> int:
        """Trim the sequence to what it has in common with ids; at least one is left to compute."""
        n_kept = _common(self.sequence.tokens, ids[:-1])
        size = self.context.spec.size
        if len(ids) > size:
            # The last token of an answer may be in common and yet not have found a cell.
            free = max(0, size - n_kept)
            hint = "the conversation is too long, use a larger --n-ctx"
            raise CacheFull(len(ids) - n_kept, free, hint)
        self.sequence.trim(len(self.sequence) - n_kept)
        return n_kept


def _common(a: list[int], b: list[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


HELP = """\
/cells   show the cells of the cache
/undo    take back the last turn
/reset   begin anew, with an empty cache
/exit    end (also Ctrl-D)
Ctrl-C ends an answer early; what was written of it stays."""


class Repl:
    """Reads lines until there are no more.

    Args:
        conversation: what answers.
        interactive: whether a person types; then there is a prompt and a greeting.
        stats: whether each turn is followed by what it took.
    """

    def __init__(self, conversation: Conversation, *, interactive: bool, stats: bool) -> None:
        self._conversation = conversation
        self._interactive = interactive
        self._stats = stats
        self._commands: dict[str, Callable[[], None]] = {
            "/help": lambda: note(HELP),
            "/cells": self._cells,
            "/undo": self._undo,
            "/reset": self._reset,
        }

    def talk(self) -> int:
        """Hold the conversation; returns how many turns failed where nobody could see to it."""
        if self._interactive:
            self._greet()
        n_failed = 0
        while (line := self._read()) is not None and line != "/exit":
            n_failed += not self._obey(line)
        return 0 if self._interactive else n_failed

    def _greet(self) -> None:
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() history and editing
        context = self._conversation.context
        note(f"{context.model.path.name}, {context.spec.size} cells. /help lists the commands.")

    def _read(self) -> str | None:
        """The next line that is not blank, or None at the end."""
        while True:
            try:
                line = input("> ") if self._interactive else sys.stdin.readline()
            except EOFError:
                print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                note("\n(Ctrl-D or /exit ends)")
                continue
            if not line and not self._interactive:
                return None
            if text := clean(line).strip():
                return text

    def _obey(self, line: str) -> bool:
        """Do what a line says; False if that failed."""
        try:
            if line in self._commands:
                self._commands[line]()
            elif line.startswith("/"):
                complain(f"no command {line.split()[0]}: /help lists those there are")
                return False
            else:
                self._answer(line)
        except CacheFull as error:
            complain(f"the cache is full ({error}): /undo takes back a turn, /reset begins anew")
            return False
        except KVCellarError as error:
            complain(error)
            return False
        return True

    def _answer(self, text: str) -> None:
        talk, output = self._conversation, Output()
        talk.context.timings.reset()
        with Interrupt() as interrupt:
            try:
                turn = talk.ask(text, output.write, interrupt)
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                note("(interrupted; the message was dropped)")
                return
            finally:
                output.end()
        if self._stats:
            note(turn_stats(talk.context, turn.n_reused, turn.n_prompt))
        if interrupt.pressed and not self._interactive:
            raise KeyboardInterrupt

    def _cells(self) -> None:
        console_for(sys.stderr).print(self._conversation.context.cache.view())

    def _undo(self) -> None:
        if not self._conversation.turns:
            note("there is no turn to take back")
            return
        n = self._conversation.undo()
        note(f"took back the last turn: {n} tokens dropped from the cache")

    def _reset(self) -> None:
        self._conversation.reset()
        note("forgot everything; all cells are free")
