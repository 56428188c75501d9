"""Text to tokens and back, with the vocabulary of a GGUF file.

The kinds of vocabulary are those of llama.cpp; docs/tokenizers.md lists them, and where tokens
differ from llama.cpp's. Tokens that are matched whole are cut out of a text first
(:class:`Partition`), and an :class:`Encoder` tokenizes what lies between them. Invariants:

1. User-defined tokens are matched wherever they stand; control tokens only with
   ``parse_special``, so that without it no text can spell one.
2. ``decode(encode(text, add_special=False), skip_special=False) == text`` for every text whose
   bytes the vocabulary can spell.
3. No metadata and no argument raises anything but ``TokenizerError`` or ``UnsupportedModel``.
4. ``Detokenizer.push`` over any tokens and ``finish`` concatenate to ``Tokenizer.decode`` of them.
5. Text that a detokenizer returned is never changed: bytes of an unfinished character wait, and
   bytes that cannot become a character turn into U+FFFD.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from kvcellar.errors import (
    OptionError,
    TokenizerError,
    UnsupportedModel,
    check_bool,
    check_integers,
    shown,
    whole,
)
from kvcellar.text.bpe import ByteBpeEncoder, CharBpeEncoder
from kvcellar.text.plamo import PlamoEncoder
from kvcellar.text.pre_tokenizers import Form, find_recipe, known_names
from kvcellar.text.rwkv import RwkvEncoder
from kvcellar.text.spm import SpmEncoder
from kvcellar.text.unigram import UnigramEncoder
from kvcellar.text.vocab import (
    EMPTY_VOCAB,
    PREFIX,
    Defaults,
    Metadata,
    TokenKind,
    Vocab,
    describe,
    read_string,
    read_vocab,
)
from kvcellar.text.wordpiece import WordPieceEncoder
from kvcellar.types import Int32Array

_NO_VOCABULARY = ("none", "no_vocab", "test")
_KEY_CHARS = 3
_MOST_WAITING = 3  # bytes of a character that is not complete
_WHITE = " \t\n\r\v\f"

Fragment = str | int
"""Text to be tokenized, or the id of a token that was matched."""

Place = tuple[int, int, int]
"""Where a token was matched, with the white space that it strips: begin, end, id."""


class TokenRun(NamedTuple):
    """Tokens that belong together, and the characters ``[begin, end)`` that they come from."""

    begin: int
    end: int
    ids: list[int]


class Tokenizer:
    """A vocabulary and how to use it.

    Attributes:
        vocab: pieces, kinds and the tokens with a meaning.
        strips_space: whether encoding puts a space before a text, which decoding removes.
    """

    def __init__(self, vocab: Vocab, encoder: Encoder) -> None:
        self.vocab = vocab
        self.strips_space = encoder.strips_space
        self._encoder = encoder
        self._control = frozenset(vocab.ids_of(TokenKind.CONTROL, TokenKind.UNKNOWN))
        self._user = frozenset(vocab.ids_of(TokenKind.USER_DEFINED))
        whole = vocab.ids_of(TokenKind.CONTROL, TokenKind.USER_DEFINED)
        self._whole = frozenset(whole) - {vocab.unknown_id}
        self._partitions: dict[bool, Partition] = {}
        self._white: Partition | None = None

    @classmethod
    def from_metadata(cls, metadata: Metadata, *, pre: str | None = None) -> Tokenizer:
        """Return the tokenizer of a GGUF file.

        Without a vocabulary (``tokenizer.ggml.model`` absent, "none" or "test") it knows only the
        number of tokens (0 where the file lists none) and raises on text.

        Args:
            metadata: the file's.
            pre: the pre-tokenizer to use instead of the one that ``tokenizer.ggml.pre`` names.

        Raises:
            TokenizerError: the metadata are damaged; names the key.
            UnsupportedModel: an unknown kind of vocabulary or pre-tokenizer.
            OptionError: no such ``pre``, or a kind of vocabulary that has no pre-tokenizer.
        """
        model = check_kind(metadata, pre)
        if model is None:
            return cls(_read_bare_vocab(metadata), NoEncoder())
        return cls(*_KINDS[model](metadata, pre))

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        return len(self.vocab)

    @property
    def has_text(self) -> bool:
        """Whether it turns text into tokens and back; otherwise it only counts them."""
        return not isinstance(self._encoder, NoEncoder)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""
        return self.vocab.bos_id

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text."""
        return self.vocab.eos_id

    @property
    def eot_id(self) -> int | None:
        """The token that ends a turn."""
        return self.vocab.eot_id

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens after which generation ends."""
        return self.vocab.stop_ids

    @property
    def add_bos(self) -> bool:
        """Whether ``add_special`` puts BOS first."""
        return self.vocab.add_bos

    @property
    def add_eos(self) -> bool:
        """Whether ``add_special`` puts EOS last."""
        return self.vocab.add_eos

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        continuing: bool = False,
        literal: Iterable[tuple[int, int]] = (),
    ) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: any text, also "".
            add_special: add BOS, EOS and SEP where the file, or the kind of vocabulary, says so.
            parse_special: match control tokens that the text spells. Do not use it for text that is
                not trusted: it could end a turn and begin another.
            continuing: the text continues another, so nothing is put before it: SentencePiece
                vocabularies put a space before the beginning of a text.
            literal: ranges of characters, ascending, that are text whatever they spell: no control
                token and no user-defined one is matched where it touches one of them. User-defined
                tokens of white space are, as they mean no more than that.

        Raises:
            TokenizerError: a lone surrogate, a character the vocabulary cannot spell, or a range
                outside the text.
        """
        add_special = check_bool("add_special", add_special)
        ids: list[int] = []
        if add_special and self.vocab.add_bos and self.vocab.bos_id is not None:
            ids.append(self.vocab.bos_id)
        runs = self.encode_runs(
            text, parse_special=parse_special, continuing=continuing, literal=literal
        )
        ids += [token for run in runs for token in run.ids]
        if add_special and self.vocab.add_eos and self.vocab.eos_id is not None:
            ids.append(self.vocab.eos_id)
        if add_special and self.vocab.add_sep and self.vocab.sep_id is not None:
            ids.append(self.vocab.sep_id)
        return ids

    def encode_runs(
        self,
        text: str,
        *,
        parse_special: bool = False,
        continuing: bool = False,
        literal: Iterable[tuple[int, int]] = (),
    ) -> list[TokenRun]:
        """Return the tokens of a text with the characters that they come from.

        A run is a token that is matched whole, or all the text between two of them. Arguments and
        errors are those of :meth:`encode`.
        """
        _check_text(text)
        parse_special = check_bool("parse_special", parse_special)
        continuing = check_bool("continuing", continuing)
        fixed = _check_ranges(literal, len(text))
        places = self._partition(parse_special).places(text, fixed)
        if fixed:
            places = [*self._white_places(text, places), *places]
        runs: list[TokenRun] = []
        done = 0
        for begin, end, token in [*sorted(places), (len(text), len(text), None)]:
            if done < begin:
                ids = self._encoder.encode(text[done:begin], continuing=continuing)
                runs.append(TokenRun(done, begin, ids))
                continuing = False
            if token is not None:
                runs.append(TokenRun(begin, end, [token]))
                continuing = False  # behind a token that is matched whole a text begins
            done = end
        return runs

    def spelled_tokens(self, text: str) -> list[tuple[int, int]]:
        """Return where a text spells tokens that would be matched whole, white space apart."""
        found = self._partition(True).places(text)
        tokens = self.vocab.tokens
        return sorted((begin, end) for begin, end, i in found if not tokens[i].isspace())

    def first_characters(self) -> frozenset[str]:
        """Return what tokens begin with that are matched whole, white space apart."""
        texts = (self.vocab.tokens[i] for i in self._whole)
        return frozenset(text[0] for text in texts if text and not text.isspace())

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, continuing: bool = False
    ) -> str:
        """Return the text of tokens; bytes that make no character become U+FFFD.

        Args:
            ids: the tokens.
            skip_special: leave control tokens out rather than spell them.
            continuing: see :class:`Detokenizer`.

        Raises:
            TokenizerError: no such token.
        """
        stream = self.detokenizer(skip_special=skip_special, continuing=continuing)
        parts = [stream.push(token) for token in check_integers("token ids", ids, TokenizerError)]
        return "".join(parts) + stream.finish()

    def detokenizer(self, *, skip_special: bool = True, continuing: bool = False) -> Detokenizer:
        """Return a new stream from tokens to text."""
        return Detokenizer(self, skip_special=skip_special, continuing=continuing)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a special token's are its name.

        Raises:
            TokenizerError: no such token.
        """
        i = self._check_id(token)
        return self._encoder.piece_bytes(self.vocab.tokens[i], int(self.vocab.kinds[i]))

    @cached_property
    def pieces(self) -> tuple[bytes, ...]:
        """The bytes of every token, as :meth:`token_bytes` has them; made when first asked for."""
        kinds = self.vocab.kinds.tolist()
        return tuple(map(self._encoder.piece_bytes, self.vocab.tokens, kinds))

    def is_special(self, token: int) -> bool:
        """Whether a token is no part of the text: a control token, or the unknown one.

        Raises:
            TokenizerError: no such token.
        """
        return self._check_id(token) in self._control

    def is_matched_whole(self, token: int) -> bool:
        """Whether a token is matched whole, before text is tokenized: control or user-defined.

        The unknown token is not: it stands for a part of a text that cannot be spelled.

        Raises:
            TokenizerError: no such token.
        """
        return self._check_id(token) in self._whole

    def ends_in_text(self, ids: Sequence[int]) -> bool:
        """Whether text behind these tokens continues theirs.

        It does not if there are none, or if the last one is matched whole. An id outside the
        vocabulary counts as text.
        """
        if not isinstance(ids, Sequence):
            raise TokenizerError(f"token ids must be a list of integers, not {shown(ids)}")
        if not ids:
            return False
        if (last := whole(ids[-1])) is None:
            raise TokenizerError(f"a token id must be an integer, found {shown(ids[-1])}")
        return last not in self._whole

    def _partition(self, parse_special: bool) -> Partition:
        if parse_special not in self._partitions:
            whole = self._user | self._control if parse_special else self._user
            texts = [(self.vocab.tokens[i], i) for i in sorted(whole)]
            self._partitions[parse_special] = Partition(
                texts, self.vocab.strip_before, self.vocab.strip_after
            )
        return self._partitions[parse_special]

    def _white_places(self, text: str, places: list[Place]) -> list[Place]:
        """Return where user-defined tokens of white space stand between other tokens."""
        if self._white is None:
            texts = ((self.vocab.tokens[i], i) for i in sorted(self._user))
            self._white = Partition([(t, i) for t, i in texts if t.isspace()])
        return self._white.places(text, [(begin, end) for begin, end, _ in sorted(places)])

    def _check_id(self, token: int) -> int:
        if (i := whole(token)) is None:
            raise TokenizerError(f"a token id must be an integer, found {shown(token)}")
        if not 0 <= i < len(self.vocab):
            raise TokenizerError(f"no token {shown(i)}: the vocabulary has {len(self.vocab)}")
        return i


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TokenizerError(f"text must be a str, found {describe(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"text has a lone surrogate at index {error.start}: "
            'replace it with text.encode("utf-8", "replace").decode()'
        ) from None


def _check_ranges(ranges: object, size: int) -> list[tuple[int, int]]:
    if not isinstance(ranges, Iterable):
        raise TokenizerError(f"literal={shown(ranges)}: give ranges of characters (begin, end)")
    result, done = [], 0
    for pair in ranges:
        if not isinstance(pair, tuple) or len(pair) != 2 or None in (both := [*map(whole, pair)]):
            raise TokenizerError(f"literal has {shown(pair)}: give ranges (begin, end)")
        begin, end = (int(i or 0) for i in both)
        if not done <= begin <= end <= size:
            raise TokenizerError(
                f"literal has ({begin}, {end}): ranges must ascend within {size} characters"
            )
        result.append((begin, end))
        done = end
    return result


def _read_bare_vocab(metadata: Metadata) -> Vocab:
    if PREFIX + "tokens" not in metadata:
        return EMPTY_VOCAB
    return read_vocab(metadata, Defaults())


# -- kinds of vocabulary


def check_pre(name: object) -> None:
    """Raise OptionError if there is no such pre-tokenizer."""
    if not isinstance(name, str) or name not in known_names():
        raise OptionError(f"pre={shown(name)} is not known; one of {', '.join(known_names())}")


def check_kind(metadata: Metadata, pre: str | None = None) -> str | None:
    """Return the kind of vocabulary, None if there is none; the vocabulary itself is not read.

    Raises:
        TokenizerError: a name of it is no string.
        UnsupportedModel: an unknown kind or pre-tokenizer.
        OptionError: no such ``pre``, or a kind that has no pre-tokenizer.
    """
    model = read_string(metadata, PREFIX + "model")
    has_pre = model in ("gpt2", "whitespace")
    if pre is not None:
        check_pre(pre)
        if not has_pre:
            raise OptionError(f"pre={pre!r}: a vocabulary of kind {model} has no pre-tokenizer")
    if model is None or model in _NO_VOCABULARY:
        return None
    if model not in _KINDS:
        raise UnsupportedModel(
            f"{PREFIX}model = {describe(model)} is not known: {', '.join(_KINDS)} are; "
            "pass token ids"
        )
    if has_pre and pre is None:
        find_recipe(read_string(metadata, PREFIX + "pre") or "default")
    return model


def _open_gpt2(metadata: Metadata, pre: str | None) -> tuple[Vocab, Encoder]:
    recipe = find_recipe(pre or read_string(metadata, PREFIX + "pre") or "default")
    vocab = read_vocab(metadata, Defaults(add_bos=recipe.add_bos, fixed=recipe.fixed))
    if recipe.form is Form.BYTES:
        return vocab, ByteBpeEncoder(vocab, metadata, recipe)
    return vocab, CharBpeEncoder(vocab, metadata, recipe)


def _open_gemma4(metadata: Metadata, pre: str | None) -> tuple[Vocab, Encoder]:
    del pre
    return _open_gpt2(metadata, "gemma4")


def _open_whitespace(metadata: Metadata, pre: str | None) -> tuple[Vocab, Encoder]:
    recipe = find_recipe(pre or read_string(metadata, PREFIX + "pre") or "whitespace")
    vocab = read_vocab(metadata, Defaults(add_bos=recipe.add_bos, fixed=recipe.fixed))
    recipe = replace(recipe, form=Form.PLAIN)
    return vocab, CharBpeEncoder(vocab, metadata, recipe, drops_spaces=True)


def _open_spm(metadata: Metadata, pre: str | None) -> tuple[Vocab, Encoder]:
    del pre
    vocab = read_vocab(metadata, Defaults({"bos": 1, "eos": 2, "unknown": 0}, add_bos=True))
    return vocab, SpmEncoder(vocab, metadata)


def _open_unigram(metadata: Metadata, pre: str | None) -> tuple[Vocab, Encoder]:
    del pre
    vocab = read_vocab(metadata, Defaults({"eos": 1, "unknown": 2}, add_eos=True))
    return vocab, UnigramEncoder(vocab, metadata)


def _open_wordpiece(metadata: Metadata, pre: str | None) -> tuple[Vocab, Encoder]:
    del pre
    ids = {"bos": 101, "unknown": 100, "seperator": 102}
    flags = Defaults(ids, add_bos=True, add_sep=True, fixed=("bos", "eos"))
    vocab = read_vocab(metadata, flags)
    return vocab, WordPieceEncoder(vocab, metadata)


def _open_rwkv(metadata: Metadata, pre: str | None) -> tuple[Vocab, Encoder]:
    del pre
    vocab = read_vocab(metadata, Defaults({"eos": 0}, fixed=("bos", "eos")))
    return vocab, RwkvEncoder(vocab)


def _open_plamo(metadata: Metadata, pre: str | None) -> tuple[Vocab, Encoder]:
    del pre
    ids = {"bos": 1, "eos": 2, "unknown": 0}
    vocab = read_vocab(metadata, Defaults(ids, fixed=("bos", "eos")))
    return vocab, PlamoEncoder(vocab)


# -- back to text


class Detokenizer:
    """Turn a stream of tokens into text, whole characters at a time.

    Args:
        tokenizer: the tokenizer of these tokens.
        skip_special: leave control tokens out rather than spell them.
        continuing: the tokens follow others, so the space that SentencePiece vocabularies put
            before a text is a real one.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, continuing: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = check_bool("skip_special", skip_special)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next = not check_bool("continuing", continuing) and tokenizer.strips_space

    def follow(self, ids: Sequence[int] | Int32Array) -> None:
        """Go on behind these tokens, as if it had been given all of them; the last few are read.

        Ids that the vocabulary lacks have no text.

        Raises:
            TokenizerError: no list or array ``[n]`` of integers.
        """
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            ids = check_integers("token ids", ids, TokenizerError)
        self._decoder.reset()
        tokenizer, n_left, n_bytes = self._tokenizer, len(ids), 0
        tail: list[tuple[bytes, bool, bool]] = []
        is_known, self._strip_next = False, tokenizer.strips_space
        while n_left and not is_known:
            token = int(ids[n_left - 1])
            if not 0 <= token < tokenizer.n_vocab:
                self._strip_next = False
                break
            n_left -= 1
            tail.append(parts := self._parts(token))
            piece, is_whole, is_shown = parts
            # Whether a space is stripped is known behind the first token read that tells, so the
            # bytes of that one do not count.
            if n_bytes >= _MOST_WAITING:
                is_known = is_whole or bool(piece)
            elif is_shown:
                n_bytes += len(piece.removeprefix(b" "))
        for parts in reversed(tail):
            self._add(*parts)

    def push(self, token: int) -> str:
        """Return the text that this token completes, often "".

        Raises:
            TokenizerError: no such token.
        """
        return self._add(*self._parts(token))

    def _parts(self, token: int) -> tuple[bytes, bool, bool]:
        """Return a token's bytes, whether it is matched whole, and whether it is shown."""
        tokenizer = self._tokenizer
        is_shown = not (self._skip_special and tokenizer.is_special(token))
        return tokenizer.token_bytes(token), tokenizer.is_matched_whole(token), is_shown

    def _add(self, piece: bytes, is_whole: bool, is_shown: bool) -> str:
        if is_whole:
            self._strip_next = self._tokenizer.strips_space
        elif piece:
            piece = piece.removeprefix(b" ") if self._strip_next else piece
            self._strip_next = False
        return self._decoder.decode(piece) if is_shown else ""

    def finish(self) -> str:
        """Return U+FFFD for bytes that still wait, and start over."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class Partition:
    """Split text at a fixed set of token texts.

    Longer tokens go first, over the whole text, as in llama.cpp: of two that overlap the longer one
    wins, wherever it begins.

    Args:
        texts: ``(text, id)`` pairs; texts are not empty.
        strip_before: tokens before which white space is dropped.
        strip_after: tokens after which white space is dropped.
    """

    def __init__(
        self,
        texts: Iterable[tuple[str, int]],
        strip_before: Collection[int] = (),
        strip_after: Collection[int] = (),
    ) -> None:
        # A vocabulary may have thousands of them, and a text hardly any: one search for a common
        # beginning rules out a whole group.
        self._groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for text, token in texts:
            self._groups[text[:_KEY_CHARS]].append((text, token))
        self._strip_before = strip_before
        self._strip_after = strip_after

    def split(self, text: str) -> list[Fragment]:
        """The fragments of a text, in order, without empty strings."""
        fragments: list[Fragment] = []
        done = 0
        for begin, end, token in sorted(self.places(text)):
            fragments += (text[done:begin], token)
            done = end
        fragments.append(text[done:])
        return [fragment for fragment in fragments if fragment != ""]

    def places(self, text: str, taken: Iterable[tuple[int, int]] = ()) -> list[Place]:
        """Where tokens stand in a text, in no order; none touches a range that is taken."""
        used = bytearray(len(text))  # 1: part of a token, or stripped
        for begin, end in taken:
            used[begin:end] = b"\1" * (end - begin)
        return [place for item in self._present(text) for place in self._take(text, used, *item)]

    def _present(self, text: str) -> list[tuple[str, int]]:
        found = [
            item
            for key, group in self._groups.items()
            if key in text
            for item in group
            if item[0] in text
        ]
        return sorted(found, key=lambda item: -len(item[0].encode("utf-8", "surrogatepass")))

    def _take(
        self, text: str, taken: bytearray, needle: str, token: int
    ) -> Iterator[tuple[int, int, int]]:
        """Take a token where nothing of it is taken; yield where that is, with stripped space."""
        begin = text.find(needle)
        while begin >= 0:
            end = begin + len(needle)
            last_taken = taken.rfind(1, begin, end)
            if last_taken >= 0:
                free = taken.find(0, last_taken)
                begin = -1 if free < 0 else text.find(needle, free)
                continue
            if token in self._strip_after:
                while end < len(text) and text[end] in _WHITE and not taken[end]:
                    end += 1
            if token in self._strip_before:
                while begin and text[begin - 1] in _WHITE and not taken[begin - 1]:
                    begin -= 1
            taken[begin:end] = b"\1" * (end - begin)
            yield begin, end, token
            begin = text.find(needle, end)


class Encoder(Protocol):
    """A kind of vocabulary: how to tokenize plain text, and what a piece stands for."""

    strips_space: bool

    def encode(self, text: str, *, continuing: bool) -> list[int]:
        """The ids of a text without special tokens; it may continue another."""

    def piece_bytes(self, text: str, kind: int) -> bytes:
        """The bytes that a piece stands for."""


class NoEncoder:
    """The encoder of a file without a usable vocabulary: every use raises."""

    strips_space = False

    def encode(self, text: str, *, continuing: bool) -> list[int]:
        """Raises TokenizerError."""
        del text, continuing
        raise TokenizerError(
            "this model has no tokenizer: pass token ids instead of text, from Python only"
        )

    def piece_bytes(self, text: str, kind: int) -> bytes:
        """Raises TokenizerError."""
        del text, kind
        raise TokenizerError("this model has no tokenizer: use the token ids as they are")


_KINDS: Mapping[str, Callable[[Metadata, str | None], tuple[Vocab, Encoder]]] = MappingProxyType(
    {
        "gpt2": _open_gpt2,
        "llama": _open_spm,
        "gemma4": _open_gemma4,
        "t5": _open_unigram,
        "bert": _open_wordpiece,
        "rwkv": _open_rwkv,
        "plamo2": _open_plamo,
        "whitespace": _open_whitespace,
    }
)
