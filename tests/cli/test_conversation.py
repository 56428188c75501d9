"""A conversation computes only what is new, whatever happened before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcellar.cli.chat import Conversation
from kvcellar.cli.interrupt import Interrupt
from kvcellar.cli.options import Answering
from kvcellar.cli.prompt import chat_ids, messages_of
from kvcellar.errors import CacheFull, TemplateError, TokenizerError
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.text.sampler import SamplerOptions


def answering(max_tokens: int = 10) -> Answering:
    return Answering(max_tokens, None, SamplerOptions(temperature=0))


def ask(conversation: Conversation, text: str, interrupt: Interrupt | None = None) -> list[str]:
    pieces: list[str] = []
    conversation.ask(text, pieces.append, interrupt or Interrupt())
    return pieces


@pytest.fixture
def context(talker: Path) -> Iterator[Context]:
    with Model.from_gguf(talker, n_threads=1) as model:
        yield model.context(n_ctx=256, n_seq_max=2, type_k="f32", type_v="f32")


def test_a_turn_holds_the_message_and_the_answer(context: Context) -> None:
    conversation = Conversation(context, answering())
    pieces = ask(conversation, "hello")
    turn = conversation.turns[0]
    assert (turn.user, turn.answer) == ("hello", "".join(pieces))
    assert (turn.n_kept, turn.n_prompt) == (
        0,
        len(chat_ids(context.model, messages_of("hello", None))),
    )


def test_only_what_is_new_is_computed(context: Context) -> None:
    conversation = Conversation(context, answering(), "Be brief.")
    ask(conversation, "one")
    held = conversation.sequence.tokens
    context.timings.reset()
    ask(conversation, "two")
    turn = conversation.turns[1]
    assert turn.n_kept >= len(held) - 1
    assert context.timings.prefill_tokens <= turn.n_prompt - turn.n_kept + 1


def test_the_sequence_is_the_rendered_conversation(context: Context) -> None:
    conversation = Conversation(context, answering(max_tokens=0), "Be brief.")
    for text in ("one", "two", "three"):
        ask(conversation, text)
    messages = [{"role": "system", "content": "Be brief."}]
    for text in ("one", "two"):
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
    ids = chat_ids(context.model, [*messages, {"role": "user", "content": "three"}])
    assert conversation.sequence.tokens == ids
    fresh = context.sequence(ids)
    np.testing.assert_allclose(conversation.sequence.logits, fresh.logits, atol=1e-3)


def test_undo_goes_back_to_what_was_held_before(context: Context) -> None:
    conversation = Conversation(context, answering())
    ask(conversation, "one")
    first = conversation.sequence.tokens
    expected = ask(conversation, "two")
    n = len(conversation.sequence)
    dropped = conversation.undo()
    assert conversation.sequence.tokens == first[: n - dropped]
    assert len(conversation.turns) == 1
    assert ask(conversation, "two") == expected


def test_reset_frees_every_cell(context: Context) -> None:
    conversation = Conversation(context, answering())
    expected = ask(conversation, "one")
    conversation.reset()
    assert context.cache.used == 0
    assert ask(conversation, "one") == expected


def test_ctrl_c_ends_the_answer_and_keeps_it(context: Context) -> None:
    conversation, interrupt, pieces = Conversation(context, answering()), Interrupt(), list[str]()

    def write(piece: str) -> None:
        pieces.append(piece)
        interrupt.pressed = len(pieces) == 3

    turn = conversation.ask("hello", write, interrupt)
    assert len(pieces) == 3
    assert turn.answer == "".join(pieces)
    assert ask(conversation, "go on")


def test_ctrl_c_before_the_answer_drops_the_message(context: Context) -> None:
    conversation, interrupt = Conversation(context, answering()), Interrupt()
    interrupt.pressed = True
    with pytest.raises(KeyboardInterrupt):
        ask(conversation, "hello", interrupt)
    assert conversation.turns == []
    interrupt.pressed = False
    assert ask(conversation, "hello", interrupt) == ask(Conversation(context, answering()), "hello")


def test_a_message_that_does_not_fit_changes_nothing(context: Context) -> None:
    conversation = Conversation(context, answering())
    ask(conversation, "one")
    held = conversation.sequence.tokens
    with pytest.raises(CacheFull):
        ask(conversation, "x" * 300)
    assert conversation.sequence.tokens == held
    assert len(conversation.turns) == 1


def test_an_answer_that_fills_the_cache_is_kept(context: Context) -> None:
    conversation = Conversation(context, answering(max_tokens=-1))
    with pytest.raises(CacheFull):
        ask(conversation, "hello")
    assert conversation.turns[0].answer
    assert context.cache.used == 256


def test_a_model_without_template_or_tokenizer_is_refused_at_once(
    shared: Path, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Model.from_gguf(shared / "models/llama-dense.gguf") as model,
        pytest.raises((TemplateError, TokenizerError)),
    ):
        Conversation(model.context(n_ctx=16), answering())
    with Model.from_gguf(talker) as model:
        metadata = {k: v for k, v in model.metadata.items() if "template" not in k}
        monkeypatch.setattr(model, "metadata", metadata)
        with pytest.raises(TemplateError, match="no chat template"):
            Conversation(model.context(n_ctx=16), answering())
