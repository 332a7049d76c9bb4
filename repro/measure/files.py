"""Atomic writing of files (whole or not at all), and the folder of caches."""

import errno
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SUFFIX = ".repro.tmp"
_IDLE_S = 86_400.0  # an older temporary folder was left by a killed process


class NotAFileError(OSError):
    """The path to read or write leads to a folder, a device, a pipe or a socket."""


def regular(path: str | os.PathLike[str]) -> Path:
    """The regular file that a path and its links lead to, which need not exist yet.

    Raises `NotAFileError` if the path leads to something else, OSError if it cannot be reached.
    """
    with suppress(FileNotFoundError):
        mode = Path(path).stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a socket"
            text = f"It is {kind}, where a regular file is expected; give another path"
            raise NotAFileError(errno.EINVAL, text, os.fspath(path))
    return Path(os.path.realpath(path))


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path; the file written there replaces `path` at the end of the block.

    An interruption leaves the old file, or none. The file's folder is made; links and the old
    file's permissions stay. A killed process leaves a hidden folder beside the file, which a later
    writer there removes after a day. Raises `NotAFileError` as `regular`, or OSError, which names
    the file and not the temporary one.
    """
    target = regular(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".*{_SUFFIX}"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > _IDLE_S:
                shutil.rmtree(left)
    prefix = f".{target.name[:50]}."  # a name has 255 bytes at most, a character up to four
    try:
        with tempfile.TemporaryDirectory(_SUFFIX, prefix, target.parent) as folder:
            temporary = Path(folder, target.name)
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            with suppress(FileNotFoundError):
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            os.replace(temporary, target)  # noqa: PTH105
    except OSError as error:
        if error.errno is not None and _SUFFIX in os.fsdecode(error.filename or _SUFFIX):
            error.filename, error.filename2 = os.fspath(path), None
        raise


def cache_folder() -> Path:
    """The folder of all caches: `$REPRO_CACHE`, `$XDG_CACHE_HOME/repro`, ``~/.cache/repro``.

    A relative `$XDG_CACHE_HOME` is ignored, as the XDG Base Directory Specification asks. Raises
    OSError if the user has no home folder, or a path names a user without one.
    """
    given, users = os.environ.get("REPRO_CACHE"), Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        if given:
            return Path(given).expanduser().absolute()
        return (users if users.is_absolute() else Path.home() / ".cache") / "repro"
    except RuntimeError as error:
        text = "there is no such home for caches; name a folder as $REPRO_CACHE"
        raise FileNotFoundError(errno.ENOENT, text, given or "~") from error
