"""Pre-tokenizers: every recipe builds, loses nothing, and cuts as its models expect."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tokenizers import PreTokenizedString

from kvcellar.errors import UnsupportedModel
from kvcellar.text.bpe import Recipe, build_pre_tokenizer, find_recipe, known_names

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

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


KINDS = (" ", "\n", "\t", "\u2028", "1", "a", "A", ".", "+", "\u0301", "日", "ʰ")
"""A character of each kind that patterns tell apart."""

RECIPES = {find_recipe(name): name for name in reversed(known_names())}
"""A name of each recipe."""


def shapes(n: int) -> dict[str, str]:
    """Texts of about n characters: a run of a kind, what may follow it, and two by turns."""
    texts = {f"{one!r} * n": one * n for one in KINDS}
    texts |= {f"{one!r} * n + {end!r}": one * n + end for one, end in permutations(KINDS, 2)}
    texts |= {f"({a!r} + {b!r}) * n": (a + b) * (n // 2) for a, b in combinations(KINDS, 2)}
    return texts


def seconds(pre_tokenizer: PreTokenizer, text: str) -> float:
    cut, start = PreTokenizedString(text), perf_counter()
    pre_tokenizer.pre_tokenize(cut)
    return perf_counter() - start


N = 2000
PLENTY = 0.15
"""Seconds that tell nothing: what grows with the square takes several times as long for 4 N."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPES.values())
def test_the_time_grows_with_the_text_not_with_its_square(recipe: Recipe) -> None:
    pre_tokenizer = build_pre_tokenizer(recipe)
    short, long = shapes(N), shapes(4 * N)
    slow = [name for name, text in long.items() if seconds(pre_tokenizer, text) > PLENTY]
    for _ in range(5):  # something else may have run meanwhile
        slow = [
            name
            for name in slow
            if (took := seconds(pre_tokenizer, long[name])) > PLENTY
            and took > 8 * seconds(pre_tokenizer, short[name])
        ]
    assert not slow


def test_the_clock_would_find_a_square() -> None:
    """With the pattern for white space as DeepSeek's own tokenizer writes it."""
    square = build_pre_tokenizer(replace(find_recipe("deepseek-llm"), patterns=(r"\s+$",)))
    short, long = (seconds(square, "\u2028" * n + "1") for n in (N, 4 * N))
    assert long > PLENTY
    assert long > 8 * short


def test_white_space_of_deepseek_llm_is_cut_as_its_own_pattern_does() -> None:
    ours = find_recipe("deepseek-llm")
    own = replace(ours, patterns=(*ours.patterns[:3], r"\s+$", *ours.patterns[4:]))
    assert ours.patterns[3] == r"(?<!\s)\s+$"
    cutters = [build_pre_tokenizer(recipe) for recipe in (ours, own)]
    random = np.random.default_rng(0)
    letters = [
        " ",
        "  ",
        "\n",
        "\r",
        "\t",
        "\u2028",
        "\u3000",
        "\x0b",
        "1",
        "a",
        "日",
        ".",
        "+",
        "ʰ",
    ]
    for _ in range(2000):
        text = "".join(random.choice(letters, random.integers(1, 12)))
        first, second = (cutter.pre_tokenize_str(text) for cutter in cutters)
        assert first == second, repr(text)
