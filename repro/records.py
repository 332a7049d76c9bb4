"""Run records: one JSON file per configuration and seed, written whole or not at all."""

import ast
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from repro import paths

SCHEMA = 1
STATUSES = ("ok", "out_of_memory", "failed")
_LIBRARIES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "scikit-image")


class RecordError(ValueError):
    """A record cannot be read, or is not one."""


@dataclass(frozen=True)
class Record:
    """What one run of one configuration with one seed came to.

    Attributes:
        key: Hash of all that the result depends on; see `record_key`.
        paper: Key of the paper, such as ``mbs``.
        experiment: Name of the experiment within the paper.
        config: The configuration, JSON values only.
        seed: Seed of initial weights, data order and augmentation.
        status: ``ok``, ``out_of_memory`` or ``failed``.
        error: The error's type and text where `status` is not ``ok``.
        metrics: Measured results by name: numbers, strings or lists of them (one per epoch, say).
        timings: Raw samples by name: ``{"samples_s": [...], "warmup": n}``.
        peak_bytes: Peak memory, where it was measured.
        dataset: ``{"name", "fingerprint", "provenance", "kind"}``, None where no data was used.
        code: Hash of the source that ran.
        device: What `repro.measure.describe_device` says.
        versions: Python's and the libraries' versions.
        commit: The commit, None outside a checkout.
        dirty: Whether the checkout had uncommitted changes.
        started: When it started, ISO 8601 in UTC.
        finished: When it finished.
        command: The command line.
        schema: Version of this format.
    """

    key: str
    paper: str
    experiment: str
    config: dict[str, Any]
    seed: int
    status: str
    metrics: dict[str, Any]
    timings: dict[str, Any]
    peak_bytes: int | None
    dataset: dict[str, Any] | None
    code: str
    device: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    dirty: bool | None
    started: str
    finished: str
    command: str
    error: str | None = None
    schema: int = field(default=SCHEMA)

    @property
    def identity(self) -> str:
        """Names the configuration and seed alone, whatever data or code they ran with."""
        return identity(self.experiment, self.config, self.seed)


def identity(experiment: str, config: Mapping[str, Any], seed: int) -> str:
    """Hash an experiment's configuration and seed."""
    return _digest({"experiment": experiment, "config": config, "seed": seed})


