"""llama.cpp's GBNF, read as llama.cpp reads it, and said in Lark.

GBNF describes characters; llguidance cuts a text into lexemes first, each as long as it can be,
and parses those. What has no recursion becomes one lexeme: then both mean the same. Of a grammar
with recursion the largest parts without become lexemes, and :class:`_Skeleton` proves that none
of them can swallow what another needs; where it cannot, they are split, in the end to single
characters, which are always safe. Recursion at the end or the beginning of a rule becomes a
repetition first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from typing import TypeAlias

from kvcellar.errors import GrammarError, shown

MAX_TIMES = 100_000
MAX_DEPTH = 40
MAX_RULES = 2_000
_MAX_CHAR = 0x10FFFF
_MAX_POSITIONS = 1_500
_MAX_PAIRS = 40_000
_MAX_WORK = 2_000_000
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_NEWLINES = "\r\n"


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these ranges, ascending and apart; both ends belong to them."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other; nothing is the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Rep:
    """Repeated at least ``least`` times, and at most ``most`` unless that is None."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    """Another rule."""

    name: str


Node: TypeAlias = "Chars | Seq | Alt | Rep | Ref"
Rules: TypeAlias = "dict[str, Node]"
EMPTY = Seq(())


@lru_cache(maxsize=16)
def to_lark(text: str) -> str:
    """Return the grammar in Lark, with ``start`` for ``root``.

    Raises:
        GrammarError: it cannot be read, which names the line, or takes too much work.
    """
    try:
        return _to_lark(parse(text))
    except RecursionError:
        raise GrammarError("the GBNF grammar: its rules are nested too deeply") from None


def _to_lark(rules: Rules) -> str:
    rules = {name: _as_repetition(name, node) for name, node in rules.items()}
    regular = _regular(rules)
    if "root" in regular:
        writer = _Writer(rules, regular)
        return writer.finished(writer.terminal(rules["root"]))
    skeleton = _Skeleton(rules, regular)
    while conflict := skeleton.conflict():
        skeleton.split(*conflict)
    return skeleton.to_lark()


# -- reading


def parse(text: str) -> Rules:
    """Return the rules by their names.

    Raises:
        GrammarError: it cannot be read; names the line.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise GrammarError("the GBNF grammar has no rule root")
    for name, node in rules.items():
        for other in sorted(_names_in(node) - rules.keys()):
            raise GrammarError(f"the GBNF grammar: {name} names {other}, which is no rule")
    return rules


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> Rules:
        rules: Rules = {}
        self._skip(newlines=True)
        while self._next():
            name = self._name()
            if name in rules:
                self._fail(f"rule {name} is there twice")
            if len(rules) >= MAX_RULES:
                self._fail(f"more than {MAX_RULES} rules")
            self._skip(newlines=False)
            self._expect("::=")
            self._skip(newlines=True)
            rules[name] = self._alternatives(0)
            if self._next() and self._next() not in _NEWLINES:
                self._fail(f"unexpected {shown(self._next())}")
            self._skip(newlines=True)
        return rules

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self._fail(f"nested deeper than {MAX_DEPTH}")
        items = [self._sequence(depth)]
        while self._next() == "|":
            self._at += 1
            self._skip(newlines=True)
            items.append(self._sequence(depth))
        return _alt(items)

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while char := self._next():
            if char == '"':
                items.append(self._literal())
            elif char == "[":
                items.append(self._class())
            elif char == ".":
                self._at += 1
                items.append(Chars(((0, _MAX_CHAR),)))
            elif char == "(":
                self._at += 1
                self._skip(newlines=True)
                items.append(self._alternatives(depth + 1))
                self._expect(")")
            elif char in _WORD:
                items.append(Ref(self._name()))
            elif char in "*+?{":
                if not items:
                    self._fail(f"nothing to repeat before {shown(char)}")
                items[-1] = Rep(items[-1], *self._times(char, newlines=depth > 0))
            elif char in "<!":
                self._fail("tokens by name or id are not supported here: use a Lark grammar")
            else:
                break
            self._skip(newlines=depth > 0)
        return _seq(items)

    def _literal(self) -> Node:
        self._at += 1
        chars: list[Node] = []
        while self._next() != '"':
            code = self._char()
            chars.append(Chars(((code, code),)))
        self._at += 1
        return _seq(chars)

    def _class(self) -> Node:
        self._at += 1
        inverse = self._next() == "^"
        self._at += inverse
        ranges: list[tuple[int, int]] = []
        while self._next() != "]":
            low = high = self._char()
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._char()
            if high < low:
                self._fail(f"the range from {shown(chr(low))} to {shown(chr(high))} is empty")
            ranges.append((low, high))
        self._at += 1
        if not ranges:
            self._fail("a class without characters")
        merged = _merged(ranges)
        if inverse and not (merged := _inverse(merged)):
            self._fail("a class without characters")
        return Chars(merged)

    def _char(self) -> int:
        char = self._next()
        if not char:
            self._fail("the text ends within quotes or a class")
        self._at += 1
        if char != "\\":
            return ord(char)
        kind = self._next()
        self._at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        if kind not in _HEX_DIGITS:
            self._fail(f"unknown escape {shown(char + kind)}")
        digits = self._text[self._at : self._at + _HEX_DIGITS[kind]]
        if len(digits) < _HEX_DIGITS[kind] or set(digits) - set("0123456789abcdefABCDEF"):
            self._fail(f"{_HEX_DIGITS[kind]} hexadecimal digits are needed, found {shown(digits)}")
        self._at += len(digits)
        code = int(digits, 16)
        if code > _MAX_CHAR or 0xD800 <= code < 0xE000:
            self._fail(f"no character has the code {digits}")
        return code

    def _times(self, char: str, *, newlines: bool) -> tuple[int, int | None]:
        self._at += 1
        if char != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        self._skip(newlines=newlines)
        least = self._number()
        most: int | None = least
        self._skip(newlines=newlines)
        if self._next() == ",":
            self._at += 1
            self._skip(newlines=newlines)
            most = self._number() if self._next().isdecimal() else None
            self._skip(newlines=newlines)
        self._expect("}")
        if most is not None and most < least:
            self._fail(f"at most {most} times is less than at least {least} times")
        return least, most

    def _number(self) -> int:
        begin = self._at
        while (char := self._next()) and char in "0123456789":
            self._at += 1
        digits = self._text[begin : self._at]
        if not digits:
            self._fail(f"a number is needed, found {shown(self._next())}")
        if len(digits) > len(str(MAX_TIMES)) or int(digits) > MAX_TIMES:
            self._fail(f"repeated more than {MAX_TIMES} times")
        return int(digits)

    def _name(self) -> str:
        begin = self._at
        while (char := self._next()) and char in _WORD:
            self._at += 1
        if self._at == begin:
            self._fail(f"the name of a rule is needed, found {shown(self._next())}")
        return self._text[begin : self._at]

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _expect(self, token: str) -> None:
        if not self._text.startswith(token, self._at):
            self._fail(f"{token} is needed, found {shown(self._next())}")
        self._at += len(token)

    def _skip(self, *, newlines: bool) -> None:
        while char := self._next():
            if char == "#":
                while self._next() and self._next() not in _NEWLINES:
                    self._at += 1
            elif char in " \t" or (newlines and char in _NEWLINES):
                self._at += 1
            else:
                return

    def _fail(self, reason: str) -> None:
        line = self._text.count("\n", 0, self._at) + 1
        raise GrammarError(f"the GBNF grammar, line {line}: {reason}")


