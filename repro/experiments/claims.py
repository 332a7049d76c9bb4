"""Who computes a run: a lock beside its record, which ends with the process that holds it.

Any number of processes may carry out plans on one folder. Each claims a run before it computes it,
passes over what another one has claimed, and finds that one's record in the end. The lock is the
operating system's (POSIX, on a file ``.EXPERIMENT-KEY.claim``): it ends with its process, however
that ends, and no child inherits it. Hosts that share a folder exclude each other as far as the file
system carries such locks between them, as NFS does with its lock service.
"""

import errno
import fcntl
import os
import socket
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from repro.experiments.design import UsageError

_SUFFIX = ".claim"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

# A process that closes a file loses its locks on it, whichever descriptor it closes. So no thread
# opens what another one holds.
_guard = threading.Lock()
_held: set[Path] = set()


class NoLocksWarning(UserWarning):
    """The file system has no locks: runs at the same time may compute the same twice."""


@contextmanager
def claimed(record: Path) -> Iterator[bool]:
    """Claim the run whose record is to be `record`, for the time of the block.

    Yields:
        Whether it was claimed; not so where another process or thread computes it.

    Raises:
        UsageError: The file beside the record cannot be made.
    """
    path = _claim_file(record)
    file = _take(path)
    try:
        yield file is not None
    finally:
        if file is not None:
            _leave(path, file)


def holder(record: Path) -> str:
    """Return who has claimed a run, in words."""
    try:
        return _claim_file(record).read_text(encoding="utf-8").strip() or "another process"
    except (OSError, UnicodeError):
        return "another process"


def sweep(folder: Path) -> None:
    """Remove the files of processes that were killed while they held a claim."""
    for path in folder.glob(f"*/.*{_SUFFIX}"):
        # What cannot be removed is in nobody's way.
        with suppress(OSError, UsageError), warnings.catch_warnings():
            warnings.simplefilter("ignore", NoLocksWarning)
            file = _take(path, new=False)
            if file is not None:
                _leave(path, file)


def _claim_file(record: Path) -> Path:
    return record.with_name(f".{record.stem}{_SUFFIX}")


def _take(path: Path, new: bool = True) -> int | None:
    """Return a descriptor with the lock, None where another holds it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if new else 0)
    with _guard:
        while path not in _held:
            file = None
            try:
                file = os.open(path, flags, 0o644)
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError(errno.EINVAL, "it is no file")
                _lock(file, path)
                if not _is(file, path):  # its last holder has removed it meanwhile
                    os.close(file)
                    continue
                os.ftruncate(file, 0)
                os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            except BaseException as error:
                if file is not None:
                    os.close(file)
                if not isinstance(error, OSError):
                    raise
                if file is not None and error.errno in (errno.EAGAIN, errno.EACCES):
                    return None
                raise UsageError(
                    f"a run cannot be claimed by {path} ({error.strerror or error}): make its "
                    "folder writable, or remove what is in the way"
                ) from error
            _held.add(path)
            return file
    return None


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"{path.parent} has no locks ({error.strerror}): another run at the same time may "
            "compute the same",
            NoLocksWarning,
            stacklevel=4,
        )


def _is(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _leave(path: Path, file: int) -> None:
    with _guard:
        # Removed while it is locked: whoever opened it before finds that it is gone.
        with suppress(OSError):
            if _is(file, path):
                path.unlink()
        os.close(file)
        _held.discard(path)
