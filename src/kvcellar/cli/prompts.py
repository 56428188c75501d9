"""Messages to token ids, through the chat template that a model comes with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.cli.console import clean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
