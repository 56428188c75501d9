"""Conversations: what they hold, however they are edited, cut, forked, saved and interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import (
    CacheFull,
    OptionError,
    SnapshotFileError,
    TemplateError,
    TokenizerError,
)
from kvcellar.runtime.chat import Chat, Turn
from kvcellar.runtime.context import Context
from kvcellar.runtime.model import Model
from kvcellar.testing.gguf_writer import gguf_bytes
from kvcellar.testing.tiny_llama import TinyLlama
from kvcellar.text.chat_template import ChatTemplate
from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import examples
from tests.text.vocabularies import CONTROL, USER, byte_letters, make_bpe

TEMPLATE = (
    "{% for m in messages %}<S>{{ m.role }}\n{{ m.content }}<E>\n{% endfor %}"
    "{% if add_generation_prompt %}<S>assistant\n{% endif %}"
)
MERGES = ["t h", "h e"]
SPECIAL = ["<S>", "<E>", "<U>"]
N_ASCII = 123


def small_vocabulary() -> dict[str, Any]:
    """128 tokens: bytes up to "z", two that can be spelled by others too, and three names."""
    pieces = [*byte_letters()[:N_ASCII], "th", "he", *SPECIAL]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": np.array([1] * (N_ASCII + 2) + [3, 3, 4], np.int32),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": pieces.index("<E>"),
    }


@pytest.fixture(scope="module", params=["llama-dense", "gemma2-dense", "jamba-dense"])
def model(request: pytest.FixtureRequest, shared: Path) -> Iterator[Model]:
    """A tiny model of each kind of cache, to which a vocabulary of bytes is given."""
    path = shared / "models" / f"{request.param}.gguf"
    with Model.from_gguf(path, n_threads=1) as model:
        tokenizer = Tokenizer.from_metadata(small_vocabulary())
        template = ChatTemplate.for_tokenizer(TEMPLATE, tokenizer)
        vars(model).update(tokenizer=tokenizer, chat_template=template)  # both are found once
        yield model


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with model.context(n_ctx=96, n_seq_max=4, type_k="f32", type_v="f32") as context:
        yield context


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model with a token for each byte."""
    names = (("<S>", CONTROL), ("<E>", CONTROL), ("<U>", USER))
    vocabulary: dict[str, Any] = make_bpe(("z u", "u o"), names, eos_token_id=259)
    tiny = TinyLlama(n_vocab=256 + 5)
    path = tmp_path_factory.mktemp("models") / "bytes.gguf"
    metadata = {**tiny.metadata(), **vocabulary, "tokenizer.chat_template": TEMPLATE}
    path.write_bytes(gguf_bytes(metadata, tiny.tensors()))
    with Model.from_gguf(path, n_threads=1) as model:
        yield model


def expected_ids(chat: Chat, turns: tuple[Turn, ...]) -> list[int]:
    """The tokens of turns, written by hand: texts tokenized, answers as they were sampled."""
    tokenizer = chat.sequence.context.model.tokenizer
    start, end = (tokenizer.vocab.tokens.index(name) for name in ("<S>", "<E>"))

    def spelled(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, literal=[(0, len(text))])

    messages = [] if chat.system is None else [("system", chat.system)]
    ids: list[int] = []
    for role, text in messages:
        ids += [start, *spelled(f"{role}\n{text}"), end, *spelled("\n")]
    for turn in turns:
        for message in turn.messages:
            ids += [start, *spelled(f"{message['role']}\n{message['content']}"), end]
            ids += spelled("\n")
        answer = (
            spelled(f"assistant\n{turn.answer}")
            if turn.ids is None
            else [*spelled("assistant\n"), *turn.ids]
        )
        ids += [start, *answer, end, *spelled("\n")]
    return ids


def check_ids(chat: Chat) -> None:
    """It holds what was said; behind an answer that ended in a stop string, also that."""
    held, turns = chat.sequence.tokens, chat.turns
    expected = expected_ids(chat, turns)
    if turns and turns[-1].finish_reason == "stop_string":
        expected = expected[:-2]
        held = held[: len(expected)]
    assert not turns or held == expected[: len(held)]


