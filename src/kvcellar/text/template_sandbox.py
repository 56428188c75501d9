"""The sandbox in which chat templates run: they come from model files that are not trusted.

Jinja's immutable sandbox keeps a template from Python's internals and from changing its
arguments. It bounds neither time nor memory, so every operation of a template is made to pay
before it begins (:mod:`kvcellar.text.template_meter`), and there are no others:

* the compiled template pays for its own nodes: the body of a loop, a branch or a macro begins with
  a call that pays for all of it; operators, comparisons, slices, and conversions to text become
  calls that pay for what they are given;
* filters, tests, methods and functions are those of a list that has the cost of each;
* a filter returns a list where Jinja's would return a generator, so nothing runs later, unpaid;
* nothing is evaluated while a template is compiled, and one with too many nodes is not.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import ignore_case, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Joiner, Namespace, _PassArg
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from kvcellar.text.template_meter import (
    FILTERS,
    ITEM,
    LOOPING,
    SLOT,
    TAKING_ANY,
    Cost,
    Meter,
    check_number,
    format_bytes,
    free,
    is_simple_key,
    json_cost,
    method_cost,
    size,
)

MAX_NODES = 8_000
"""Of a template; the longest that models come with have 2,000."""
MAX_BRANCH_NAMES = 200_000
"""Branches times names that are set: Jinja's compiler copies all names for each branch."""
MAX_NESTING = 12
"""Of loops and macros in each other: Jinja's compiler searches each of them for names."""


class MeteredContext(Context):
    """The names of a render, its meter, and the operations that compiled templates call."""

    meter: Meter

    def derived(self, locals: dict[str, Any] | None = None) -> Context:  # noqa: A002
        """Return a context with more names and the same meter."""
        context = super().derived(locals)
        assert isinstance(context, MeteredContext)
        context.meter = self.meter
        return context

    def spend(self, n_steps: int, n_bytes: int) -> bool:
        """Pay for nodes that are about to be evaluated."""
        self.meter.step(n_steps)
        if n_bytes:
            self.meter.pay(n_bytes)
        return True

    def text(self, value: object) -> str:
        """Return what is printed of a value."""
        # Twice: a part of the output, and of the text that it is joined to.
        if type(value) is str:
            self.meter.pay(2 * size(value))
            return value
        self.meter.pay(2 * self.meter.text(value))
        return str(value)

    def concat(self, *parts: object) -> str:
        """Evaluate the operator ``~``."""
        self.meter.pay(2 * sum(map(self.meter.text, parts)))
        return "".join(map(str, parts))

    def add(self, first: Any, *rest: Any) -> Any:
        """Evaluate a sum, from the left; all its parts are evaluated before."""
        if type(first) is str and {*map(type, rest)} == {str}:
            parts = (first, *rest)
            each = 1 if all(map(str.isascii, parts)) else 4
            self.meter.pay(each * sum(map(len, parts)) * len(rest))  # no sum on the way is larger
            return "".join(parts)
        for one in rest:
            first = self.environment.call_binop(self, "+", first, one)  # type: ignore[attr-defined]
        return first

    def compare(self, left: Any, *rest: Any) -> Any:
        """Evaluate ``left sign value`` or a chain of them: ``rest`` are signs and values."""
        result: Any = True
        for sign, right in zip(rest[::2], rest[1::2], strict=True):
            if sign in ("in", "notin"):
                result = self.meter.contains(left, right) == (sign == "in")
            else:
                self.meter.compare(left, right)
                result = _COMPARISONS[sign](left, right)
            if not result:
                break
            left = right
        return result

    def item(self, value: Any, key: Any) -> Any:
        """Evaluate ``value[key]``."""
        self.meter.look_up(key)
        if isinstance(key, str) and len(key) > 256:
            self.meter.pay(40 * size(key))  # it may become a part of a message
        return self.environment.getitem(value, key)

    def key(self, value: Any) -> Any:
        """Return the key of a dictionary that is being made."""
        self.meter.look_up(value)
        return value

    def slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Evaluate ``value[start:stop:step]``."""
        part = slice(start, stop, step)
        if isinstance(value, (str, list, tuple)):
            n = len(range(*part.indices(len(value))))
            self.meter.pay(n * SLOT)
        return value[part]

    def spread(self, values: Any) -> Any:
        """Return the values of ``*values`` in a call."""
        return self.meter.items(values)

    def spread_named(self, values: Any) -> Any:
        """Return the values of ``**values`` in a call."""
        self.meter.step(len(values))
        self.meter.pay(len(values) * 2 * ITEM)
        return values


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
}


class GenerationBlock(Extension):
    """``{% generation %}``: marks what the model wrote; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body in place of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# --- what templates are compiled to -------------------------------------------------------------


