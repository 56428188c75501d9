"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


def describe(model: Path, threads: int, repeats: int) -> dict[str, Any]:
    """Processor, system, model and settings; nothing that names the machine or a person."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cpu": cpu_model(),
        "cores": available_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "model": model.name,
        "threads": threads,
        "repeats": repeats,
    }


def available_cores() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, as far as the system tells."""
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or "unknown"
