"""Finding, loading and checking libggml.

The prebuilt libraries of the ``libggml-python`` wheel are used unless the environment variable
``KVCELLAR_LIBGGML`` names another build: a folder, or one library file, of the same minor version.
Loading happens at the first use, never at import, and once a process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
from functools import lru_cache
from pathlib import Path

from kvcellar.backends.ggml.binding import CPU_FEATURES, OBJECT_SIZE, Ggml, LogCallback, Tensor
from kvcellar.errors import LibraryError

ENV = "KVCELLAR_LIBGGML"
SUPPORTED = (0, 20)
_STEMS = ("ggml-base", "ggml-cpu", "ggml")
_LEVELS = {2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}

log = logging.getLogger("kvcellar.ggml")


class _LogRelay:
    """Sends ggml's messages to :mod:`logging` and remembers the last error."""

    def __init__(self) -> None:
        self.last_error = ""
        self.callback = LogCallback(self._receive)
        log.addHandler(logging.NullHandler())  # errors are raised; without it they are printed too

    def _receive(self, level: int, text: bytes | None, _data: object) -> None:
        message = (text or b"").decode("utf-8", "replace").rstrip("\n")
        if level == 4:
            self.last_error = message
        log.log(_LEVELS.get(level, logging.DEBUG), "%s", message)


class Library:
    """A loaded and checked libggml.

    Attributes:
        api: the C functions.
        version: ggml's own version, for example "0.20.2".
        origin: where it was loaded from.
    """

    def __init__(self, paths: list[Path], origin: str) -> None:
        self.origin = origin
        libraries = _open(paths, origin)
        _check_unmixed(libraries)
        self.api = Ggml(libraries)
        self.version = self._check()
        self._relay = _LogRelay()
        self.api.ggml_log_set(self._relay.callback, None)

    def take_error(self) -> str:
        """The last error ggml logged since the last call, or an empty string."""
        message, self._relay.last_error = self._relay.last_error, ""
        return message

    def features(self) -> tuple[str, ...]:
        """Those of ``CPU_FEATURES`` that this build uses."""
        return tuple(n for n in CPU_FEATURES if getattr(self.api, f"ggml_cpu_has_{n}")())

    def _check(self) -> str:
        if "ggml_version" in self.api.missing:
            raise LibraryError(f"{self.origin} is not a libggml: it has no ggml_version()")
        version = str(self.api.ggml_version().decode())
        wanted = ".".join(map(str, SUPPORTED))
        if not _is_supported(version):
            raise LibraryError(
                f"{self.origin} is ggml {version}, kvcellar needs {wanted}.x: "
                f"install libggml-python~={wanted}.0 or set {ENV} to such a build"
            )
        if self.api.missing:
            raise LibraryError(f"{self.origin} lacks {', '.join(self.api.missing)}")
        size = ctypes.sizeof(Tensor)
        expected = self.api.ggml_tensor_overhead() - OBJECT_SIZE
        if size != expected:
            raise LibraryError(
                f"{self.origin} has tensors of {expected} bytes, kvcellar was written for {size}: "
                "use the build of libggml-python"
            )
        return version


def _check_unmixed(libraries: list[ctypes.CDLL]) -> None:
    """Refuse a libggml whose parts were bound to another one's.

    The loader knows a library by its name alone, so one that is already in the process (that of
    llama-cpp-python, say) takes the place of ours wherever ours is needed.
    """
    found = [getattr(library, "ggml_version", None) for library in libraries]
    addresses = {ctypes.cast(f, ctypes.c_void_p).value for f in found if f is not None}
    if len(addresses) > 1:
        raise LibraryError(
            "another libggml is loaded in this process already, perhaps by llama_cpp: "
            "use kvcellar in a process of its own"
        )


def _is_supported(version: str) -> bool:
    parts = version.split(".")
    return tuple(parts[:2]) == tuple(map(str, SUPPORTED))


@lru_cache(maxsize=1)
def load() -> Library:
    """The process's libggml, loaded at the first call.

    Raises:
        LibraryError: absent, unloadable, of another version or layout.
    """
    named = os.environ.get(ENV)
    if named:
        return Library(_paths_in(Path(named)), f"{ENV}={named}")
    folder = _wheel_folder()
    return Library(_paths_in(folder), str(folder))


def _wheel_folder() -> Path:
    spec = importlib.util.find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        raise LibraryError(
            f"libggml is not installed: pip install libggml-python, or set {ENV} to a build of it"
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    for name in ("lib64", "lib", "bin"):
        if _library_file(root / name, "ggml-base") is not None:
            return root / name
    raise LibraryError(f"no libggml in {root}: reinstall libggml-python or set {ENV}")


def _paths_in(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise LibraryError(f"{place} does not exist: {ENV} must name a folder or a libggml file")
    found = [_library_file(place, stem) for stem in _STEMS]
    paths = [path for path in found if path is not None]
    if not paths:
        raise LibraryError(f"no libggml in {place}: {ENV} must name a folder that holds one")
    return paths


def _library_file(folder: Path, stem: str) -> Path | None:
    for name in (f"lib{stem}.so", f"lib{stem}.dylib", f"{stem}.dll", f"lib{stem}.dll"):
        if (folder / name).is_file():
            return folder / name
    return None


def _open(paths: list[Path], origin: str) -> list[ctypes.CDLL]:
    try:
        return [ctypes.CDLL(str(path)) for path in paths]
    except OSError as error:
        raise LibraryError(f"cannot load libggml from {origin}: {error}") from error
