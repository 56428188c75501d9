"""``kvcellar chat``: a conversation at the terminal, of which only what is new is computed.

Answers go to stdout, everything else to stderr. With a terminal at both ends there is a prompt and
a greeting; otherwise each line of stdin is a message or a command. An error ends a turn, never the
conversation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import typer

from kvcellar.cli import options as o
from kvcellar.cli.console import Output, clean, complain, console_for, note
from kvcellar.cli.interrupt import Interrupt
from kvcellar.cli.prompt import Templates, read_tokens
from kvcellar.cli.prompt_cache import PromptCacheOptions, stored_at_end
from kvcellar.cli.run import note_end
from kvcellar.cli.stats import turn_stats
from kvcellar.cli.units import human_bytes
from kvcellar.errors import CacheFull, KVCellarError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvcellar.prompts.cache import PromptCache
    from kvcellar.runtime.chat import Chat
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.sequence import Sequence

HELP = '''\
/retry         answer the last message again
/edit TEXT     say TEXT instead of the last message
/undo          take back the last turn
/reset         start over with an empty cache
/system TEXT   set the system message; without TEXT show it
/save FILE     write the conversation and its cache to a file
/load FILE     go on with one
/cells         show the cells of the cache
/exit          end the conversation (also Ctrl-D)
"""            begins and ends a message of several lines
Ctrl-C stops an answer; the text so far is kept.'''

QUOTES = '"""'


def chat(
    model: o.ModelName,
    *,
    system: o.System = None,
    max_tokens: o.MaxTokens = 512,
    stop: o.Stop = None,
    ignore_eos: o.IgnoreEos = False,
    stats: o.ShowStats = False,
    sampling: o.Sampling,
    constraining: o.Constraining,
    templates: Templates,
    computing: o.Computing,
    cache: PromptCacheOptions,
) -> None:
    """Chat with a model; each turn computes only its new tokens.

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D ends the conversation.
    """
    answering = o.Answering(
        max_tokens, stop, sampling.checked(), constraining.checked(), ignore_eos
    )
    with computing.open(model) as context, cache.open() as prompts:
        grows = computing.n_ctx is None
        conversation = Conversation(context, answering, system, prompts, templates, grows=grows)
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        with stored_at_end(prompts, conversation.chat.sequence):
            n_failed = Repl(conversation, interactive=interactive, stats=stats).talk()
    if n_failed:
        raise typer.Exit(1)


class Conversation:
    """A chat whose prompts are computed with a progress bar, and with a prompt cache.

    Args:
        context: what computes; a sequence of it must be free.
        answering: how to answer.
        system: the system message, if any.
        prompts: the prompt cache to restore tokens from, if any.
        templates: which template, and what it is given.
        grows: a full context grows before turns are dropped.

    Attributes:
        chat: what was said.

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
        templates: Templates | None = None,
        *,
        grows: bool = False,
    ) -> None:
        from kvcellar.runtime.chat import Chat

        self._answering = answering
        self._prompts = prompts
        self._interrupt = Interrupt()
        self._n_restored = 0
        template, variables = (None, {}) if templates is None else templates.chosen()
        self.chat: Chat = Chat(
            context,
            system=system,
            template=template,
            variables=variables,
            when_full="grow" if grows else "drop",
            append=self._read,
            options=answering.sampling,
        )

    @property
    def context(self) -> Context:
        """What computes."""
        return self.chat.sequence.context

    def say(self, text: str, write: Callable[[str], None], interrupt: Interrupt) -> None:
        """Answer a message, piece by piece; Ctrl-C ends the answer early.

        Raises:
            CacheFull: the message does not fit, and no turn was added; or the answer does not, and
                the turn has the part that did.
            TemplateError: the template refuses the message.
            KeyboardInterrupt: Ctrl-C was pressed before the answer began; no turn was added.
        """
        self._write(lambda: self.chat.stream(text, **self._how()), write, interrupt)

    def again(self, text: str | None, write: Callable[[str], None], interrupt: Interrupt) -> None:
        """Answer the last message again, or another in its place; errors are those of ``say``.

        Raises:
            OptionError: nothing was said yet.
        """
        self._write(lambda: self.chat.stream(text, turn=-1, **self._how()), write, interrupt)

    def note_end(self) -> None:
        """Say why the last answer ended, where that is not plain to see."""
        turn = self.chat.turns[-1]
        note_end(turn.finish_reason, len(turn.ids or ()), self._answering.max_tokens)

    def stats(self) -> str:
        """Return the cost of the last turn in a line."""
        turn = self.chat.turns[-1]
        return turn_stats(self.context, turn, self._n_restored)

    def _write(
        self,
        begin: Callable[[], Iterator[str]],
        write: Callable[[str], None],
        interrupt: Interrupt,
    ) -> None:
        self._interrupt, self._n_restored = interrupt, 0
        n_dropped = len(self.chat.dropped)
        try:
            for piece in self._answering.hinted(begin()):
                write(piece)
                if interrupt.pressed:
                    return
        finally:
            if n := len(self.chat.dropped) - n_dropped:
                turns = "turn was" if n == 1 else f"{n} turns were"
                note(f"(the context is full: the oldest {turns} dropped)")

    def _read(self, sequence: Sequence, ids: list[int]) -> None:
        hit = read_tokens(sequence, ids, self._interrupt, self._prompts)
        self._n_restored += 0 if hit is None else hit.n_reused

    def _how(self) -> dict[str, Any]:
        return {
            "max_tokens": self._answering.limit,
            "stop": self._answering.stop or (),
            "grammar": self._answering.grammar,
            "ignore_eos": self._answering.ignore_eos,
        }


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
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: note(*HELP.splitlines()),
            "/cells": self._cells,
            "/undo": self._undo,
            "/reset": self._reset,
            "/retry": lambda _: self._answer(lambda *to: conversation.again(None, *to)),
            "/edit": self._edit,
            "/system": self._system,
            "/save": self._save,
            "/load": self._load,
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

    # -- reading

    def _read(self) -> str | None:
        """Return the next message or command that is not blank, or None at the end."""
        while True:
            try:
                line = self._line("> ")
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                note("", "(Ctrl-D or /exit ends the conversation)")
                continue
            if line is None:
                return None
            if line.lstrip().startswith(QUOTES):
                try:
                    return self._lines(line.lstrip().removeprefix(QUOTES))
                except KeyboardInterrupt:
                    if not self._interactive:
                        raise
                    note("", "(the message was dropped)")
                    continue
            if text := line.strip():
                return text

    def _lines(self, first: str) -> str | None:
        """Return a message of several lines, up to the closing quotes or the end of the input."""
        lines, line = [], first
        while not line.rstrip().endswith(QUOTES):
            lines.append(line)
            if (read := self._line("... ")) is None:
                break
            line = read
        else:
            lines.append(line.rstrip().removesuffix(QUOTES))
        return "\n".join(lines).strip("\n") or None

    def _line(self, prompt: str) -> str | None:
        """Return a line without its end, or None at the end of the input."""
        if not self._interactive:
            line = sys.stdin.readline()
            return clean(line.removesuffix("\n")) if line else None
        try:
            return clean(input(prompt))
        except EOFError:
            note("")
            return None

    # -- answering

    def _obey(self, line: str) -> bool:
        """Run a command or answer a message; return False if that failed."""
        name, _, rest = line.partition(" ")
        try:
            if name in self._commands:
                self._commands[name](rest.strip())
            elif line.startswith("/") and "\n" not in line:
                complain(f"unknown command {name}: /help lists the commands")
                return False
            else:
                self._answer(lambda *to: self._conversation.say(line, *to))
        except CacheFull as error:
            complain(f"the cache is full ({error}): /undo takes back a turn, /reset starts over")
            return False
        except KVCellarError as error:
            complain(error)
            return False
        return True

    def _answer(self, say: Callable[[Callable[[str], None], Interrupt], None]) -> None:
        conversation, output = self._conversation, Output()
        conversation.context.timings.reset()
        with Interrupt() as interrupt:
            try:
                say(output.write, interrupt)
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                note("(interrupted; the message was dropped)")
                return
            finally:
                output.end()
        if self._stats:
            note(conversation.stats())
        else:
            conversation.note_end()
        if interrupt.pressed and not self._interactive:
            raise KeyboardInterrupt

    # -- commands

    def _cells(self, _rest: str) -> None:
        console_for(sys.stderr).print(self._conversation.context.cache.view())

    def _undo(self, _rest: str) -> None:
        chat = self._conversation.chat
        if not chat.turns:
            note("no turn to take back")
            return
        n = len(chat.sequence)
        chat.undo()
        note(f"took back the last turn: {n - len(chat.sequence)} tokens dropped from the cache")

    def _reset(self, _rest: str) -> None:
        self._conversation.chat.reset()
        note("conversation dropped; all cells are free")

    def _edit(self, text: str) -> None:
        if not text:
            raise OptionError("/edit needs the text to say instead")
        self._answer(lambda *to: self._conversation.again(text, *to))

    def _system(self, text: str) -> None:
        chat = self._conversation.chat
        if text:
            chat.system = text
        note(f"system message: {chat.system}" if chat.system else "there is no system message")

    def _save(self, name: str) -> None:
        if not name:
            raise OptionError("/save needs the name of a file")
        n_bytes = self._conversation.chat.save(name)
        note(f"saved {turns_of(self._conversation.chat)} to {name}, {human_bytes(n_bytes)}")

    def _load(self, name: str) -> None:
        if not name:
            raise OptionError("/load needs the name of a file")
        self._conversation.chat.restore(name)
        note(f"loaded {turns_of(self._conversation.chat)} from {name}")


def turns_of(chat: Chat) -> str:
    """Return how many turns a chat has, in words."""
    n = len(chat.turns)
    return f"{n} turn" if n == 1 else f"{n} turns"
