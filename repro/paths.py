"""Where things live: resolved from the package, never from the working directory."""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent


def data_roots(root: str | os.PathLike[str] | None = None) -> list[Path]:
    """Return the folders searched for datasets, in order: `root`, `$REPRO_DATA`, `./data`."""
    candidates = [root, os.environ.get("REPRO_DATA"), ROOT / "data"]
    return [_absolute(c) for c in candidates if c]


def _absolute(path: str | os.PathLike[str]) -> Path:
    # A relative path is meant from where the command was typed; a notebook's kernel runs in
    # another folder, so that the repository is tried as well.
    given = Path(path).expanduser()
    return given.resolve() if given.exists() else (ROOT / given).resolve()


def cache_dir() -> Path:
    """Return where decoded datasets are kept: `$REPRO_CACHE`, else `data/.cache`."""
    return Path(os.environ.get("REPRO_CACHE") or ROOT / "data" / ".cache").expanduser().resolve()


def results_dir() -> Path:
    """Return the folder of records: `$REPRO_RESULTS`, else `results`."""
    return Path(os.environ.get("REPRO_RESULTS") or ROOT / "results").expanduser().resolve()
