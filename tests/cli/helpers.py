"""Types of the fixtures that run the command."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from typer.testing import Result

Invoke = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[bytes]"]
