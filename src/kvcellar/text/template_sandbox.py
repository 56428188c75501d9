"""The sandbox in which chat templates run: they come from model files that are not trusted.

Jinja's immutable sandbox keeps a template from Python's internals and from changing its
arguments. Beyond that, what a template can use is limited:

* steps: each turn of a loop and each call of a macro counts (``MAX_STEPS``), and checks the clock
  (``MAX_SECONDS``);
* size: the output, and any result of an operator, function, method or filter, has at most
  ``MAX_CHARS`` characters or items; numbers given to them are at most ``MAX_NUMBER``.

Not prevented: one single call that is slow or large with arguments within these limits; the size
of its result is checked afterwards (``a.replace("x", b)`` with two long texts).
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 250_000
MAX_SECONDS = 10.0
MAX_CHARS = 16 * 2**20
MAX_NUMBER = 10**6

_MAX_BITS = 4096
_WIDE_FIELD = re.compile(r"\d{7}|%[^a-zA-Z%]*\*")
# Steps left and the time limit of the render that runs in this context.
_budget: ContextVar[list[float] | None] = ContextVar("kvcellar_template_budget", default=None)


@contextmanager
def spending() -> Iterator[None]:
    """Count the steps and the time of a render inside."""
    token = _budget.set([MAX_STEPS, time.monotonic() + MAX_SECONDS])
    try:
        yield
    finally:
        _budget.reset(token)


class GenerationBlock(Extension):
    """``{% generation %}``: marks what the model wrote; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body in place of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with limits; see the module."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
            cache_size=0,
        )
        del self.globals["lipsum"]  # nothing but a way to spend time
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            step = nodes.ExprStmt(_call_environment("step", []))
            node.body.insert(0, step.set_lineno(node.lineno))  # type: ignore[attr-defined]
        return _ConcatToCall().visit(tree)  # type: ignore[no-any-return]

    def step(self) -> None:
        """Count one step of the current render."""
        budget = _budget.get()
        if budget is None:
            return
        budget[0] -= 1
        if budget[0] < 0 or time.monotonic() > budget[1]:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps or {MAX_SECONDS:g} seconds")

    def concat_bounded(self, *parts: Any) -> str:
        """Evaluate the ``~`` operator."""
        return "".join(check_size(str(part)) for part in parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate ``left operator right``, if the result is within the limits."""
        del context
        if operator == "**" and isinstance(right, int | float) and abs(right) > 64:
            raise SecurityError(f"power {right} is too large")
        if operator == "*":
            _check_product(left, right)
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        return check_size(self.binop_table[operator](left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Wrap ``str.format``, if no field is too wide."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call(
        __self,  # noqa: N805 - keeps the names free for the template's own arguments
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a function or method for the template."""
        for value in (*args, *kwargs.values()):
            _check_number(value)
        return check_size(super().call(__context, __obj, *args, **kwargs))


def check_size(value: Any) -> Any:
    """Return the value, if its size is within the limits."""
    if isinstance(value, str | bytes | list | tuple) and len(value) > MAX_CHARS:
        raise SecurityError(f"a value of {len(value)} items is too large")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise SecurityError(f"a number of {value.bit_length()} bits is too large")
    return value


class _ConcatToCall(NodeTransformer):
    """Turn ``a ~ b`` into a call: Jinja can intercept only binary operators."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the visitor's naming
        self.generic_visit(node)
        return _call_environment("concat_bounded", node.nodes).set_lineno(node.lineno)


def _call_environment(name: str, args: list[nodes.Expr]) -> nodes.Call:
    # An attribute of the environment is no name that a template could put something else under.
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            _check_number(value)
        if function.__name__ == "do_format" and args and isinstance(args[0], str):
            _check_format(args[0])
        return check_size(function(*args, **kwargs))

    return checked


def _check_number(value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise SecurityError(f"the number {value:.3g} is too large for an argument")


def _check_product(left: Any, right: Any) -> None:
    for items, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(items, str | bytes | list | tuple):
            if len(items) * times > MAX_CHARS:
                raise SecurityError(f"{times} times {len(items)} items are too many")
            return


def _check_format(text: str) -> None:
    if _WIDE_FIELD.search(text):
        raise SecurityError(f"the format {text[:40]!r} has a field that is too wide")
