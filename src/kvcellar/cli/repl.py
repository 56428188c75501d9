"""The loop of ``kvcellar chat``: read a line, obey or answer it.

Answers go to stdout, all else to stderr. An error ends a turn, never the conversation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from kvcellar.cli.console import clean, complain, console_for, note
from kvcellar.cli.conversation import Conversation
from kvcellar.cli.interrupt import Interrupt
from kvcellar.cli.output import Output
from kvcellar.cli.stats import turn_stats
from kvcellar.errors import CacheFull, KVCellarError

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
