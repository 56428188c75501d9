"""What a chat template may spend, and what each operation costs, paid before it begins.

A render has two accounts. Steps are the work of the interpreter: about one for each node of the
template that is evaluated and for each item that a filter, a comparison or a conversion visits.
Bytes are what is allocated and what C code reads through: characters of a result (four bytes each,
unless the text is ASCII), slots of a list. Nothing is ever given back, so the accounts bound the
time of a render as well as the memory of all values that live.

Costs are upper bounds found without doing the work: a list that holds another twice, thirty times
over, costs a few steps to make and is refused when it is to be printed, compared or serialised.
"""

from __future__ import annotations

import operator
import re
import string
import time
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence, Set
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined
from markupsafe import Markup

MAX_STEPS = 200_000
MAX_BYTES = 48 * 2**20
MAX_SECONDS = 5.0
STEPS_PER_ITEM = 500
"""Further steps for each value in the messages and tools."""
BYTES_PER_BYTE = 64
"""Further bytes for each byte of the messages and tools."""
MAX_ITEMS = 2**22
"""Of values in the messages and tools, half as many if they are in lists."""
MAX_DEPTH = 100
"""Of nested values, and of calls inside calls."""
MAX_BITS = 4096
"""Of an integer."""

SLOT, ITEM = 8, 64  # bytes: of a place in a list, and of a small object in it
_NUMBER = 352  # characters of the longest float
_SMALL_INT = 2**60  # hashes of larger ones can be made to collide
_ESCAPED = 6  # characters of one that is escaped for HTML, at most
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

Cost = Callable[..., None]
"""Pays for a filter or method: takes the meter, and the arguments of what it pays for."""


