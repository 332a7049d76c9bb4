"""The project's folders: beside the package in a checkout, else in the working directory.

A checkout, including an editable install, has its data, results and notebooks beside the package,
for any working directory. An installed package contains the reference records and notebooks, and
writes its results in the working directory.
"""

import errno
import json
import os
import re
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent
SHIPPED = PACKAGE / "shipped"  # a checkout's other folders, within a wheel
BUILT = PACKAGE / "build.json"  # the commit of a build


def _is_installed() -> bool:
    try:
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return True
    # If copied into another project, the package lies beside that project's results.
    return SHIPPED.is_dir() or not re.search(r'^name = "repro"$', project, re.MULTILINE)


INSTALLED = _is_installed()


def home() -> Path:
    """The folder that holds `data` and `results`: the checkout, or the working directory."""
    return Path.cwd() if INSTALLED else ROOT


def data_roots(root: str | os.PathLike[str] | None = None) -> list[Path]:
    """The folders searched for datasets, in order: `root`, `$REPRO_DATA`, `./data`."""
    candidates = [root, os.environ.get("REPRO_DATA"), home() / "data"]
    return [_absolute(c) for c in candidates if c]


def data_problem(root: str | os.PathLike[str] | None = None) -> str | None:
    """Name the fault of a given data folder, or of `$REPRO_DATA`; None if there is none.

    An unreadable folder would otherwise silently be replaced by other data.
    """
    given = {"": root, " of $REPRO_DATA": os.environ.get("REPRO_DATA") or None}
    for whence, folder in given.items():
        if folder is None:
            continue
        try:
            if not os.fspath(folder):
                raise FileNotFoundError(errno.ENOENT, "has no name")
            os.scandir(_absolute(folder)).close()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            return (
                f"data folder {os.fspath(folder)!r}{whence} cannot be read ({why}); make it, give "
                "another, or leave it out"
            )
    return None


def _absolute(path: str | os.PathLike[str]) -> Path:
    # A relative path starts at the command's working directory; a notebook's kernel runs in another
    # folder, so that the repository is tried as well.
    # Neither function fails for an unknown user, or for links in a circle.
    given = Path(os.path.expanduser(path))  # noqa: PTH111
    return Path(os.path.realpath(given if os.path.exists(given) else home() / given))  # noqa: PTH110


def results_dir() -> Path:
    """The folder of records: `$REPRO_RESULTS`, else `results`."""
    given = os.environ.get("REPRO_RESULTS")
    return Path(given).expanduser().resolve() if given else (home() / "results").resolve()


def reference_dirs() -> list[Path]:
    """The folders of reference records, the most important one last."""
    shipped = [SHIPPED / "reference"] if INSTALLED else []
    return [*shipped, results_dir() / "reference"]


def git(*arguments: str) -> bytes | None:
    """Output of git in the checkout; None if git fails, or outside a checkout."""
    if INSTALLED:
        return None
    # Variables of a calling hook would make git use its repository.
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, env=kept)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def checkout_state() -> tuple[str | None, bool | None]:
    """The commit of the checkout and whether it has changes; None if this is no checkout.

    A repository around the checkout does not count.
    """
    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(os.fsdecode(top).removesuffix("\n")).resolve() != ROOT.resolve():
        return None, None
    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "-uno")
    return commit.decode().strip() if commit else None, None if changes is None else bool(changes)


def built_from() -> tuple[str | None, bool | None]:
    """The commit that the package was built from and whether it had changes, if known."""
    try:
        build = json.loads(BUILT.read_text(encoding="utf-8"))
        return build["commit"], build["dirty"]
    except (OSError, ValueError, LookupError, TypeError):
        return None, None
