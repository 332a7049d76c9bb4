"""Files that are written whole or not at all, and the folder of those that may go."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; what was written there takes its place at the end.

    Whatever stops the writing leaves the old file, or none. The folder is made.

    Args:
        path: The file. The temporary one is ``.NAME.PROCESS.tmp``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
