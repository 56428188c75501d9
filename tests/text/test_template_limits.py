"""Templates that try to take time or memory without end, and those that must not notice limits."""

from __future__ import annotations

import _thread
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvcellar.errors import TemplateError
from kvcellar.text.chat_template import ChatTemplate
from kvcellar.text.template_meter import FILTERS, method_cost
from kvcellar.text.template_sandbox import TemplateEnvironment

HELLO = [{"role": "user", "content": "Hello"}]
CPU_SECONDS = 3.0
MEBIBYTES = 192

# --- what is tried ------------------------------------------------------------------------------

LOOP = "{% for i in range(100000) %}"
END = "{% endfor %}"
HASHES_TO_0 = 2**61 - 1


def doubled(name: str, pair: str) -> str:
    """Return what sets a name to a value that holds itself twice, forty times over."""
    return (
        f"{{% set {name} = namespace(x={pair.replace('x', '1')}) %}}{{% for i in range(40) %}}"
        f"{{% set {name}.x = {pair.replace('x', name + '.x')} %}}{END}"
    )


LISTS = doubled("a", "[x, x]") + doubled("b", "[x, x]")
TUPLES = doubled("a", "(x, x)") + doubled("b", "(x, x)")
LONG = "{% set a = namespace(x='x' * 8000000) %}{% set b = a %}"