def _seq(items: Iterable[Node]) -> Node:
    flat: list[Node] = []
    for item in items:
        flat += item.items if isinstance(item, Seq) else (item,)
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def _alt(items: Iterable[Node]) -> Node:
    flat: dict[Node, None] = {}
    for item in items:
        flat |= dict.fromkeys(item.items if isinstance(item, Alt) else (item,))
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def _merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def _inverse(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    edges = [(-1, -1), *ranges, (_MAX_CHAR + 1, _MAX_CHAR + 1)]
    return tuple((a[1] + 1, b[0] - 1) for a, b in pairwise(edges) if a[1] + 1 < b[0])


def _names_in(node: Node) -> set[str]:
    if isinstance(node, Ref):
        return {node.name}
    if isinstance(node, Rep):
        return _names_in(node.item)
    return set().union(*map(_names_in, node.items)) if isinstance(node, (Seq, Alt)) else set()


# -- recursion


def _as_repetition(name: str, node: Node) -> Node:
    """Return a rule that names itself only first, or only last, without doing so."""
    options = _options(node)
    for last in (True, False):
        steps: list[Node] = []
        ends: list[Node] = []
        for option in options:
            items = option.items if isinstance(option, Seq) else (option,)
            if items and items[-1 if last else 0] == Ref(name):
                steps.append(_seq(items[:-1] if last else items[1:]))
            else:
                ends.append(option)
        if steps and ends and name not in set().union(*map(_names_in, [*steps, *ends])):
            repeated = Rep(_alt(steps), 0, None)
            return _seq([repeated, _alt(ends)] if last else [_alt(ends), repeated])
    return node


def _options(node: Node) -> list[Node]:
    if isinstance(node, Rep) and (node.least, node.most) == (0, 1):
        return [*_options(node.item), EMPTY]
    if isinstance(node, Alt):
        return [option for item in node.items for option in _options(item)]
    return [node]


def _regular(rules: Rules) -> frozenset[str]:
    """Return the rules that lead to no recursion."""
    regular: set[str] = set()
    names = {name: _names_in(node) for name, node in rules.items()}
    found = True
    while found:
        new = {name for name in rules if name not in regular and names[name] <= regular}
        regular |= new
        found = bool(new)
    return frozenset(regular)


# -- what may follow what


@dataclass(frozen=True, slots=True)
class _Part:
    """Positions at which characters are read: first and last ones, and whether none may be."""

    first: frozenset[int]
    last: frozenset[int]
    may_be_empty: bool


class _TooLarge(Exception):
    """An expression with too many positions to look at."""


class _Automaton:
    """Glushkov's automaton of an expression; repetitions count as unlimited.

    It accepts what the expression does, and more where repetitions are limited.
    """

    def __init__(self, node: Node, rules: Rules) -> None:
        self._rules = rules
        self.chars: list[tuple[tuple[int, int], ...]] = []
        self.follow: list[set[int]] = []
        part = self._part(node)
        self.first, self.last, self.may_be_empty = part.first, part.last, part.may_be_empty

    def _part(self, node: Node) -> _Part:
        if isinstance(node, Chars):
            if len(self.chars) >= _MAX_POSITIONS:
                raise _TooLarge
            self.chars.append(node.ranges)
            self.follow.append(set())
            here = frozenset((len(self.chars) - 1,))
            return _Part(here, here, False)
        if isinstance(node, Ref):
            return self._part(self._rules[node.name])
        if isinstance(node, Alt):
            parts = [self._part(item) for item in node.items]
            return _Part(
                frozenset().union(*(part.first for part in parts)),
                frozenset().union(*(part.last for part in parts)),
                any(part.may_be_empty for part in parts),
            )
        if isinstance(node, Rep):
            part = self._part(node.item)
            if node.most is None or node.most > 1:
                self._link(part.last, part.first)
            return replace(part, may_be_empty=part.may_be_empty or node.least == 0)
        whole = _Part(frozenset(), frozenset(), True)
        for item in node.items:
            part = self._part(item)
            self._link(whole.last, part.first)
            whole = _Part(
                whole.first | part.first if whole.may_be_empty else whole.first,
                whole.last | part.last if part.may_be_empty else part.last,
                whole.may_be_empty and part.may_be_empty,
            )
        return whole

    def _link(self, last: frozenset[int], first: frozenset[int]) -> None:
        for position in last:
            self.follow[position] |= first

    def first_chars(self) -> tuple[tuple[int, int], ...]:
        return _merged(span for position in self.first for span in self.chars[position])


@dataclass(frozen=True, slots=True)
class _Overlap:
    """What two expressions do with the same text: what the second reads where the first ends."""

    reads_on: tuple[tuple[int, int], ...]
    can_end_together: bool


_ANY = _Overlap(((0, _MAX_CHAR),), True)


def _overlap(a: _Automaton, b: _Automaton, pay: Callable[[int], None]) -> _Overlap:
    pending = [pair for pair in product(a.first, b.first) if _meet(a, b, pair)]
    seen = set(pending)
    reads_on: set[tuple[int, int]] = set()
    together = False
    while pending:
        p, q = pending.pop()
        pay(len(a.follow[p]) * len(b.follow[q]) + 1)
        if p in a.last:
            reads_on.update(span for after in b.follow[q] for span in b.chars[after])
            together = together or q in b.last
        for pair in product(a.follow[p], b.follow[q]):
            if pair not in seen and _meet(a, b, pair):
                seen.add(pair)
                pending.append(pair)
        if len(seen) > _MAX_PAIRS:
            return _ANY
    return _Overlap(_merged(reads_on), together)


def _meet(a: _Automaton, b: _Automaton, pair: tuple[int, int]) -> bool:
    return _intersect(a.chars[pair[0]], b.chars[pair[1]])


def _intersect(a: Iterable[tuple[int, int]], b: Iterable[tuple[int, int]]) -> bool:
    return any(low <= end and begin <= high for low, high in a for begin, end in b)


# -- lexemes among recursion


@dataclass(frozen=True, slots=True)
class _Lexeme:
    """A part without recursion, read at once."""

    node: Node


Tree: TypeAlias = "Chars | Seq | Alt | Rep | Ref | _Lexeme"


class _Skeleton:
    """A grammar with recursion, whose parts without are lexemes."""

    def __init__(self, rules: Rules, regular: frozenset[str]) -> None:
        self._rules = rules
        self._regular = regular
        self._split: set[Node] = set()
        self._automata: dict[Node, _Automaton | None] = {}
        self._overlaps: dict[tuple[Node, Node], _Overlap] = {}
        self._empty: set[str] = set()
        self._work = 0
        self._trees = self._build()

    def split(self, *nodes: Node) -> None:
        """Read these in parts."""
        self._split.update(nodes)
        self._trees = self._build()

    def to_lark(self) -> str:
        writer = _Writer(self._rules, self._regular)
        for name, tree in self._trees.items():
            writer.rule(name, tree)
        return writer.finished(writer.rule_name("root"))

    def conflict(self) -> list[Node]:
        """Return lexemes that may swallow what another needs; empty if none may.

        Of two that are expected at one place, the lexer goes on with the longer one: wrong if the
        shorter one may end there and what the longer one reads may follow it.
        """
        firsts = self._first_sets()
        follows = self._follow_sets(firsts)
        begin = firsts["root"]
        pending = list(product(begin, begin))
        seen = set(pending)
        found: dict[Node, None] = {}
        while pending:
            one, other = pending.pop()
            self._pay(len(follows[one]))
            overlap = self._overlap(one, other)
            following = [span for node in follows[one] for span in self._first_chars(node)]
            if _intersect(overlap.reads_on, following):
                found |= dict.fromkeys(node for node in (one, other) if not isinstance(node, Chars))
            if overlap.can_end_together:
                self._pay(len(follows[one]) * len(follows[other]))
                new = set(product(follows[one], follows[other])) - seen
                seen |= new
                pending += new
        return list(found)

    def _pay(self, steps: int) -> None:
        self._work += steps
        if self._work > _MAX_WORK:
            raise GrammarError("the GBNF grammar is too ambiguous: use fewer or smaller rules")

    def _build(self) -> dict[str, Tree]:
        trees: dict[str, Tree] = {}
        pending = ["root"]
        while pending:
            name = pending.pop()
            if name not in trees:
                trees[name] = self._tree(self._rules[name])
                pending += _rules_in(trees[name])
        return trees

    def _tree(self, node: Node) -> Tree:
        if self._is_regular(node):
            if node not in self._split:
                return _Lexeme(node) if node != EMPTY else EMPTY
            if isinstance(node, Ref):
                return self._tree(self._rules[node.name])
        if isinstance(node, (Seq, Alt)):
            items = node.items
            if not self._is_regular(node):
                items = self._grouped(node)
            trees = tuple(map(self._tree, items))
            return Seq(trees) if isinstance(node, Seq) else Alt(trees)  # type: ignore[arg-type]
        if isinstance(node, Rep):
            return replace(node, item=self._tree(node.item))  # type: ignore[arg-type]
        return node

    def _grouped(self, node: Seq | Alt) -> tuple[Node, ...]:
        """Return the items, neighbours without recursion as one; all of an Alt are neighbours."""
        together = _seq if isinstance(node, Seq) else _alt
        items = list(node.items)
        if isinstance(node, Alt):
            items.sort(key=self._is_regular)
        groups: list[list[Node]] = []
        for item in items:
            if groups and self._is_regular(item) and self._is_regular(groups[-1][-1]):
                groups[-1].append(item)
            else:
                groups.append([item])
        return tuple(together(group) for group in groups)

    def _is_regular(self, node: Node) -> bool:
        return _names_in(node) <= self._regular

    def _first_sets(self) -> dict[str, set[Node]]:
        firsts: dict[str, set[Node]] = {name: set() for name in self._trees}
        self._empty = set()
        changed = True
        while changed:
            before = sum(map(len, firsts.values())) + len(self._empty)
            for name, tree in self._trees.items():
                first, may_be_empty = self._first(tree, firsts)
                firsts[name] |= first
                self._pay(len(first))
                if may_be_empty:
                    self._empty.add(name)
            changed = before != sum(map(len, firsts.values())) + len(self._empty)
        return firsts

    def _first(self, tree: Tree, firsts: dict[str, set[Node]]) -> tuple[set[Node], bool]:
        if isinstance(tree, _Lexeme):
            return {tree.node}, self._may_be_empty(tree.node)
        if isinstance(tree, Ref):
            return firsts[tree.name], tree.name in self._empty
        if isinstance(tree, Rep):
            first, may_be_empty = self._first(tree.item, firsts)
            return first, may_be_empty or tree.least == 0
        if isinstance(tree, Alt):
            parts = [self._first(item, firsts) for item in tree.items]
            return set().union(*(part[0] for part in parts)), any(part[1] for part in parts)
        assert isinstance(tree, Seq)
        found: set[Node] = set()
        for item in tree.items:
            first, may_be_empty = self._first(item, firsts)
            found |= first
            if not may_be_empty:
                return found, False
        return found, True

    def _follow_sets(self, firsts: dict[str, set[Node]]) -> dict[Node, set[Node]]:
        follows: dict[Node, set[Node]] = {}
        behind: dict[str, set[Node]] = {name: set() for name in self._trees}

        def visit(tree: Tree, after: set[Node]) -> None:
            self._pay(len(after) + 1)
            if isinstance(tree, _Lexeme):
                follows.setdefault(tree.node, set()).update(after)
            elif isinstance(tree, Ref):
                behind[tree.name] |= after
            elif isinstance(tree, Alt):
                for item in tree.items:
                    visit(item, after)
            elif isinstance(tree, Rep):
                again = tree.most is None or tree.most > 1
                visit(tree.item, after | self._first(tree.item, firsts)[0] if again else after)
            elif isinstance(tree, Seq):
                for item in reversed(tree.items):
                    visit(item, after)
                    first, may_be_empty = self._first(item, firsts)
                    after = after | first if may_be_empty else set(first)

        changed = True
        while changed:
            before = sum(map(len, behind.values())) + sum(map(len, follows.values()))
            for name, tree in self._trees.items():
                visit(tree, behind[name])
            changed = before != sum(map(len, behind.values())) + sum(map(len, follows.values()))
        return follows

    def _automaton(self, node: Node) -> _Automaton | None:
        if node not in self._automata:
            try:
                self._automata[node] = _Automaton(node, self._rules)
            except _TooLarge:
                self._automata[node] = None
        return self._automata[node]

    def _may_be_empty(self, node: Node) -> bool:
        automaton = self._automaton(node)
        return automaton is None or automaton.may_be_empty

    def _first_chars(self, node: Node) -> tuple[tuple[int, int], ...]:
        automaton = self._automaton(node)
        return _ANY.reads_on if automaton is None else automaton.first_chars()

    def _overlap(self, one: Node, other: Node) -> _Overlap:
        if (one, other) not in self._overlaps:
            a, b = self._automaton(one), self._automaton(other)
            found = _ANY if a is None or b is None else _overlap(a, b, self._pay)
            self._overlaps[one, other] = found
        return self._overlaps[one, other]


def _rules_in(tree: Tree) -> set[str]:
    if isinstance(tree, Ref):
        return {tree.name}
    if isinstance(tree, Rep):
        return _rules_in(tree.item)
    return set().union(*map(_rules_in, tree.items)) if isinstance(tree, (Seq, Alt)) else set()


# -- writing


class _Writer:
    """Rules of Lark, one for each group; terminals have upper-case names."""

    def __init__(self, rules: Rules, regular: frozenset[str]) -> None:
        self._rules = rules
        self._regular = regular
        self._lines: list[str] = []
        self._terminals: dict[Node, str] = {}
        self._names: dict[str, str] = {}

    def finished(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._lines])

    def rule_name(self, name: str) -> str:
        return self._names.setdefault(name, f"r{len(self._names)}")

    def rule(self, name: str, tree: Tree) -> None:
        self._lines.append(f"{self.rule_name(name)}: {self._body(tree)}")

    def terminal(self, node: Node) -> str:
        """Return the name of a terminal for a part without recursion."""
        if node not in self._terminals:
            name = self._terminals[node] = f"T{len(self._terminals)}"
            if isinstance(node, Ref):
                body = self.terminal(self._rules[node.name])
            elif isinstance(node, Chars):
                body = _spell_class(node)
            elif isinstance(node, Rep):
                body = self._repeated(self._part(node.item), node)
            else:
                parts = [self._part(item) for item in node.items]
                body = (" " if isinstance(node, Seq) else " | ").join(parts) or '""'
            self._lines.append(f"{name}: {body}")
        return self._terminals[node]

    def _part(self, node: Node) -> str:
        if node == EMPTY:
            return '""'
        return _spell_class(node) if isinstance(node, Chars) else self.terminal(node)

    def _body(self, tree: Tree) -> str:
        if isinstance(tree, (_Lexeme, Ref)):
            return self._atom(tree)
        if isinstance(tree, Rep):
            return self._repeated(self._atom(tree.item), tree)
        assert isinstance(tree, (Seq, Alt))
        parts = [self._atom(item) for item in tree.items]
        return (" " if isinstance(tree, Seq) else " | ").join(parts) or '""'

    def _atom(self, tree: Tree) -> str:
        if isinstance(tree, _Lexeme):
            return self.terminal(tree.node)
        if isinstance(tree, Ref):
            return self.rule_name(tree.name)
        name = f"g{len(self._lines)}"
        at = len(self._lines)
        self._lines.append("")
        self._lines[at] = f"{name}: {self._body(tree)}"
        return name

    @staticmethod
    def _repeated(part: str, rep: Rep) -> str:
        most = "" if rep.most is None else rep.most
        return f"{part}{{{rep.least},{most}}}" if rep.most != 0 else '""'


def _spell_class(chars: Chars) -> str:
    spans = "".join(
        f"\\x{{{low:x}}}" if low == high else f"\\x{{{low:x}}}-\\x{{{high:x}}}"
        for low, high in _without_surrogates(chars.ranges)
    )
    return f"/[{spans}]/"


def _without_surrogates(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges without 0xD800 to 0xDFFF, which no text holds."""
    found: list[tuple[int, int]] = []
    for low, high in ranges:
        found += [(low, min(high, 0xD7FF)), (max(low, 0xE000), high)]
    return [(low, high) for low, high in found if low <= high]
