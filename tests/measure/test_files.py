"""A file is written whole or not at all, and what a killed writer leaves behind goes."""

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

from repro.measure import NotAFileError
from repro.measure.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from repro.measure.files import replacing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)


@pytest.mark.parametrize("name", ["file.txt", "x" * 255, "μ" * 127])
def test_the_folder_is_made_and_nothing_else_is_left(tmp_path, name):
    path = tmp_path / "new" / name
    with replacing(path) as temporary:
        temporary.write_text("first")
        # A suffix decides what some libraries write.
        assert temporary.name == name and not path.exists()
    assert path.read_text() == "first" and names(path.parent) == [name]


@pytest.mark.parametrize("moment", ["writing", "fsync", "replace"])
def test_what_stops_it_leaves_the_old_file(tmp_path, monkeypatch, moment):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def crash(*arguments):
        raise KeyboardInterrupt

    if moment == "fsync":
        monkeypatch.setattr(os, "fsync", crash)
    elif moment == "replace":
        monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("new")
        if moment == "writing":
            crash()
    monkeypatch.undo()
    assert path.read_text() == "old" and names(tmp_path) == ["file.txt"]


def test_a_link_stays_and_its_target_is_written(tmp_path):
    real, link, second = tmp_path / "a" / "real", tmp_path / "b" / "link", tmp_path / "b" / "again"
    real.parent.mkdir()
    link.parent.mkdir()
    link.symlink_to(Path("..") / "a" / "real")
    second.symlink_to(link)
    for text in ("made through the link", "written through it"):
        write(second, text)
        assert link.is_symlink() and second.is_symlink() and real.read_text() == text
    assert names(tmp_path / "b") == ["again", "link"] and names(tmp_path / "a") == ["real"]


def test_permissions_stay(tmp_path):
    path = tmp_path / "file"
    for mode in (0o600, 0o664, 0o440):
        path.unlink(missing_ok=True)
        path.write_text("old")
        path.chmod(mode)
        write(path, "new")
        assert stat.S_IMODE(path.stat().st_mode) == mode and path.read_text() == "new"
    umask = os.umask(0o027)
    try:
        write(tmp_path / "other", "new")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o640


@pytest.mark.parametrize("kind", ["folder", "device", "pipe", "socket", "link to a device"])
def test_nothing_but_a_file_is_replaced_or_read(tmp_path, kind):
    path = tmp_path / "there"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "device":
        path = Path("/dev/null")
    else:
        path.symlink_to("/dev/null")
    before = path.lstat()
    for act in (lambda: write(path, "x"), lambda: load_checkpoint(path),
                lambda: save_checkpoint(path, {})):  # fmt: skip
        with pytest.raises(NotAFileError, match=kind.split()[-1]) as caught:
            act()
        assert caught.value.filename == str(path) and "\n" not in str(caught.value)
    after = path.lstat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert names(tmp_path) in ([], ["there"])


@pytest.mark.parametrize("kind", ["circle", "below a file", "full disk", "full disk in fsync"])
def test_errors_name_the_file(tmp_path, monkeypatch, kind):
    path = tmp_path / "file"
    if kind == "circle":
        path.symlink_to("file")
    elif kind == "below a file":
        path.write_text("")
        path = path / "other"

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full if kind == "full disk in fsync" else os.fsync)
    with pytest.raises(OSError, match=r"\[Errno") as caught, replacing(path) as temporary:
        temporary.write_text("new")
        if kind == "full disk":
            full()
    monkeypatch.undo()
    assert Path(caught.value.filename) in (path, path.parent)
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_a_killed_writer_leaves_the_old_file_and_a_later_one_removes_the_rest(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from repro.measure.files import replacing\n"
        "with replacing(sys.argv[1]) as temporary:\n"
        "    temporary.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "checkpoint"
    save_checkpoint(path, {"epoch": 3})
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    write(tmp_path / "other", "new")
    left, *files = names(tmp_path)
    assert files == ["checkpoint", "other"] and load_checkpoint(path) == {"epoch": 3}
    os.utime(tmp_path / left, (0, 0))
    write(tmp_path / "other", "newer")
    assert names(tmp_path) == ["checkpoint", "other"]


def test_many_writers_of_one_file(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as temporary:
        temporary.write_text("mine")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: write(path, str(number % 10) * 1000), range(200)))
        assert len(set(path.read_text())) == 1 and len(path.read_text()) == 1000
    assert path.read_text() == "mine" and names(tmp_path) == ["file"]


def test_a_checkpoint_of_something_else(tmp_path):
    """The checksum is right and the content is not."""
    path = tmp_path / "checkpoint"
    path.write_bytes(sha256(b"content").digest() + b"content")
    with pytest.raises(CheckpointError, match="no checkpoint of repro"):
        load_checkpoint(path)
    with pytest.raises(CheckpointError, match="give plain numbers"):
        save_checkpoint(path, {"rate": lambda epoch: 0.1})