FOLDING = [
    "{{ " + "('x' * 100)" + " * 100" * 8 + " }}",
    "{{ " + "(" * 50 + "[0]" + " * 99)" * 50 + " }}",
    "{% set x = 'x' | center(99999999) %}",
    "{% if 10 ** (10 ** 9) %}{% endif %}",
    "{{ ['a' * 99999] * 99999 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 'ab' | list * 99999999 }}",
]
GROWING = [
    f"{{% set n = namespace(x={start}) %}}{LOOP}{{% set n.x = {more} %}}{END}"
    for start, more in (
        ("'a'", "n.x ~ n.x"),
        ("'a'", "n.x + n.x"),
        ("'a'", "n.x * 2"),
        ("'a'", "n.x | replace('a', 'aa')"),
        ("'a'", "'%s%s' % (n.x, n.x)"),
        ("'a'", "'{0}{0}'.format(n.x)"),
        ("'a'", "[n.x, n.x] | join"),
        ("'a'", "n.x.join([n.x, n.x])"),
        ("[]", "n.x + ['a' * 100000]"),
        ("[]", "[n.x, 'a' * 1000]"),
        ("[]", "[n.x, {}, {}, {}, {}, {}, {}]"),
        ("[]", "[n.x, namespace(), namespace()]"),
        ("[1]", "n.x * 2"),
        ("[1]", "(n.x, n.x) | sum(start=[])"),
        ("9", "n.x * n.x"),
        ("9", "n.x ** 9"),
    )
]
CHAINED = [
    f"{{% set n = namespace(x={start}) %}}{{% for i in range(9000) %}}{{% set n.x = {more} %}}{END}"
    for start, more in (
        ("()", "(n.x,)"),
        ("[]", "[n.x]"),
        ("{}", "{'a': n.x}"),
        ("{}", "{'a': n.x}.items()"),
        ("[]", "n.x | map('list')"),
        ("[]", "[n.x] | map('list')"),
        ("[]", "[[n.x]] | reverse"),
        ("[]", "[n.x].copy"),
        ("[]", "[n.x].missing"),
        ("[]", "cycler(n.x)"),
        ("[]", "namespace(x=n.x)"),
    )
]
DEEP = [
    chain + use
    for chain in CHAINED[:3]
    for use in (
        *("{{ n.x }}", "{{ {n.x: 1} }}", "{{ {}[n.x] }}", "{{ n.x == [n.x] or n.x | tojson }}"),
        *("{{ n.x in [n.x, n.x] }}", "{{ [n.x] | unique | list }}", "{{ [n.x] | sort }}"),
    )
]
COUNTING = [
    f"{{% for i in range(9999) %}}{body}{END}"
    for body in (
        "{{ range(99999) | sum }}",
        "{{ range(99999) | list | length }}",
        "{{ range(99999) | map('center', 999999) | list }}",
        "{{ range(99999) | select('string') | list }}",
        "{{ range(99999) | reject('number') | first }}",
        "{{ range(99999) | batch(2) | list }}",
        "{{ range(99999) | map(attribute='a.b.c') | list }}",
        "{{ 'x' in range(99999) }}",
        "{{ -1 in range(99999) | list }}",
        "{% for j in range(99999) if false %}{% endfor %}",
        "{% for j in range(99999) %}{% endfor %}",
        "{{ dict(*[range(99999)]) }}",
        "{{ cycler(*range(99999)).current }}",
        "{{ range(99999) | sort(reverse=true) | first }}",
        "{{ range(99999) | groupby('a.b') | length }}",
    )
]
WIDE = [
    "{{ " + text + " }}"
    for text in (
        "'{:>{w}}'.format(1, w=999999999)",
        "'{:>999999999}'.format(1)",
        "'{:.999999999f}'.format(1.5)",
        "'{0:{1}}'.format(1, '>999999999')",
        "'{a:>999999999}'.format_map({'a': 1})",
        "('{0}' * 9999).format('x' * 99999)",
        "('%(a)s' * 9999) % {'a': 'x' * 99999}",
        "('%(a)s' * 9999) | format(a='x' * 99999)",
        "'%((a))999999999d' % {'(a)': 1}",
        "'%*d' % (999999999, 1)",
        "'%.*f' % (999999999, 1.5)",
        "'%999999999d' is odd",
        "'%999999999d' is divisibleby(1)",
        "'a' | center(999999999)",
        "'a'.ljust(999999999)",
        "'7'.zfill(999999999)",
        "('\\t' * 9999).expandtabs(99999)",
        "('\\n' * 99999) | indent(99999)",
        "('\\n' * 99999) | indent('x' * 99999, blank=true)",
        "range(9) | batch(99999999, 0) | list",
        "range(9) | slice(99999999) | list",
        "[1] | tojson(separators=('x' * 9999999, 'x')) ~ range(99) | list | tojson(indent=999999)",
        "(range(9999) | list) | tojson(indent=999999)",
        "1.5 | round(999999999, 'ceil')",
        "5 | round(-999999999)",
        "9 ** 99999",
        "2 ** 64 ** 64",
        "('9' * 9999999) | int",
        "('9' * 4000) | int * ('9' * 4000) | int",
        "range(999999999)",
        "('x' | safe).join(['<' * 4000000] * 4)",
        "('%s' | safe) % ('<' * 9999999)",
        "('<' * 999999) | striptags",
        "('a' * 4000000).rfind('b' + 'a' * 1000000)",
        "('a' * 4000000).rsplit('b' + 'a' * 1000000)",
        "('ab' * 2000000).strip('c' * 1000000 + 'ab')",
        "('a ' * 9999999).split()",
        "('\\n' * 9999999).splitlines()",
        "{}['x' * 40000000].y",
    )
]
COLLIDING = [
    f"{{% set n = namespace(x=[]) %}}{{% for i in range({count}) %}}"
    f"{{% set n.x = n.x + [{item.replace('P', str(HASHES_TO_0))}] %}}{END}{use}"
    for use, count, item in (
        ("{{ n.x | unique | list | length }}", "3000", "i * P"),
        ("{{ n.x | unique | list | length }}", "3000", "(i * P, 1)"),
        ("{{ dict(n.x) | length }}", "2000", "(i * P, 1)"),
        ("{{ namespace(n.x).a }}", "2000", "(i * P, 1)"),
    )
]
RECURSIVE = [
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ caller() }}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call f() %}" * 11
    + "x" * 999
    + "{% endcall %}" * 11,
    "{% for x in [[1], [2]] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{% macro f(a=[" + "[1]," * 900 + "]) %}{% endmacro %}" + LOOP + "{{ f() }}" + END,
]
COMPILING = [
    "{{a}}" * 13_000,
    "{{ " + "-" * 60_000 + "1 }}",
    "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "{{ [" + "1," * 30_000 + "] }}",
    "{{ " + " + ".join("a" * 20_000) + " }}",
    "{{ " + "9" * 60_000 + " }}",
    "{% set a = 'x' * 9999999 %}{{ " + " + ".join("a" * 15_000) + " }}",
    "{% set a = [1] * 999999 %}{{ " + " + ".join("a" * 15_000) + " }}",
    "".join(f"{{%set a{i}=1%}}" for i in range(1500)) + "{%if a1%}{%endif%}" * 2000,
    "{%macro f()%}" * 60 + "{{x}}" * 2000 + "{%endmacro%}" * 60,
    "{{ 'x' | center(9999999) | list | sort | join }}" * 1000,
]
ENDLESS = [
    f"{LOOP}{LOOP}{body}{END}{END}"
    for body in (
        "",
        "{% set z = 'a' | upper %}",
        "{{ strftime_now('%c') }}",
        "{% if i in [1, 2, 3] %}{% endif %}",
        "{% set z = messages | selectattr('role', 'eq', 'user') | list %}",
        "{% set z = (i and i or i and i) if i else i %}",
        "{% set z = messages[0].content[0:] %}",
        "x" * 9999,
    )
]

