"""A lock of the operating system for each run, which ends with the process that holds it."""

import errno
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class NoLocksWarning(UserWarning):
    """The file system has no locks: runs at the same time may compute the same twice."""


@contextmanager
def locked(record: Path) -> Iterator[bool]:
    """Lock the run of a record; yield False where another process or thread computes it.

    Raises:
        OSError: The lock file beside the record cannot be made.
    """
    path = record.with_name(f".{record.stem}.lock")
    lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        why = f"a run cannot be locked by {path} ({error.strerror or error})"
        warnings.warn(f"{why}: another may compute the same", NoLocksWarning, stacklevel=3)
    try:
        yield True
    finally:
        with suppress(OSError):
            path.unlink()  # while it is locked; who opened it before finds that it is gone
        lock.release()
