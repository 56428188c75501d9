"""GBNF against its definition: a character at a time, every derivation tried."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import GrammarError
from kvcellar.text import gbnf
from kvcellar.text.gbnf import Alt, Chars, Node, Ref, Rules, Seq
from kvcellar.text.grammar import Grammar
from tests.profiles import examples
from tests.text.following import BYTES, fits

ALPHABET = "ab"
TEXTS = ["".join(text) for n in range(6) for text in product(ALPHABET, repeat=n)]


def texts_of(rules: Rules, most: int) -> set[str]:
    """All texts of ``root`` up to a length, as the smallest sets that fulfil all rules."""
    known: dict[str, set[str]] = {name: set() for name in rules}

    def joined(left: set[str], right: set[str]) -> set[str]:
        return {a + b for a in left for b in right if len(a + b) <= most}

    def of(node: Node) -> set[str]:
        if isinstance(node, Chars):
            return {c for c in ALPHABET if any(lo <= ord(c) <= hi for lo, hi in node.ranges)}
        if isinstance(node, Ref):
            return known[node.name]
        if isinstance(node, Alt):
            return set().union(*map(of, node.items))
        if isinstance(node, Seq):
            found = {""}
            for item in node.items:
                found = joined(found, of(item))
            return found
        once = of(node.item)
        power = {""}
        for _ in range(node.least):
            power = joined(power, once)
        found = set(power)
        for _ in range(most if node.most is None else node.most - node.least):
            power = joined(power, once)
            found |= power
        return found

    while True:
        before = {name: set(texts) for name, texts in known.items()}
        for name, node in rules.items():
            known[name] |= of(node)
        if before == known:
            return known["root"]


ATOMS = st.sampled_from(['"a"', '"b"', '"ab"', "[ab]", "[^a]", "root", "x", "y", '""'])
ITEMS = st.one_of(
    ATOMS,
    st.tuples(ATOMS, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,1}"])).map("".join),
    st.tuples(ATOMS, ATOMS, st.sampled_from(["*", "?", ""])).map(
        lambda t: f"({t[0]} | {t[1]}){t[2]}"
    ),
)
BODIES = st.lists(
    st.lists(ITEMS, min_size=1, max_size=3).map(" ".join), min_size=1, max_size=3
).map(" | ".join)


@examples(40)
@given(root=BODIES, x=BODIES, y=BODIES)
def test_grammars_have_the_texts_of_their_derivations(root: str, x: str, y: str) -> None:
    text = f"root ::= {root}\nx ::= {x}\ny ::= {y}"
    expected = texts_of(gbnf.parse(text), 5)
    grammar = Grammar.gbnf(text)
    found = (
        {candidate for candidate in TEXTS if fits(grammar, candidate)} if has_text(text) else set()
    )
    assert found == expected, text


def has_text(text: str) -> bool:
    try:
        gbnf.to_lark(text)
    except GrammarError as error:
        return "no text fits" not in str(error)
    return True


@pytest.mark.parametrize(
    ("text", "fitting", "others"),
    [
        ('root ::= "true" | [a-z]+', ["trueish", "true", "tr"], ["", "T"]),
        ('root ::= w " "? "b"\nw ::= [a-z]+', ["ab", "abb", "a b"], ["b", "a"]),
        ('root ::= ("a" | "ab") "bc"?', ["a", "abc", "abbc"], ["abcc"]),
        ('root ::= "(" root ")" | [a-z]+ | "let" [a-z]', ["((letx))", "(let)", "letx"], ["(let"]),
        ("root ::= .", ["\n", "é", "😀"], ["", "ab"]),
        (r'root ::= "\u0041\xe9\U0001F600\t\"\\"', ['Aé😀\t"\\'], []),
        (r"root ::= [\u0041-\u005A\-\]]+", ["AZ-]"], ["a"]),
        ("root ::= [[/&~^-]+", ["[/&~^-"], ["]"]),
        (r'root ::= [^"\\\x7F\x00-\x1F]+', ["ab é"], ['"', "\n"]),
        ('root ::= start\nstart ::= "a"', ["a"], ["b"]),
        ('root ::= fooBar foo-bar foo_bar\nfooBar ::= "a"\nfoo-bar ::= "b"\nfoo_bar ::= "c"',
         ["abc"], []),
        ('root ::= # none\n  ( # yet\n "x" )?', ["", "x"], []),
        ('root ::= "a" |\n  "b"\n\nx ::= "c"\r\n', ["a", "b"], ["c"]),
        ('root ::= "ab"{ 2, }', ["abab", "ababab"], ["ab", "abb"]),
        ('root ::= ([ \\n] root)? "a"', [" \naaa", "a"], ["a ", " a"]),
        ('root ::= "a" x | "b"\nx ::= "c" x', ["b"], ["a", "ac"]),
        ('root ::= "a" list\nlist ::= "," root | ""', ["a,a,a", "a"], ["a,", ","]),
    ],
)  # fmt: skip
def test_what_grammars_say(text: str, fitting: list[str], others: list[str]) -> None:
    grammar = Grammar.gbnf(text)
    assert [t for t in fitting if not fits(grammar, t)] == []
    assert [t for t in others if fits(grammar, t)] == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no rule root"),
        ('roo ::= "a"', "no rule root"),
        ("root ::= x", "root names x"),
        ('root ::= "a', "within quotes"),
        ('root := "a"', "line 1: ::= is needed"),
        ('root ::= "a"\n| "b"', "line 2"),
        ('root ::= "a"\nroot ::= "b"', "root is there twice"),
        ("root ::= [z-a]", "range from 'z' to 'a'"),
        ("root ::= []", "without characters"),
        (r"root ::= [^\x00-\U0010FFFF]", "without characters"),
        (r'root ::= "\q"', "escape"),
        (r'root ::= "\u12"', "4 hexadecimal digits"),
        (r'root ::= "\uD800"', "no character"),
        (r'root ::= "\U00110000"', "no character"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= "a"{3,2}', "less than"),
        ('root ::= "a"{999999999999}', "more than"),
        ('root ::= ("a"', r"\) is needed"),
        ('root ::= "a")', "unexpected"),
        ("root ::= <[12]>", "Lark"),
        ('root ::= "a" root', "never comes to an end"),
        ("root ::= x\nx ::= x | x root", "never comes to an end"),
        ("root ::= " + "(" * 5000, "nested deeper"),
        ("\n".join(f'r{i} ::= "a"' for i in range(3000)), "more than 2000 rules"),
    ],
)
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        Grammar.gbnf(text).matcher(BYTES)


@pytest.mark.parametrize(
    "text",
    [
        "root ::= " + " | ".join(f'"{i}" root' for i in range(1500)) + ' | ""',
        "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40))
        + '\nr40 ::= "a"\nroot ::= r0 root | ""',
        "\n".join(f"r{i} ::= r{i + 1}" for i in range(1900)) + '\nr1900 ::= "a"\nroot ::= r0',
        'root ::= ([a-z]* root "a"?)* ([b-y]+ | root root)?',
        "root ::= root",
    ],
)
def test_costly_grammars_end(text: str) -> None:
    with suppress(GrammarError):
        Grammar.gbnf(text).matcher(BYTES).allowed()


# -- grammars that come with llama.cpp, where KVCELLAR_LLAMA_VOCABS names its folder of models

SHIPPED = sorted(Path(os.environ.get("KVCELLAR_LLAMA_VOCABS", "?"), "../grammars").glob("*.gbnf"))


def drawn(node: Node, rules: Rules, chance: random.Random, depth: int = 0) -> str:
    """A random text by the definition; RecursionError if it becomes too deep."""
    if depth > 60:
        raise RecursionError
    if isinstance(node, Chars):
        low, high = chance.choice(node.ranges)
        return chr(min(chance.randint(low, min(high, low + 90)), 0xD7FF))
    if isinstance(node, Ref):
        return drawn(rules[node.name], rules, chance, depth + 1)
    if isinstance(node, Alt):
        return drawn(chance.choice(node.items), rules, chance, depth + 1)
    if isinstance(node, Seq):
        return "".join(drawn(item, rules, chance, depth + 1) for item in node.items)
    most = node.least + 9 if node.most is None else node.most
    times = min(node.least + int(chance.expovariate(1)), most)
    return "".join(drawn(node.item, rules, chance, depth + 1) for _ in range(times))


@pytest.mark.skipif(not SHIPPED, reason="needs llama.cpp's source package")
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_grammars_of_llama_cpp_accept_their_own_texts(path: Path) -> None:
    rules, grammar = gbnf.parse(path.read_text()), Grammar.gbnf(path.read_text())
    n_tried = 0
    for seed in range(200):
        with suppress(RecursionError):
            text = drawn(rules["root"], rules, random.Random(seed))
            if len(text) < 300 and n_tried < 20:
                n_tried += 1
                assert fits(grammar, text), text
    assert n_tried > 3
