"""Grammars: what a generated text may be, as a value that is compiled for a vocabulary.

A JSON Schema, a regular expression, a grammar in Lark's syntax or in llama.cpp's GBNF. llguidance
compiles them (the extra ``kvcellar[grammar]``). A compilation has a budget of size and of time,
a mask one of work: what exceeds it raises :class:`~kvcellar.errors.GrammarError`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from kvcellar.errors import GrammarError, check_choice, check_kind, check_real, check_text
from kvcellar.text import gbnf, json_schema
from kvcellar.text.grammar_matcher import Compiled, GrammarMatcher, shorten
from kvcellar.text.grammar_vocab import GrammarVocab, library, vocab_of
from kvcellar.text.tokenizer import Tokenizer
from kvcellar.types import BoolArray

T = TypeVar("T")

KINDS = {
    "json_schema": "the JSON Schema",
    "regex": "the regular expression",
    "lark": "the Lark grammar",
    "gbnf": "the GBNF grammar",
}

_MAX_CHARS = 2**18
_MAX_SYMBOLS = 50_000
_STACKS = (256 << 20, 32 << 20, 0)  # bytes; the library's compiler recurses
_MAX_KEPT = 32
_MAX_SEARCHED = 200
# The library would otherwise tokenize what is certain by itself; the model does it better.
_FOOTER = '\n%llguidance {"no_forcing": true}'


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that generated text has to match; made by one of the class methods.

    It is a value: it can be compared, copied and pickled, and belongs to no model.

    Attributes:
        kind: "json_schema", "regex", "lark" or "gbnf".
        text: the grammar; a JSON Schema as JSON.

    Raises:
        GrammarError: the text is not of that kind, or too large.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, tuple(KINDS))
        check_text("text", self.text)
        if len(self.text) > _MAX_CHARS:
            raise GrammarError(
                f"{KINDS[self.kind]} has {len(self.text)} characters: {_MAX_CHARS} are allowed"
            )
        if self.kind == "json_schema":
            object.__setattr__(self, "text", json_schema.read_schema(self.text))
        elif self.kind == "gbnf":
            gbnf.parse(self.text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Return the grammar of JSON that fits a schema.

        Properties come in the order of the schema. The guide on grammars lists the keywords.

        Args:
            schema: what ``json.loads`` makes of a schema, or its text.

        Raises:
            GrammarError: it holds what would be ignored; names its path.
        """
        return cls("json_schema", json_schema.read_schema(schema))

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of texts that match an expression as a whole.

        Args:
            pattern: in the syntax of Rust's crate ``regex``, which is Python's without look-around
                and back-references.
        """
        return cls("regex", check_text("pattern", pattern))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Return a grammar in llguidance's variant of Lark; its first rule is ``start``."""
        return cls("lark", check_text("text", text))

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """Return a grammar in llama.cpp's GBNF; its first rule is ``root``.

        Raises:
            GrammarError: it cannot be read; names the line.
        """
        return cls("gbnf", check_text("text", text))

    def matcher(self, tokenizer: Tokenizer, *, timeout: float = 20.0) -> GrammarMatcher:
        """Return a matcher at the beginning of a text.

        The first call for a tokenizer compiles the grammar; it is kept for the next ones.

        Args:
            tokenizer: that of the model.
            timeout: seconds that a compilation may take.

        Raises:
            GrammarError: the grammar is wrong, has no text, or exceeds a budget.
            TokenizerError: the model has no vocabulary.
            LibraryError: llguidance is not installed.
        """
        check_kind("tokenizer", tokenizer, Tokenizer, made="model.tokenizer")
        seconds = check_real("timeout", timeout, 0.0, 86400.0)
        vocab = vocab_of(tokenizer)
        compiled = vocab.compiled.get(self)
        if compiled is None:
            compiled = _in_time(lambda: _compile(self, vocab), seconds, KINDS[self.kind])
            while len(vocab.compiled) >= _MAX_KEPT:
                vocab.compiled.pop(next(iter(vocab.compiled)), None)
            vocab.compiled[self] = compiled
        return GrammarMatcher(compiled)


def _compile(grammar: Grammar, vocab: GrammarVocab) -> Compiled:
    start, error = _try(grammar, vocab)
    if error:
        where = _place(grammar, vocab, error) if grammar.kind == "json_schema" else ""
        raise GrammarError(f"{where or KINDS[grammar.kind]}: {error}")
    return Compiled(vocab, start, _usable(grammar, vocab), KINDS[grammar.kind])


def _try(grammar: Grammar, vocab: GrammarVocab) -> tuple[Any, str]:
    """Return the library's matcher and "", or what is wrong."""
    llguidance = library()
    limits = llguidance.LLParserLimits(max_grammar_size=_MAX_SYMBOLS, verbose_errors=False)
    start = llguidance.LLMatcher(
        vocab.tokenizer, _lark(grammar) + _FOOTER, log_level=0, limits=limits
    )
    if start.is_error():
        return start, shorten(start.get_error())
    probe = start.deep_copy()
    mask = np.frombuffer(probe.compute_bitmask(), np.uint8)
    if probe.is_error() or not mask.any():
        error = shorten(probe.get_error())
        return start, "no text fits it" if error.startswith("NoExtension") or not error else error
    return start, ""


def _lark(grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        return json_schema.to_lark(grammar.text)
    if grammar.kind == "gbnf":
        return gbnf.to_lark(grammar.text)
    if grammar.kind == "regex":
        made = json.loads(library().LLMatcher.grammar_from_regex(grammar.text))
        return str(made["grammars"][0]["lark_grammar"])
    return grammar.text


def _place(grammar: Grammar, vocab: GrammarVocab, error: str) -> str:
    """Return the path of the smallest schema within that has the same error, "" if none has."""
    for i, (path, text) in enumerate(json_schema.subschemas(grammar.text)):
        if i >= _MAX_SEARCHED:
            break
        if _try(Grammar("json_schema", text), vocab)[1] == error:
            return path
    return ""


def _usable(grammar: Grammar, vocab: GrammarVocab) -> BoolArray:
    """Return what text can mean, stop tokens, and special tokens that a Lark grammar names."""
    usable = ~vocab.special
    usable[list(vocab.stop_ids)] = True
    if grammar.kind == "lark":
        named = {
            vocab.names[name]
            for name in re.findall(r"<[^<>\s]*>", grammar.text)
            if name in vocab.names
        }
        usable[list(named)] = True
        if re.search(r"<\[[\^*\d]", grammar.text):
            usable[:] = True
    return usable


def _in_time(function: Callable[[], T], seconds: float, what: str) -> T:
    """Return a function's result; it runs in a thread of its own, with a large stack.

    Raises:
        GrammarError: it takes longer. The thread ends when the library's own limits end it.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = _start_thread(run)
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise GrammarError(f"{what} took longer than {seconds:g} s to compile: make it smaller")
    return results[0]


_stack_size = threading.Lock()


def _start_thread(run: Callable[[], None]) -> threading.Thread:
    with _stack_size:
        before = threading.stack_size()
        try:
            for size in _STACKS[:-1]:
                with suppress(RuntimeError, ValueError):  # no room for it
                    return _thread_of(run, size)
            return _thread_of(run, _STACKS[-1])
        finally:
            threading.stack_size(before)


def _thread_of(run: Callable[[], None], stack_size: int) -> threading.Thread:
    threading.stack_size(stack_size)
    thread = threading.Thread(target=run, name="kvcellar-compile", daemon=True)
    thread.start()
    return thread