KINDS = {
    "folding": FOLDING,
    "growing": GROWING,
    "deep": DEEP,
    "counting": COUNTING,
    "wide": WIDE,
    "colliding": COLLIDING,
    "recursive": RECURSIVE,
    "compiling": COMPILING,
    "endless": ENDLESS,
}

MORE_ARGUMENTS = {
    "attr": "'x'",
    "batch": "2",
    "format": "1",
    "join": "','",
    "map": "'string'",
    "rejectattr": "0, 'eq', b.x",
    "replace": "'a', 'b'",
    "select": "'eq', b.x",
    "reject": "'eq', b.x",
    "selectattr": "0, 'eq', b.x",
    "slice": "2",
    "sum": "start=[]",
}
OPERATORS = ("==", "!=", "<", "<=", "in", "not in", "~", "+", "*", "%")
PRINTED = ("{{ USE }}", "{{ [USE] | string }}", "{{ USE | list | string }}", "{{ USE | tojson }}")


def everything_with(values: str) -> Iterator[str]:
    """Yield every filter, test, method and operator, used on values named a.x and b.x."""
    environment = TemplateEnvironment({})
    uses = [f"a.x {sign} b.x" for sign in OPERATORS]
    uses += [f"a.x | {name}({MORE_ARGUMENTS.get(name, '')})" for name in FILTERS]
    uses += [f"[a.x, b.x] | {name}({MORE_ARGUMENTS.get(name, '')})" for name in FILTERS]
    uses += [f"'a' | {name}(b.x)" for name in FILTERS]
    uses += [f"a.x is {name}" for name in environment.tests if name.isalpha()]
    uses += [f"a.x is {name}(b.x)" for name in environment.tests if name.isalpha()]
    for owner, kind in (("'a'", str), ("[a.x]", list), ("(a.x,)", tuple), ("{'a': a.x}", dict)):
        for name in dir(kind):
            if not name.startswith("_") and _allowed(kind(), name):
                uses += [f"{owner}.{name}()", f"{owner}.{name}(b.x)", f"{owner}.{name}(b.x, b.x)"]
    uses += [f"{name}(a.x)" for name in ("raise_exception", "strftime_now", "dict", "joiner")]
    uses += ["{a.x: 1}", "{}[a.x]", "a.x[b.x]", "a.x[:]", "'%s' % [a.x]", "'%(a)s' % {'a': a.x}"]
    for use in uses:
        body = "".join(f"{{% set z %}}{one.replace('USE', use)}{{% endset %}}" for one in PRINTED)
        yield values + body


