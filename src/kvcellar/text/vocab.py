"""The vocabulary of a GGUF file: pieces, their kinds, and the tokens with a meaning.

Metadata come from a file that may be damaged or hostile: everything is read with its type checked,
and whatever is wrong raises :class:`TokenizerError` with the key and what was found. Invariants:

1. ``len(tokens) == len(kinds)``; no two tokens have the same text.
2. Every special id is None or inside the vocabulary.
3. ``stop_ids`` holds every token after which a model has nothing more to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kvcellar.errors import (
    TokenizerError,
    shown,
)
from kvcellar.types import Float32Array, Int32Array

Metadata = Mapping[str, object]

PREFIX = "tokenizer.ggml."

END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<\uff5cend▁of▁sentence\uff5c>",
    "<end_of_utterance>",
)
"""Texts that end a turn, in order of preference where a file names no EOT."""

_OTHER_STOPS = (
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "[e~[",
)
# The first of each group is what a fill-in-the-middle model writes when the gap is filled.
_FILL_STOPS = (
    ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
    ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("<|file_sep|>",),
)
# Ordinary words or mark-up in some vocabularies: they stop only where the file calls them control.
_AMBIGUOUS = frozenset({"</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<PAD>", "<REPO>"})
_HARMONY_TEXT = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class TokenKind(IntEnum):
    """What a token is, under the numbers of ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, eq=False)
class Vocab:
    """Tokens by id, and the ids with a meaning; ``kinds`` holds :class:`TokenKind`."""

    tokens: tuple[str, ...]
    kinds: Int32Array
    scores: Float32Array | None
    ids: dict[str, int]
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    unknown_id: int | None
    stop_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    strip_after_special: bool

    def __len__(self) -> int:
        return len(self.tokens)

    def ids_of(self, *kinds: TokenKind) -> list[int]:
        """The ids of all tokens of these kinds, ascending."""
        found = np.isin(self.kinds, np.array(kinds, np.int32))
        return [int(i) for i in np.flatnonzero(found)]


EMPTY_VOCAB = Vocab(
    tokens=(),
    kinds=np.empty(0, np.int32),
    scores=None,
    ids={},
    bos_id=None,
    eos_id=None,
    eot_id=None,
    unknown_id=None,
    stop_ids=frozenset(),
    add_bos=False,
    add_eos=False,
    strip_after_special=False,
)
"""The vocabulary of a file that has none."""


def read_vocab(metadata: Metadata, *, add_bos: bool, defaults: tuple[int, int] | None) -> Vocab:
    """Read and check the vocabulary.

    Args:
        metadata: that of the GGUF file.
        add_bos: the value where the file does not say.
        defaults: BOS and EOS where the file names none, as SentencePiece has them.

    Raises:
        TokenizerError: a key is missing, of the wrong type, length or range.
    """
    tokens = _read_tokens(metadata)
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        i, token = next((i, t) for i, t in enumerate(tokens) if ids[t] != i)
        raise TokenizerError(
            f"{PREFIX}tokens holds {describe(token)} twice, as {i} and as {ids[token]}"
        )
    kinds = read_ints(metadata, PREFIX + "token_type", len(tokens))
    if kinds is None:
        kinds = np.full(len(tokens), TokenKind.NORMAL, np.int32)
    special = _read_special_ids(metadata, len(tokens), defaults)
    eot_id = _apply_roles(ids, kinds, special["eot"])
    vocab = Vocab(
        tokens=tokens,
        kinds=kinds,
        scores=read_floats(metadata, PREFIX + "scores", len(tokens)),
        ids=ids,
        bos_id=special["bos"],
        eos_id=special["eos"],
        eot_id=eot_id,
        unknown_id=special["unknown"],
        stop_ids=_find_stops(ids, kinds, (special["eos"], eot_id, special["eom"])),
        add_bos=read_flag(metadata, PREFIX + "add_bos_token", add_bos),
        add_eos=read_flag(metadata, PREFIX + "add_eos_token", False),
        strip_after_special=_is_phi3(metadata),
    )
    _check_added(vocab)
    return vocab


def _read_tokens(metadata: Metadata) -> tuple[str, ...]:
    tokens = read_strings(metadata, PREFIX + "tokens")
    if not tokens:
        raise TokenizerError(f"{PREFIX}tokens is empty")
    if "" in tokens:
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    return tuple(tokens)


def _read_special_ids(
    metadata: Metadata, n_vocab: int, defaults: tuple[int, int] | None
) -> dict[str, int | None]:
    names = ("bos", "eos", "eot", "eom", "unknown")
    found = {name: read_token_id(metadata, f"{PREFIX}{name}_token_id", n_vocab) for name in names}
    if defaults is not None:
        for name, default in zip(("bos", "eos", "unknown"), (*defaults, 0), strict=True):
            if found[name] is None and default < n_vocab:
                found[name] = default
    return found


