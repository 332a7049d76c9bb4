"""Run records: one JSON file per run, or one compressed file for all of a folder's runs."""

import fcntl
import gzip
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import stat
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from repro import paths
from repro.measure.files import replacing

SCHEMA = 3
STATUSES = ("ok", "out_of_memory", "failed")
_LIBRARIES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "scikit-image")


class RecordError(ValueError):
    """A record cannot be read, or is not one."""


class CorruptRecordWarning(UserWarning):
    """A file in a folder of records is no record. It is left alone; the others are read."""


@dataclass(frozen=True)
class Record:
    """What one run of one configuration with one seed came to.

    Attributes:
        key: Hash of all that the result depends on; see `record_key`.
        paper: Key of the paper, such as ``mbs``.
        experiment: Name of the experiment within the paper.
        version: Version of the experiment that ran; see `repro.experiments.design.Experiment`.
        config: The configuration, JSON values only.
        seed: Seed of initial weights, data order and augmentation.
        status: ``ok``, ``out_of_memory`` or ``failed``.
        error: The error's type and text where `status` is not ``ok``.
        metrics: Measured results by name: numbers, strings or lists of them (one per epoch, say).
        timings: Raw samples by name: ``{"samples_s": [...], "warmup": n}``.
        peak_bytes: Peak memory, where it was measured.
        dataset: ``{"name", "fingerprint", "provenance", "kind"}``, None where no data was used.
        device: What `repro.measure.describe_device` says.
        versions: Python's and the libraries' versions.
        commit: The package's commit, None where it is not known.
        dirty: Whether there were uncommitted changes.
        started: When it started, ISO 8601 in UTC.
        finished: When it finished.
        command: The command line.
        first_steps: Losses and digest of a training's first steps (`repro.experiments.replay`).
        code: Hash of the source that ran, in records made before experiments had versions.
        schema: Version of this format.
    """

    key: str
    paper: str
    experiment: str
    version: int
    config: dict[str, Any]
    seed: int
    status: str
    metrics: dict[str, Any]
    timings: dict[str, Any]
    peak_bytes: int | None
    dataset: dict[str, Any] | None
    device: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    dirty: bool | None
    started: str
    finished: str
    command: str
    error: str | None = None
    first_steps: dict[str, Any] | None = None
    code: str | None = None
    schema: int = SCHEMA

    @cached_property
    def identity(self) -> str:
        """Names the configuration and seed alone, whatever data or version they ran with."""
        return identity(self.experiment, self.config, self.seed)


def identity(experiment: str, config: Mapping[str, Any], seed: int) -> str:
    """Hash an experiment's configuration and seed."""
    return _digest({"experiment": experiment, "config": config, "seed": seed})


