"""A hash of all that a model computes with, made once and kept beside its file.

Metadata that change no logits (names, templates, tokens) do not count, and neither does the order
of the tensors. What is kept is believed as long as the file has the size and the time of its last
change that it had; where the directory cannot be written, it is kept among the user's caches.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Any, TypeAlias

import numpy as np

from kvcellar.backends.base import ModelFile

SUFFIX = ".kvcellar.json"
VERSION = 1
"""Of what :func:`compute_hash` counts; another one makes what is kept void."""

Stamp: TypeAlias = "Mapping[str, int] | None"
"""The size of a file and when it was changed; None: it cannot be told."""


def file_stamp(path: str | Path) -> Stamp:
    """That of a file, to be taken before it is opened."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return None
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}


def weights_hash(file: ModelFile[Any], stamp: Stamp) -> str:
    """The hash, 64 hexadecimal digits; of a file that is not known yet, all of it is read.

    Args:
        file: the file, open.
        stamp: what it was when it was opened. If there is another one at its path by now, nothing
            that is kept there belongs to this one.
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
    """The hash, computed."""
    whole = hashlib.sha256()
    architecture = str(file.metadata.get("general.architecture", ""))
    for key in sorted(file.metadata):
        if key == "general.architecture" or key.startswith(f"{architecture}."):
            whole.update(f"{key}={_plain(file.metadata[key])}\n".encode())
    for name, type_name, shape, data in file.tensors():
        whole.update(f"{name}:{type_name}:{list(shape)}:{data.nbytes}\n".encode())
        whole.update(data.data)
    return whole.hexdigest()


def _plain(value: object) -> str:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return json.dumps(value, sort_keys=True)


def _places(path: Path) -> Iterator[Path]:
    """Where the hash of a file may be kept: beside it, else among the user's caches."""
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
    """Keep it; False if that place cannot be written."""
    temporary = place.with_name(f".{place.name}.{os.getpid()}.{get_ident()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(what))
        temporary.replace(place)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        return False
    return True
