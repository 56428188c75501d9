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
from dataclasses import dataclass, field
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
    "<turn|>",
    "<|tool_response>",
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
    ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    ("<|file_sep|>",),
)
# Ordinary words or mark-up in some vocabularies: they stop only where the file calls them control.
_AMBIGUOUS = frozenset({"</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<PAD>", "<REPO>"})
_HARMONY_TEXT = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
# Where a vocabulary has all of one of these, "<|end|>" ends a message, not a turn.
_HARMONY_STOPS = (
    {"<|return|>", "<|call|>"},
    {"<|return|>", "<|calls|>"},
    {"<|call|>", "<|flush|>"},
    {"<|calls|>", "<|flush|>"},
)
# Vocabularies and architectures whose mask token takes the white space before it.
_MASK_STRIPS = {
    "tokenizer.ggml.pre": ("jina-v2-de", "jina-v2-es", "jina-v2-code", "mmbert"),
    "general.architecture": ("nomic-bert-moe", "jina-bert-v3"),
}


class TokenKind(IntEnum):
    """What a token is, under the numbers of ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a kind of vocabulary has where the file does not say.

    Attributes:
        ids: special tokens by name; those beyond the vocabulary count as absent.
        add_bos: whether a text begins with BOS.
        add_eos: whether a text ends with EOS.
        add_sep: whether a text ends with SEP, whatever the file says.
        fixed: the flags of ``bos`` and ``eos`` that the file cannot change.
    """

    ids: Mapping[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_sep: bool = False
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Vocab:
    """Tokens by id, and the ids with a meaning; ``kinds`` holds :class:`TokenKind`.

    White space before tokens of ``strip_before`` and after those of ``strip_after`` is dropped.
    """

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
    sep_id: int | None = None
    add_sep: bool = False
    strip_before: frozenset[int] = frozenset()
    strip_after: frozenset[int] = frozenset()

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
)
"""The vocabulary of a file that has none."""


def read_vocab(metadata: Metadata, defaults: Defaults) -> Vocab:
    """Read and check the vocabulary.

    Args:
        metadata: that of the GGUF file.
        defaults: what counts where the file does not say.

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
    strip_before, strip_after = _find_stripping(metadata, ids, kinds)
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
        add_bos=_read_add(metadata, "bos", defaults.add_bos, defaults),
        add_eos=_read_add(metadata, "eos", defaults.add_eos, defaults),
        sep_id=special["seperator"],
        add_sep=defaults.add_sep,
        strip_before=strip_before,
        strip_after=strip_after,
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
    metadata: Metadata, n_vocab: int, defaults: Defaults
) -> dict[str, int | None]:
    names = ("bos", "eos", "eot", "eom", "unknown", "seperator")  # GGUF spells it so
    found = {name: read_token_id(metadata, f"{PREFIX}{name}_token_id", n_vocab) for name in names}
    for name, default in defaults.ids.items():
        if found[name] is None and default < n_vocab:
            found[name] = default
    return found


def _read_add(metadata: Metadata, name: str, default: bool, defaults: Defaults) -> bool:
    said = read_flag(metadata, f"{PREFIX}add_{name}_token", default)
    return default if name in defaults.fixed else said


def _apply_roles(ids: dict[str, int], kinds: Int32Array, eot_id: int | None) -> int | None:
    """Correct the kinds of tokens that files are known to mislabel; return the EOT id."""
    for text in (*END_OF_TURN, *_OTHER_STOPS):
        token = ids.get(text)
        if token is not None and text not in _AMBIGUOUS:
            kinds[token] = TokenKind.CONTROL
    for text in _HARMONY_TEXT:
        if text in ids:
            kinds[ids[text]] = TokenKind.USER_DEFINED
    if "<|end|>" in ids and any(ids.keys() >= texts for texts in _HARMONY_STOPS):
        kinds[ids["<|end|>"]] = TokenKind.USER_DEFINED
    if "<|tool_response>" in ids and "</s>" in ids:  # Gemma 4, where it is HTML
        kinds[ids["</s>"]] = TokenKind.NORMAL
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


def _find_stripping(
    metadata: Metadata, ids: dict[str, int], kinds: Int32Array
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the tokens that take the white space before and behind them; no key says so."""
    name = _text(metadata, "general.name").lower()
    if any(part in _text(metadata, key) for key, parts in _MASK_STRIPS.items() for part in parts):
        return frozenset(ids[text] for text in ("<mask>",) if text in ids), frozenset()
    if "phi-3" in name or "phi3" in name:
        whole = np.isin(kinds, [TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED])
        plain = {ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        return frozenset(), frozenset(map(int, np.flatnonzero(whole))) - plain
    masks = ("[MASK]",) if "modern-bert" in name else ()
    return frozenset(ids[text] for text in masks if text in ids), frozenset()


def _text(metadata: Metadata, key: str) -> str:
    value = metadata.get(key)
    return value if isinstance(value, str) else ""


def _check_added(vocab: Vocab) -> None:
    for flag, token, name in (
        (vocab.add_bos, vocab.bos_id, "bos"),
        (vocab.add_eos, vocab.eos_id, "eos"),
    ):
        if flag and token is None:
            raise TokenizerError(
                f"{PREFIX}add_{name}_token is true but {PREFIX}{name}_token_id is missing"
            )
    if vocab.add_sep and vocab.sep_id is None:
        raise TokenizerError(f"{PREFIX}seperator_token_id is missing: it ends every text")


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
