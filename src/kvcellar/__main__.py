"""The entry point of ``kvcellar`` and of ``python -m kvcellar``.

Ctrl-C is handled from the first import on. A stream that the caller closed reads as empty, and
what is written to it is discarded.
"""

from __future__ import annotations

import os
import sys

from kvcellar.cli import INTERRUPTED


def main() -> None:
    """Run the command line; never returns."""
    try:
        _prepare_streams()
        sys.excepthook = _show_traceback
        # Imported here, because it takes long enough for Ctrl-C to be pressed.
        from kvcellar.cli.app import app

        app(prog_name="kvcellar")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _show_traceback(_kind: object, error: BaseException, _trace: object) -> None:
    from kvcellar.cli.console import show_traceback

    show_traceback(error)


def _prepare_streams() -> None:
    for name, mode, flags in (
        ("stdin", "r", os.O_RDONLY),
        ("stdout", "w", os.O_WRONLY),
        ("stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            # In this order each gets its own descriptor back. Otherwise the next file that is
            # opened would get it, and what a library prints would end up in that file.
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, encoding="utf-8"))
        # A character that the terminal cannot show must not end the program.
        getattr(sys, name).reconfigure(errors="replace")


if __name__ == "__main__":
    main()