def check(chat: Chat) -> None:
    """It holds what was said, and its logits are those of a fresh decode."""
    check_ids(chat)
    context, sequence = chat.sequence.context, chat.sequence
    if not context.cache.n_free():  # a token that is pending has no cell
        sequence.trim(len(sequence) - context.cache.seq_count(sequence.seq_id))
    if not (held := sequence.tokens):
        return
    with context.model.context(n_ctx=256, n_seq_max=1, type_k="f32", type_v="f32") as other:
        fresh = other.sequence(held)
        np.testing.assert_allclose(sequence.logits, fresh.logits, rtol=1e-3, atol=2e-3)


texts = st.sampled_from(["the", "a <E> <S>", "", "x" * 9, "\n he ", "<U>"])
verbs = st.sampled_from(["say", "cut", "undo", "retry", "edit", "fork", "save", "trim", "add"])


@examples(15)
@given(
    steps=st.lists(st.tuples(verbs, texts, st.integers(0, 9)), min_size=2, max_size=8),
    when_full=st.sampled_from(["grow", "drop"]),
    system=st.sampled_from([None, "be the he"]),
    seed=st.integers(0, 2**32),
)
def test_it_holds_what_was_said_whatever_was_done(
    model: Model,
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, str, int]],
    when_full: Any,
    system: str | None,
    seed: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "chat.kv"
    with model.context(n_ctx=96, n_seq_max=4, type_k="f32", type_v="f32") as context:
        chat = Chat(context, system=system, when_full=when_full, temperature=1.0, top_k=0)
        for i, (verb, text, n) in enumerate(steps):
            before = chat.turns
            how: dict[str, Any] = {"max_tokens": n, "seed": seed + i}
            if verb == "say":
                chat.ask(text, stop="q", **how)
            elif verb == "cut":
                stream = chat.stream(text, **how)
                next(stream, None)
            elif verb == "add":
                chat.add(text, "the he")
            elif verb == "fork" and context.cache.n_free() > 60:  # it may not drop the other's
                other = chat.fork()
                chat.ask("the", **how)
                assert other.turns == before
                chat.close()
                chat = other
            elif verb == "save":
                chat.save(path)
                chat.ask("gone", **how)
                chat.restore(path)
                assert chat.turns == before
            elif verb == "trim":
                chat.turns  # noqa: B018  an answer is what the sequence holds of it
                chat.add("a", "b")
                chat.sequence.trim(len(chat.sequence) * n // 10)
            elif before and verb == "undo":
                assert chat.undo() == before[-1:]
                assert chat.turns == before[:-1]
            elif before and verb == "retry":
                chat.retry(n % len(before), **how)
                assert chat.turns[-1].messages == before[n % len(before)].messages
            elif before and verb == "edit":
                chat.edit(-1, text, **how)
                assert chat.turns[-1].messages[0]["content"] == text
            check_ids(chat)
            context.cache.check()
        check(chat)


def test_a_conversation_that_only_grows_computes_only_what_is_new(model: Model) -> None:
    with model.context(n_ctx=256, n_seq_max=1) as context:
        chat = Chat(context, system="be", temperature=1.0, top_k=0, seed=3)
        for text in ("the", "he", "x", "the he"):
            held = chat.sequence.tokens
            chat.ask(text, 7)
            turn = chat.turns[-1]
            assert chat.sequence.tokens[: len(held)] == held
            assert turn.n_reused >= len(held) - 1


def test_answers_stay_as_sampled_however_they_could_be_spelled(bytes_model: Model) -> None:
    """Both "zu" and "uo" are tokens, so "z" and "uo" would be tokenized otherwise."""
    tokens = bytes_model.tokenizer.vocab.tokens
    ids = [tokens.index(piece) for piece in ("z", "uo")]
    assert bytes_model.tokenizer.encode("zuo") != ids
    with bytes_model.context(n_ctx=256) as context:
        chat = Chat(context)
        chat.ask("hi", 0)
        chat.sequence.append(ids)
        assert chat.turns[-1].answer == "zuo"
        held = chat.sequence.tokens
        chat.ask("more", 1)
        assert chat.sequence.tokens[: len(held)] == held
        assert chat.turns[-1].n_reused == len(held)


def test_an_answer_cut_within_a_character_has_no_replacement_in_the_history(
    bytes_model: Model,
) -> None:
    with bytes_model.context(n_ctx=256) as context:
        chat = Chat(context)
        chat.ask("hi", 0)
        chat.sequence.append(bytes_model.tokenizer.encode("a🙂")[:-1])
        held = chat.sequence.tokens
        assert chat.turns[-1].answer == "a"
        chat.ask("more", 1)
        assert chat.sequence.tokens[: len(held)] == held
        assert all("\ufffd" not in str(message["content"]) for message in chat.messages)


def test_a_stop_string_is_not_part_of_the_answer(bytes_model: Model) -> None:
    with bytes_model.context(n_ctx=256, type_k="f32", type_v="f32") as context:
        chat = Chat(context)
        text = chat.ask("hi", 12)
        chat.reset()
        stopped = chat.ask("hi", 12, stop=text[5:7])
        assert (stopped, chat.finish_reason) == (text[: text.index(text[5:7])], "stop_string")
        assert chat.turns[-1].answer == stopped
        chat.ask("more", 1)
        check(chat)


def test_stop_tokens_and_ignore_eos_are_passed_on(bytes_model: Model) -> None:
    end = bytes_model.tokenizer.vocab.tokens.index("<E>")
    bias = {end: 100.0}
    with bytes_model.context(n_ctx=256) as context:
        chat = Chat(context)
        assert chat.ask("hi", 5, logit_bias=bias) == ""
        assert chat.finish_reason == "stop_token"
        assert len(chat.ask("hi", 5, logit_bias=bias, ignore_eos=True)) > 0
        ids = chat.turns[-1].ids or ()
        chat.retry(-1, 5, stop_tokens=[ids[2]], ignore_eos=True)
        assert len(chat.turns[-1].ids or ()) <= 2


# -- forms of what is said


def test_messages_are_those_of_the_api(bytes_model: Model) -> None:
    with (
        bytes_model.context(n_ctx=256, type_k="f32", type_v="f32") as context,
        Chat(context, system="be") as chat,
    ):
        answer = chat.ask("hi", 2)
        chat.add([{"role": "tool", "content": "result"}], "fine")
        assert chat.messages == [
            {"role": "system", "content": "be"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": answer},
            {"role": "tool", "content": "result"},
            {"role": "assistant", "content": "fine"},
        ]
        chat.system = "other"
        chat.ask("go on", 1)
        check(chat)
    assert chat.sequence.is_closed


def test_a_model_makes_a_context_of_its_own(bytes_model: Model) -> None:
    with Chat(bytes_model) as chat:
        assert chat.ask("hi", 2)
    prompt = bytes_model.chat([{"role": "user", "content": "hi"}])
    with bytes_model.context() as context:
        assert context.sequence().append(prompt).generate(2) == chat.turns[0].answer


def test_seeds_go_on_over_turns(bytes_model: Model) -> None:
    with bytes_model.context(n_ctx=512, n_seq_max=2) as context:
        one, two = (Chat(context, temperature=1.0, top_k=0, seed=5) for _ in range(2))
        said = [[chat.ask("hi", 8) for _ in range(2)] for chat in (one, two)]
        assert said[0] == said[1]
        assert said[0][0] != said[0][1]
        drawn = Chat(context.model, temperature=1.0, top_k=0)
        drawn.ask("hi", 8)
        assert drawn.turns[0].seed is not None
        assert drawn.retry(0, 8, seed=drawn.turns[0].seed) == drawn.turns[0].answer


# -- full contexts


def test_a_full_context_grows_to_what_the_model_was_trained_for(model: Model) -> None:
    with model.context(n_ctx=64, n_seq_max=2) as context:
        chat = Chat(context, temperature=1.0, top_k=0, seed=1)
        held: list[int] = []
        while not chat.dropped:
            chat.ask("the he", 20)
            if not chat.dropped:
                assert chat.sequence.tokens[: len(held)] == held
            held = chat.sequence.tokens
        assert context.spec.size == model.spec.n_ctx_train
        check(chat)


@pytest.mark.parametrize("system", [None, "be brief"])
def test_the_oldest_turns_are_dropped_and_the_system_message_stays(
    model: Model, system: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with model.context(n_ctx=96, n_seq_max=2, type_k="f32", type_v="f32") as context:
        chat = Chat(context, system=system, when_full="drop", temperature=1.0, top_k=0, seed=1)
        asked = []
        for i in range(6):
            asked.append(f"the {i}")
            chat.ask(asked[-1], 20)
        turns = (*chat.dropped, *chat.turns)
        assert [turn.messages[0]["content"] for turn in turns] == asked
        assert chat.dropped
        assert "the context is full: dropped the oldest" in caplog.text
        assert len(chat.turns[-1].ids or ()) == 20 or chat.finish_reason == "stop_token"
        assert chat.messages[0]["role"] == ("user" if system is None else "system")
        check(chat)


def test_a_context_that_may_not_change_refuses(model: Model) -> None:
    with model.context(n_ctx=64, n_seq_max=2) as context:
        chat = Chat(context, when_full="refuse", temperature=1.0, top_k=0, seed=1)
        answers: list[str] = []
        with pytest.raises(CacheFull):
            answers.extend(chat.ask("the", 20) for _ in range(9))
        assert not chat.dropped
        assert len(chat.turns) >= len(answers)


def test_what_never_fits_changes_nothing(model: Model) -> None:
    with model.context(n_ctx=64, n_seq_max=2) as context:
        chat = Chat(context)
        chat.ask("the", 3)
        turns = chat.turns
        with pytest.raises(CacheFull):
            chat.ask("x" * 400)
        assert chat.turns == turns
        assert chat.dropped == ()
        chat.ask("the", 3)


# -- interrupts


def test_an_exception_keeps_the_answer_so_far_and_drops_what_has_none(model: Model) -> None:
    class Stop(Exception):
        pass

    fail = [False]

    def append(sequence: Any, ids: list[int]) -> None:
        sequence.append(ids[: len(ids) // 2] if fail[0] else ids)
        if fail[0]:
            raise Stop

    with model.context(n_ctx=200, n_seq_max=2, type_k="f32", type_v="f32") as context:
        chat = Chat(context, append=append, temperature=1.0, top_k=0, seed=2)
        chat.ask("the", 4)
        turns = chat.turns
        fail[0] = True
        with pytest.raises(Stop):
            chat.ask("he")
        assert chat.turns == turns
        fail[0] = False
        stream = chat.stream("he", 20)
        pieces = [piece for _, piece in zip(range(3), stream, strict=False)]
        assert chat.turns[-1].answer.startswith("".join(pieces))
        chat.ask("the", 2)
        assert chat.turns[1].finish_reason is None
        check(chat)


# -- files


def test_a_saved_conversation_goes_on_in_another_context(
    bytes_model: Model, tmp_path: Path
) -> None:
    path = tmp_path / "chat.kv"
    with bytes_model.context(n_ctx=256) as context, bytes_model.context(n_ctx=300) as other:
        chat = Chat(context, system="be", tools=[{"name": "f"}], variables={"x": 1})
        chat.ask("hi", 5)
        chat.save(path)
        again = Chat.load(other, path)
        assert (again.turns, again.system) == (chat.turns, "be")
        assert again.ask("more", 5) == chat.ask("more", 5)
        assert again.turns[-1].n_reused > 0
        assert other.load(path).tokens == Chat.load(other, path).sequence.tokens


def test_a_full_context_can_be_saved(bytes_model: Model, tmp_path: Path) -> None:
    with bytes_model.context(n_ctx=40, n_seq_max=1) as context:
        chat = Chat(context, when_full="refuse")
        with pytest.raises(CacheFull):
            chat.ask("hi")
        turns = chat.turns
        chat.save(tmp_path / "full.kv")
        assert Chat.load(bytes_model.context(n_ctx=80), tmp_path / "full.kv").turns == turns


def test_what_is_no_conversation_is_refused(bytes_model: Model, tmp_path: Path) -> None:
    path = tmp_path / "chat.kv"
    with bytes_model.context(n_ctx=256) as context:
        sequence = context.sequence([1, 2, 3])
        sequence.save(path)
        chat = Chat(context)
        chat.ask("hi", 2)
        turns = chat.turns
        for note in ({}, {"chat": "[1]"}, {"chat": "{"}, {"chat": json.dumps({"version": 9})}):
            sequence.save(path, note=note)
            with pytest.raises(SnapshotFileError, match="conversation"):
                Chat.load(context, path)
            with pytest.raises(SnapshotFileError, match="conversation"):
                chat.restore(path)
        assert chat.turns == turns
        assert chat.ask("more", 1)


def test_forged_turns_are_refused(bytes_model: Model, tmp_path: Path) -> None:
    path = tmp_path / "chat.kv"
    turn = {
        "messages": [{"role": "user", "content": "a"}],
        "answer": "b",
        "ids": [1],
        "gap": 0,
        "finish_reason": None,
        "n_prompt": 1,
        "n_reused": 0,
        "seed": 3,
    }
    sound: dict[str, Any] = {
        "version": 1,
        "system": None,
        "tools": None,
        "variables": {},
        "template": TEMPLATE,
        "turns": [turn],
        "dropped": [],
    }
    with bytes_model.context(n_ctx=256) as context:
        sequence = context.sequence([1, 2, 3])

        def load(about: dict[str, Any]) -> Chat:
            sequence.save(path, note={"chat": json.dumps(about)})
            return Chat.load(context, path)

        load(sound).close()
        for name in sound:
            wrongs: tuple[Any, ...] = (7.5, [[]], {"a": []})
            for wrong in wrongs:
                if (name, wrong) == ("variables", {"a": []}):
                    continue
                with pytest.raises((SnapshotFileError, TemplateError)):
                    load({**sound, name: wrong})
        for name in turn:
            with pytest.raises(SnapshotFileError):
                load({**sound, "turns": [{**turn, name: {"a": 1.5}}]})
        with pytest.raises(SnapshotFileError, match="tokens of another vocabulary"):
            load({**sound, "turns": [{**turn, "ids": [261]}]})
        load({**sound, "variables": None}).close()
        assert len(context.sequences) == 1


# -- templates and models


def test_the_template_can_be_another(bytes_model: Model, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("[{{ messages[0].content }}{{ mark }}]")
    said = [{"role": "user", "content": "hi"}]
    assert bytes_model.chat(said, template=file, mark="!").text == "[hi!]"
    assert bytes_model.chat(said, template="({{ messages[0].content }})").text == "(hi)"
    assert bytes_model.chat(said, template="chatml").text.startswith("<|im_start|>user\nhi")
    with pytest.raises(TemplateError, match="no chat template 'absent'; one of chatml"):
        bytes_model.chat(said, template="absent")
    with pytest.raises(TemplateError, match="give a file of Jinja source"):
        bytes_model.chat(said, template=tmp_path)


def test_a_model_without_template_or_tokenizer_is_refused_at_once(shared: Path) -> None:
    with (
        Model.from_gguf(shared / "models/llama-dense.gguf") as model,
        model.context(n_ctx=16, n_seq_max=1) as context,
    ):
        with pytest.raises((TemplateError, TokenizerError)):
            Chat(context)
        context.sequence()  # it took none


def test_turns_that_do_not_exist_are_named(bytes_model: Model) -> None:
    with bytes_model.context(n_ctx=256) as context:
        chat = Chat(context)
        with pytest.raises(OptionError, match="nothing was said yet"):
            chat.retry()
        chat.ask("hi", 1)
        with pytest.raises(OptionError, match="turn=1"):
            chat.edit(1, "hi")
        with pytest.raises(OptionError, match="n_turns=2"):
            chat.undo(2)
        with pytest.raises(OptionError, match="message=None"):
            chat.ask(None)