def record_key(
    paper: str,
    experiment: str,
    config: Mapping[str, Any],
    seed: int,
    *,
    fingerprint: str | None,
    code: str,
    device: str | None,
) -> str:
    """Hash all that a result depends on.

    Args:
        paper: Key of the paper.
        experiment: Name of the experiment.
        config: Its configuration.
        seed: Its seed.
        fingerprint: The dataset's, None where no data is used.
        code: Hash of the source that runs.
        device: Device and torch version for an experiment that measures time or memory, None
            for one whose result does not depend on them.
    """
    parts = {"schema": SCHEMA, "paper": paper, "experiment": experiment, "config": config}
    return _digest(parts | {"seed": seed, "data": fingerprint, "code": code, "device": device})


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class RecordStore:
    """A folder of records, ``FOLDER/PAPER/EXPERIMENT-KEY.json``.

    Args:
        folder: Where the records are; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, paper: str, experiment: str, key: str) -> Path:
        return self.folder / paper / f"{experiment}-{key}.json"

    def has(self, paper: str, experiment: str, key: str) -> bool:
        """Whether the record of that key stands; a file that is no record is an error."""
        return self.get(paper, experiment, key) is not None

    def get(self, paper: str, experiment: str, key: str) -> Record | None:
        """Return the record of that key, None where there is none.

        Raises:
            RecordError: The file is no readable record.
        """
        path = self._path(paper, experiment, key)
        return read_record(path) if path.exists() else None

    def load(self, paper: str) -> list[Record]:
        """Return a paper's records, oldest first.

        Raises:
            RecordError: A file is no readable record; it is left as it is.
        """
        records = [read_record(path) for path in sorted((self.folder / paper).glob("*.json"))]
        return sorted(records, key=lambda record: (record.finished, record.key))

    def write(self, record: Record) -> Path:
        """Write a record under a temporary name, then rename it."""
        path = self._path(record.paper, record.experiment, record.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with temporary.open("w") as file:
            json.dump(asdict(record), file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        return path

    def sweep(self) -> None:
        """Remove the temporary files of processes that were killed while they wrote."""
        for temporary in self.folder.glob("*/.*.tmp"):
            owner = temporary.name.rsplit(".", 2)[1]
            if not owner.isdigit() or not _is_running(int(owner)):
                temporary.unlink(missing_ok=True)


def read_record(path: Path) -> Record:
    """Read one record.

    Raises:
        RecordError: The file is not JSON, lacks a field or is of another schema.
    """
    advice = "move it away or delete it, then run again; no other record is touched"
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"record {path} cannot be read ({error}); {advice}") from error
    names = {f.name for f in fields(Record)}
    if not isinstance(content, dict) or set(content) != names:
        given = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise RecordError(f"{path} is not a record: it has {given}; {advice}")
    if content["schema"] != SCHEMA or content["status"] not in STATUSES:
        raise RecordError(
            f"record {path} has schema {content['schema']!r} and status {content['status']!r}; "
            f"this version reads schema {SCHEMA} with status {', '.join(STATUSES)}; {advice}"
        )
    wrong = [name for name, kinds in _KINDS.items() if not isinstance(content[name], kinds)]
    if wrong:
        raise RecordError(f"record {path} has another type of {', '.join(wrong)}; {advice}")
    return Record(**content)


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("key", "paper", "experiment", "code", "started", "finished", "command"), str),
    **dict.fromkeys(("config", "metrics", "timings", "device", "versions"), dict),
    "seed": int,
    "dataset": dict | None,
}


def local_store(profile: str) -> RecordStore:
    """Return the store of what was computed on this machine under a profile."""
    return RecordStore(paths.results_dir() / "local" / profile)


def reference_stores() -> dict[tuple[str, str], RecordStore]:
    """Return the stores of records that ship with the project, by (device, profile)."""
    root = paths.results_dir() / "reference"
    return {
        (folder.parent.name, folder.name): RecordStore(folder)
        for folder in sorted(root.glob("*/*"))
        if folder.is_dir()
    }


def source_hash(modules: Iterable[str]) -> str:
    """Hash the code of modules of this package, such as ``repro.mbs.streamer``.

    Docstrings, comment lines and blank lines do not count, so that explaining a method better
    makes no record stale.
    """
    digest = hashlib.sha256()
    for module in sorted(set(modules)):
        digest.update(module.encode() + b"\n" + _code_lines(_source_path(module)))
    return digest.hexdigest()[:24]


def _source_path(module: str) -> Path:
    stem = paths.PACKAGE.parent / Path(*module.split("."))
    return stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")


def _code_lines(path: Path) -> bytes:
    lines = path.read_text().split("\n")
    skipped: set[int] = set()  # lines of nothing but a docstring
    inside: set[int] = set()  # lines of a text that is not a docstring: every character counts
    tree = ast.parse("\n".join(lines))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno:
            inside.update(range(node.lineno, node.end_lineno + (node.end_lineno > node.lineno)))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body or not isinstance(body[0], ast.Expr):
            continue
        value = body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            first, last = body[0].lineno, body[0].end_lineno or body[0].lineno
            before = lines[first - 1].encode()[: body[0].col_offset]
            after = lines[last - 1].encode()[body[0].end_col_offset :].strip()
            inside.difference_update(range(first, last + 1))
            if not before.strip() and (not after or after.startswith(b"#")):
                skipped.update(range(first, last + 1))
    kept = [
        line if number in inside else line.rstrip()
        for number, line in enumerate(lines, 1)
        if number not in skipped
        and (number in inside or (line.strip() and not line.lstrip().startswith("#")))
    ]
    return "\n".join(kept).encode()


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that results depend on."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def commit_state() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout and whether it has changes; None outside one."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(paths.ROOT), *arguments], capture_output=True, text=True
            )
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--untracked-files=no")
    return commit, (bool(changes) if changes is not None else None)


def now() -> str:
    """Return the time in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
