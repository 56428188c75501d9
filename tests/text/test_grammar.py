"""Grammars and matchers: every kind of vocabulary, and whatever comes in between."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import GrammarError, HandleError, LibraryError, OptionError, TokenizerError
from kvcellar.text import grammar_matcher
from kvcellar.text.constraint import Constraint
from kvcellar.text.grammar import Grammar
from kvcellar.text.grammar_matcher import GrammarMatcher
from kvcellar.text.tokenizer import Tokenizer
from tests.profiles import examples
from tests.text.following import BYTE_IDS, BYTES, END, TOOL, TURN, continuing, fits
from tests.text.test_rwkv import make as make_rwkv
from tests.text.vocabularies import UNUSED, make_bpe, make_spm

SPM = Tokenizer.from_metadata(
    make_spm(
        {"▁": -1, "▁a": -2, "ab": -3, "é": -4, "▁ab": -5, "bé": -6},
        (("<pad>", UNUSED), ("<|im_end|>", 3)),
    )
)
NO_STOP = Tokenizer.from_metadata(make_bpe())
LETTERS = Tokenizer.from_metadata(
    {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["<s>", *"abcdefgh"]}
)
VOCABULARIES = {
    "byte BPE": BYTES,
    "SentencePiece": SPM,
    "rwkv": Tokenizer.from_metadata(make_rwkv([b"ab", "bé".encode(), b" a", b"\xc3\xa9a"])),
}

TEXTS = st.sets(st.text("ab é", max_size=4), min_size=1, max_size=5)
MAKERS = {
    "regex": lambda texts: Grammar.regex("|".join(map(re.escape, texts))),
    "lark": lambda texts: Grammar.lark("start: " + " | ".join(f'"{text}"' for text in texts)),
    "gbnf": lambda texts: Grammar.gbnf("root ::= " + " | ".join(f'"{text}"' for text in texts)),
}


@pytest.mark.parametrize("kind", VOCABULARIES)
@examples(15)
@given(texts=TEXTS, maker=st.sampled_from(sorted(MAKERS)), data=st.data())
def test_exactly_the_tokens_that_continue_a_text_are_allowed(
    kind: str, texts: set[str], maker: str, data: st.DataObject
) -> None:
    """On the way of any tokens, not just of those that a text would be tokenized to."""
    if maker == "lark":
        texts = texts - {""} or {"a"}  # its lexer has no empty strings beside others
    tokenizer = VOCABULARIES[kind]
    matcher = MAKERS[maker](sorted(texts)).matcher(tokenizer)
    assert isinstance(matcher, Constraint)
    encoded = [text.encode() for text in texts]
    so_far = b""
    while True:
        expected = continuing(encoded, so_far, tokenizer)
        assert set(matcher.allowed().nonzero()[0].tolist()) == expected
        assert matcher.is_accepting == (so_far in encoded)
        assert matcher.is_finished == (so_far in encoded and expected <= tokenizer.stop_ids)
        token = data.draw(st.sampled_from(sorted(expected)))
        matcher.accept(token)
        if token in tokenizer.stop_ids:
            break
        so_far += tokenizer.token_bytes(token)
    assert matcher.is_finished
    assert set(matcher.allowed().nonzero()[0].tolist()) == tokenizer.stop_ids


@examples(40)
@given(
    pattern=st.recursive(
        st.sampled_from(["a", "b", "[^a]", ".", r"\d", "é", r"\.", r"\w"]),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda t: f"(?:{t[0]}|{t[1]})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])).map(
                lambda t: f"(?:{t[0]}){t[1]}"
            ),
        ),
        max_leaves=5,
    ),
    texts=st.lists(st.text("ab.é1", max_size=5), min_size=5, max_size=5),
)
def test_an_expression_matches_as_a_whole(pattern: str, texts: list[str]) -> None:
    grammar = Grammar.regex(pattern)
    assert [fits(grammar, t) for t in texts] == [bool(re.fullmatch(pattern, t)) for t in texts]


def test_no_text_spells_a_special_token() -> None:
    for grammar in (Grammar.regex("(?s:.*)"), Grammar.lark('start: A\nA: ~"x"')):
        allowed = grammar.matcher(BYTES).allowed()
        assert not allowed[TOOL]
        assert allowed[[END, TURN]].all()


def test_a_lark_grammar_may_name_a_special_token() -> None:
    matcher = Grammar.lark('start: <tool> "a"').matcher(BYTES)
    assert matcher.allowed().nonzero()[0].tolist() == [TOOL]
    matcher.accept(TOOL)
    assert matcher.allowed().nonzero()[0].tolist() == [BYTE_IDS[b"a"]]


def test_a_stop_token_that_a_grammar_names_is_part_of_the_text() -> None:
    matcher = Grammar.lark('start: <eot> "a"').matcher(BYTES)
    assert matcher.allowed().nonzero()[0].tolist() == [TURN]
    matcher.accept(TURN)
    assert not matcher.is_finished
    matcher.accept(BYTE_IDS[b"a"])
    assert matcher.allowed().nonzero()[0].tolist() == [END, TURN]


def test_without_stop_tokens_the_text_is_finished_all_the_same() -> None:
    assert not NO_STOP.stop_ids
    matcher = Grammar.regex("a").matcher(NO_STOP)
    matcher.accept(NO_STOP.encode("a")[0])
    assert matcher.is_finished
    assert not matcher.allowed().any()


def test_a_vocabulary_that_cannot_go_on_says_so() -> None:
    matcher = Grammar.regex("aé").matcher(LETTERS)
    matcher.accept(1)
    with pytest.raises(GrammarError, match="no token of the vocabulary"):
        matcher.allowed()
    matcher.rollback(1)
    assert matcher.allowed()[1]


def test_a_model_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(TokenizerError, match="no tokenizer"):
        Grammar.regex("a").matcher(Tokenizer.from_metadata({}))


def test_what_is_not_allowed_changes_nothing() -> None:
    matcher = Grammar.regex("ab").matcher(BYTES)
    before = matcher.allowed()
    for token in (BYTE_IDS[b"b"], END, TOOL):
        with pytest.raises(GrammarError, match=f"token {token} is not allowed"):
            matcher.accept(token)
    wrong: list[Any] = [-1, BYTES.n_vocab, True, "a"]
    for other in wrong:
        with pytest.raises(OptionError, match="token"):
            matcher.accept(other)
    assert matcher.allowed() is before
    with pytest.raises(ValueError, match="read-only"):
        before[0] = True


@examples(30)
@given(data=st.data())
def test_copies_and_rollbacks_are_what_their_tokens_say(data: st.DataObject) -> None:
    grammar = Grammar.json_schema({"type": "array", "items": {"enum": ["a", 12, True]}})
    matchers = [grammar.matcher(BYTES)]
    for _ in range(data.draw(st.integers(1, 20))):
        at = data.draw(st.integers(0, len(matchers) - 1))
        matcher = matchers[at]
        step = data.draw(st.sampled_from(["accept"] * 4 + ["copy", "rollback"]))
        if step == "accept":
            tokens = matcher.allowed().nonzero()[0].tolist()
            matcher.accept(data.draw(st.sampled_from(tokens)))
        elif step == "copy" and len(matchers) < 4:
            matchers.append(matcher.copy())
        elif step == "rollback":
            matcher.rollback(data.draw(st.integers(0, len(matcher.tokens))))
    for matcher in matchers:
        assert_equal(matcher, replayed(matcher))


def replayed(matcher: GrammarMatcher) -> GrammarMatcher:
    other = GrammarMatcher(matcher._compiled)
    for token in matcher.tokens:
        other.accept(token)
    return other


def assert_equal(matcher: GrammarMatcher, other: GrammarMatcher) -> None:
    assert matcher.tokens == other.tokens
    assert (matcher.allowed() == other.allowed()).all()
    assert matcher.is_accepting == other.is_accepting
    assert matcher.is_finished == other.is_finished


def test_more_than_was_accepted_is_not_taken_back() -> None:
    matcher = Grammar.regex("ab").matcher(BYTES)
    matcher.accept(BYTE_IDS[b"a"])
    with pytest.raises(OptionError, match="n_tokens"):
        matcher.rollback(2)


class Interrupting:
    """An ``LLMatcher`` that is interrupted before or after what it does."""

    def __init__(self, state: Any, *, before: bool) -> None:
        self._state = state
        self._before = before

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._state, name)
        if name not in ("consume_token", "rollback"):
            return method

        def call(argument: int) -> None:
            if not self._before:
                method(argument)
            raise KeyboardInterrupt

        return call


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("step", ["accept", "rollback"])
def test_an_interrupted_step_leaves_the_matcher_usable(step: str, before: bool) -> None:
    matcher = Grammar.regex("ab(c|d)").matcher(BYTES)
    matcher.accept(BYTE_IDS[b"a"])
    live = matcher._settled()
    matcher._live = live._replace(state=Interrupting(live.state, before=before))
    with pytest.raises(KeyboardInterrupt):
        matcher.accept(BYTE_IDS[b"b"]) if step == "accept" else matcher.rollback(1)
    assert_equal(matcher, replayed(matcher))
    assert_equal(matcher.copy(), matcher)


def test_an_interrupt_once_a_token_is_accepted_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = Grammar.regex("ab(c|d)").matcher(BYTES)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(grammar_matcher._WORKERS, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            matcher.accept(BYTE_IDS[b"a"])
    assert matcher.tokens == (BYTE_IDS[b"a"],)
    assert_equal(matcher, replayed(matcher))


def test_the_next_mask_is_computed_without_being_asked_for() -> None:
    matcher = Grammar.json_object().matcher(BYTES)
    matcher.accept(BYTE_IDS[b"{"])
    live = matcher._live
    assert live is not None
    live.step.result(timeout=10)
    assert matcher.allowed() is live.step.result().allowed


def test_threads_may_share_a_grammar_and_a_matcher() -> None:
    grammar = Grammar.regex("(ab)*")
    shared = grammar.matcher(BYTES)
    begin = threading.Barrier(4)

    def follow(_: int) -> bool:
        begin.wait()
        own = grammar.matcher(BYTES)
        for byte in b"abababab":
            own.accept(BYTE_IDS[bytes([byte])])
            shared.allowed()
            shared.copy()
        return own.is_accepting

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(follow, range(4)))
    assert_equal(shared, replayed(shared))


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
from tests.text.following import BYTES, BYTE_IDS
from kvcellar.text.grammar import Grammar
matcher = Grammar.json_object().matcher(BYTES)
for n in range(20):
    matcher.accept(BYTE_IDS[b"{" if n == 0 else b" " if n % 2 else b"\\n"]) if n < 2 else None
    child = os.fork()
    if child == 0:
        mine = matcher.copy()
        mine.accept(BYTE_IDS[b'"'])
        matcher.accept(BYTE_IDS[b'"'])
        os._exit(0 if (mine.allowed() == matcher.allowed()).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
matcher.accept(BYTE_IDS[b'"'])
assert matcher.allowed().any()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_matcher_goes_on_in_a_forked_process() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


def test_a_grammar_is_a_value_and_a_matcher_is_not() -> None:
    grammar = Grammar.json_schema({"type": "object", "title": "é"})
    assert pickle.loads(pickle.dumps(grammar)) == grammar == copy.deepcopy(grammar)
    assert len({grammar, Grammar.json_schema('{"type": "object", "title": "\\u00e9"}')}) == 1
    assert Grammar.regex("a") != Grammar.lark("a")
    with pytest.raises(HandleError, match="copy"):
        copy.copy(grammar.matcher(BYTES))


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        (Grammar.regex("(a"), "the regular expression: .*unclosed group"),
        (Grammar.regex("a(?=b)"), "look-around"),
        (Grammar.regex("[^\\s\\S]"), "the regular expression"),
        (Grammar.lark("start: foo"), 'the Lark grammar: .*"foo"'),
        (Grammar.lark(""), "no start rule"),
        (Grammar.lark("start: a\na: a"), "no text fits"),
        (Grammar.lark('%import foo\nstart: "a"'), "the Lark grammar"),
        (Grammar.lark("start: " + "(" * 50_000), "nested"),
        (Grammar.lark("start: " + '("a" | ' * 400 + '"b"' + ")" * 400), "nested"),
        (Grammar.regex("(" * 50_000), "the regular expression"),
        (Grammar.regex("(" * 20_000 + "a" + ")" * 20_000), "the regular expression"),
        (Grammar.regex("a{1000000000000}"), "the regular expression"),
    ],
)
def test_what_is_wrong_or_hostile_is_refused(grammar: Grammar, named: str) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match=named) as caught:
            grammar.matcher(BYTES)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        "start: start start | /[a-z]/ | ",
        "start: (/[a-z]/ | /[a-y]/ | /[b-z]/)* /[a-z]/{1,50} /[c-z]/*",
        'start: x{0,2000}\nx: x x | "a" | "b" y\ny: x | "c" y',
    ],
)
def test_ambiguous_grammars_cost_no_more_than_their_budget(text: str) -> None:
    """They end with an error that names them, or go on; nothing else happens."""
    matcher = Grammar.lark(text).matcher(BYTES)
    try:
        for _ in range(60):
            matcher.allowed()
            matcher.accept(BYTE_IDS[b"a"])
    except GrammarError as error:
        message = str(error)
        assert message.startswith("the Lark grammar: ")
    tokens = matcher.tokens
    matcher.rollback(len(tokens))
    matcher.accept(BYTE_IDS[b"a"])
    assert matcher.allowed().any()


def test_too_much_text_and_too_little_time_are_refused() -> None:
    with pytest.raises(GrammarError, match="262144 are allowed"):
        Grammar.regex("a" * 300_000)
    slow = Grammar.json_schema({"properties": {f"p{i}": {} for i in range(1500)}})
    with pytest.raises(GrammarError, match=r"longer than 0\.01 s"):
        slow.matcher(BYTES, timeout=0.01)


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    tokenizer = Tokenizer.from_metadata(make_spm({"a": -1.0}))
    with pytest.raises(LibraryError, match=r'pip install "kvcellar\[grammar\]"'):
        Grammar.regex("a").matcher(tokenizer)
