"""Who may read and change a store: its owner alone, unless its folder was opened to a group.

The tokens of a text, and K and V from which it can be told, are as private as the text.

1. A new store's folders have mode 0700 and its files 0600, whatever the umask.
2. The folder of the store decides for all that is made in it: what it grants its group, each file
   in it grants the group too. ``chmod 2770`` shares a store with a group.
3. A folder of ours that others may read, enter or write is closed when it is opened for writing:
   older versions left that to the umask. It says so. A folder that is open to a group but not to
   others was made so on purpose, and stays.
4. A folder of somebody else that everybody may write to is refused: anybody could put K and V of
   another text there, and their answers would be used. One that only its owner may write to is
   used, with a warning, unless it is root's.
5. What root makes in a store of somebody else belongs to its owner, who could not read it
   otherwise.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from kvcellar.errors import StoreError

_log = logging.getLogger(__name__)
_OTHERS = stat.S_IRWXO


@dataclass(frozen=True, slots=True)
class Access:
    """The modes of what is made in a store.

    Attributes:
        folder: mode of folders.
        file: mode of files.
        owner: the user and the group that they are given to; None: whoever makes them.
    """

    folder: int = 0o700
    file: int = 0o600
    owner: tuple[int, int] | None = None

    @classmethod
    def of(cls, root: Path) -> Access:
        """The modes that a store's folder asks for."""
        status = root.stat()
        if os.name != "posix":
            return cls()
        group = status.st_mode & (stat.S_ISGID | stat.S_IRWXG)
        owner = (status.st_uid, status.st_gid)
        is_for_another = os.geteuid() == 0 and status.st_uid != 0
        return cls(
            stat.S_IRWXU | group,
            stat.S_IRUSR | stat.S_IWUSR | (group & (stat.S_IRGRP | stat.S_IWGRP)),
            owner if is_for_another else None,
        )

    def make_folder(self, path: Path) -> None:
        """Make a folder, unless there is one; the folder above it has to be there."""
        with suppress(FileExistsError):
            path.mkdir(self.folder)
            if os.name == "posix":
                if self.owner is not None:
                    os.chown(path, *self.owner)
                if stat.S_IMODE(path.stat().st_mode) != self.folder:
                    path.chmod(self.folder)

    def make_file(self, path: Path) -> None:
        """Make an empty file, unless there is one."""
        with suppress(FileExistsError), FileIO(path, "x", opener=self.opener) as file:
            self.settle(file)

    def opener(self, path: str, flags: int) -> int:
        """Open a new file, for ``FileIO``; :meth:`settle` it then."""
        return os.open(path, flags, self.file)

    def settle(self, file: FileIO) -> None:
        """Give a new file its mode and owner, whatever the umask took."""
        if os.name == "posix":
            if self.owner is not None:
                os.fchown(file.fileno(), *self.owner)
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) != self.file:
                os.fchmod(file.fileno(), self.file)


def admit(root: Path, read_only: bool) -> Access:
    """Close a store's folder to others, or refuse it; return the modes of what is made in it.

    Raises:
        StoreError: everybody may change what is in it, and it is not ours to close.
    """
    if os.name != "posix":
        return Access()
    status = root.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.geteuid():
        if mode & _OTHERS and not read_only:
            _close(root, mode)
    elif mode & stat.S_IWOTH:
        raise StoreError(
            f"{root} belongs to user {status.st_uid}, and everybody may write to it (mode "
            f"{mode:o}): anybody could change what is stored. Have its owner run chmod o-rwx, or "
            "name a folder below it, which will be yours"
        )
    elif status.st_uid != 0:
        _log.warning(
            "the store in %s belongs to user %d, who can change what is read from it",
            root,
            status.st_uid,
        )
    return Access.of(root)


def _close(root: Path, mode: int) -> None:
    """Leave a folder to its owner; some file systems have no modes to change."""
    with suppress(OSError):
        root.chmod(stat.S_IRWXU)
    left = stat.S_IMODE(root.stat().st_mode)
    if left & _OTHERS:
        _log.warning(
            "the store in %s can be used by others (mode %o) and not be closed", root, mode
        )
    elif _is_inhabited(root):
        _log.warning(
            "the store in %s could be used by others (mode %o); now only by you (700). To share "
            "it with a group, run chmod 2770 there",
            root,
            mode,
        )


def _is_inhabited(root: Path) -> bool:
    """Whether there may be something that others could have read or changed."""
    return next(root.iterdir(), None) is not None
