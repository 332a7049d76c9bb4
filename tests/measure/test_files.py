"""A file is written whole or not at all, and what a killed writer leaves behind goes."""

import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

import pytest

from repro.measure import NotAFileError, files
from repro.measure.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from repro.measure.files import replacing, sweep


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)


def test_the_folder_is_made_and_other_files_stay(tmp_path):
    path = tmp_path / "new" / "x.html"
    with replacing(path) as temporary:
        temporary.write_text("page")
        # A suffix decides what some libraries write.
        assert temporary.name == "x.html" and not path.exists()
    assert path.read_text() == "page" and names(path.parent) == ["x.html"]
    others = ["x.tmp", "x.html.tmp", ".x.html.1.tmp", "x.html~", ".x.html.repro-1-2.tmp", ".tmp"]
    for name in others:
        (path.parent / name).write_text(name)
    for name in ("x.html", "x" * 255, "μ" * 127):
        write(path.parent / name, "page")
    assert names(path.parent) == sorted([*others, "x.html", "x" * 255, "μ" * 127])
    assert all((path.parent / name).read_text() == name for name in others)


@pytest.mark.parametrize("moment", ["writing", "fsync", "replace"])
def test_what_stops_it_leaves_the_old_file(tmp_path, monkeypatch, moment):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def crash(*arguments):
        raise KeyboardInterrupt

    if moment != "writing":
        monkeypatch.setattr(os if moment == "fsync" else Path, moment, crash)
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("new")
        if moment == "writing":
            crash()
    monkeypatch.undo()
    assert path.read_text() == "old" and names(tmp_path) == ["file.txt"]


def test_a_link_and_permissions_stay(tmp_path):
    real, link, second = tmp_path / "a" / "real", tmp_path / "b" / "link", tmp_path / "b" / "again"
    real.parent.mkdir()
    link.parent.mkdir()
    link.symlink_to(Path("..") / "a" / "real")
    second.symlink_to(link)
    for text, mode in (("made through the link", 0o440), ("written through it", 0o600)):
        write(second, text)
        assert link.is_symlink() and second.is_symlink() and real.read_text() == text
        real.chmod(mode)
        write(second, "again")
        assert stat.S_IMODE(real.stat().st_mode) == mode and real.read_text() == "again"
    assert names(tmp_path / "b") == ["again", "link"] and names(tmp_path / "a") == ["real"]
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
        with pytest.raises(NotAFileError, match=f"It is a {kind.split()[-1]}") as caught:
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


def killed_while_it_writes(path: Path) -> None:
    """Let a process be killed between the beginning and the end of its writing."""
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from repro.measure.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_the_next_writer_or_whoever_loads_a_checkpoint_removes_leftovers(tmp_path):
    path = tmp_path / "checkpoint"
    save_checkpoint(path, {"epoch": 3})
    for _ in range(2):
        killed_while_it_writes(path)
    assert len(names(tmp_path)) == 2  # one swept the other's
    assert load_checkpoint(path) == {"epoch": 3} and names(tmp_path) == ["checkpoint"]
    killed_while_it_writes(path)
    write(tmp_path / "another file", "new")
    assert load_checkpoint(path) == {"epoch": 3}
    assert names(tmp_path) == ["another file", "checkpoint"]
    # The checksum fits and the content does not.
    path.write_bytes(sha256(b"content").digest() + b"content")
    with pytest.raises(CheckpointError, match="no checkpoint of repro"):
        load_checkpoint(path)


@pytest.mark.parametrize("locks", [True, False])
def test_a_writer_at_work_is_left_alone(tmp_path, monkeypatch, locks):
    def none(*arguments):  # a file system without locks tells nothing of who is alive
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    if not locks:
        monkeypatch.setattr(files.fcntl, "flock", none)
    path = tmp_path / "file"
    with replacing(path) as temporary:
        temporary.write_text("mine")
        write(path, "theirs")
        write(tmp_path / "other", "theirs")
        sweep(tmp_path)
        assert temporary.read_text() == "mine" and path.read_text() == "theirs"
    assert path.read_text() == "mine" and names(tmp_path) == ["file", "other"]


def test_another_machines_stay_for_a_day_and_links_are_not_followed(tmp_path):
    """Its locks need not be seen here: on a shared folder only time tells."""
    killed_while_it_writes(tmp_path / "file")
    (made,) = tmp_path.iterdir()
    left = made.rename(tmp_path / made.name.replace(files._kernel(), "0123abcd"))
    old = time.time() - files.IDLE_S - 1
    for outdated in ([], [left], [left / "file", left]):  # its content was written a moment ago
        sweep(tmp_path)
        assert left.exists()
        for path in outdated:
            os.utime(path, (old, old))
    sweep(tmp_path)
    assert not left.exists()
    precious = tmp_path / "precious"
    write(precious / "file", "1")
    (tmp_path / f".x.repro-{files._kernel()}-01234567.tmp").symlink_to(precious)
    sweep(tmp_path)
    assert (precious / "file").read_text() == "1"


def test_many_writers_of_one_file(tmp_path):
    """Each sweeps while the others write; all of them succeed, and what stands is whole."""
    path, errors = tmp_path / "file", []

    def work(number: int) -> None:
        try:
            for _ in range(25):
                write(path, str(number) * 1000)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and names(tmp_path) == ["file"]
    assert len(set(path.read_text())) == 1 and len(path.read_text()) == 1000


@pytest.mark.parametrize("moment", ["open", "lock"])
def test_a_folder_that_is_swept_before_it_is_held_is_made_again(tmp_path, monkeypatch, moment):
    owner, name = (files, "_hold") if moment == "open" else (files.fcntl, "flock")
    own, swept = getattr(owner, name), []

    def late(*arguments):
        if not swept:
            swept.extend(tmp_path.iterdir())
            shutil.rmtree(swept[0])
        return own(*arguments)

    monkeypatch.setattr(owner, name, late)
    write(tmp_path / "file", "new")
    assert len(swept) == 1 and names(tmp_path) == ["file"]