class Meter:
    """The accounts of one render.

    Args:
        values: what the template is given; larger values allow it to do more.

    Raises:
        SecurityError: the values are nested too deep, or refer to themselves.
    """

    __slots__ = ("_deadline", "_depth", "bytes_left", "steps_left")

    def __init__(self, *values: object) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._depth = 0
        self.steps_left, self.bytes_left = MAX_ITEMS, 2**50
        n_items, n_bytes = self.weigh(values)
        self.steps_left = MAX_STEPS + n_items * STEPS_PER_ITEM
        self.bytes_left = MAX_BYTES + n_bytes * BYTES_PER_BYTE
        self._deadline += n_items * STEPS_PER_ITEM * 1e-5

    # -- spending

    def step(self, n: int) -> None:
        """Pay for work of the interpreter."""
        self.steps_left -= n
        if self.steps_left < 0:
            raise SecurityError("it takes too many steps")
        if time.monotonic() > self._deadline:
            raise SecurityError("it takes too long")

    def pay(self, n: int) -> None:
        """Pay for bytes."""
        self.bytes_left -= n
        if self.bytes_left < 0:
            raise SecurityError("its values and texts are too large")

    def enter(self) -> None:
        """Begin a call of a macro, a block or a recursive loop; end it with :meth:`leave`."""
        if self._depth == MAX_DEPTH:
            raise SecurityError(f"calls are nested over {MAX_DEPTH} deep")
        self._depth += 1

    def leave(self) -> None:
        """End a call."""
        self._depth -= 1

    # -- sizes

    def weigh(self, value: object) -> tuple[int, int]:
        """Return the number of values in a value, itself included, and the bytes of its text.

        The text is that of ``repr`` or of JSON, whatever needs escapes. A value that is there
        several times counts as often. Each visited value is paid for.
        """
        n_values = n_bytes = depth = 0
        level: list[object] = [value]
        while level:
            depth += 1
            if depth > MAX_DEPTH:
                raise SecurityError(f"values are nested over {MAX_DEPTH} deep")
            n_values += len(level)
            self.step(len(level))
            below: list[object] = []
            for one in level:
                kind = type(one)
                if kind is str:  # as _escaped; this loop visits every value of every message
                    n_bytes += len(one) * (6 if one.isascii() else 40)  # type: ignore[arg-type,attr-defined]
                elif kind is dict:
                    self.step(2 * len(one))  # type: ignore[arg-type]
                    below += one.keys()  # type: ignore[attr-defined]
                    below += one.values()  # type: ignore[attr-defined]
                elif kind is list or kind is tuple:
                    self.step(len(one))  # type: ignore[arg-type]
                    below += one  # type: ignore[arg-type]
                else:
                    n_bytes += self._weigh_other(one, below)
            level = below
        return n_values, n_bytes + 16 * n_values

    def _weigh_other(self, one: object, below: list[object]) -> int:
        if one is None or isinstance(one, (bool, float, Undefined, range)):
            return _NUMBER if isinstance(one, float) else 0
        if isinstance(one, str):
            return _escaped(one)
        if isinstance(one, int):
            return one.bit_length()
        if isinstance(one, Mapping):
            self.step(2 * len(one))
            below += (*one.keys(), *one.values())
            return ITEM
        if isinstance(one, (list, tuple, Set, MappingView)):
            self.step(len(one))
            below += one  # type: ignore[arg-type]
            return ITEM
        return 4 * len(repr(one))

    def text(self, value: object) -> int:
        """Return the bytes of ``str(value)``, at most; visiting a container is paid for."""
        if isinstance(value, str):
            return size(value)
        if value is None or isinstance(value, (int, float, Undefined)):
            return _NUMBER if isinstance(value, float) else 16 + int(value or 0).bit_length()
        return self.weigh(value)[1]

    # -- operations

    def compare(self, left: object, right: object) -> None:
        """Pay for ``left == right`` and the like."""
        if isinstance(left, str) and isinstance(right, str):
            self.pay(min(size(left), size(right)))
        elif not (_is_plain(left) or _is_plain(right)):
            self.pay(self.weigh(left)[1] + self.weigh(right)[1])

    def look_up(self, key: object) -> None:
        """Pay for looking up a key."""
        if isinstance(key, str):
            self.pay(size(key))
        elif not _is_plain(key):
            self.pay(self.weigh(key)[1])

    def contains(self, item: object, container: object) -> bool:
        """Return ``item in container``."""
        if isinstance(container, Iterator):
            for one in container:
                self.step(1)
                self.compare(item, one)
                if one is item or one == item:
                    return True
            return False
        if isinstance(container, str):
            self.find(container, item)
        elif isinstance(container, range) and not isinstance(item, int):
            self.step(len(container))
        elif isinstance(container, (Mapping, Set)):
            self.look_up(item)
        elif isinstance(container, (list, tuple, MappingView)):
            self.step(len(container))
            if not _is_plain(item):
                self.pay(self.weigh(container)[1] + self.weigh(item)[1])
            elif isinstance(item, str):
                self.pay(len(container) * size(item))
        return item in container  # type: ignore[operator]

    def find(self, text: str, part: object) -> None:
        """Pay for a search from the left, which is fast for long parts."""
        n = len(part) if isinstance(part, str) else 0
        self.pay(size(text) + min(len(text), 30_000) * min(n, 100) // 16)

    def arguments(self, *values: object) -> None:
        """Pay for a look at everything that is in arguments, whatever will be done with them."""
        for value in values:
            if not _is_plain(value):
                self.weigh(value)

    def items(self, value: Any, each: int = SLOT) -> Any:
        """Return something to loop over, after paying for it; an iterator becomes a list."""
        if isinstance(value, Iterator):
            found = []
            for one in value:
                self.step(1)
                self.pay(each)
                found.append(one)
            return found
        n = operator.length_hint(value, 0)
        self.step(n)
        self.pay(n * each)
        return value

    def binary(self, sign: str, left: Any, right: Any) -> None:
        """Pay for ``left sign right``.

        Raises:
            SecurityError: a number would be too large, or these have no such operator.
        """
        if sign == "%" and isinstance(left, str):
            escaped = _ESCAPED if isinstance(left, Markup) else 1
            self.pay(escaped * percent_bytes(self, left, right))
            return
        if not (isinstance(left, _OPERANDS) and isinstance(right, _OPERANDS)):
            names = f"{type(left).__name__} {sign} {type(right).__name__}"
            raise SecurityError(f"{names} is not for templates")
        escaped = _ESCAPED if isinstance(left, Markup) or isinstance(right, Markup) else 1
        if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            self.pay(escaped * (size(left) + size(right)))
        elif sign == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, (str, list, tuple)) and isinstance(times, int):
                    self.pay(size(items) * max(times, 0))
                    return
        if sign in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if sign == "**" else right.bit_length()
            if bits + left.bit_length() > 2 * MAX_BITS:
                raise SecurityError("a number is too large")


_OPERANDS = (int, float, str, list, tuple, dict, type(None), Undefined)


