"""Which source files run, for tests of what a record says it depends on."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from repro import paths


@contextmanager
def watching() -> Iterator[set[Path]]:
    """Give a set, which at the end of the block has every file that ran in it, threads included."""
    names: set[str] = set()
    files: set[Path] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        names.add(frame.f_code.co_filename)

    before = sys.gettrace()
    sys.settrace(note)
    threading.settrace(note)
    try:
        yield files
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]
        files.update(map(Path, names))


def of_this_package(files: set[Path]) -> set[str]:
    """Return the files of this package among them, as ``repro/...``."""
    root = paths.PACKAGE.parent
    return {f.relative_to(root).as_posix() for f in files if paths.PACKAGE in f.parents}
