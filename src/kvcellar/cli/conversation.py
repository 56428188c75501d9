"""A conversation in one sequence, of which only what is new is ever computed.

Before each answer the whole conversation is rendered through the chat template and compared with
the tokens that the sequence holds: what agrees stays in the cache, the rest is trimmed and the new
tokens are appended. So nothing has to be tracked, whatever happened in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcellar.cli.prefill import read_tokens
from kvcellar.cli.prompts import chat_ids
from kvcellar.errors import CacheFull

if TYPE_CHECKING:
    from kvcellar.cli.interrupt import Interrupt
    from kvcellar.cli.options import Answering
    from kvcellar.runtime.context import Context
    from kvcellar.runtime.prompt_cache import PromptCache


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