def _allowed(owner: object, name: str) -> bool:
    try:
        method_cost(owner, name)
    except Exception:
        return False
    return True


TEXTS = (
    *("{t} ~ {v}", "{t} + {t}", "{t} * 9", "[{v}, {v}] | join({t})", "'%s%s' % ({v}, {v})"),
    *("{t} | replace('b', {t})", "{v} | tojson", "{v} | string | upper", "{t}.join([{t}, {t}])"),
    *("'{{}}{{}}'.format({v}, {v})", "{t} | indent({t})", "{t}[1:]"),
)
ITEMS = (
    *("[{v}, {v}]", "[{v}, {v}] + {l}", "[{v}] * 9", "{t}.split('b')", "{t} | list"),
    *("[{v}, {v}] | map('string') | list", "{l} | unique | list", "{l} | batch(2, {v}) | list"),
    *("{l} | sort(attribute='x')", "[{l}, {l}] | sum(start=[])", "[{{'k': {v}}}]"),
)


def mixtures(n: int) -> Iterator[str]:
    """Yield templates that nest what amplifies, at random."""
    rng = random.Random(1)

    def text(depth: int) -> str:
        if depth == 0:
            return rng.choice(["(a.x | string)", "'bb'", "messages[0].content"])
        return filled(TEXTS, depth)

    def items(depth: int) -> str:
        if depth == 0:
            return rng.choice(["[a.x]", "messages", "(range(99) | list)"])
        return filled(ITEMS, depth)

    def filled(forms: tuple[str, ...], depth: int) -> str:
        inner = [rng.choice((text, items))(depth - 1) for _ in range(4)]
        form = rng.choice(forms)
        for name, more in (("{v}", inner), ("{t}", [text(depth - 1)]), ("{l}", [items(depth - 1)])):
            while name in form:
                form = form.replace(name, rng.choice(more), 1)
        return f"({form.replace('{{', '{').replace('}}', '}')})"

    for _ in range(n):
        kind, times = rng.choice((text, items)), rng.choice((3, 40, 400))
        yield (
            f"{{% set a = namespace(x='b') %}}{{% for i in range({times}) %}}"
            f"{{% set a.x = {kind(rng.choice((1, 2, 3)))} %}}{{% endfor %}}{{{{ {kind(1)} }}}}"
        )


# --- how it is tried ----------------------------------------------------------------------------

CHILD = """
import gc, json, resource, sys, time
from kvcellar.errors import TemplateError
from kvcellar.text.chat_template import ChatTemplate

def peak():
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit

ChatTemplate("{{ 1 }}").render([])
sources, before = json.load(sys.stdin), peak()
limit = 4 * 2**30
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for i, source in enumerate(sources):
    print(i, end=" ", flush=True)
    start = time.process_time()
    try:
        ChatTemplate(source).render([{"role": "user", "content": "Hello"}])
        what = "ok"
    except TemplateError as error:
        what = str(error)
    except BaseException as error:
        what = f"! {error!r}"
    print(json.dumps([what, time.process_time() - start, peak() - before]), flush=True)
"""


def tried(sources: list[str]) -> list[tuple[str, str, float, float]]:
    """Return source, outcome, CPU seconds, and the peak of memory so far in MiB, for each.

    CPU seconds, because on a busy machine seconds measure the others.
    """
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(sources),
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = child.stdout.splitlines()
    n_done = len([line for line in lines if line.endswith("]")])
    assert child.returncode == 0, f"{child.stderr[-300:]} at {sources[n_done][-300:]}"
    results = [json.loads(line.split(" ", 1)[1]) for line in lines]
    return [(source, *result) for source, result in zip(sources, results, strict=True)]


def check_bounded(sources: list[str], *, refused: bool) -> list[str]:
    """Check time and memory; return the outcomes."""
    found = tried(sources)
    for source, what, seconds, mebibytes in found:
        about = f"{what}, {seconds:.1f} s, {mebibytes:.0f} MiB: {source[-200:]}"
        assert not what.startswith("!"), about
        assert seconds < CPU_SECONDS, about
        assert mebibytes < MEBIBYTES, about
        assert what != "ok" or not refused, about
    return [what for _, what, _, _ in found]