def record_key(
    paper: str,
    experiment: str,
    version: int,
    config: Mapping[str, Any],
    seed: int,
    *,
    fingerprint: str | None,
    device: str | None,
) -> str:
    """Hash all that a result depends on. The version stands in for the source code.

    Args:
        paper: Key of the paper.
        experiment: Name of the experiment.
        version: Its version, which is raised whenever what it computes changes.
        config: Its configuration.
        seed: Its seed.
        fingerprint: The dataset's, None where no data is used.
        device: Device and torch version for an experiment that measures time or memory, None
            for one whose result does not depend on them.
    """
    parts = {"paper": paper, "experiment": experiment, "version": version, "config": config}
    return _digest(parts | {"seed": seed, "data": fingerprint, "device": device})


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class RecordStore:
    """A folder of records: ``PAPER/EXPERIMENT-KEY.json`` each, or packed in ``PAPER.jsonl.gz``.

    Runs write single files; `pack` folds them into the packed file, a line each. If both have a
    record of one key, the single file's counts.

    Args:
        folder: Where the records are; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, paper: str, experiment: str, key: str) -> Path:
        """Return where the single file of a record lies, or would."""
        return self.folder / paper / f"{experiment}-{key}.json"

    def packed(self, paper: str) -> Path:
        """Return where the packed records of a paper lie, or would."""
        return self.folder / f"{paper}.jsonl.gz"

    def holds(self, paper: str) -> bool:
        """Return whether there are files of a paper's records."""
        return self.packed(paper).exists() or any((self.folder / paper).glob("*.json"))

    def where(self, record: Record) -> Path:
        """Return the file that holds a record."""
        path = self.path(record.paper, record.experiment, record.key)
        return path if path.exists() else self.packed(record.paper)

    def load(self, paper: str) -> list[Record]:
        """Return a paper's records, oldest first.

        What is no readable record is named by a `CorruptRecordWarning`, and left alone.
        """
        records, problems = self.read(paper)
        for problem in problems:
            warnings.warn(str(problem), CorruptRecordWarning, stacklevel=2)
        return records

    def read(self, paper: str) -> tuple[list[Record], list[RecordError]]:
        """Return a paper's records, oldest first, and an error for each that cannot be read."""
        singles, problems = [], []
        for path in sorted((self.folder / paper).glob("*.json")):
            try:
                record = read_record(path)
                _check_paper(record, paper, f"record {path}", _ADVICE)
                singles.append(record)
            except RecordError as error:
                if os.path.lexists(path):  # else it has been packed meanwhile
                    problems.append(error)
        packed, wrong = self._read_packed(paper)  # last, so that a record packed meanwhile is seen
        records = {record.key: record for record in [*packed, *singles]}
        return sorted(records.values(), key=lambda r: (r.finished, r.key)), [*wrong, *problems]

    def _read_packed(self, paper: str) -> tuple[list[Record], list[RecordError]]:
        path = self.packed(paper)
        try:
            state = path.stat()
            if not stat.S_ISREG(state.st_mode):  # a pipe would be waited for
                raise OSError("it is no file")
        except FileNotFoundError:
            return [], []
        except OSError as error:
            return [], [RecordError(f"{path} cannot be read ({error}); {_PACKED_ADVICE}")]
        records, problems = _read_packed(path, paper, state.st_mtime_ns, state.st_size)
        return list(records), list(problems)

    def pack(self, paper: str, records: Iterable[Record] = ()) -> int:
        """Fold records and this folder's single files of a paper into its packed file.

        The single files are removed once the packed file has been written and read back.

        Args:
            paper: Key of the paper.
            records: Further ones, such as those of another store. If there are several of one key,
                the newest counts.

        Returns:
            How many records are new in the packed file, or newer than those that it held.

        Raises:
            RecordError: A file cannot be read, or cannot be written. No record is lost then.
        """
        records = list(records)
        if not records and not self.folder.is_dir():
            return 0
        path, lock = self.packed(paper), None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)  # two packers would overwrite each other's file
            singles = sorted((self.folder / paper).glob("*.json"))
            kept, problems = self.read(paper)
            if problems:
                raise problems[0]
            before = self._read_packed(paper)[0]
            every = sorted([*before, *kept, *records], key=lambda record: record.finished)
            by_key = {record.key: record for record in every}
            ordered = sorted(  # similar records side by side compress best
                by_key.values(),
                key=lambda r: (r.experiment, json.dumps(r.config, sort_keys=True), r.seed, r.key),
            )
            if ordered and [_line(record) for record in ordered] != [_line(r) for r in before]:
                with replacing(path) as temporary:
                    # Without a time, so that the same records give the same bytes.
                    text = "".join(map(_line, ordered))
                    temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
                    again, wrong = _read_lines(temporary, paper)
                    if wrong or [r.key for r in again] != [r.key for r in ordered]:
                        raise OSError("it reads back differently")
            for single in singles:
                single.unlink()
        except OSError as error:
            raise RecordError(
                f"{path} cannot be written ({error.strerror or error}): no record is lost; "
                f"{_MAKE_ROOM}, then pack again"
            ) from error
        finally:
            if lock is not None:
                os.close(lock)
        known = {_line(record) for record in before}
        return sum(_line(record) not in known for record in ordered)

    def find(self, paper: str, experiment: str, key: str) -> Record | None:
        """Return a record as it is now, None where there is none.

        Raises:
            RecordError: Something else lies in its place.
        """
        path = self.path(paper, experiment, key)
        try:
            record = read_record(path)
        except RecordError:
            if os.path.lexists(path):
                raise
            packed = self._read_packed(paper)[0]
            return next((record for record in packed if record.key == key), None)
        if (record.paper, record.experiment, record.key) != (paper, experiment, key):
            raise RecordError(f"record {path} is of another run, {record.key!r}; {_ADVICE}")
        return record

    def write(self, record: Record) -> Path:
        """Write a record whole or not at all.

        Raises:
            RecordError: It cannot be written; what stood before stands.
        """
        path = self.path(record.paper, record.experiment, record.key)
        text = json.dumps(asdict(record), indent=1, sort_keys=True)
        try:
            with replacing(path) as temporary:
                temporary.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise RecordError(
                f"record {path} cannot be written ({error.strerror or error}): what was computed "
                f"before stands; {_MAKE_ROOM}, then run again to go on"
            ) from error
        return path

    def check_writable(self, paper: str) -> None:
        """Write a file beside a paper's records and remove it, before anything is computed.

        Raises:
            RecordError: That cannot be done; the text says why.
        """
        check_writable(self.folder / paper, f"records of {paper}", _MAKE_ROOM)