def _operation(name: str, *args: nodes.Expr, line: int) -> nodes.Call:
    """Return a call of a method of :class:`MeteredContext`.

    The attribute of an environment, which the generator below writes as one of the context, is no
    name that a template could put something else under.
    """
    call = nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)
    call.set_lineno(line)
    return call


class _Generator(CodeGenerator):
    """Writes operations as direct calls."""

    def visit_Call(  # noqa: N802 - the visitor's naming
        self, node: nodes.Call, frame: Frame, forward_caller: bool = False
    ) -> None:
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.write(f"{self.get_context_ref()}.{node.node.name}(")
        for arg in node.args:
            self.visit(arg, frame)
            self.write(", ")
        self.write(")")


class _Operations(NodeTransformer):
    """Turns expressions whose cost depends on values into operations."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _operation("concat", *node.nodes, line=node.lineno)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        """Turn a whole sum into one operation: templates write texts as sums of many parts."""
        parts, left = [], node.left
        parts.append(node.right)
        while isinstance(left, nodes.Add):
            parts.append(left.right)
            left = left.left
        parts.append(left)
        return _operation("add", *map(self.visit, reversed(parts)), line=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        rest = [part for one in node.ops for part in (nodes.Const(one.op), one.expr)]
        return _operation("compare", node.expr, *rest, line=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        key = node.arg
        if isinstance(key, nodes.Slice):
            ends = [one or nodes.Const(None) for one in (key.start, key.stop, key.step)]
            return _operation("slice", node.node, *ends, line=node.lineno)
        if isinstance(key, nodes.Const):
            return node
        return _operation("item", node.node, key, line=node.lineno)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _operation("key", node.key, line=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:  # noqa: N802
        self.generic_visit(node)
        for i, one in enumerate(node.nodes):
            if not isinstance(one, (nodes.TemplateData, nodes.Const)):
                node.nodes[i] = _operation("text", one, line=one.lineno)
        return node

    def _visit_arguments(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _operation("spread", node.dyn_args, line=node.lineno)
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = _operation("spread_named", node.dyn_kwargs, line=node.lineno)
        return node

    visit_Call = visit_Filter = visit_Test = _visit_arguments  # noqa: N815


class _Spending:
    """Makes each body that may run a number of times pay for its nodes first.

    Raises:
        SecurityError: the template is too large to be compiled soon.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self._n_nodes = self._n_branches = self._nesting = 0
        self._names: set[str] = set()
        tree.body.insert(0, _payment(*self._cost_of(tree.body), tree.lineno))

    def _cost_of(self, parts: Iterable[nodes.Node]) -> tuple[int, int]:
        """Return steps and bytes of nodes without the bodies in them, which pay for themselves."""
        costs = [self._cost_of_one(node) for node in parts]
        return sum(steps for steps, _ in costs), sum(n_bytes for _, n_bytes in costs)

    def _cost_of_one(self, node: nodes.Node) -> tuple[int, int]:
        self._count(node)
        n_steps, n_bytes = _own_cost(node)
        self._nesting += isinstance(node, _NESTING)
        for name, value in node.iter_fields():
            below = [
                one
                for one in (value if isinstance(value, list) else [value])
                if isinstance(one, nodes.Node)
            ]
            steps, size_below = self._cost_of(below)
            if isinstance(node, nodes.For) and name == "test" and below:
                node.test = nodes.And(_spend(steps, size_below, node.lineno), node.test)
            elif isinstance(node, _BRANCHING) and name in ("body", "else_"):
                if isinstance(node, (nodes.Macro, nodes.CallBlock)):
                    more = self._cost_of(node.defaults)
                    steps, size_below = steps + more[0], size_below + more[1]
                if below or name == "body":
                    value.insert(0, _payment(steps, size_below, node.lineno))
            else:
                n_steps, n_bytes = n_steps + steps, n_bytes + size_below
        self._nesting -= isinstance(node, _NESTING)
        return n_steps, n_bytes

    def _count(self, node: nodes.Node) -> None:
        self._n_nodes += 1
        self._n_branches += isinstance(node, nodes.If)
        if isinstance(node, nodes.Name) and node.ctx != "load":
            self._names.add(node.name)
        if self._n_nodes > MAX_NODES:
            raise SecurityError(f"it has more than {MAX_NODES} nodes")
        if self._n_branches * len(self._names) > MAX_BRANCH_NAMES:
            raise SecurityError(
                f"it has too many branches ({self._n_branches}) and names ({len(self._names)})"
            )
        if self._nesting > MAX_NESTING:
            raise SecurityError(f"its loops and macros are nested over {MAX_NESTING} deep")


