"""Files that are written whole or not at all, and nothing that is left behind.

What is being written lies in a folder of its own beside the file, and takes the file's place at the
end. The writer holds a lock on that folder, ``.NAME.repro-KERNEL-RANDOM.tmp``, which the kernel
takes back however the writer ends: a folder of that name that nobody holds is a leftover, and
whoever writes there next removes it. No number of a process is trusted, since numbers are used
again and mean nothing in another container or on another machine.
"""

import contextlib
import errno
import fcntl
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path

IDLE_S = 86_400.0  # from which on a folder of another machine counts as left behind
_LEFTOVER = re.compile(r"\..*\.repro-([0-9a-f]{8})-[0-9a-f]{8}\.tmp")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


class NotAFileError(OSError):
    """What should be written or read is there, but is a folder, a device, a pipe or a socket."""


def regular(path: str | os.PathLike[str]) -> Path:
    """Return the regular file that a path leads to, or the place where it will be.

    Symbolic links are followed, so that a link stays one and its target is written.

    Raises:
        NotAFileError: Something else is there.
        OSError: It cannot be reached, such as through links that lead in a circle.
    """
    try:
        kind = stat.S_IFMT(Path(path).stat().st_mode)
    except FileNotFoundError:
        kind = stat.S_IFREG
    if kind != stat.S_IFREG:
        raise NotAFileError(
            errno.EISDIR if kind == stat.S_IFDIR else errno.EINVAL,
            f"It is {_KINDS.get(kind, 'no file')}, where a regular file is expected; give another "
            "path",
            os.fspath(path),
        )
    return Path(os.path.realpath(path))


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path; what was written there takes the place of `path` at the end.

    Whatever stops the writing leaves the old file, or none, and at most a temporary folder, which
    the next writer in the same place removes. The file's folder is made; its permissions stay.

    Args:
        path: The file. Where it is a symbolic link, the file that it leads to.

    Raises:
        NotAFileError: A folder, a device, a pipe or a socket is in its place.
        OSError: It cannot be written; the error names the file, not the temporary one.
    """
    target = regular(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _naming(path), scratch(target) as folder:
        temporary = folder / target.name
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise now what `replacing` would raise when the work is done."""
    target = regular(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _naming(path), scratch(target):
        pass


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let errors name the file that is written, not the temporary one."""
    try:
        yield
    except OSError as error:
        of_temporary = error.filename is None or _LEFTOVER.search(os.fsdecode(error.filename))
        if of_temporary and error.errno is not None:  # a full disk, say, which no name comes with
            error.filename, error.filename2 = os.fspath(path), None
        raise


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """Give a new folder beside a file or folder to be made; it is removed at the end.

    A folder that a killed process left in the same place is removed as well.

    Args:
        target: What is to be moved from there to its place; its own folder must be there.
    """
    sweep(target.parent)
    # A name has 255 bytes at most, a character up to four.
    stem = f".{target.name[:50]}.repro-{_kernel()}"
    folder, lock = target.parent, None
    try:
        while lock is None:
            folder = target.with_name(f"{stem}-{secrets.token_hex(4)}.tmp")
            folder.mkdir(mode=0o700)
            lock = _hold(folder)
        yield folder
    finally:
        if folder != target.parent:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _hold(folder: Path) -> int | None:
    """Lock a folder that was just made; None where another process has swept it meanwhile."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        # Where there are no locks, what is idle for long is taken for a leftover.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(lock), folder.stat()):
            return lock
    except FileNotFoundError:
        pass
    os.close(lock)
    return None


class UnsafeFolderError(PermissionError):
    """A folder that code is loaded from belongs to another user, or can be written by others."""


def own_folder(path: Path) -> int:
    """Open a folder that nobody else can write, made with the permissions 0700 where it is not.

    What is then opened relative to the descriptor was put there by this user or by root, whatever
    others may do to the folders above it.

    Returns:
        A descriptor, to be closed.

    Raises:
        UnsafeFolderError: It belongs to another user (root's is trusted), others can write it, or
            it is a symbolic link.
        OSError: It cannot be made.
    """
    if path.is_symlink():
        raise _unsafe(path, "It is a symbolic link, which may lead anywhere")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    state = os.fstat(folder)
    if is_own(state):
        return folder
    os.close(folder)
    if state.st_mode & 0o022:
        raise _unsafe(path, "Others can write it, and could have put any code there")
    raise _unsafe(path, f"It belongs to user {state.st_uid}, who could have put any code there")


def is_own(state: os.stat_result) -> bool:
    """Whether a file or folder is this user's or root's, and nobody else can write it."""
    return state.st_uid in (os.geteuid(), 0) and not state.st_mode & 0o022


def _unsafe(path: Path, reason: str) -> UnsafeFolderError:
    return UnsafeFolderError(errno.EPERM, f"{reason}; remove it", os.fspath(path))


def sweep(folder: Path) -> None:
    """Remove from a folder what processes left there that were killed while they wrote.

    What another machine writes to a shared folder stays, until it was idle for a day.
    """
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return
    for name in names:
        if name.startswith(".") and (match := _LEFTOVER.fullmatch(name)):
            with contextlib.suppress(OSError):
                _remove(folder / name, match[1])


def _remove(leftover: Path, kernel: str) -> None:
    """Remove a temporary folder unless its writer may be alive."""
    lock = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            conclusive = kernel == _kernel()  # another machine's locks need not be seen here
        except BlockingIOError:
            return
        except OSError:
            conclusive = False
        times = [entry.stat().st_mtime for entry in (leftover, *leftover.iterdir())]
        if conclusive or time.time() - max(times) > IDLE_S:
            shutil.rmtree(leftover, ignore_errors=True)
    finally:
        os.close(lock)


@cache
def _kernel() -> str:
    """Name the running kernel, which all containers on a machine share, and with it all locks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    except OSError:
        boot = platform.node()
    return sha256(boot.encode()).hexdigest()[:8]


def cache_folder() -> Path:
    """Return where all caches are kept: `$REPRO_CACHE`, else ``repro`` in the user's cache folder.

    The user's is `$XDG_CACHE_HOME`, which has to be an absolute path (XDG Base Directory
    Specification), else ``~/.cache``. What lies there may be deleted at any time.

    Raises:
        OSError: The user, or the one that is named, has no home.
    """
    given = os.environ.get("REPRO_CACHE")
    users = Path(os.environ.get("XDG_CACHE_HOME") or ".")
    try:
        if given:
            return Path(given).expanduser().absolute()
        return (users if users.is_absolute() else Path.home() / ".cache") / "repro"
    except RuntimeError as error:
        text = "there is no such home for caches; name a folder as $REPRO_CACHE"
        raise FileNotFoundError(errno.ENOENT, text, given or "~") from error
