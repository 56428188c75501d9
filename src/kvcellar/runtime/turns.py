"""Threads that share a context take turns: one call at a time, on whichever of its sequences."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class TakesTurns(Protocol):
    """What :func:`in_turn` methods belong to."""

    turn: AbstractContextManager[object]


T = TypeVar("T", bound=TakesTurns)


def in_turn(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A method during which no other thread works on the context."""

    @wraps(method)
    def alone(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.turn:
            return method(self, *args, **kwargs)

    return alone