_NESTING = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
_BRANCHING = (*_NESTING, nodes.If)


def _own_cost(node: nodes.Node) -> tuple[int, int]:
    if isinstance(node, nodes.TemplateData):
        return 1, 2 * size(node.data)
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return 1, ITEM + SLOT * len(node.items)
    if isinstance(node, nodes.Dict):  # its keys may be such that all have one hash
        n = len(node.items)
        return 1 + n * n // 64, ITEM + 2 * ITEM * n
    return 1, 0


def _spend(n_steps: int, n_bytes: int, line: int) -> nodes.Call:
    return _operation("spend", nodes.Const(n_steps + 1), nodes.Const(n_bytes), line=line)


def _payment(n_steps: int, n_bytes: int, line: int) -> nodes.Stmt:
    return nodes.ExprStmt(_spend(n_steps, n_bytes, line), lineno=line)


# --- what templates can use ---------------------------------------------------------------------


class TemplateNamespace(Namespace):
    """A namespace that does not print its values, which may be each other."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Format:
    """The method ``format`` of a text, which the environment calls."""

    __slots__ = ("call", "form", "is_map")

    def __init__(self, form: str, call: Callable[..., str], *, is_map: bool) -> None:
        self.form = form
        self.call = call
        self.is_map = is_map


def _table_cost(meter: Meter, *tables: Any, **named: object) -> None:
    """The cost of ``dict`` and ``namespace``."""
    meter.pay(4 * ITEM + 2 * ITEM * len(named))
    for table in tables:
        n_values, n_bytes = meter.weigh(table)
        meter.pay(n_bytes + n_values * 2 * ITEM)
        if not isinstance(table, (Mapping, Undefined)) and not all(map(_has_simple_key, table)):
            meter.step(n_values * n_values)


def _has_simple_key(pair: object) -> bool:
    return isinstance(pair, (list, tuple)) and bool(pair) and is_simple_key(pair[0])


def _texts_cost(meter: Meter, *values: object, **named: object) -> None:
    meter.pay(2 * sum(map(meter.text, (*values, *named.values()))))


@pass_context
def _join(
    context: MeteredContext, value: Any, d: Any = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    meter, sep, parts = context.meter, str(d), list[str]()
    meter.pay(size(sep))
    for part in value:
        meter.pay(size(sep) + meter.text(part))
        parts.append(str(part))
    return sep.join(parts)


@pass_context
def _sum(
    context: MeteredContext, iterable: Any, attribute: str | int | None = None, start: Any = 0
) -> Any:
    if attribute is not None:
        iterable = map(make_attrgetter(context.environment, attribute), iterable)
    values = list(iterable)
    if isinstance(start, str) or all(isinstance(one, (int, float)) for one in (start, *values)):
        return sum(values, start)
    for value in values:
        context.meter.binary("+", start, value)
        start = check_number(start + value)
    return start


@pass_context
def _unique(
    context: MeteredContext,
    value: Any,
    case_sensitive: bool = False,
    attribute: str | int | None = None,
) -> list[Any]:
    postprocess = None if case_sensitive else ignore_case
    key_of = make_attrgetter(context.environment, attribute, postprocess=postprocess)
    found: dict[Any, Any] = {}
    for one in value:
        key = key_of(one)
        if not is_simple_key(key):
            context.meter.step(len(found))
        found.setdefault(key, one)
    return list(found.values())


@pass_context
def _to_json(
    context: MeteredContext,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as models were trained on it: not escaped for HTML, unlike Jinja's filter."""
    json_cost(context.meter, value, indent, separators)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _wraps_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    cost, leading = FILTERS[name], _leading(function)
    loops, takes_any = name in LOOPING or name == "list", name in LOOPING | TAKING_ANY

    @pass_context
    def metered(context: MeteredContext, value: Any, /, *args: Any, **named: Any) -> Any:
        meter = context.meter
        meter.step(4)
        if loops and isinstance(value, Iterator):
            value = meter.items(value)
        if not takes_any:
            meter.arguments(value)
        meter.arguments(*args, *named.values())
        _pay(meter, cost, (value, *args), named)
        result = function(*leading(context), value, *args, **named)
        if name in ("reverse", "unique") and isinstance(result, list):
            result = iter(result)
        return iter(meter.items(result)) if isinstance(result, Iterator) else check_number(result)

    return metered


