"""Pre-tokenizers: every recipe builds, loses nothing, and cuts as its models expect."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from kvcellar.errors import UnsupportedModel
from kvcellar.text.pre_tokenizers import (
    Form,
    build_pre_tokenizer,
    cut_every_third_digit,
    find_recipe,
    group_digits_of_words,
    group_numbers,
    known_names,
)
from tests.profiles import examples

TEXT = "Hi 12345678's WE'RE\n\n  x  3.14\t日本語!?"
IN_BYTES = [name for name in known_names() if find_recipe(name).form is Form.BYTES]
DISTINCT = {find_recipe(name): name for name in IN_BYTES}.values()
N_LONG = 30_000
LONG_TEXTS = (
    *("a", "A", "1", "½", "!", "'", "日", "\u0301", "_"),
    *(" ", "\n", "\t ", "\r\n", "!\n ", " a", "a ", "Aa", "a\u0301 ", "'s", "1a", "IMG"),
)
"""What long texts are made of."""


def _words(name: str, text: str) -> list[str]:
    recipe = find_recipe(name)
    cutter = build_pre_tokenizer(recipe)
    words: list[str] = []
    for part in [text] if recipe.digits is None else recipe.digits(text):
        pieces = cutter.pre_tokenize_str(part)
        words += [part[begin:end] for _, (begin, end) in pieces]
    return words


@pytest.mark.parametrize("name", IN_BYTES)
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
        ("kimi-k2", "HelloWorld's日本ab 1234", ["Hello", "World's", "日本", "ab", " ", "123", "4"]),
        (
            "youtu",
            "HelloWorld 한국어…日本 12",
            ["Hello", "World", " ", "한국어", "…", "日本", " ", "1", "2"],
        ),
        ("superbpe", "12345 6789x123", ["12", "345", " ", "6", "789", "x", "123"]),
        ("afmoe", "x 1234567 เ日b!c\n", ["x", " ", "1", "234", "567", " ", "เ日", "b", "!c", "\n"]),
        ("tiny_aya", "1234567 1234x", ["1", "234", "567", " ", "123", "4", "x"]),
        ("exaone-moe", "one two 12\n\n", ["one two", " ", "1", "2", "\n\n"]),
        ("chameleon", "a-1\tIMGIMGABZ", ["a", "-", "1", "\t", "IMGIMGABZ"]),
        ("jais-2", "a" + 7 * " " + "b  \n c", ["a", 4 * " ", 2 * " ", " b", "  \n", " c"]),
        ("laguna", "one!\n two", ["one", "!", "\n", " two"]),
        ("spark2_5", "a!\n\n 1234", ["a", "!", "\n", "\n", " ", "1", "2", "3", "4"]),
        ("talkie", "HelloWorld's", ["Hello", "World's"]),
        ("granite-embed-multi-97m", "e\u0301tE\u0301", ["e\u0301t", "E\u0301"]),
        ("glm5", "don't 1234", ["don", "'t", " ", "123", "4"]),
    ],
)
def test_recipes_cut(name: str, text: str, words: list[str]) -> None:
    assert _words(name, text) == words


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTINCT)
def test_long_texts_take_no_quadratic_time(name: str) -> None:
    for unit in LONG_TEXTS:
        text = " " + unit * (N_LONG // len(unit)) + "1x"
        begin = time.process_time()
        assert "".join(_words(name, text)) == text
        assert time.process_time() - begin < 1.5, unit


DIGITS = st.text("0123 ½²a_é\u0301-٣", max_size=25)


def _by_pattern(text: str, *patterns: str) -> list[str]:
    cutter = Sequence([Split(Regex(pattern), "isolated") for pattern in patterns])
    return [text[begin:end] for _, (begin, end) in cutter.pre_tokenize_str(text)]


@examples(150)
@given(DIGITS)
def test_digits_are_grouped_as_the_models_patterns_say(text: str) -> None:
    numbers = r"\p{N}+"
    assert group_digits_of_words(text) == _by_pattern(text, r"\d{1,3}(?=(?:\d{3})*\b)") or [""]
    grouped = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
    assert group_numbers(text) == _by_pattern(text, numbers, grouped)
    cut = [part for piece in cut_every_third_digit(text) for part in _by_pattern(piece, numbers)]
    assert cut == _by_pattern(text, numbers, r"(?=(\d{3})+(?!\d))")


def test_unknown_names_are_told_with_those_there_are() -> None:
    with pytest.raises(UnsupportedModel, match=r"'quux' is not known; one of .*llama-bpe"):
        find_recipe("quux")


def test_llama3_takes_whole_words_without_merging() -> None:
    assert find_recipe("llama3").ignore_merges
    assert find_recipe("llama3").add_bos
    assert not find_recipe("qwen2").ignore_merges


def test_glm_takes_whole_words_without_merging() -> None:
    assert find_recipe("glm4").ignore_merges
    assert find_recipe("glm5").ignore_merges
    assert not find_recipe("glm4").add_bos