posix = pytest.mark.skipif(sys.platform == "win32", reason="measures with POSIX's getrusage")


@posix
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_amplifies_is_refused_soon_and_takes_little(kind: str) -> None:
    check_bounded(KINDS[kind], refused=True)


@posix
@pytest.mark.slow
def test_long_chains_of_values_are_freed_without_a_crash() -> None:
    check_bounded(CHAINED, refused=False)


@posix
@pytest.mark.slow
@pytest.mark.parametrize("values", [LISTS, TUPLES, LONG], ids=["lists", "tuples", "texts"])
def test_everything_that_a_template_can_do_with_a_large_value_is_bounded(values: str) -> None:
    outcomes = check_bounded(list(everything_with(values)), refused=False)
    too_much = [what for what in outcomes if "too many steps" in what or "too large" in what]
    assert len(too_much) > len(outcomes) / 4


@posix
@pytest.mark.slow
def test_mixtures_are_bounded() -> None:
    outcomes = check_bounded(list(mixtures(200)), refused=False)
    too_much = [what for what in outcomes if "too " in what]
    assert len(too_much) > 20
    assert outcomes.count("ok") > 20


@pytest.mark.parametrize("name", ["pprint", "urlize", "wordwrap", "xmlattr"])
def test_filters_whose_cost_nobody_knows_are_refused(name: str) -> None:
    with pytest.raises(TemplateError, match=f"No filter named '{name}'"):
        ChatTemplate(f"{{{{ 'a' | {name} }}}}")


@pytest.mark.parametrize(
    "call",
    [
        "'a'.encode()",
        "'a'.translate({97: 'b' * 999})",
        "dict.fromkeys(range(9))",
        "(1).to_bytes(9)",
        "{'a': 1}.keys().isdisjoint([])",
        "range(9).index(3)",
        "('a' | safe).unescape()",
    ],
)
def test_methods_whose_cost_nobody_knows_are_refused(call: str) -> None:
    with pytest.raises(TemplateError, match="is not for templates"):
        ChatTemplate(f"{{{{ {call} }}}}").render(HELLO)


def test_values_that_contain_themselves_are_refused() -> None:
    knot: dict[str, Any] = {"role": "user", "content": "x"}
    knot["self"] = [knot, knot]
    with pytest.raises(TemplateError):
        ChatTemplate("{{ messages[0].content }}").render([knot])


def test_larger_messages_allow_more() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% for n in range(5) %}{{ m.content | trim | replace('a', 'b') }}"
        "{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "ha " * 300}] * 3000
    assert template.render(messages) == "hb" + (" hb" * 299 + "hb") * 14999 + " hb" * 299


def test_a_refused_template_leaves_nothing_behind() -> None:
    template = ChatTemplate(f"{{% if bad %}}{LOOP}{LOOP}{END}{END}{{% endif %}}fine")
    for _ in range(3):
        with pytest.raises(TemplateError, match="too many steps"):
            template.render(HELLO, bad=True)
        assert template.render(HELLO) == "fine"


