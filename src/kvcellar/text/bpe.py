"""Byte-level BPE, as in GPT-2: merges in the order of the file, by Hugging Face tokenizers.

Pieces are written in letters that each stand for a byte. A byte for which the vocabulary has no
token is left out, as the models' own tokenizers and llama.cpp do: such models never saw it.

Before it is merged, text is cut into words by the recipe that ``tokenizer.ggml.pre`` names: a
sequence of patterns, each of which cuts what the one before it left; both the matches and what lies
between them are words. The patterns are those of the models' own tokenizers, in Oniguruma's syntax.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kvcellar.errors import TokenizerError, UnsupportedModel
from kvcellar.text.vocab import PREFIX, Metadata, TokenKind, Vocab, describe, read_strings

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_HOLE = " hole "  # no piece has a space in it


class BpeEncoder:
    """Turn text into ids by merging bytes; special tokens are unknown here.

    Raises:
        TokenizerError: the merges are malformed or name pieces that are not in the vocabulary.
    """

    strips_space = False

    def __init__(self, vocab: Vocab, metadata: Metadata, recipe: Recipe) -> None:
        self._hole = len(vocab)
        self._has_holes = not vocab.ids.keys() >= _byte_of_letter().keys()
        self._tokenizer = _build(vocab, _read_merges(metadata), recipe)

    def encode(self, text: str, *, after_special: bool) -> list[int]:
        """The ids of a text without special tokens."""
        del after_special
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i != self._hole] if self._has_holes else ids

    def piece_bytes(self, text: str, kind: int) -> bytes:
        """The bytes that a piece stands for."""
        if kind not in (TokenKind.NORMAL, TokenKind.UNUSED, TokenKind.UNDEFINED):
            return text.encode("utf-8", "surrogateescape")
        letters = _byte_of_letter()
        try:
            return bytes([letters[letter] for letter in text])
        except KeyError:  # not written in letters for bytes: added as it stands
            return text.encode("utf-8", "surrogateescape")


@cache
def _byte_of_letter() -> dict[str, int]:
    # Printable bytes stand for themselves, the others for the letters from U+0100 on, in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = sorted(set(range(256)) - set(printable))
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _read_merges(metadata: Metadata) -> list[tuple[str, str]]:
    key = PREFIX + "merges"
    lines = read_strings(metadata, key)
    # A piece may not begin with a space, so a pair is cut at the first space behind its start.
    merges = [(left, right) for left, _, right in [line.partition(" ") for line in lines]]
    for i, (left, right) in enumerate(merges):
        if not left or not right or " " in right:
            raise TokenizerError(f"{key}[{i}] must be two pieces, found {describe(lines[i])}")
    return merges


def _build(vocab: Vocab, merges: list[tuple[str, str]], recipe: Recipe) -> Tokenizer:
    from tokenizers import Tokenizer, models

    # Control tokens are left out, so that no text can spell one.
    pieces = dict(vocab.ids)
    barred = [vocab.tokens[i] for i in vocab.ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN)]
    for text in barred:
        del pieces[text]
    for text in _undecodable(vocab.tokens):
        pieces.pop(text, None)
    if not set(barred).isdisjoint(left + right for left, right in merges):
        merges = [pair for pair in merges if _spells_a_piece(pair, pieces)]
    # Without a token to put in its place, a byte that has none would let its neighbours merge.
    pieces[_HOLE] = len(vocab)
    try:
        model = models.BPE(pieces, merges, unk_token=_HOLE, ignore_merges=recipe.ignore_merges)
    except Exception as error:  # the library raises bare exceptions
        raise TokenizerError(f"{PREFIX}merges do not fit the vocabulary: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = build_pre_tokenizer(recipe)
    return tokenizer


def _undecodable(tokens: tuple[str, ...]) -> list[str]:
    """Tokens that are not UTF-8: no text can have them, and the library refuses them."""
    try:
        "".join(tokens).encode("utf-8")
    except UnicodeEncodeError:
        return [text for text in tokens if any("\ud800" <= letter <= "\udfff" for letter in text)]
    return []


def _spells_a_piece(pair: tuple[str, str], pieces: dict[str, int]) -> bool:
    left, right = pair
    return left in pieces and right in pieces and left + right in pieces


# -- recipes


@dataclass(frozen=True, slots=True)
class Recipe:
    """The pre-tokenizer that a name of ``tokenizer.ggml.pre`` stands for.

    Attributes:
        patterns: how text is cut into words.
        ignore_merges: whether a word that is a token is left unmerged.
        add_bos: the value where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_CASED_TAIL}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_TAIL}"
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
    r"(?<!\s)\s+$",  # finds what \s+$ does, without trying each space of a run in the middle
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
    ("dbrx smaug-bpe glm4 chatglm-bpe", Recipe((_LLAMA3,))),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        Recipe((_QWEN2,)),
    ),
    ("qwen35", Recipe((_QWEN35,))),
    ("ufakzeka", Recipe((_UFAKZEKA,))),
    ("minicpm5", Recipe((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True)),
    ("tekken", Recipe((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2", Recipe((_GPT4O,))),
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
        f"tokenizer.ggml.pre = {name[:60]!r} is not known; one of {', '.join(known_names())}"
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
