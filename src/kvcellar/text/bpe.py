"""BPE by a list of merges, as in GPT-2: in the order of the file, by Hugging Face tokenizers.

Pieces are written in letters that each stand for a byte, or in characters (:class:`Form`); what a
file's pieces are, and how text is cut into words before it is merged, the pre-tokenizer's
:class:`Recipe` says. A byte for which the vocabulary has no token is left out, as the models' own
tokenizers and llama.cpp do: such models never saw it.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from kvcellar.errors import TokenizerError
from kvcellar.text.pieces import SPACE, find_byte_tokens, spaced_bytes
from kvcellar.text.pre_tokenizers import Form, Recipe, build_pre_tokenizer
from kvcellar.text.vocab import (
    PREFIX,
    Metadata,
    TokenKind,
    Vocab,
    describe,
    read_flag,
    read_strings,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_HOLE = " hole "  # no piece has a space in it
_WHITE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


class ByteBpeEncoder:
    """Turn text into ids by merging bytes; special tokens are unknown here.

    Raises:
        TokenizerError: the merges are malformed or name pieces that are not in the vocabulary.
    """

    strips_space = False

    def __init__(self, vocab: Vocab, metadata: Metadata, recipe: Recipe) -> None:
        self._hole = len(vocab)
        self._has_holes = not vocab.ids.keys() >= _byte_of_letter().keys()
        self._cut = recipe.digits
        self._tokenizer = _build(vocab, _read_merges(metadata), ignore_merges=recipe.ignore_merges)
        self._tokenizer.pre_tokenizer = build_pre_tokenizer(recipe)

    def encode(self, text: str, *, continuing: bool) -> list[int]:
        """The ids of a text without special tokens."""
        del continuing
        if self._cut is None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        else:
            parts = self._cut(text)
            ids = self._tokenizer.encode(parts, is_pretokenized=True, add_special_tokens=False).ids
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


class CharBpeEncoder:
    """Turn text into ids by merging characters; special tokens are unknown here.

    A character that is no piece is spelled in byte tokens. Merges do not cross line breaks.

    Args:
        vocab: the vocabulary.
        metadata: that of the GGUF file.
        recipe: what pieces are written in, and what is left unmerged.
        drops_spaces: whether white space is no part of the text, and only separates words.

    Raises:
        TokenizerError: the merges are malformed or name pieces that are not in the vocabulary, or
            a byte token is not written ``<0xNN>``.
    """

    def __init__(
        self, vocab: Vocab, metadata: Metadata, recipe: Recipe, *, drops_spaces: bool = False
    ) -> None:
        self.strips_space = recipe.form is Form.WORDS
        self._form = recipe.form
        self._newlines = _find_newlines(vocab) if recipe.whole_newlines else {}
        self._lowers = drops_spaces and read_flag(metadata, PREFIX + "normalizer.lowercase", False)
        find_byte_tokens(vocab)
        self._hole = len(vocab)
        self._tokenizer = _build(vocab, _read_merges(metadata), in_bytes=False)
        self._word = re.compile(_words_of(recipe.form, drops_spaces=drops_spaces))

    def encode(self, text: str, *, continuing: bool) -> list[int]:
        """The ids of a text without special tokens."""
        ids: list[int] = []
        for word in self._words(text, continuing=continuing):
            whole = self._newlines.get(word)
            if whole is None:
                encoding = self._tokenizer.encode(word, add_special_tokens=False)
                ids += [i for i in encoding.ids if i < self._hole]
            else:
                ids.append(whole)
        return ids

    def piece_bytes(self, text: str, kind: int) -> bytes:
        """The bytes that a piece stands for."""
        if self._form is Form.PLAIN and kind != TokenKind.BYTE:
            return text.encode("utf-8", "surrogateescape")
        return spaced_bytes(text, kind)

    def _words(self, text: str, *, continuing: bool) -> list[str]:
        if self._lowers:
            text = "".join(map(str.lower, text))  # letter by letter: without regard to word ends
        if self._form is Form.PLAIN:
            return self._word.findall(text)
        text = text.replace(" ", SPACE)
        if self._form is Form.SPACED:
            return self._word.findall(text)
        # Each line begins a word, as if it began with a space, but for one that continues a text.
        text = re.sub(rf"(?<=\n)(?=[^\n{SPACE}])", SPACE, text)
        if not text.startswith(("\n", SPACE)) and not continuing:
            text = SPACE + text
        return self._word.findall(text)


def _find_newlines(vocab: Vocab) -> dict[str, int]:
    control = set(vocab.ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN))
    found = [text for text in vocab.tokens if text[0] == "\n" and not text.strip("\n")]
    return {text: vocab.ids[text] for text in found if vocab.ids[text] not in control}


def _words_of(form: Form, *, drops_spaces: bool) -> str:
    if drops_spaces:
        return f"[^{_WHITE}]+"
    if form is Form.PLAIN:
        return f"[^{_WHITE}]+|[{_WHITE}]+"
    return r"\n+|[^\n]+" if form is Form.SPACED else rf"\n+|{SPACE}?[^\n{SPACE}]+|{SPACE}"


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


def _build(
    vocab: Vocab,
    merges: list[tuple[str, str]],
    *,
    in_bytes: bool = True,
    ignore_merges: bool = False,
) -> Tokenizer:
    """Return a tokenizer that merges; ids from ``len(vocab)`` on stand for what has no token."""
    from tokenizers import Tokenizer, models

    # Control tokens are left out, so that no text can spell one.
    pieces = dict(vocab.ids)
    barred = [vocab.tokens[i] for i in vocab.ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN)]
    for text in barred:
        del pieces[text]
    for text in _undecodable(vocab.tokens):
        pieces.pop(text, None)
    # Nor may it spell a byte token, but those are needed for what is no piece.
    byte_texts = {vocab.tokens[i] for i in vocab.ids_of(TokenKind.BYTE)}
    if not byte_texts.union(barred).isdisjoint(left + right for left, right in merges):
        merges = [pair for pair in merges if _spells_a_piece(pair, pieces, byte_texts)]
    # Without a token to put in its place, a byte that has none would let its neighbours merge.
    pieces[_HOLE] = len(vocab)
    if not in_bytes:
        for byte in range(256):
            pieces.setdefault(f"<0x{byte:02X}>", len(vocab) + 1 + byte)
    try:
        model = models.BPE(
            pieces,
            merges,
            unk_token=_HOLE,
            byte_fallback=not in_bytes,
            ignore_merges=ignore_merges,
        )
    except Exception as error:  # the library raises bare exceptions
        raise TokenizerError(f"{PREFIX}merges do not fit the vocabulary: {error}") from error
    return Tokenizer(model)


def _undecodable(tokens: tuple[str, ...]) -> list[str]:
    """Tokens that are not UTF-8: no text can have them, and the library refuses them."""
    try:
        "".join(tokens).encode("utf-8")
    except UnicodeEncodeError:
        return [text for text in tokens if any("\ud800" <= letter <= "\udfff" for letter in text)]
    return []


def _spells_a_piece(pair: tuple[str, str], pieces: dict[str, int], barred: set[str]) -> bool:
    left, right = pair
    union = left + right
    return left in pieces and right in pieces and union in pieces and union not in barred