def check_number(value: Any) -> Any:
    """Return the value, unless it is an integer that is too large."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise SecurityError(f"a number of {value.bit_length()} bits is too large")
    return value


def size(value: str | list[Any] | tuple[Any, ...]) -> int:
    """Return the bytes of a text or of the slots of a list, at most."""
    if isinstance(value, str):
        return len(value) if value.isascii() else 4 * len(value)
    return SLOT * len(value)


def is_simple_key(key: object) -> bool:
    """Return whether nobody can make many keys of this kind that have the same hash."""
    if isinstance(key, int):
        return abs(key) < _SMALL_INT
    return key is None or isinstance(key, str)


def _escaped(text: str) -> int:
    """Return the bytes of a text as ``repr`` or JSON writes it, at most."""
    return len(text) * (6 if text.isascii() else 40)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float, Undefined))


def _width(value: object) -> int:
    """Return the bytes of padding to a width."""
    return 4 * max(0, value) if isinstance(value, int) else 0


# --- formats ------------------------------------------------------------------------------------

_CONVERSION = re.compile(r"[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?(.?)", re.DOTALL)
_DIGITS = re.compile(r"\d+")


def percent_bytes(meter: Meter, form: str, values: object) -> int:
    """Return the bytes of ``form % values``, at most."""
    n_fields = n_padding = 0
    start = form.find("%")
    while start >= 0:
        meter.step(1)
        start += 1
        if form.startswith("(", start):
            start = _closing(form, start)
        match = _CONVERSION.match(form, start)
        if match is None:
            break
        for width in match.group(1, 2):
            n_padding += _field_width(form, width or "0")
        n_fields += match[3] != "%"
        start = form.find("%", match.end())
    if not n_fields:
        return size(form)
    each = meter.weigh(values)[1]
    if isinstance(values, Mapping):  # a value can be named in every field
        each *= n_fields
    return size(form) + 4 * n_padding + each


def _closing(form: str, start: int) -> int:
    """Return where a name in parentheses ends."""
    depth = 0
    for i in range(start, len(form)):
        depth += (form[i] == "(") - (form[i] == ")")
        if depth == 0:
            return i + 1
    return len(form)


def format_bytes(meter: Meter, form: str, /, *values: object, **named: object) -> int:
    """Return the bytes of ``form.format(...)``, at most."""
    meter.step(len(form) // 4)
    n_fields = n_padding = 0
    for _, name, spec, _ in string.Formatter().parse(form):
        if name is None:
            continue
        n_fields += 1
        if spec and "{" in spec:
            raise SecurityError(f"the format {form[:40]!r} has a field whose width is a value")
        n_padding += sum(_field_width(form, run) for run in _DIGITS.findall(spec or ""))
    return size(form) + 4 * n_padding + n_fields * meter.weigh((values, named))[1]


def _field_width(form: str, digits: str) -> int:
    if digits == "*" or len(digits) > 7:
        raise SecurityError(f"the format {form[:40]!r} has a field that is too wide")
    return int(digits or 0)


# --- methods ------------------------------------------------------------------------------------


def _copy(times: int) -> Cost:
    """Return the cost of a text that is made of the first argument's."""

    def cost(meter: Meter, text: object, /, *args: object, **named: object) -> None:
        more = (*args, *named.values())
        meter.pay(times * (meter.text(text) + sum(map(meter.text, more))))

    return cost


