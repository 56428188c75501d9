"""Who may read a store: its owner, whatever the umask; what others may change is refused."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvcellar.errors import StoreError
from kvcellar.stores.disk import DiskStore
from kvcellar.testing.store_use import content, refusal

pytestmark = pytest.mark.skipif(os.name != "posix", reason="there are no such modes")

as_root = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can give files away"
)
NOBODY = 65534


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o277, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(root: Path) -> dict[str, set[int]]:
    """The modes of all folders and of all files."""
    found: dict[str, set[int]] = {"folders": {mode_of(root)}, "files": set()}
    for path in root.rglob("*"):
        found["folders" if path.is_dir() else "files"].add(mode_of(path))
    return found


def use(root: Path) -> DiskStore:
    """A store in which everything has been made: values, logs, a second index, leftovers."""
    store = DiskStore(root)
    store.put("a", [b"1"])
    (root / "index-1.sqlite").write_bytes(b"damaged")
    again = DiskStore(root)
    again.put("b", [b"2"])
    assert (root / "index-2.sqlite-wal").exists()
    store.close()
    return again


@pytest.mark.usefixtures("umask")
def test_a_store_is_for_its_owner(tmp_path: Path) -> None:
    store = use(tmp_path / "store")
    assert modes(tmp_path / "store") == {"folders": {0o700}, "files": {0o600}}
    assert content(store, ["a", "b"]) == [b"1", b"2"]
    store.close()


def test_folders_above_it_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    DiskStore(tmp_path / "above" / "store").close()
    os.umask(before)
    assert mode_of(tmp_path / "above") == 0o755


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o777, 0o701, 0o1777])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_folder_that_is_open_to_others_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_new: bool
) -> None:
    """By whoever opens it to write, who is told if there was anything to be read."""
    root = tmp_path / "store"
    root.mkdir()
    if not is_new:
        DiskStore(root).close()
    root.chmod(mode)
    store = DiskStore(root)
    store.put("a", [b"1"])
    store.close()
    assert mode_of(root) == 0o700
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (0 if is_new else 1)
    assert all(
        f"the store in {root} could be used by others (mode {mode:o})" in one for one in said
    )
    DiskStore(root).close()
    assert len(caplog.records) == len(said)


@pytest.mark.parametrize(("mode", "of_files"), [(0o2770, 0o660), (0o750, 0o640), (0o770, 0o660)])
@pytest.mark.usefixtures("umask")
def test_a_folder_that_was_opened_to_a_group_stays_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, of_files: int
) -> None:
    """For all that is made in it."""
    root = tmp_path / "store"
    root.mkdir(0o700)
    root.chmod(mode)
    store = use(root)
    assert modes(root) == {"folders": {mode}, "files": {of_files}}
    store.close()
    assert caplog.records == []


def test_reading_changes_no_modes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "store"
    DiskStore(root).close()
    root.chmod(0o755)
    DiskStore(root, read_only=True).close()
    assert (mode_of(root), caplog.records) == (0o755, [])


@as_root
@pytest.mark.parametrize("read_only", [True, False])
def test_what_everybody_may_change_is_refused(tmp_path: Path, read_only: bool) -> None:
    """If it is not ours to close; a folder in it is."""
    root = tmp_path / "store"
    DiskStore(root).close()
    root.chmod(0o777)
    os.chown(root, NOBODY, NOBODY)
    message = refusal(StoreError, lambda: DiskStore(root, read_only=read_only))
    assert message.startswith(f"{root} belongs to user {NOBODY}, and everybody may write to it")
    assert mode_of(root) == 0o777


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_what_belongs_to_somebody_else_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    """And what root makes there belongs to its owner, too."""
    root = tmp_path / "store"
    root.mkdir()
    root.chmod(mode)
    os.chown(root, NOBODY, NOBODY)
    store = use(root)
    assert {path.stat().st_uid for path in [root, *root.rglob("*")]} == {NOBODY}
    assert {path.stat().st_gid for path in [root, *root.rglob("*")]} == {NOBODY}
    store.close()
    assert f"the store in {root} belongs to user {NOBODY}" in caplog.records[0].getMessage()
    assert mode_of(root) == mode


@as_root
def test_a_folder_of_root_is_trusted() -> None:
    """As systems make them for a service; the store itself is opened by another user."""
    code = (
        "import os, sys\n"
        "from kvcellar.stores.disk import DiskStore\n"
        "import kvcellar.stores.disk.access, kvcellar.stores.memory, encodings.idna\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "store = DiskStore(sys.argv[1])\n"
        "store.put('a', [b'1'])\n"
        "print(bytes(store.get('a')))\n"
    )
    with TemporaryDirectory() as above:
        Path(above).chmod(0o755)
        root = Path(above, "store")
        root.mkdir()
        os.chown(root, 0, NOBODY)
        root.chmod(0o770)
        command = [sys.executable, "-c", code, str(root)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("b'1'\n", "")
        assert modes(root) == {"folders": {0o770}, "files": {0o660}}