def check_writable(folder: Path, what: str, advice: str) -> None:
    """Write a file of some size into a folder, made where it is not there, and remove it again.

    Raises:
        RecordError: That cannot be done; the text names `what` and ends in `advice`.
    """

    class Enough(Exception):
        pass

    try:
        with suppress(Enough), replacing(folder / "probe") as temporary:
            with temporary.open("wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())  # a full disk may be found no earlier
            raise Enough  # and so it takes no place
    except OSError as error:
        raise RecordError(
            f"{what} cannot be written to {folder} ({error.strerror or error}): {advice}"
        ) from error


def read_record(path: Path) -> Record:
    """Read one record; a second time only where the file has changed.

    Raises:
        RecordError: The file is not JSON, lacks a field or is of another schema.
    """
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):  # a pipe would be waited for
            raise OSError("it is no file")
        if state.st_size > _LARGEST_BYTES:
            raise OSError(f"it has {state.st_size} bytes, and a record at most {_LARGEST_BYTES}")
        return _read(path, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise RecordError(f"record {path} cannot be read ({error}); {_ADVICE}") from error


_ADVICE = "move it away or delete it, then run again; no other record is touched"
_PACKED_ADVICE = "restore the file from git or from a copy"
_MAKE_ROOM = "free some space, make the folder writable, or name another one in $REPRO_RESULTS"
_PROBE_BYTES = 2**18  # most records are smaller
_LARGEST_BYTES = 2**28


@lru_cache(maxsize=20_000)
def _read(path: Path, changed: int, size: int) -> Record:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"record {path} cannot be read ({error}); {_ADVICE}") from error
    return _checked(content, f"record {path}", _ADVICE)


@lru_cache(maxsize=64)
def _read_packed(
    path: Path, paper: str, changed: int, size: int
) -> tuple[tuple[Record, ...], tuple[RecordError, ...]]:
    """Read a packed file; a second time only where it has changed."""
    records, problems = _read_lines(path, paper)
    return tuple(records), tuple(problems)


def _read_lines(path: Path, paper: str) -> tuple[list[Record], list[RecordError]]:
    records: list[Record] = []
    problems: list[RecordError] = []
    try:
        if not (content := path.read_bytes()):
            raise EOFError("it is empty")
        if not (lines := gzip.decompress(content).splitlines()):
            raise EOFError("it holds no record")
    except (OSError, EOFError, zlib.error) as error:
        return [], [RecordError(f"{path} cannot be read ({error}); {_PACKED_ADVICE}")]
    for number, line in enumerate(lines, 1):
        where = f"line {number} of {path}"
        try:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RecordError(f"{where} cannot be read ({error}); {_PACKED_ADVICE}") from error
            record = _checked(value, where, _PACKED_ADVICE)
            _check_paper(record, paper, where, _PACKED_ADVICE)
            records.append(record)
        except RecordError as error:
            problems.append(error)
    return records, problems


def _check_paper(record: Record, paper: str, where: str, advice: str) -> None:
    if record.paper != paper:
        raise RecordError(f"{where} is of the paper {record.paper!r}, not of {paper!r}; {advice}")


def _line(record: Record) -> str:
    return json.dumps(asdict(record), sort_keys=True, separators=(",", ":")) + "\n"


def _checked(content: Any, where: str, advice: str) -> Record:
    """Return the record that JSON holds.

    Raises:
        RecordError: It is none; the text names `where` and ends in `advice`.
    """
    names = {f.name for f in fields(Record)}
    if not isinstance(content, dict) or set(content) != names:
        given = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise RecordError(f"{where} is not a record: it has {given}; {advice}")
    if content["schema"] != SCHEMA or content["status"] not in STATUSES:
        raise RecordError(
            f"{where} has schema {content['schema']!r} and status {content['status']!r}; "
            f"this version reads schema {SCHEMA} with status {', '.join(STATUSES)}; {advice}"
        )
    wrong = [name for name, holds in _SHAPES.items() if not holds(content[name])]
    if wrong:
        raise RecordError(f"{where} cannot be used for its {', '.join(wrong)}; {advice}")
    return Record(**content)