def test_threads_have_budgets_of_their_own() -> None:
    template = ChatTemplate(f"{{% if n is odd %}}{LOOP}{LOOP}{END}{END}{{% endif %}}{{{{ n }}}}")
    results: dict[int, str] = {}

    def render(n: int) -> None:
        try:
            results[n] = template.render(HELLO, n=n)
        except TemplateError as error:
            results[n] = str(error)

    threads = [threading.Thread(target=render, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[n] for n in (0, 2, 4)] == ["0", "2", "4"]
    assert all("too many steps" in results[n] or "too long" in results[n] for n in (1, 3, 5))


def test_ctrl_c_ends_a_render_and_the_next_one_works() -> None:
    template = ChatTemplate(f"{{% if bad %}}{LOOP}{LOOP}{END}{END}{{% endif %}}fine")
    messages = HELLO * 5000  # with a budget for half a minute
    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        template.render(messages, bad=True)
    timer.join()
    assert time.monotonic() - started < 10
    assert template.render(messages) == "fine"


# --- what must not change -----------------------------------------------------------------------

SAME = [
    "{{ [3, 1, 2] | sort }}{{ [3, 1, 2] | sort(reverse=true) | first }}{{ 'bca' | sort | join }}",
    "{{ ['b', 'A', 'a'] | sort(case_sensitive=true) }}{{ ['b', 'A', 'a'] | unique | list }}",
    "{{ [1, 2, 3, 4, 5] | batch(2, 0) | list }}{{ [1, 2, 3, 4, 5] | slice(2, 0) | list }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | map('length') | list }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages | rejectattr('role', 'in', ['user']) | list }}{{ [0, 1] | select | list }}",
    "{{ [1, 2, 3] | select('odd') | list }}{{ [1, 2, 3] | reject('even') | first }}",
    "{{ [1, 2, 2.5] | sum }}{{ [[1], [2]] | sum(start=[]) }}{{ messages | sum('missing') }}",
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ {'b': 1, 'a': 2} | items | list }}",
    "{% for role, group in messages | groupby('role') %}{{ role }}{{ group | length }}{% endfor %}",
    "{{ 'a,b' | replace(',', ';') }}{{ 'x' | center(9) }}|{{ 'a b' | title }}",
    "{{ 'a b' | wordcount }}",
    "{{ 'a\nb' | indent }}{{ 'a\n\nb' | indent(2, true, blank=true) }}{{ 'a\nb' | indent('> ') }}",
    "{{ 'a' * 300 | int }}{{ ('word ' * 99) | truncate }}{{ '  x ' | trim }}",
    "{{ 'xax' | trim('x') }}",
    "{{ '42' | int + 1 }}{{ 'x' | int(7) }}{{ 'ff' | int(0, 16) }}",
    "{{ '1.5' | float }}{{ 2.5 | round }}",
    "{{ -3 | abs }}{{ [1, 2] | min }}{{ [1, 2] | max }}{{ [1, 2] | last }}{{ none | default(1) }}",
    "{{ '<b>' | e }}{{ '<b>' | safe }}{{ '<b>x</b>' | striptags }}{{ 'a b&' | urlencode }}",
    "{{ ('<' | safe) + '&' }}{{ ('<' | safe) ~ '&' }}{{ ('%s' | safe) % '&' }}",
    "{{ '%s' | format(1) }}",
    "{{ 'abc' | reverse }}{{ [1, 2] | reverse | list }}{{ 'abc' | list }}",
    "{{ 'ab' | upper | lower }}",
    "{{ 1000000 | filesizeformat }}{{ messages[0] | attr('items') is defined }}{{ 5 | string }}",
    "{{ 'a-b'.split('-') }}{{ 'a b '.strip() }}{{ 'aXb'.partition('X') }}{{ 'a\nb'.splitlines() }}",
    "{{ 'a' in 'cat' }}{{ 'role' in messages[0] }}{{ 2 in [1, 2] }}",
    "{{ 'x' not in ['y'] }}{{ 1 in (1,) }}",
    "{{ 1 < 2 < 3 }}{{ 1 < 2 > 3 }}{{ [1] == [1] }}{{ {'a': [1]} == {'a': [1]} }}{{ 'a' <= 'b' }}",
    "{{ 'abcdef'[1:4] }}{{ 'abc'[::-1] }}{{ [1, 2, 3][1:] }}{{ messages[-1].role }}{{ [1][5] }}",
    "{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 7 / 2 }}{{ 'ab' * 3 }}",
    "{{ [0] * 3 }}{{ 'a' + 'b' }}{{ -3 }}",
    "{{ '%s=%05.2f' % ('a', 1.5) }}{{ '%(a)s%%' % {'a': 1} }}{{ '{:>5}|{a!r}'.format(1, a='x') }}",
    "{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}/{{ loop.length }}:{{ x }}{% endfor %}",
    "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }},{% endfor %}",
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}",
    "{% for x in [] %}{% else %}none{% endfor %}",
    "{% for x in [1, 1] %}{{ loop.changed(x) }}{{ loop.cycle(1, 2) }}{{ loop.last }}{% endfor %}",
    "{% macro f(a, b=2) %}{{ [a, b, varargs, kwargs] }}{% endmacro %}{{ f(1, *[3], **{'c': 5}) }}",
    "{% macro f() %}<{{ caller('x') }}>{% endmacro %}{% call(y) f() %}{{ y }}{% endcall %}",
    "{% set a %}b{{ 1 }}{% endset %}{{ a | upper }}{% filter upper %}x{{ 'y' }}{% endfilter %}",
    "{% with a = 1 %}{{ a }}{% endwith %}{{ a is defined }}{% set x, y = [1, 2] %}{{ x ~ y }}",
    "{% block b %}in{{ 1 }}{% endblock %}{{ self.b() }}{% set c = cycler(1, 2) %}{{ c.next() }}",
    "{% set j = joiner('|') %}{{ j() }}a{{ j() }}b{{ dict(a=1) }}{{ range(3) | list }}",
    "{% if messages | selectattr('role', 'equalto', 'none') %}always{% endif %}",
    "{{ 'yes' if messages else 'no' }}{{ missing }}",
    "{{ missing | default('d') }}{{ none }}{{ true }}",
    "{% set n = namespace(a=0) %}{% for i in [1, 2] %}{% set n.a = n.a + i %}{% endfor %}{{ n.a }}",
    "{{ 3 is odd }}{{ 4 is divisibleby 2 }}{{ 'a' is string }}",
    "{{ {} is mapping }}{{ 'a' is lower }}",
    "{{ [1] is sequence }}{{ 1 is number }}{{ none is none }}{{ 1 is sameas 1 }}{{ 1.0 is float }}",
    "{{ 'upper' is filter }}{{ 'odd' is test }}{{ 2 is in [1, 2] }}",
    "{{ 1 is ne 2 }}{{ x is undefined }}",
    "{{ [1, 'a', none, {'b': [true]}] }}{{ ('a',) }}{{ messages }}{{ 1e300 }}{{ {1: 2} }}",
]


