"""Run records: one JSON file per configuration and seed, written whole or not at all."""

import hashlib
import importlib.metadata
import json
import os
import platform
import stat
import subprocess
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from repro import paths
from repro.measure.files import replacing, sweep

SCHEMA = 2
STATUSES = ("ok", "out_of_memory", "failed")
_LIBRARIES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "scikit-image")


class RecordError(ValueError):
    """A record cannot be read, or is not one."""


class CorruptRecordWarning(UserWarning):
    """A file among the records is none; it was left alone, and the others were read."""


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
        entry: ``module:function`` that ran; empty in a record of schema 1.
        first_steps: Losses and digest of a training's first steps (`repro.experiments.replay`).
        stands: Further code under which the record was found to stand: ``{"code", "entry",
            "commit", "dirty", "by"}`` each, `by` saying what was compared with what.
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
    entry: str = ""
    first_steps: dict[str, Any] | None = None
    stands: list[dict[str, Any]] = field(default_factory=list)
    schema: int = field(default=SCHEMA)

    @cached_property
    def identity(self) -> str:
        """Names the configuration and seed alone, whatever data or code they ran with."""
        return identity(self.experiment, self.config, self.seed)

    @property
    def codes(self) -> list[str]:
        """The hashes of all code under which it stands."""
        return [self.code, *(entry["code"] for entry in self.stands)]


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

    def load(self, paper: str) -> list[Record]:
        """Return a paper's records, oldest first.

        A file that is no readable record is named by a `CorruptRecordWarning`, and left alone.
        """
        records = []
        for path in sorted((self.folder / paper).glob("*.json")):
            try:
                records.append(read_record(path))
            except RecordError as error:
                warnings.warn(str(error), CorruptRecordWarning, stacklevel=2)
        return sorted(records, key=lambda record: (record.finished, record.key))

    def write(self, record: Record) -> Path:
        """Write a record whole or not at all."""
        path = self._path(record.paper, record.experiment, record.key)
        text = json.dumps(asdict(record), indent=1, sort_keys=True)
        with replacing(path) as temporary:
            temporary.write_text(f"{text}\n", encoding="utf-8")
        return path

    def sweep(self) -> None:
        """Remove the temporary files of processes that were killed while they wrote."""
        for folder in self.folder.glob("*/"):
            sweep(folder)
        for temporary in self.folder.glob("*/.*.tmp"):  # of earlier versions
            owner = temporary.name.rsplit(".", 2)[1]
            dead = not owner.isdigit() or not _is_running(int(owner))
            if dead and temporary.is_file():
                temporary.unlink(missing_ok=True)


def read_record(path: Path) -> Record:
    """Read one record; a second time only where the file has changed.

    Raises:
        RecordError: The file is not JSON, lacks a field or is of another schema.
    """
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):  # a pipe would be waited for
            raise OSError("it is no file")
        return _read(path, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise RecordError(f"record {path} cannot be read ({error}); {_ADVICE}") from error


_ADVICE = "move it away or delete it, then run again; no other record is touched"


@lru_cache(maxsize=20_000)
def _read(path: Path, changed: int, size: int) -> Record:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"record {path} cannot be read ({error}); {_ADVICE}") from error
    if isinstance(content, dict) and content.get("schema") == 1:
        content = {"entry": "", "first_steps": None, "stands": []} | content
    names = {f.name for f in fields(Record)}
    if not isinstance(content, dict) or set(content) != names:
        given = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise RecordError(f"{path} is not a record: it has {given}; {_ADVICE}")
    if content["schema"] not in (1, SCHEMA) or content["status"] not in STATUSES:
        raise RecordError(
            f"record {path} has schema {content['schema']!r} and status {content['status']!r}; "
            f"this version reads schema 1 and {SCHEMA} with status {', '.join(STATUSES)}; "
            f"{_ADVICE}"
        )
    wrong = [name for name, holds in _SHAPES.items() if not holds(content[name])]
    if wrong:
        raise RecordError(f"record {path} cannot be used for its {', '.join(wrong)}; {_ADVICE}")
    return Record(**content)


def _has(value: Any, **kinds: Any) -> bool:
    """Whether a value is a dictionary that has these keys, of these types."""
    return isinstance(value, dict) and all(isinstance(value.get(k), t) for k, t in kinds.items())


def _is_config(value: Any) -> bool:
    # One that names a dataset is read for its name.
    return _has(value) and (value.get("dataset") is None or _has(value["dataset"], name=str))


# What whoever reads a record relies on, so that one that lacks it is named and passed over.
_SHAPES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("key", "paper", "experiment", "code", "started", "finished", "command", "entry"),
        lambda value: isinstance(value, str),
    ),
    "seed": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "config": _is_config,
    "metrics": _has,
    "timings": lambda value: (
        _has(value) and all(_has(timing, samples_s=list) for timing in value.values())
    ),
    "dataset": lambda value: (
        value is None or _has(value, name=str, fingerprint=str, provenance=str, kind=str)
    ),
    "device": lambda value: _has(value, name=str, type=str),
    "versions": lambda value: _has(value, torch=str, python=str),
    "first_steps": lambda value: (
        value is None or _has(value, losses=list, digest=str, norm=float, instructions=str)
    ),
    "stands": lambda value: (
        isinstance(value, list) and all(_has(entry, code=str, entry=str, by=str) for entry in value)
    ),
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
                ["git", "-C", str(paths.ROOT), *arguments],
                capture_output=True,
                text=True,
                encoding="utf-8",
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
