"""``kvcellar chat``: a conversation in one sequence, of which only what is new is computed.

Before each answer the whole conversation is rendered through the chat template and compared with
the tokens of the sequence: the common prefix stays in the cache, the rest is trimmed, and the new
tokens are appended. So nothing has to be tracked, whatever happened in between.

Answers go to stdout, everything else to stderr. With a terminal at both ends there is a prompt and
a greeting; otherwise each line of stdin is a message or a command. An error ends a turn, never the
conversation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from kvcellar.cli import options as o
from kvcellar.cli.console import Output, clean, complain, console_for, note
from kvcellar.cli.interrupt import Interrupt
from kvcellar.cli.prompt import chat_ids, messages_of, read_tokens
from kvcellar.cli.prompt_cache import PromptCacheOptions, stored_at_end
from kvcellar.cli.stats import turn_stats
from kvcellar.errors import CacheFull, KVCellarError

if TYPE_CHECKING:
    from kvcellar.prompts.cache import PromptCache
    from kvcellar.runtime.context import Context

HELP = """\
/cells   show the cells of the cache
/undo    take back the last turn
/reset   start over with an empty cache
/exit    end the conversation (also Ctrl-D)
Ctrl-C stops an answer; the text so far is kept."""


def chat(
    model: o.ModelName,
    *,
    system: o.System = None,
    max_tokens: o.MaxTokens = 512,
    stop: o.Stop = None,
    stats: o.ShowStats = False,
    sampling: o.Sampling,
    computing: o.Computing,
    cache: PromptCacheOptions,
) -> None:
    """Chat with a model; each turn computes only its new tokens.

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the conversation.
    """
    answering = o.Answering(max_tokens, stop, sampling.checked())
    with computing.open(model) as context, cache.open() as prompts:
        conversation = Conversation(context, answering, system, prompts)
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        with stored_at_end(prompts, conversation.sequence):
            n_failed = Repl(conversation, interactive=interactive, stats=stats).talk()
    if n_failed:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and the model's answer.

    Attributes:
        user: the message.
        answer: the answer, complete or not.
        n_kept: tokens of the sequence that the message was appended to.
        n_reused: tokens that were not computed: in the cache, or restored from a prompt cache. May
            be less than ``n_kept``, because recurrent states may go back further.
        n_prompt: tokens of the conversation before the answer.
    """

    user: str
    answer: str
    n_kept: int
    n_reused: int
    n_prompt: int


class Conversation:
    """Messages and the sequence that holds them.

    Args:
        context: what computes; a sequence of it must be free.
        answering: how to answer.
        system: the system message, if any.
        prompts: the prompt cache to restore tokens from, if any.

    Raises:
        TemplateError: the model has no chat template.
        TokenizerError: it has no tokenizer.
    """

    def __init__(
        self,
        context: Context,
        answering: o.Answering,
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
            CacheFull: the message does not fit, and no turn was added; or the answer does not, and
                the turn has the part that did.
            TemplateError: the template refuses the message.
            KeyboardInterrupt: Ctrl-C was pressed before the answer began; no turn was added.
        """
        ids = chat_ids(self.context.model, self._messages(text))
        n_kept = self._keep_prefix(ids)
        n_reused = min(n_kept, self.context.cache.seq_count(self.sequence.seq_id))
        hit = read_tokens(self.sequence, ids[n_kept:], interrupt, self._prompts)
        n_reused += 0 if hit is None else hit.n_reused
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
        """Drop the last turn; return how many tokens were dropped from the cache."""
        turn = self.turns.pop()
        before = len(self.sequence)
        self.sequence.trim(max(0, before - turn.n_kept))
        return before - len(self.sequence)

    def reset(self) -> None:
        """Drop every turn and free all cells."""
        self.turns.clear()
        self.sequence.trim(len(self.sequence))

    def _messages(self, text: str) -> list[dict[str, str]]:
        *system, message = messages_of(text, self._system)
        turns = [
            {"role": role, "content": content}
            for turn in self.turns
            for role, content in (("user", turn.user), ("assistant", turn.answer))
        ]
        return [*system, *turns, message]

    def _keep_prefix(self, ids: list[int]) -> int:
        """Trim the sequence to its common prefix with all ids but the last, which is computed."""
        n_kept = _common(self.sequence.tokens, ids[:-1])
        size = self.context.spec.size
        if len(ids) > size:
            # The last token of an answer may be shared without having a cell yet.
            free = max(0, size - n_kept)
            hint = "the conversation is too long, use a larger --n-ctx"
            raise CacheFull(len(ids) - n_kept, free, hint)
        self.sequence.trim(len(self.sequence) - n_kept)
        return n_kept


def _common(a: list[int], b: list[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


class Repl:
    """Reads lines until there are no more, and obeys or answers them.

    Args:
        conversation: what answers.
        interactive: a person types: print a prompt and a greeting.
        stats: print statistics after each turn.
    """

    def __init__(self, conversation: Conversation, *, interactive: bool, stats: bool) -> None:
        self._conversation = conversation
        self._interactive = interactive
        self._stats = stats
        self._commands: dict[str, Callable[[], None]] = {
            "/help": lambda: note(*HELP.splitlines()),
            "/cells": self._cells,
            "/undo": self._undo,
            "/reset": self._reset,
        }

    def talk(self) -> int:
        """Hold the conversation; return how many lines failed; 0 if a person saw it."""
        if self._interactive:
            self._greet()
        n_failed = 0
        while (line := self._read()) is not None and line != "/exit":
            n_failed += not self._obey(line)
        return 0 if self._interactive else n_failed

    def _greet(self) -> None:
        with suppress(ImportError):
            import readline  # noqa: F401  gives input() history and editing
        context = self._conversation.context
        note(f"{context.model.path.name}, {context.spec.size} cells. /help lists the commands.")

    def _read(self) -> str | None:
        """Return the next line that is not blank, or None at the end."""
        while True:
            try:
                line = input("> ") if self._interactive else sys.stdin.readline()
            except EOFError:
                note("")
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                note("", "(Ctrl-D or /exit ends the conversation)")
                continue
            if not line and not self._interactive:
                return None
            if text := clean(line).strip():
                return text

    def _obey(self, line: str) -> bool:
        """Run a command or answer a message; return False if that failed."""
        try:
            if line in self._commands:
                self._commands[line]()
            elif line.startswith("/"):
                complain(f"unknown command {line.split()[0]}: /help lists the commands")
                return False
            else:
                self._answer(line)
        except CacheFull as error:
            complain(f"the cache is full ({error}): /undo takes back a turn, /reset starts over")
            return False
        except KVCellarError as error:
            complain(error)
            return False
        return True

    def _answer(self, text: str) -> None:
        conversation, output = self._conversation, Output()
        conversation.context.timings.reset()
        with Interrupt() as interrupt:
            try:
                turn = conversation.ask(text, output.write, interrupt)
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                note("(interrupted; the message was dropped)")
                return
            finally:
                output.end()
        if self._stats:
            note(turn_stats(conversation.context, turn.n_reused, turn.n_prompt))
        if interrupt.pressed and not self._interactive:
            raise KeyboardInterrupt

    def _cells(self) -> None:
        console_for(sys.stderr).print(self._conversation.context.cache.view())

    def _undo(self) -> None:
        if not self._conversation.turns:
            note("no turn to take back")
            return
        n = self._conversation.undo()
        note(f"took back the last turn: {n} tokens dropped from the cache")

    def _reset(self) -> None:
        self._conversation.reset()
        note("conversation dropped; all cells are free")
