"""Pre-tokenizers: how text is cut into words before it is merged.

``tokenizer.ggml.pre`` names a recipe: a sequence of patterns, each of which cuts what the one
before it left; both the matches and what lies between them are words. The patterns are those of the
models' own tokenizers, in Oniguruma's syntax, rewritten only where they would take time that grows
with the square of a text. docs/tokenizers.md says where llama.cpp cuts otherwise.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from kvcellar.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


class Form(Enum):
    """What the pieces of a vocabulary are written in."""

    BYTES = "letters that each stand for a byte"
    SPACED = "characters; a space is ▁"
    WORDS = "characters; a space is ▁ and begins a word, as the beginning of a text does"
    PLAIN = "characters as they are"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The pre-tokenizer that a name of ``tokenizer.ggml.pre`` stands for.

    Attributes:
        patterns: how text is cut into words; with forms other than bytes, only at line breaks.
        form: what pieces are written in.
        ignore_merges: whether a word that is a token is left unmerged.
        whole_newlines: whether a run of line breaks that is a token is left unmerged.
        digits: where long numbers are cut before anything else, if anywhere.
        add_bos: the value where the file does not say.
        fixed: the flags that the file cannot change.
    """

    patterns: tuple[str, ...]
    form: Form = Form.BYTES
    ignore_merges: bool = False
    whole_newlines: bool = False
    digits: Callable[[str], list[str]] | None = None
    add_bos: bool = False
    fixed: tuple[str, ...] = ()


# -- numbers
#
# Models that group digits from the right do it with a lookahead to the end of the number, which
# takes quadratic time, so it is done here.


def group_numbers(text: str) -> list[str]:
    """Cut out runs of numbers (Unicode's N), in groups of three from the right."""
    parts: list[str] = []
    for is_number, letters in groupby(text, _is_number):
        run = "".join(letters)
        parts += _groups(run) if is_number else [run]
    return parts


def group_digits_of_words(text: str) -> list[str]:
    """Cut out runs of digits that end a word, in groups of three from the right."""
    return _cut(text, _ends_of_groups(text, only_at_words_end=True))


def cut_every_third_digit(text: str) -> list[str]:
    """Cut before each three, six, nine, ... digits that end a run of digits."""
    return _cut(text, _ends_of_groups(text, only_at_words_end=False))


def _ends_of_groups(text: str, *, only_at_words_end: bool) -> Iterator[int]:
    for match in re.finditer(r"\d+", text):
        start, end = match.span()
        if not only_at_words_end:
            yield from range(start + (end - start) % 3, end, 3)
        elif end == len(text) or not _is_word_letter(text[end]):
            yield start
            yield from range(start + (end - start) % 3, end + 1, 3)


def _cut(text: str, places: Iterator[int]) -> list[str]:
    bounds = sorted({0, len(text), *places})
    return [text[begin:end] for begin, end in pairwise(bounds)]


def _groups(run: str) -> list[str]:
    first = len(run) % 3
    return [run[:first]] * bool(first) + [run[i : i + 3] for i in range(first, len(run), 3)]


def _is_number(letter: str) -> bool:
    return unicodedata.category(letter)[0] == "N"


def _is_word_letter(letter: str) -> bool:
    """Whether a letter is part of a word, as Oniguruma sees it."""
    category = unicodedata.category(letter)
    return category[0] in "LM" or category in ("Nd", "Pc")


# -- patterns

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_TAIL = rf"{_SIGNS}|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UFAKZEKA = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_CASED_TAIL}"
)
_GPT4O = rf"{_CASED}|\p{{N}}{{1,3}}|{_CASED_TAIL}"
# White space in runs of powers of two. A line break can only be ahead where a run begins, or behind
# another one: to look for it at each place would take quadratic time.
_JAIS2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SIGNS}"
    r"|(?:(?<!\s)|(?<=[\r\n]))\s*[\r\n]+"
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)"
    r"|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s"
)
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = (
    r"\p{Han}+|"
    + _CASED.replace(_UPPER, _UPPER[:-1] + _NOT_HAN).replace(_LOWER, _LOWER[:-1] + _NOT_HAN)
    + rf"|\p{{N}}{{1,3}}|{_TAIL}"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_YOUTU = (_YOUTU_SCRIPTS, rf"{_CASED}|\p{{N}}|{_CASED_TAIL}")
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    "([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_SEED = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK3_MAIN = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _DEEPSEEK3_MAIN,
)
_SPARK = (
    r"\p{N}{1,3}",
    _DEEPSEEK3[1],
    _DEEPSEEK3_MAIN.replace(r"+[\r\n]*|\s*[\r\n]+", r"+|[\r\n]"),
    r"\p{N}",
)
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_AFMOE = (_AFMOE_SCRIPTS, _DEEPSEEK3_MAIN)
# The letters of scripts with upper and lower case, as DeepSeek's first tokenizer lists them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = (
    "[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"(?<!\s)\s++$",  # or each place of a long run would be tried
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)