def _pay(meter: Meter, cost: Cost, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    before = meter.bytes_left
    cost(meter, *args, **named)
    if any(isinstance(one, Markup) for one in (*args, *named.values())):
        meter.pay(5 * (before - meter.bytes_left))  # it escapes what it is combined with


def _leading(function: Callable[..., Any]) -> Callable[[Context], tuple[Any, ...]]:
    """Return what gives the arguments that a filter or test takes before its value."""
    kind = _PassArg.from_obj(function)
    if kind is _PassArg.context:
        return lambda context: (context,)
    if kind is _PassArg.eval_context:
        return lambda context: (context.eval_ctx,)
    if kind is _PassArg.environment:
        return lambda context: (context.environment,)
    return lambda _: ()


_COMPARING = frozenset(
    (
        *("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan"),
        *("ge", ">=", "<", "lt", "lessthan", "<=", "le"),
    )
)
_DIVIDING = frozenset(("odd", "even", "divisibleby"))


def _wraps_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    leading = _leading(function)

    @functools.wraps(function)
    def metered(context: MeteredContext, value: Any, /, *args: Any, **named: Any) -> Any:
        meter = context.meter
        meter.step(2)
        if name in _COMPARING and args:
            meter.compare(value, args[0])
        elif name in ("lower", "upper"):
            meter.pay(2 * meter.text(value))
        elif name in _DIVIDING and not isinstance(value, (int, float, Undefined)):
            raise TypeError(f"{type(value).__name__} is no number")
        elif name in ("filter", "test"):
            meter.look_up(value)
        elif name == "in" and args:
            return meter.contains(value, args[0])
        return function(*leading(context), value, *args, **named)

    return pass_context(metered)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which everything is paid for; see the module."""

    code_generator_class = _Generator
    context_class = MeteredContext
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
            cache_size=0,
            optimized=False,
        )
        del self.globals["lipsum"]  # nothing but a way to spend time
        self.globals["namespace"] = TemplateNamespace
        self.globals.update(functions)
        self._functions: dict[int, Cost] = {
            **{id(function): _texts_cost for function in functions.values()},
            **{id(one): _table_cost for one in (dict, TemplateNamespace)},
            **{id(self.globals[name]): free for name in ("range", "cycler", "joiner")},
        }
        self.filters.update(join=_join, sum=_sum, unique=_unique, tojson=_to_json)
        self.filters = {name: _wraps_filter(name, self.filters[name]) for name in FILTERS}
        tests: dict[str, Any] = self.tests
        self.tests = {name: _wraps_test(name, test) for name, test in tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Operations().visit(super()._parse(source, name, filename))
        _Spending(tree)
        return tree  # type: ignore[no-any-return]

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return ``obj.attribute``; what templates ask for most is answered without detours."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_NAMES:
            return obj[attribute]
        if type(obj) is LoopContext and attribute in _LOOP_NAMES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate ``left operator right``."""
        assert isinstance(context, MeteredContext)
        context.meter.binary(operator, left, right)
        return check_number(self.binop_table[operator](left, right))

    def wrap_str_format(self, value: Any) -> Any:
        """Return what :meth:`call` knows to be the method ``format`` of a text, or None."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        return _Format(value.__self__, wrapped, is_map=value.__name__ == "format_map")

    def call(
        __self,  # noqa: N805 - keeps the names free for the template's own arguments
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a function, macro or method for the template."""
        assert isinstance(__context, MeteredContext)
        meter = __context.meter
        meter.step(2 + len(args) + len(kwargs))
        if isinstance(__obj, (Macro, BlockReference, LoopContext)):
            meter.enter()
            try:
                text = super().call(__context, __obj, *args, **kwargs)
            finally:
                meter.leave()
            meter.pay(size(text))
            return text
        cost, owner = __self._cost_of(__context, __obj)
        if cost is not None:
            args = tuple(meter.items(one) if isinstance(one, Iterator) else one for one in args)
            named = {name: kwargs[name] for name in kwargs if name not in _INTERNAL}
            meter.arguments(*args, *named.values())
            _pay(meter, cost, (*owner, *args), named)
            if isinstance(__obj, _Format):
                return __obj.call(*args, **named)
        return check_number(super().call(__context, __obj, *args, **kwargs))

    def _cost_of(self, context: Context, obj: Any) -> tuple[Cost | None, tuple[Any, ...]]:
        """Return what a call costs, None if nothing, and what it is a method of, if anything.

        Raises:
            SecurityError: it is not for templates.
        """
        if (cost := self._functions.get(id(obj))) is not None:
            return cost, ()
        if isinstance(obj, _Format):
            return _format_cost, (obj,)
        if any(obj is one for one in context.parent.values()):
            return None, ()  # what it costs is known to the caller, who gave it
        if isinstance(obj, (BuiltinMethodType, MethodType)):
            owner = obj.__self__
            if isinstance(obj, BuiltinMethodType) or isinstance(owner, Markup):
                return method_cost(owner, obj.__name__), (owner,)
            if isinstance(owner, LoopContext):
                return _texts_cost, ()  # changed() compares, which costs as much as printing
        # Beyond Jinja's own, methods and functions in Python are those of the caller's values.
        if isinstance(obj, (FunctionType, MethodType, Joiner, Undefined)):
            return None, ()
        raise SecurityError(f"calling a {type(obj).__name__} is not for templates")


_INTERNAL = ("_loop_vars", "_block_vars")
_DICT_NAMES = frozenset(dir(dict))
_LOOP_NAMES = frozenset({"first", "last", "index", "index0", "revindex", "revindex0", "length"})


def _format_cost(meter: Meter, method: _Format, /, *values: Any, **named: Any) -> None:
    if method.is_map:
        meter.pay(format_bytes(meter, method.form, *values))
    else:
        meter.pay(format_bytes(meter, method.form, *values, **named))
    if isinstance(method.form, Markup):
        meter.pay(format_bytes(meter, method.form, *values, **named) * 5)
