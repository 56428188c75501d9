"""Toys to interrupt: some are sound, and each of the others is broken in one way."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from kvcellar.testing.interrupts.trials import Fault, Happened, NotApplicable, Stage

SPOILT: list[bool] = []


class Pair:
    """Two numbers that are to be the same, and ways to count both up."""

    def __init__(self) -> None:
        self.both = (0, 0)
        self.lock = threading.RLock()
        self.n_begun = 0

    def sound(self) -> None:
        with self.lock:
            both = tuple(up(number) for number in self.both)
            self.both = both[0], both[1]
            up(0)

    def half(self) -> None:
        self.both = up(self.both[0]), self.both[1]
        self.both = self.both[0], up(self.both[1])

    def taken_back(self) -> None:
        """Sound, unless a second exception comes while the first is being handled."""
        before = self.both
        try:
            self.half()
        except BaseException:
            up(0)
            self.both = up(before[0]) - 1, before[1]
            raise

    def crash(self) -> None:
        try:
            self.sound()
        except BaseException:
            os.abort()

    def hang(self) -> None:
        try:
            self.sound()
        except BaseException:
            while True:
                up(0)

    def swallow(self) -> None:
        try:
            self.sound()
        except BaseException:
            return

    def mask(self) -> None:
        try:
            self.sound()
        except BaseException:
            raise ValueError("something else") from None

    def keep_lock(self) -> None:
        self.lock.acquire()
        self.sound()
        self.lock.release()

    def leak(self) -> None:
        """Nothing is wrong before it was interrupted a few times."""
        self.n_begun += 1
        self.sound()
        self.n_begun -= 1

    def spoil(self) -> None:
        """Nothing in this process works any more once it was interrupted."""
        if SPOILT:
            raise ValueError("spoilt")
        try:
            self.sound()
        except BaseException:
            SPOILT.append(True)
            raise

    def refuse(self) -> None:
        raise NotApplicable("a toy that cannot")

    def exit(self) -> None:
        try:
            self.sound()
        except BaseException:
            os._exit(3)


def up(number: int) -> int:
    """One more."""
    return sum([number, 1])


class Toy(Stage):
    """A pair that is counted up, by one of its methods."""

    def __init__(self, way: str) -> None:
        self._way = way
        self._pair = Pair()
        self._before = 0

    def learn(self) -> None:
        self.prepare()
        self.act()

    def prepare(self) -> None:
        self._before = self._pair.both[0]

    def act(self) -> object:
        act: Callable[[], object] = getattr(self._pair, self._way)
        return act()

    def verify(self) -> Happened:
        first, second = self._pair.both
        if first != second:
            raise Fault("half done", f"{first} and {second}")
        if "owner=0" not in repr(self._pair.lock):
            raise Fault("lock held")
        if self._pair.n_begun > 3:
            raise Fault("leak", f"{self._pair.n_begun} are counted")
        return "before" if first == self._before else "after"

    def renew(self, *, broken: bool = False) -> None:  # noqa: ARG002
        self._pair = Pair()

    def close(self) -> None:
        self.renew()
