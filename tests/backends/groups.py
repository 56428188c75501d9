"""A ``/proc`` and ``/sys`` that say in which control groups this process is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Groups = Mapping[str, Mapping[str, str]]
"""The files of each group, by its path; the longest path is the process's own group."""


class FakeSystem:
    """Files below a folder that stands for the root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True, exist_ok=True)

    def second_generation(self, groups: Groups, *, top: str = "/", own: str | None = None) -> None:
        """One tree.

        Args:
            groups: what there is in it.
            top: the group on the host that the mount shows.
            own: the process's own group; None: the longest path.
        """
        self._mount("/sys/fs/cgroup", top, "cgroup2", "rw,nsdelegate", groups)
        self._belong("0::", groups, own)

    def first_generation(
        self, controllers: str, groups: Groups, *, top: str = "/", own: str | None = None
    ) -> None:
        """The tree of some controllers, separated by commas."""
        place = f"/sys/fs/cgroup/{controllers}"
        self._mount(place, top, "cgroup", f"rw,{controllers}", groups)
        self._belong(f"4:{controllers}:", groups, own)

    def _mount(self, place: str, top: str, kind: str, options: str, groups: Groups) -> None:
        line = f"31 23 0:28 {top} {place} rw,relatime shared:9 - {kind} {kind} {options}\n"
        with (self.root / "proc/self/mountinfo").open("a") as file:
            file.write("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + line)
        for path, files in groups.items():
            folder = self.root / place.lstrip("/") / path
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / name).write_text(text + "\n")

    def _belong(self, start: str, groups: Groups, own: str | None) -> None:
        path = "/" + max(groups, key=len) if own is None else own
        with (self.root / "proc/self/cgroup").open("a") as file:
            file.write(f"{start}{path}\n")