def _strip(meter: Meter, text: object, chars: object = None) -> None:
    n = len(chars) if isinstance(chars, str) else 0
    meter.pay(meter.text(text) * (1 + n // 8))


def _find(meter: Meter, text: str, part: object = "", *_: object) -> None:
    meter.find(text, part)


def _find_last(meter: Meter, text: str, part: object = "", *_: object) -> None:
    n = len(part) if isinstance(part, str) else 0
    meter.pay(3 * size(text) + len(text) * n // 16)


def _split(meter: Meter, text: str, sep: object = None, maxsplit: object = -1) -> None:
    if isinstance(sep, str) and sep:
        meter.find(text, sep)
        n = text.count(sep) + 1
    else:
        n = len(text) // 2 + 1
    if isinstance(maxsplit, int) and maxsplit >= 0:
        n = min(n, maxsplit + 1)
    meter.pay(size(text) + n * ITEM)


def _split_last(meter: Meter, text: str, sep: object = None, maxsplit: object = -1) -> None:
    _find_last(meter, text, sep)
    _split(meter, text, sep, maxsplit)


def _lines(meter: Meter, text: str, _: object = False) -> None:
    meter.pay(2 * size(text) + n_lines(text) * ITEM)


def n_lines(text: str) -> int:
    """Return how many lines ``splitlines`` makes of a text, at most."""
    return 1 + sum(map(text.count, _LINE_BREAKS))


def _replace(
    meter: Meter, text: object, old: object, new: object, *_: object, **__: object
) -> None:
    meter.pay(meter.text(text))
    text, old = str(text), str(old)
    meter.find(text, old)
    meter.pay(meter.text(text) + text.count(old) * meter.text(new))


def _pad(meter: Meter, text: object, width: object = 80, *_: object) -> None:
    meter.pay(4 * meter.text(text) + _width(width))


def _tabs(meter: Meter, text: str, tabsize: object = 8) -> None:
    meter.pay(size(text) + text.count("\t") * _width(tabsize))


def _join(meter: Meter, sep: str, parts: Any) -> None:
    """For parts that are at hand; those of an iterator are none of a template's values."""
    total = size(sep) * operator.length_hint(parts, 0)
    for part in meter.items(parts):
        total += meter.text(part)
    meter.pay(total)


def _format(meter: Meter, form: str, /, *values: object, **named: object) -> None:
    meter.pay(format_bytes(meter, form, *values, **named))


def _index(meter: Meter, items: Any, item: object = None, *_: object) -> None:
    meter.step(len(items))
    if not _is_plain(item):
        meter.pay(meter.weigh(items)[1] + meter.weigh(item)[1])
    elif isinstance(item, str):
        meter.pay((len(items) + 40) * size(item))


def _get(meter: Meter, _: object, key: object = None, *__: object) -> None:
    meter.look_up(key)


def _copy_items(meter: Meter, items: Any) -> None:
    meter.pay(len(items) * 2 * ITEM)


def free(*_: object, **__: object) -> None:
    """Pay nothing: the step that every call costs is enough."""


_STR_METHODS: dict[str, Cost] = {
    **dict.fromkeys(("capitalize", "casefold", "lower", "swapcase", "title", "upper"), _copy(3)),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _pad),
    **dict.fromkeys(("count", "find", "index", "partition"), _find),
    **dict.fromkeys(("rfind", "rindex", "rpartition"), _find_last),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _strip),
    **dict.fromkeys(("startswith", "endswith", "removeprefix", "removesuffix"), _copy(1)),
    **{
        f"is{kind}": _copy(1)
        for kind in (
            *("alnum", "alpha", "ascii", "decimal", "digit", "identifier", "lower", "numeric"),
            *("printable", "space", "title", "upper"),
        )
    },
    "expandtabs": _tabs,
    "join": _join,
    "replace": _replace,
    "rsplit": _split_last,
    "split": _split,
    "splitlines": _lines,
}
_METHODS: tuple[tuple[type | tuple[type, ...], dict[str, Cost]], ...] = (
    (str, _STR_METHODS),
    ((list, tuple), {"copy": _copy_items, "count": _index, "index": _index}),
    (
        dict,
        {"copy": _copy_items, "get": _get, "items": free, "keys": free, "values": free},
    ),
    ((int, float), {"is_integer": free}),
)


def method_cost(owner: object, name: str) -> Cost:
    """Return the cost of a method.

    Raises:
        SecurityError: it is none that templates may call.
    """
    for kind, costs in _METHODS:
        if isinstance(owner, kind) and name in costs:
            return costs[name]
    raise SecurityError(f"the method {name} of {type(owner).__name__} is not for templates")


# --- filters ------------------------------------------------------------------------------------


def _percent(meter: Meter, form: object, /, *values: object, **named: object) -> None:
    meter.pay(meter.text(form))
    meter.pay(percent_bytes(meter, str(form), named or values))


def _indent(
    meter: Meter, text: object, width: object = 4, first: object = False, blank: object = False
) -> None:
    del first, blank
    each = meter.text(width) if isinstance(width, str) else _width(width)
    n_bytes = meter.text(text)
    n = n_lines(text) if isinstance(text, str) else n_bytes
    meter.pay(6 * n_bytes + n * (ITEM + each))


def _by_piece(meter: Meter, text: object) -> None:
    """For filters that take a text to pieces, which may be single characters."""
    n_bytes = meter.text(text)
    meter.step(n_bytes)
    meter.pay(n_bytes * ITEM)


def _tags(meter: Meter, text: object) -> None:
    """Comments and tags are taken out one by one, which copies the text each time."""
    n_bytes = meter.text(text)
    meter.pay(2 * n_bytes)
    meter.pay(n_bytes * (ITEM + 2 * str(text).count("<")))


def _int(meter: Meter, value: object, default: object = 0, base: object = 10) -> None:
    del default, base
    if isinstance(value, str):
        meter.pay(40 * size(value) + len(value) ** 2 // 256)


def _round(_: Meter, value: object, precision: object = 0, method: object = "common") -> None:
    del value, method
    if isinstance(precision, int) and abs(precision) > 64:
        raise SecurityError(f"the precision {precision:.3g} is too large")


def _list(meter: Meter, value: Any) -> None:
    meter.items(value, each=80 if isinstance(value, str) else SLOT)


def _reverse(meter: Meter, value: Any) -> None:
    meter.pay(size(value) if isinstance(value, str) else 0)


def _each(meter: Meter, value: Any, /, *args: object, **named: object) -> None:
    """For filters that visit each item, and parts of it that a path with dots names."""
    paths = [one for one in (*args, *named.values()) if isinstance(one, str)]
    n_parts = sum(path.count(".") + path.count(",") for path in paths)
    n = operator.length_hint(value, 0)
    meter.step(n * (2 + n_parts))
    meter.pay(n * 2 * SLOT + n_parts * ITEM + sum(map(size, paths)))


def _ordered(meter: Meter, value: Any, /, *args: object, **named: object) -> None:
    """For filters that compare items: at most 24 times each, as in sorting 10 million."""
    _each(meter, value, *args, **named)
    n_values, n_bytes = meter.weigh(value)
    meter.step(n_values)
    meter.pay(24 * n_bytes)


def _batch(meter: Meter, value: Any, linecount: object, fill_with: object = None) -> None:
    _each(meter, value)
    meter.pay(operator.length_hint(value, 0) * ITEM)
    if fill_with is not None:
        meter.pay(2 * _width(linecount))


def _slice(meter: Meter, value: Any, slices: object, fill_with: object = None) -> None:
    del fill_with
    _each(meter, value)
    meter.step(_width(slices))
    meter.pay(ITEM // 4 * _width(slices))


FILTERS: dict[str, Cost] = {
    **dict.fromkeys(("abs", "count", "d", "default", "first", "last", "length", "random"), free),
    **dict.fromkeys(("attr", "safe", "string"), _copy(2)),
    **dict.fromkeys(("capitalize", "lower", "upper"), _copy(3)),
    **dict.fromkeys(("e", "escape", "forceescape"), _copy(_ESCAPED)),
    **dict.fromkeys(("float", "filesizeformat"), _copy(40)),
    **dict.fromkeys(("title", "urlencode", "wordcount"), _by_piece),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr", "sum"), _each),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _ordered),
    "batch": _batch,
    "center": _pad,
    "format": _percent,
    "indent": _indent,
    "int": _int,
    "items": _copy_items,
    "join": _each,
    "list": _list,
    "replace": _replace,
    "reverse": _reverse,
    "round": _round,
    "slice": _slice,
    "striptags": _tags,
    "tojson": free,
    "trim": _strip,
    "truncate": _copy(4),
}
"""The filters that templates may use. ``join``, ``sum`` and ``tojson`` pay for the rest as they go.
"""
TAKING_ANY = frozenset(name for name, cost in FILTERS.items() if cost in (free, _list, _reverse))
"""Those that do not look into a value."""
LOOPING = frozenset(
    {name for name, cost in FILTERS.items() if cost in (_each, _ordered, _batch, _slice)}
)
"""Those that visit all items of a value, which may be an iterator."""


def json_cost(
    meter: Meter, value: object, indent: object, separators: Sequence[object] | None
) -> None:
    """Pay for a value as JSON."""
    n_values, n_bytes = meter.weigh(value)
    each = sum(map(meter.text, separators or ())) + ITEM
    if indent is not None:
        each += MAX_DEPTH * (meter.text(indent) if isinstance(indent, str) else _width(indent))
    meter.pay(n_bytes + n_values * each)
