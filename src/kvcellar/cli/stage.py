"""Where the tour is shown: frames that follow each other in a terminal, the last one elsewhere.

In a terminal a frame stays for a moment, so that one can see what happens; a computation that
takes as long by itself is not held up. Elsewhere nothing waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from rich.text import Text

from kvcellar.cli.console import show

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

ShowFrame: TypeAlias = "Callable[[RenderableType], None]"

_FRAME, _PAUSE = 0.05, 1.5  # seconds that a frame stays, and the end of a step
_MAX_WIDTH = 100


class Stage:
    """A console with a sense of time.

    Args:
        console: where to show.
        hurried: never wait.
    """

    def __init__(self, console: Console, *, hurried: bool) -> None:
        self.console = console
        self.width = min(console.width, _MAX_WIDTH)
        self._waits = console.is_terminal and not hurried

    @contextmanager
    def step(self, title: str) -> Iterator[ShowFrame]:
        """A step of the tour; gives the function that shows a frame in place of the one before."""
        self.heading(title)
        if self.console.is_terminal:
            with self._moving() as show_frame:
                yield show_frame
        else:
            with self._still() as show_frame:
                yield show_frame

    def heading(self, title: str) -> None:
        """Print a title with a line behind it."""
        line = "-" if self.console.options.ascii_only else "─"
        rest = max(3, self.width - len(title) - 4)
        self.console.print(Text(f"\n{line * 2} {title} ", "bold").append(line * rest, "dim"))

    def say(self, text: RenderableType) -> None:
        """Print below what was shown."""
        show(self.console, text)

    def say_code(self, code: str) -> None:
        """Print Python, in colours if there are any."""
        if not self.console.is_terminal:
            self.say(Text(code))
            return
        from rich.syntax import Syntax

        self.say(Syntax(code, "python", theme="ansi_dark", background_color="default"))

    def pause(self) -> None:
        """Leave time to look at the end of a step."""
        if self._waits:
            time.sleep(_PAUSE)

    @contextmanager
    def _moving(self) -> Iterator[ShowFrame]:
        from rich.live import Live

        last = time.perf_counter()
        with Live(console=self.console, auto_refresh=False) as live:

            def show_frame(frame: RenderableType) -> None:
                nonlocal last
                if self._waits:
                    time.sleep(max(0.0, last + _FRAME - time.perf_counter()))
                last = time.perf_counter()
                live.update(frame, refresh=True)

            yield show_frame

    @contextmanager
    def _still(self) -> Iterator[ShowFrame]:
        frames: list[RenderableType] = []
        yield lambda frame: frames.__setitem__(slice(None), [frame])
        show(self.console, *frames)
