"""The conversation behind ``kvcellar chat``: Ctrl-C, full contexts, and what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar.cli.chat import Conversation
from kvcellar.cli.interrupt import Interrupt
from kvcellar.cli.options import Answering
from kvcellar.errors import CacheFull, TemplateError, TokenizerError
from kvcellar.prompts.cache import PromptCache
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.stores.memory import MemoryStore
from kvcellar.text.sampler import SamplerOptions


def answering(max_tokens: int = 10) -> Answering:
    return Answering(max_tokens, None, SamplerOptions(temperature=0))


def ask(conversation: Conversation, text: str, interrupt: Interrupt | None = None) -> list[str]:
    pieces: list[str] = []
    conversation.say(text, pieces.append, interrupt or Interrupt())
    return pieces


@pytest.fixture
def context(talker: Path) -> Iterator[Context]:
    with Model.from_gguf(talker, n_threads=1) as model:
        yield model.context(n_ctx=256, n_seq_max=2, type_k="f32", type_v="f32")


def test_only_what_is_new_is_computed(context: Context) -> None:
    conversation = Conversation(context, answering(), "Be brief.")
    ask(conversation, "one")
    held = conversation.chat.sequence.tokens
    context.timings.reset()
    ask(conversation, "two")
    turn = conversation.chat.turns[1]
    assert turn.n_reused >= len(held) - 1
    assert context.timings.prefill_tokens <= turn.n_prompt - turn.n_reused + 1


def test_what_the_prompt_cache_has_counts_as_reused(context: Context) -> None:
    prompts = PromptCache(MemoryStore(), block_size=8)
    first = Conversation(context, answering(), "Be brief.", prompts)
    ask(first, "one")
    first.chat.reset()
    ask(first, "one")
    assert first.chat.turns[0].n_reused == 0
    assert int(first.stats().split()[0]) >= 16


def test_ctrl_c_ends_the_answer_and_keeps_it(context: Context) -> None:
    conversation, interrupt, pieces = Conversation(context, answering()), Interrupt(), list[str]()

    def write(piece: str) -> None:
        pieces.append(piece)
        interrupt.pressed = len(pieces) == 3

    conversation.say("hello", write, interrupt)
    assert len(pieces) == 3
    assert conversation.chat.turns[0].answer == "".join(pieces)
    assert ask(conversation, "go on")


def test_ctrl_c_before_the_answer_drops_the_message(context: Context) -> None:
    conversation, interrupt = Conversation(context, answering()), Interrupt()
    interrupt.pressed = True
    with pytest.raises(KeyboardInterrupt):
        ask(conversation, "hello", interrupt)
    assert conversation.chat.turns == ()
    interrupt.pressed = False
    assert ask(conversation, "hello", interrupt) == ask(Conversation(context, answering()), "hello")


def test_a_message_that_does_not_fit_changes_nothing(context: Context) -> None:
    conversation = Conversation(context, answering())
    ask(conversation, "one")
    turns = conversation.chat.turns
    with pytest.raises(CacheFull):
        ask(conversation, "x" * 300)
    assert conversation.chat.turns == turns


def test_an_answer_that_fills_the_cache_is_kept(context: Context) -> None:
    conversation = Conversation(context, answering(max_tokens=-1))
    with pytest.raises(CacheFull):
        ask(conversation, "hello")
    assert conversation.chat.turns[0].answer
    assert context.cache.used == 256


def test_a_context_that_may_grow_does(context: Context) -> None:
    conversation = Conversation(context, answering(max_tokens=200), grows=True)
    ask(conversation, "x" * 100)
    assert context.spec.size > 256
    assert conversation.chat.dropped == ()


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
