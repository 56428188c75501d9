"""What the figures were measured on."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kvcellar.cli.environment import processor_name, usable_cpus


def describe(model: Path, threads: int, repeats: int) -> dict[str, Any]:
    """Processor, system, model and settings; nothing that names the machine or a person."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cpu": processor_name(),
        "cores": usable_cpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "model": model.name,
        "threads": threads,
        "repeats": repeats,
    }