def _apply_roles(ids: dict[str, int], kinds: Int32Array, eot_id: int | None) -> int | None:
    """Correct the kinds of tokens that files are known to mislabel; return the EOT id."""
    for text in (*END_OF_TURN, *_OTHER_STOPS):
        token = ids.get(text)
        if token is not None and text not in _AMBIGUOUS:
            kinds[token] = TokenKind.CONTROL
    harmony = "<|return|>" in ids and "<|call|>" in ids
    for text in _HARMONY_TEXT:
        if text in ids:
            kinds[ids[text]] = TokenKind.USER_DEFINED
    if harmony and "<|end|>" in ids:
        kinds[ids["<|end|>"]] = TokenKind.USER_DEFINED
    if eot_id is not None:
        return eot_id
    present = (ids[text] for text in END_OF_TURN if text in ids)
    return next((i for i in present if kinds[i] == TokenKind.CONTROL), None)


def _find_stops(
    ids: dict[str, int], kinds: Int32Array, named: tuple[int | None, ...]
) -> frozenset[int]:
    texts = [*END_OF_TURN, *_OTHER_STOPS]
    for group in _FILL_STOPS:
        texts += [text for text in group if text in ids][:1]
    stops = {ids[text] for text in texts if text in ids}
    control = {i for i in stops if kinds[i] == TokenKind.CONTROL}
    return frozenset(control | {i for i in named if i is not None})


def _is_phi3(metadata: Metadata) -> bool:
    # Phi-3 was trained with the white space behind a special token removed; no key says so.
    name = metadata.get("general.name")
    return isinstance(name, str) and any(part in name.lower() for part in ("phi-3", "phi3"))


def _check_added(vocab: Vocab) -> None:
    for flag, token, name in (
        (vocab.add_bos, vocab.bos_id, "bos"),
        (vocab.add_eos, vocab.eos_id, "eos"),
    ):
        if flag and token is None:
            raise TokenizerError(
                f"{PREFIX}add_{name}_token is true but {PREFIX}{name}_token_id is missing"
            )


# -- metadata


def describe(value: object) -> str:
    """Show a value in an error, shortened."""
    if isinstance(value, str | int | float):
        return shown(value)
    if isinstance(value, Sequence):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype} {value.shape}"
    return type(value).__name__


def read_string(metadata: Metadata, key: str) -> str | None:
    """The string under a key, None if there is no such key."""
    value = metadata.get(key)
    if value is None or isinstance(value, str):
        return value
    raise TokenizerError(f"{key} must be a string, found {describe(value)}")


def read_flag(metadata: Metadata, key: str, default: bool) -> bool:
    """The boolean under a key, or the default."""
    value = metadata.get(key, default)
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TokenizerError(f"{key} must be true or false, found {describe(value)}")


def read_token_id(metadata: Metadata, key: str, n_vocab: int) -> int | None:
    """The token id under a key, None if there is no such key.

    Raises:
        TokenizerError: not an integer, or outside the vocabulary.
    """
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TokenizerError(f"{key} must be a token id, found {describe(value)}")
    if not 0 <= value < n_vocab:
        raise TokenizerError(f"{key} = {value} is outside the vocabulary of {n_vocab} tokens")
    return int(value)


def read_strings(metadata: Metadata, key: str) -> list[str]:
    """The list of strings under a key.

    Raises:
        TokenizerError: absent, or not a list of strings.
    """
    value = metadata.get(key)
    if value is None:
        raise TokenizerError(f"{key} is missing: the file has no vocabulary for this tokenizer")
    # An empty GGUF array has no element type worth keeping, so it may arrive as a NumPy array.
    if isinstance(value, np.ndarray) and value.size == 0:
        return []
    if not isinstance(value, list | tuple):
        raise TokenizerError(f"{key} must be a list of strings, found {describe(value)}")
    if set(map(type, value)) - {str}:
        bad = next(i for i, item in enumerate(value) if type(item) is not str)
        raise TokenizerError(f"{key}[{bad}] must be a string, found {describe(value[bad])}")
    return list(value)


def read_ints(metadata: Metadata, key: str, length: int) -> Int32Array | None:
    """The ``length`` integers under a key, None if there is no such key."""
    array = _read_numbers(metadata, key, length)
    if array is None:
        return None
    if array.dtype.kind not in "iu":
        raise TokenizerError(f"{key} must hold integers, found {describe(array)}")
    info = np.iinfo(np.int32)
    if array.size and (array.min() < info.min or array.max() > info.max):
        raise TokenizerError(f"{key} holds values beyond 32 bits: {array.max()}")
    return array.astype(np.int32)


def read_floats(metadata: Metadata, key: str, length: int) -> Float32Array | None:
    """The ``length`` numbers under a key, none of them NaN; None if there is no such key."""
    array = _read_numbers(metadata, key, length)
    if array is None:
        return None
    floats = array.astype(np.float32)
    if floats.size and math.isnan(float(floats.max())):
        raise TokenizerError(f"{key} holds NaN at index {int(np.isnan(floats).argmax())}")
    return floats


def _read_numbers(metadata: Metadata, key: str, length: int) -> np.ndarray | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iuf":
        raise TokenizerError(f"{key} must be an array of numbers, found {describe(value)}")
    if len(value) != length:
        raise TokenizerError(f"{key} has {len(value)} entries for a vocabulary of {length} tokens")
    return value
