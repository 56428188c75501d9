"""Tokenizer: special tokens, damaged files, texts at the edges."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import TokenizerError, UnsupportedModel
from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import examples

CONTROL, USER = 3, 4
Maker = Callable[..., dict[str, object]]

CHAT = (("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<tool>", USER), ("<tool>x", USER))


@pytest.fixture(scope="module")
def chat(bpe: Maker) -> Tokenizer:
    return Tokenizer.from_metadata(
        bpe(("h i", "h e", "Ġ t"), CHAT, bos_token_id=259, eos_token_id=260, add_bos_token=True)
    )


def test_control_tokens_are_parsed_only_when_asked(chat: Tokenizer) -> None:
    text = "<|im_start|>hi<|im_end|>"
    assert chat.encode(text, add_special=False, parse_special=True) == [259, 256, 260]
    plain = chat.encode(text, add_special=False)
    assert not any(chat.is_special(i) for i in plain)
    assert chat.decode(plain) == text


def test_user_defined_tokens_are_always_matched_longest_first(chat: Tokenizer) -> None:
    assert chat.encode("hi<tool>hi<tool>x", add_special=False) == [256, 261, 256, 262]
    assert not chat.is_special(261)
    assert chat.decode([261]) == "<tool>"


def test_bos_and_eos_are_added_as_the_file_says(bpe: Maker) -> None:
    metadata = bpe(("h i",), CHAT, bos_token_id=257, eos_token_id=258)
    assert Tokenizer.from_metadata(metadata).encode("hi") == [256]
    metadata["tokenizer.ggml.add_bos_token"] = True
    metadata["tokenizer.ggml.add_eos_token"] = True
    both = Tokenizer.from_metadata(metadata)
    assert both.encode("hi") == [257, 256, 258]
    assert both.encode("hi", add_special=False) == [256]
    assert both.encode("") == [257, 258]


def test_skip_special_leaves_control_tokens_out(chat: Tokenizer) -> None:
    ids = [259, 256, 260]
    assert chat.decode(ids) == "hi"
    assert chat.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"


def test_stop_tokens_are_found_by_their_texts(bpe: Maker) -> None:
    special = (
        ("<|eot_id|>", CONTROL),
        ("<|endoftext|>", CONTROL),
        ("</s>", USER),
        ("<x>", CONTROL),
    )
    tokenizer = Tokenizer.from_metadata(bpe((), special, eos_token_id=259))
    assert tokenizer.eot_id == 256
    assert tokenizer.stop_ids == {256, 257, 259}


def test_a_mislabelled_end_of_turn_is_control(bpe: Maker) -> None:
    tokenizer = Tokenizer.from_metadata(bpe((), (("<|im_end|>", USER),)))
    assert tokenizer.is_special(256)
    assert tokenizer.stop_ids == {256}


def test_harmony_end_of_message_does_not_stop(bpe: Maker) -> None:
    special = tuple((f"<|{name}|>", CONTROL) for name in ("return", "call", "end", "channel"))
    tokenizer = Tokenizer.from_metadata(bpe((), special))
    assert tokenizer.stop_ids == {256, 257}
    assert not tokenizer.is_special(259)


def test_white_space_after_special_tokens_goes_for_phi3(spm: Maker) -> None:
    metadata = spm({"▁": -1.0, "h": -2.0}, (("<|user|>", CONTROL),), add_space_prefix=False)
    ids = Tokenizer.from_metadata(metadata).encode("<|user|>\n h", parse_special=True)
    assert len(ids) == 5
    metadata["general.name"] = "Phi-3 mini"
    assert len(Tokenizer.from_metadata(metadata).encode("<|user|>\n h", parse_special=True)) == 3


@pytest.mark.parametrize("model", ["test", "none", "no_vocab", None])
def test_without_a_vocabulary_text_raises(model: str | None) -> None:
    metadata: dict[str, object] = {"tokenizer.ggml.tokens": ["tok_0", "tok_1"]}
    if model:
        metadata["tokenizer.ggml.model"] = model
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.n_vocab == 2
    assert not tokenizer.stop_ids
    with pytest.raises(TokenizerError, match="pass token ids"):
        tokenizer.encode("hello")
    with pytest.raises(TokenizerError, match="no tokenizer"):
        tokenizer.decode([1])


def test_without_any_metadata_text_raises() -> None:
    tokenizer = Tokenizer.from_metadata({"tokenizer.ggml.token_type": np.ones(3, np.int32)})
    assert tokenizer.n_vocab == 0
    with pytest.raises(TokenizerError, match="pass token ids"):
        tokenizer.encode("hello")


@pytest.mark.parametrize("text", [chr(0xD800), "ab" + chr(0xDFFF)])
def test_lone_surrogates_are_refused(chat: Tokenizer, text: str) -> None:
    with pytest.raises(TokenizerError, match="lone surrogate at index"):
        chat.encode(text)


@pytest.mark.parametrize("token", [-1, 263, 2**40, 1.5, "1", None])
def test_tokens_that_do_not_exist_are_refused(chat: Tokenizer, token: object) -> None:
    for call in (chat.token_bytes, chat.is_special, lambda i: chat.decode([i])):
        with pytest.raises(TokenizerError, match="token"):
            call(token)  # type: ignore[arg-type]


def test_numpy_ids_decode(chat: Tokenizer) -> None:
    assert chat.decode(np.array([256, 256], np.int32)) == "hihi"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokens", [], "tokens is empty"),
        ("tokens", "abc", "must be a list of strings"),
        ("tokens", ["a", 7], r"tokens\[1\] must be a string"),
        ("tokens", ["a", "b", "a"], "twice, as 0 and as 2"),
        ("token_type", np.ones(3, np.int32), "3 entries"),
        ("token_type", np.ones(257, np.float32), "integers"),
        ("token_type", [1] * 257, "array of numbers"),
        ("scores", np.ones(5, np.float32), "5 entries"),
        ("scores", np.full(257, np.nan, np.float32), "NaN at index 0"),
        ("merges", ["h i", "hi"], r"merges\[1\] must be two pieces"),
        ("merges", [" x"], r"merges\[0\] must be two pieces"),
        ("merges", ["h nothere"], "do not fit the vocabulary"),
        ("bos_token_id", 257, "bos_token_id = 257 is outside the vocabulary of 257"),
        ("eos_token_id", -1, "eos_token_id = -1"),
        ("eot_token_id", "2", "eot_token_id must be a token id"),
        ("unknown_token_id", True, "unknown_token_id must be a token id"),
        ("add_bos_token", 1, "add_bos_token must be true or false"),
        ("add_bos_token", True, "bos_token_id is missing"),
        ("model", 3, "model must be a string"),
    ],
)
def test_damaged_metadata_are_named(bpe: Maker, key: str, value: object, words: str) -> None:
    metadata = bpe(("h i",))
    if key == "tokens" and value != "abc":
        del metadata["tokenizer.ggml.token_type"]
    metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.from_metadata(metadata)


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_absent_metadata_are_named(bpe: Maker, key: str) -> None:
    metadata = bpe(("h i",))
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(TokenizerError, match=f"{key} is missing"):
        Tokenizer.from_metadata(metadata)


def test_tokens_that_are_no_text_are_never_met_but_keep_their_bytes(bpe: Maker) -> None:
    tokenizer = Tokenizer.from_metadata(bpe(("h i",), (("\udcff", 1),)))
    assert tokenizer.token_bytes(257) == b"\xff"
    assert tokenizer.encode("hi") == [256]


@pytest.mark.parametrize(("key", "value"), [("model", "quuz"), ("pre", "quux")])
def test_unknown_kinds_are_named(bpe: Maker, key: str, value: str) -> None:
    metadata = bpe(("h i",)) | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(UnsupportedModel, match=value):
        Tokenizer.from_metadata(metadata)


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.text(max_size=3), st.integers()), max_size=5),
    st.integers(0, 300).map(lambda n: np.zeros(n, np.int32)),
    st.integers(0, 300).map(lambda n: np.full(n, 2**40, np.int64)),
    st.just(np.zeros((2, 2))),
)


_KEYS = [
    *("model", "pre", "tokens", "scores", "token_type", "merges", "bos_token_id", "eos_token_id"),
    *("add_bos_token", "add_eos_token", "add_space_prefix", "unknown_token_id"),
]


@examples(150)
@given(
    kind=st.sampled_from(["gpt2", "llama"]),
    changes=st.dictionaries(
        st.sampled_from(_KEYS),
        _VALUES,
        min_size=1,
        max_size=3,
    ),
)
def test_no_metadata_gives_another_error(
    bpe: Maker, spm: Maker, kind: str, changes: dict[str, object]
) -> None:
    metadata = bpe(("h i",)) if kind == "gpt2" else spm({"h": -1.0, "hi": -2.0, "i": -3.0})
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with contextlib.suppress(TokenizerError, UnsupportedModel):
        Tokenizer.from_metadata(metadata).encode("hi hi\n")


def test_a_text_of_bytes_that_merge_to_a_control_token_cannot_spell_it(bpe: Maker) -> None:
    metadata = bpe(("a b", "ab c"))
    kinds = metadata["tokenizer.ggml.token_type"]
    assert isinstance(kinds, np.ndarray)
    kinds[257] = CONTROL
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.encode("abc") == [256, ord("c")]
    assert tokenizer.encode("abc", parse_special=True) == [257]


def test_import_does_not_load_the_library() -> None:
    code = (
        "import sys, kvcellar.text.tokenizer, kvcellar.text.chat_template\n"
        "assert not {'tokenizers', 'jinja2'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
