"""A hash of all that a model computes with, made once and kept beside its file.

Metadata that change no logits (names, templates, tokens) do not count, and neither does the order
of the tensors. The kept hash is valid while the file has the same size and modification time; where
the folder cannot be written, it is kept among the user's caches.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvcellar.backends.base import ModelFile
from kvcellar.errors import SnapshotFileError
from kvcellar.snapshot.atomic import replacing

SUFFIX = ".kvcellar.json"
VERSION = 1
"""The version of :func:`compute_hash`; kept hashes of another one are ignored."""

Stamp: TypeAlias = "Mapping[str, int] | None"
"""The size of a file and when it was changed; None: it cannot be told."""


def file_stamp(path: str | Path) -> Stamp:
    """Return the stamp of a file; take it before the file is opened."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return None
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def weights_hash(file: ModelFile[Any], stamp: Stamp) -> str:
    """Return the hash, 64 hexadecimal digits; a file that is new is read as a whole.

    Args:
        file: the file, open.
        stamp: that of the file when it was opened. If another file is at its path by now, what is
            kept there is not about this one.
    """
    if stamp is None or file_stamp(file.path) != stamp:
        return compute_hash(file)
    places = list(_places(file.path))
    for place in places:
        if (known := _recall(place, stamp)) is not None:
            return known
    made = compute_hash(file)
    for place in places:
        if _keep(place, {"version": VERSION, **stamp, "weights": made}):
            break
    return made


def compute_hash(file: ModelFile[Any]) -> str:
    """Compute the hash."""
    whole = hashlib.sha256()
    architecture = str(file.metadata.get("general.architecture", ""))
    for key in sorted(file.metadata):
        if key == "general.architecture" or key.startswith(f"{architecture}."):
            value = json.dumps(file.metadata[key], sort_keys=True, default=np.ndarray.tolist)
            whole.update(f"{key}={value}\n".encode())
    for name, type_name, shape, data in file.tensors():
        whole.update(f"{name}:{type_name}:{list(shape)}:{data.nbytes}\n".encode())
        whole.update(data.data)
    return whole.hexdigest()


def _places(path: Path) -> Iterator[Path]:
    """Yield where the hash of a file may be kept: beside it, else among the user's caches."""
    yield path.with_name(path.name + SUFFIX)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]
    with suppress(RuntimeError):  # there is no home
        yield Path(cache).expanduser() / "kvcellar" / "weights" / f"{name}.json"


def _recall(place: Path, stamp: Mapping[str, int]) -> str | None:
    try:
        kept = json.loads(place.read_text())
        known_as = {"version": VERSION, **stamp}
        if all(kept[key] == value for key, value in known_as.items()):
            known = str(kept["weights"])
            return known if len(known) == 64 and set(known) <= set("0123456789abcdef") else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _keep(place: Path, what: Mapping[str, int | str]) -> bool:
    """Write what is kept; return False if that place cannot be written."""
    try:
        place.parent.mkdir(0o700, parents=True, exist_ok=True)  # the user's own
        with replacing(place) as beside:
            beside.write_text(json.dumps(what))
    except (OSError, SnapshotFileError):
        return False
    return True
