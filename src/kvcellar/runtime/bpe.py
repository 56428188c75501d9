"""Byte-level BPE, as GPT-2 has it: merges in the order of the file, by Hugging Face tokenizers.

Pieces are written in letters that each stand for a byte. A byte for which the vocabulary has no
token is left out, as the models' own tokenizers and llama.cpp do: such models never saw it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kvcellar.errors import TokenizerError
from kvcellar.runtime.metadata import Metadata, describe, read_strings
from kvcellar.runtime.pretokenizers import Recipe, build_pre_tokenizer
from kvcellar.runtime.vocab import PREFIX, TokenKind, Vocab

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_HOLE = " hole "  # no piece has a space in it


class BpeEncoder:
    """Turns text into ids by merging bytes; knows no special tokens.

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
    """Tokens that are no UTF-8: no text can have them, and the library takes none."""
    try:
        "".join(tokens).encode("utf-8")
    except UnicodeEncodeError:
        return [text for text in tokens if any("\ud800" <= letter <= "\udfff" for letter in text)]
    return []


def _spells_a_piece(pair: tuple[str, str], pieces: dict[str, int]) -> bool:
    left, right = pair
    return left in pieces and right in pieces and left + right in pieces