_PLAIN_GPT2 = (
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum "
    "modern-bert jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe"
)
_GROUPS: tuple[tuple[str, Recipe], ...] = (
    ("default", Recipe(_DEFAULT)),
    (_PLAIN_GPT2, Recipe((_GPT2,))),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        Recipe((r"\p{N}", _GPT2)),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        Recipe((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", Recipe((_LLAMA3,))),
    ("glm4 glm5", Recipe((_LLAMA3,), ignore_merges=True)),
    ("jais-2", Recipe((_JAIS2,))),
    ("kimi-k2", Recipe((_KIMI,))),
    ("youtu", Recipe(_YOUTU, ignore_merges=True)),
    ("laguna", Recipe((r"[^\n]+|\n+", _QWEN2))),
    ("exaone-moe", Recipe((_EXAONE_MOE,))),
    ("chameleon", Recipe(_CHAMELEON, add_bos=True)),
    ("superbpe", Recipe((r"\p{N}+",), digits=cut_every_third_digit)),
    ("tiny_aya cohere2moe", Recipe((_GPT4O,), digits=group_digits_of_words)),
    ("afmoe", Recipe(_AFMOE, digits=group_numbers)),
    ("spark2_5", Recipe(_SPARK)),
    ("granite-embed-multi-97m", Recipe((_GPT4O,), ignore_merges=True)),
    (
        "gemma4 granite-embed-multi-311m",
        Recipe((), Form.SPACED, whole_newlines=True, add_bos=True, fixed=("bos",)),
    ),
    ("mmbert", Recipe((), Form.WORDS, whole_newlines=True)),
    ("sarvam-moe", Recipe((), Form.SPACED)),
    ("whitespace", Recipe((), Form.PLAIN)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        Recipe((_QWEN2,)),
    ),
    ("qwen35", Recipe((_QWEN35,))),
    ("ufakzeka", Recipe((_UFAKZEKA,))),
    ("minicpm5", Recipe((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True)),
    ("tekken", Recipe((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2 talkie", Recipe((_GPT4O,))),
    ("seed-coder", Recipe((_SEED,))),
    ("bailingmoe bailingmoe2 llada-moe", Recipe((_BAILING,))),
    ("deepseek-llm", Recipe(_DEEPSEEK)),
    ("deepseek-coder", Recipe(_DEEPSEEK_CODER)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Recipe(_DEEPSEEK3)),
    ("falcon", Recipe((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _THREE_DIGITS))),
    ("poro-chat bloom gpt3-finnish", Recipe((_BLOOM,))),
    ("viking", Recipe((_BLOOM, r"\p{N}"))),
)


def known_names() -> list[str]:
    """The known values of ``tokenizer.ggml.pre``, sorted."""
    return sorted(name for names, _ in _GROUPS for name in names.split())


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a ``tokenizer.ggml.pre``.

    Raises:
        UnsupportedModel: there is no such name; the message lists the known ones.
    """
    for names, recipe in _GROUPS:
        if name in names.split():
            return recipe
    raise UnsupportedModel(
        f"tokenizer.ggml.pre = {name[:60]!r} is not known; one of {', '.join(known_names())}. "
        "If one of them is right for this model, name it: pre=NAME, or --pre NAME"
    )


def build_pre_tokenizer(recipe: Recipe) -> PreTokenizer:
    """Build a recipe's pre-tokenizer, which also turns bytes into the letters for them."""
    from tokenizers import Regex, pre_tokenizers

    # The library has GPT-2's pattern built in, and faster.
    ends_in_gpt2 = recipe.patterns[-1] == _GPT2
    steps: list[PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in (recipe.patterns[:-1] if ends_in_gpt2 else recipe.patterns)
    ]
    return pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=ends_in_gpt2)]
    )