def _has(value: Any, **kinds: Any) -> bool:
    """Whether a value is a dictionary that has these keys, of these types."""
    return isinstance(value, dict) and all(isinstance(value.get(k), t) for k, t in kinds.items())


def _is_time(value: Any) -> bool:
    try:
        return datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


def _is_config(value: Any) -> bool:
    # One that names a dataset is read for its name.
    return _has(value) and (value.get("dataset") is None or _has(value["dataset"], name=str))


# What whoever reads a record relies on, so that one that lacks it is named and passed over.
_SHAPES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("key", "paper", "experiment", "command"),
        lambda value: isinstance(value, str),
    ),
    **dict.fromkeys(("started", "finished"), lambda value: _is_time(value)),
    **dict.fromkeys(
        ("error", "commit", "code"), lambda value: value is None or isinstance(value, str)
    ),
    **dict.fromkeys(("schema", "version"), lambda value: type(value) is int),
    "dirty": lambda value: value is None or isinstance(value, bool),
    "peak_bytes": lambda value: value is None or isinstance(value, int),
    # numpy's generators take seeds of 32 bits.
    "seed": lambda value: type(value) is int and 0 <= value < 2**32,
    "config": _is_config,
    "metrics": _has,
    "timings": lambda value: (
        _has(value) and all(_has(timing, samples_s=list) for timing in value.values())
    ),
    "dataset": lambda value: (
        value is None or _has(value, name=str, fingerprint=str, provenance=str, kind=str)
    ),
    "device": lambda value: _has(value, name=str, type=str, slug=str),
    "versions": lambda value: _has(value, torch=str, python=str),
    "first_steps": lambda value: (
        value is None or _has(value, losses=list, digest=str, norm=float, instructions=str)
    ),
}


def local_store(profile: str) -> RecordStore:
    """Return the store of what was computed on this machine under a profile."""
    return RecordStore(paths.results_dir() / "local" / profile)


def reference_stores() -> dict[tuple[str, str], RecordStore]:
    """Return the stores of records that ship with the project, by (device, profile)."""
    return {
        (folder.parent.name, folder.name): RecordStore(folder)
        for root in paths.reference_dirs()
        for folder in sorted(root.glob("*/*"))
        if folder.is_dir()
    }


def pack_reference(papers: Iterable[str], profiles: Iterable[str]) -> list[tuple[Path, int]]:
    """Fold this machine's records, and single files among the reference, into packed references.

    A record goes to ``results/reference/DEVICE/PROFILE/PAPER.jsonl.gz`` of its own device. This
    machine's single files stay; those among the reference are removed.

    Returns:
        Each packed file that records were folded into, and how many are new or newer there.

    Raises:
        RecordError: A record cannot be read, or a file cannot be written.
    """
    root = paths.results_dir() / "reference"
    packed = []
    for profile, paper in itertools.product(profiles, papers):
        records, problems = local_store(profile).read(paper)
        if problems:
            raise problems[0]
        for record in records:
            if not re.fullmatch(r"\w[\w.-]*", slug := record.device["slug"]):
                where = local_store(profile).where(record)
                raise RecordError(f"record {where} has a device {slug!r}, which names no folder")
        devices = {folder.name for folder in root.glob("*/") if (folder / profile).is_dir()}
        for device in sorted(devices.union(record.device["slug"] for record in records)):
            store = RecordStore(root / device / profile)
            of_it = [record for record in records if record.device["slug"] == device]
            singles = any((store.folder / paper).glob("*.json"))
            if (of_it or singles) and ((added := store.pack(paper, of_it)) or singles):
                packed.append((store.packed(paper), added))
    return packed


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that results depend on."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


def commit_state() -> tuple[str | None, bool | None]:
    """Return the commit of this package's source and whether it had changes; None where unknown.

    That of the checkout, or the one that an installed package was built from; never that of a
    repository that the package merely lies in or is called from. ``$REPRO_COMMIT`` names that of a
    copy that has no git, or another one.

    Raises:
        RecordError: That variable holds no hash.
    """
    if given := os.environ.get("REPRO_COMMIT"):
        if not re.fullmatch("[0-9a-f]{7,40}", given):
            raise RecordError(
                f"$REPRO_COMMIT is {given!r}; give the hash of the commit that this copy was made "
                "from (git rev-parse HEAD), or leave it out"
            )
        return given, None
    return paths.built_from() if paths.INSTALLED else paths.checkout_state()


def now() -> str:
    """Return the time in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
