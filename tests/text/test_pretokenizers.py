"""Pre-tokenizers: every recipe builds, loses nothing, and cuts as its models expect."""

from __future__ import annotations

import pytest

from kvcellar.errors import UnsupportedModel
from kvcellar.text.bpe import build_pre_tokenizer, find_recipe, known_names

TEXT = "Hi 12345678's WE'RE\n\n  x  3.14\t日本語!?"


def _words(name: str, text: str) -> list[str]:
    pieces = build_pre_tokenizer(find_recipe(name)).pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in pieces]


@pytest.mark.parametrize("name", known_names())
def test_recipes_lose_nothing(name: str) -> None:
    assert "".join(_words(name, TEXT)) == TEXT


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "don't 123  x", ["don", "'t", " 123", " ", " x"]),
        ("gpt-2", "WE'RE\n\n y", ["WE", "'", "RE", "\n\n", " y"]),
        ("smollm", "x  12 y", ["x", "  ", "1", "2", " y"]),
        ("llama-bpe", "WE'RE 12345", ["WE", "'RE", " ", "123", "45"]),
        ("llama-bpe", "a.\n\n b", ["a", ".\n\n", " b"]),
        ("qwen2", "x 123", ["x", " ", "1", "2", "3"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("deepseek-v3", "1234 日本x", ["123", "4", " ", "日本", "x"]),
        ("deepseek-llm", "x 123\n", ["x", " ", "123", "\n"]),
        ("deepseek-coder", "f(12)", ["f", "(", "1", "2", ")"]),
        ("falcon", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("bloom", "one two, 3", ["one", " two", ",", " 3"]),
    ],
)
def test_recipes_cut(name: str, text: str, words: list[str]) -> None:
    assert _words(name, text) == words


def test_unknown_names_are_told_with_those_there_are() -> None:
    with pytest.raises(UnsupportedModel, match=r"'quux' is not known; one of .*llama-bpe"):
        find_recipe("quux")


def test_llama3_takes_whole_words_without_merging() -> None:
    assert find_recipe("llama3").ignore_merges
    assert find_recipe("llama3").add_bos
    assert not find_recipe("qwen2").ignore_merges
