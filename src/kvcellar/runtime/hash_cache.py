"""Hashes of model files, kept from one process to the next in the user's cache folder.

A file per entry, named by the device and inode of the model's file, so that a file's next version
takes the place of the one before::

    $KVCELLAR_CACHE_DIR, else the system's folder for caches (~/.cache/kvcellar on Linux)
    └── hashes              0700
        └── 1b-4d2.json     0600: version, stamp, secret, samples, weights

Only what this user wrote is believed: a folder or file that belongs to somebody else, or that
others may write, is not, and neither are links. What is damaged counts as absent and is replaced.
Files appear complete, by renaming, so any number of processes may read and write at once. Beyond
:data:`MAX_ENTRIES`, those that were unused for longest are removed. Nothing here raises: where the
folder cannot be used, hashes are not kept, and a message for debugging says why.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from kvcellar.files import FileStamp, open_regular

ENV = "KVCELLAR_CACHE_DIR"
MAX_ENTRIES = 256
VERSION = 1
"""The version of entries and of the hash in them; those of another one are ignored."""

_FOLDER = "hashes"
_MAX_BYTES = 4096
_DIGEST = re.compile("[0-9a-f]{64}")
_IS_POSIX = os.name == "posix"  # elsewhere a user's folders are closed to others anyway

log = logging.getLogger("kvcellar.hashes")


@dataclass(frozen=True, slots=True)
class KeptHash:
    """The hash of a file, and what confirms that it still is that file.

    Attributes:
        weights: the hash, 64 hexadecimal digits.
        secret: 32 bytes that say where samples are taken.
        samples: the digest of samples taken there, 64 hexadecimal digits.
    """

    weights: str
    secret: bytes
    samples: str


class HashCache:
    """Entries in a folder; None: there is no folder, and nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def of_user(cls) -> HashCache:
        """That of the user, in the folder that ``KVCELLAR_CACHE_DIR`` or the system names."""
        try:
            folder = _user_folder() / _FOLDER
            with suppress(FileNotFoundError):  # it will be made
                _check_private(folder.lstat(), str(folder))
        except (OSError, RuntimeError, ValueError) as error:
            log.debug("hashes of models are not kept (%s may name a folder): %s", ENV, error)
            return cls(None)
        return cls(folder)

    def get(self, stamp: FileStamp) -> KeptHash | None:
        """Return the entry of a file; None if there is none that can be believed."""
        if self._folder is None:
            return None
        path = self._folder / _name(stamp)
        try:
            with open_regular(path, follow_links=False) as file:
                _check_private(os.fstat(file.fileno()), path.name)
                kept = _parse(file.read(_MAX_BYTES), stamp)
            with suppress(OSError):  # it is used, and can be even if that cannot be noted
                os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.debug("a kept hash is not used: %s: %r", path, error)
            return None
        return kept

    def put(self, stamp: FileStamp, kept: KeptHash) -> None:
        """Keep the hash of a file, in place of what was kept of it before."""
        if self._folder is None:
            return
        entry = {
            "version": VERSION,
            "stamp": stamp._asdict(),
            "secret": kept.secret.hex(),
            "samples": kept.samples,
            "weights": kept.weights,
        }
        try:
            self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            _check_private(self._folder.lstat(), str(self._folder))
            _replace(self._folder / _name(stamp), json.dumps(entry))
            self._drop_oldest()
        except (OSError, ValueError) as error:
            log.debug("the hash of a model is not kept: %s: %s", self._folder, error)

    def _drop_oldest(self) -> None:
        """Remove what is over the limit; that includes files that interrupted writers left."""
        assert self._folder is not None
        found: list[tuple[int, Path]] = []
        for path in self._folder.iterdir():
            with suppress(OSError):  # another process removed it
                found.append((path.lstat().st_mtime_ns, path))
        for _, path in sorted(found, reverse=True)[MAX_ENTRIES:]:
            with suppress(OSError):
                path.unlink()


def _user_folder() -> Path:
    """Return the folder that ``KVCELLAR_CACHE_DIR`` names, else that of the system.

    Raises:
        RuntimeError: there is no home folder.
        OSError: the name is relative, and there is no current folder.
    """
    if named := os.environ.get(ENV):
        return Path(named).expanduser().absolute()
    folder = Path(platformdirs.user_cache_dir("kvcellar", appauthor=False))
    if not folder.is_absolute():
        raise RuntimeError(f"the system names {folder}: there is no home folder")
    return folder


def _name(stamp: FileStamp) -> str:
    return f"{stamp.device:x}-{stamp.inode:x}.json"


def _parse(text: bytes, stamp: FileStamp) -> KeptHash | None:
    """Return the entry, None if it is of another version or of the file before it was changed.

    Raises:
        ValueError, KeyError, TypeError, RecursionError: nobody here wrote this.
    """
    found = json.loads(text)
    if found["version"] != VERSION or found["stamp"] != stamp._asdict():
        return None
    digests = [found[name] for name in ("secret", "samples", "weights")]
    if not all(isinstance(one, str) and _DIGEST.fullmatch(one) for one in digests):
        raise ValueError("a digest is damaged")
    secret, samples, weights = digests
    return KeptHash(weights, bytes.fromhex(secret), samples)


def _check_private(status: os.stat_result, what: str) -> None:
    """Raise ValueError unless this user owns it and nobody else may write it; files: nor read it.

    The folder is made closed to all others too, but one that others may list does no harm.
    """
    if not _IS_POSIX:
        return
    if stat.S_ISLNK(status.st_mode):
        raise ValueError(f"{what} is a link")
    if status.st_uid != os.geteuid():
        raise ValueError(f"{what} belongs to user {status.st_uid}")
    closed = 0o022 if stat.S_ISDIR(status.st_mode) else 0o077
    if status.st_mode & closed:
        mode = stat.S_IMODE(status.st_mode)
        raise ValueError(f"{what} is open to others (mode {mode:04o}): chmod go-rwx")


def _replace(path: Path, text: str) -> None:
    """Write a file that only the user can read, whole or not at all; links are replaced."""
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=".new-")  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(beside, path)  # noqa: PTH105
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)  # noqa: PTH108
        raise