@pytest.mark.parametrize("source", SAME)
def test_templates_render_as_without_limits(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    answer = {"role": "assistant", "content": "Hi", "missing": 3}
    messages = [{**HELLO[0], "missing": 1}, answer, {**HELLO[0], "missing": 2}]
    expected = plain.from_string(source).render(messages=messages)
    assert ChatTemplate(source).render(messages) == expected


def test_every_filter_is_compared_with_jinja() -> None:
    text = "".join(SAME)
    own = {"tojson", "random"}  # another function; at random
    aliases = {"d", "count", "forceescape", "escape", "capitalize"}
    missing = [name for name in FILTERS if f"| {name}" not in text and f"'{name}'" not in text]
    assert set(missing) <= own | aliases


@pytest.mark.parametrize("value", [{"a": [1, "x\x00é", None]}, [], "x", 1.5, {"b": {"c": {}}}])
@pytest.mark.parametrize("options", ["", "indent=2", "separators=(',', ':')", "sort_keys=true"])
def test_json_is_that_of_python(value: object, options: str) -> None:
    source = f"{{{{ value | tojson({options}) }}}}"
    named = eval(f"dict({options.replace('true', 'True')})")
    expected = json.dumps(value, ensure_ascii=False, **named)
    assert ChatTemplate(source).render(HELLO, value=value) == expected


def test_functions_that_the_caller_gives_can_be_called() -> None:
    template = ChatTemplate("{{ shout('a') }}{{ clock.tick() }}{{ size([1]) }}")

    class Clock:
        def tick(self) -> str:
            return "tick"

    text = template.render(HELLO, shout=lambda text: text.upper(), clock=Clock(), size=len)
    assert text == "Atick1"
