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
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from repro import paths
from repro.measure.files import regular, replacing

SCHEMA = 3
STATUSES = ("ok", "out_of_memory", "failed")
_LIBRARIES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "scikit-image")
_ADVICE = "move it away or delete it, then run again; no other record is touched"
_PACKED_ADVICE = "restore the file from git or from a copy"
MAKE_ROOM = "free some space, make the folder writable, or name another one in $REPRO_RESULTS"
_PROBE_BYTES = 2**18  # most records are smaller
_LARGEST_BYTES = 2**28


class RecordError(ValueError):
    """A record cannot be read, or is not one."""


class CorruptRecordWarning(UserWarning):
    """A file in a folder of records is no record. It is ignored; the others are read."""


@dataclass(frozen=True)
class Record:
    """The result of one run of one configuration with one seed; JSON values only."""

    key: str  # of `record_key`
    paper: str  # such as mbs
    experiment: str  # its name within the paper
    version: int  # of the experiment; see `repro.experiments.design.Experiment`
    config: dict[str, Any]
    seed: int  # of initial weights, data order and augmentation
    status: str  # ok, out_of_memory or failed
    metrics: dict[str, Any]  # results by name: numbers, texts or lists of them
    timings: dict[str, Any]  # by name: {"samples_s": [...], "warmup": n}
    peak_bytes: int | None  # peak memory, if it was measured
    dataset: dict[str, Any] | None  # name, fingerprint, provenance, kind
    device: dict[str, Any]  # of `repro.measure.describe_device`
    versions: dict[str, str]  # of Python and the libraries
    commit: str | None  # of the package, if known
    dirty: bool | None  # whether there were uncommitted changes
    started: str  # ISO 8601 in UTC
    finished: str
    command: str
    error: str | None = None  # type and text, if the status is not ok
    first_steps: dict[str, Any] | None = None  # of a training: `repro.experiments.one_run`
    code: str | None = None  # hash of the source, in records older than experiments' versions
    schema: int = SCHEMA

    @cached_property
    def identity(self) -> str:
        """Hash of the configuration and seed, independent of data and version."""
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
    """Hash everything on which a result depends; the version represents the source code.

    The fingerprint is the dataset's, None without data. The device is None where neither time nor
    memory is measured, else device and torch version.
    """
    parts = {"paper": paper, "experiment": experiment, "version": version, "config": config}
    return _digest(parts | {"seed": seed, "data": fingerprint, "device": device})


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _has(value: Any, **kinds: type) -> bool:
    """Whether a value is a dictionary that has these keys, of these types."""
    return isinstance(value, dict) and all(isinstance(value.get(k), t) for k, t in kinds.items())


def _is_time(text: str) -> bool:
    with suppress(ValueError):
        return datetime.fromisoformat(text).tzinfo is not None
    return False


# The types of a record's fields, such as {dict, NoneType}, and what else readers need of some.
_TYPES = {
    name: {get_origin(kind) or kind for kind in (get_args(hint) or [hint])}
    if isinstance(hint, UnionType)
    else {get_origin(hint) or hint}
    for name, hint in get_type_hints(Record).items()
}
_DATA = dict.fromkeys(("name", "fingerprint", "provenance", "kind"), str)
_STEPS = {"losses": list, "digest": str, "norm": float, "instructions": str}
_NEEDED: dict[str, Callable[[Any], bool]] = {
    "schema": lambda number: bool(number == SCHEMA),
    "status": lambda word: word in STATUSES,
    "seed": lambda seed: bool(0 <= seed < 2**32),  # the range of numpy's generators
    "started": _is_time,
    "finished": _is_time,
    "timings": lambda timings: all(_has(timing, samples_s=list) for timing in timings.values()),
    "config": lambda config: config.get("dataset") is None or _has(config["dataset"], name=str),
    "device": lambda device: _has(device, name=str, type=str, slug=str),
    "versions": lambda versions: _has(versions, torch=str, python=str),
    "dataset": lambda data: data is None or _has(data, **_DATA),
    "first_steps": lambda steps: steps is None or _has(steps, **_STEPS),
}


def _parsed(text: bytes, where: str, advice: str, paper: str | None) -> Record:
    """Return a record from JSON; `paper` is the only one that it may be of."""
    try:
        content = json.loads(text.decode())
        if not isinstance(content, dict) or set(content) != set(Record.__annotations__):
            given = sorted(content) if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"it has {given}")
        wrong = [
            name
            for name, kinds in _TYPES.items()
            if type(content[name]) not in kinds
            or not _NEEDED.get(name, lambda value: True)(content[name])
        ]
        if wrong:
            raise ValueError(f"its {', '.join(wrong)} cannot be used")
        if paper not in (None, content["paper"]):
            raise ValueError(f"it is of the paper {content['paper']!r}, not of {paper!r}")
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where} cannot be read ({error}); {advice}") from error
    return Record(**content)


def _line(record: Record) -> str:
    return json.dumps(asdict(record), sort_keys=True, separators=(",", ":")) + "\n"


def read_record(path: Path, paper: str | None = None) -> Record:
    """Read one record, optionally of one paper; read again only if the file has changed."""
    records, problems = _read(path, paper)
    if problems:
        raise problems[0]
    return records[0]


def _read(path: Path, paper: str | None) -> tuple[list[Record], list[RecordError]]:
    """Read a file, packed or of one record: its records, and the faults in it."""
    packed = path.suffix == ".gz"
    try:
        state = regular(path).stat()
        return _read_again(path, paper, packed, state.st_mtime_ns, state.st_size)
    except (OSError, EOFError, zlib.error) as error:
        if packed and isinstance(error, FileNotFoundError):
            return [], []
        advice = _PACKED_ADVICE if packed else _ADVICE
        return [], [RecordError(f"{path} cannot be read ({error}); {advice}")]


@lru_cache(maxsize=20_000)
def _read_again(
    path: Path, paper: str | None, packed: bool, changed: int, size: int
) -> tuple[list[Record], list[RecordError]]:
    if size > _LARGEST_BYTES:
        raise OSError(f"it has {size} bytes, and a record at most {_LARGEST_BYTES}")
    content = path.read_bytes()
    texts = {f"record {path}": content}
    if packed:
        lines = gzip.decompress(content).splitlines()
        if not lines:
            raise EOFError("it is empty")
        texts = {f"line {number} of {path}": line for number, line in enumerate(lines, 1)}
    records, problems = [], []
    for where, text in texts.items():
        try:
            records.append(_parsed(text, where, _PACKED_ADVICE if packed else _ADVICE, paper))
        except RecordError as error:
            problems.append(error)
    return records, problems


class RecordStore:
    """A folder of records: ``PAPER/EXPERIMENT-KEY.json`` each, or packed in ``PAPER.jsonl.gz``.

    Runs write single files; `pack` folds them into the packed file, one line each. If both have a
    record of one key, the single file counts. The first record that is written makes the folder.
    What is read may also be in `below`, a store whose records count where this one has none.
    """

    def __init__(self, folder: Path, below: "RecordStore | None" = None) -> None:
        self.folder, self.below = folder, below

    def path(self, paper: str, experiment: str, key: str) -> Path:
        """Return the path of a record's single file, which need not exist."""
        return self.folder / paper / f"{experiment}-{key}.json"

    def packed(self, paper: str) -> Path:
        """Return the path of a paper's packed records, which need not exist."""
        return self.folder / f"{paper}.jsonl.gz"

    def singles(self, paper: str) -> list[Path]:
        """Return the single files of a paper's records."""
        return sorted((self.folder / paper).glob("*.json"))

    def holds(self, paper: str) -> bool:
        """Return whether there are files of a paper's records."""
        here = self.packed(paper).exists() or bool(self.singles(paper))
        return here or (self.below is not None and self.below.holds(paper))

    def where(self, record: Record) -> Path:
        """Return the file that holds a record."""
        path = self.path(record.paper, record.experiment, record.key)
        if path.exists():
            return path
        if self.below:
            packed, _ = _read(self.packed(record.paper), record.paper)
            if all(held.key != record.key for held in packed):
                return self.below.where(record)
        return self.packed(record.paper)

    def load(self, paper: str) -> list[Record]:
        """Return a paper's records, oldest first.

        An unreadable record is named by a `CorruptRecordWarning`, and ignored.
        """
        records, problems = self.read(paper)
        for problem in problems:
            warnings.warn(str(problem), CorruptRecordWarning, stacklevel=2)
        return records

    def read(self, paper: str) -> tuple[list[Record], list[RecordError]]:
        """Return a paper's records, oldest first, and an error for each that cannot be read."""
        singles: list[Record] = []
        problems: list[RecordError] = []
        for path in self.singles(paper):
            held, faults = _read(path, paper)
            singles += held
            problems += faults if os.path.lexists(path) else ()  # else it was packed meanwhile
        # Last, so that a record that was packed meanwhile is seen.
        packed, wrong = _read(self.packed(paper), paper)
        below, faults = self.below.read(paper) if self.below else ([], [])
        records = {record.key: record for record in [*below, *packed, *singles]}
        ordered = sorted(records.values(), key=lambda r: (r.finished, r.key))
        return ordered, [*faults, *wrong, *problems]

    def find(self, paper: str, experiment: str, key: str) -> Record | None:
        """Return the current record, or None."""
        path = self.path(paper, experiment, key)
        if not os.path.lexists(path):
            packed, _ = _read(self.packed(paper), paper)
            found = next((record for record in packed if record.key == key), None)
            return found or (self.below.find(paper, experiment, key) if self.below else None)
        if (record := read_record(path, paper)).key != key:
            raise RecordError(f"record {path} is of another run, {record.key!r}; {_ADVICE}")
        return record

    def write(self, record: Record) -> Path:
        """Write a record whole; where that fails (`RecordError`), an earlier record stays."""
        path = self.path(record.paper, record.experiment, record.key)
        text = json.dumps(asdict(record), indent=1, sort_keys=True)
        problem = f"record {path} cannot be written"
        with _naming(problem, "run again to go on"), replacing(path) as temporary:
            temporary.write_text(f"{text}\n", encoding="utf-8")
        return path

    def pack(self, paper: str, records: Iterable[Record] = ()) -> int:
        """Fold records, and this folder's single files of a paper, into its packed file.

        The single files are removed once the packed file has been written and read back. If there
        are several records of one key, the newest counts.

        Returns the number of records that are new there, or newer than before. Where a file cannot
        be read or written (`RecordError`), no record is lost.
        """
        records = list(records)
        if not records and not self.folder.is_dir():
            return 0
        path = self.packed(paper)
        with _naming(f"{path} cannot be written", "pack again"), _locked(self.folder):
            singles = {path: path.stat().st_mtime_ns for path in self.singles(paper)}
            kept, problems = RecordStore(self.folder).read(paper)
            if problems:
                raise problems[0]
            before, _ = _read(path, paper)
            every = sorted([*before, *kept, *records], key=lambda record: record.finished)
            ordered = sorted(  # similar records side by side compress best
                {record.key: record for record in every}.values(),
                key=lambda r: (r.experiment, json.dumps(r.config, sort_keys=True), r.seed, r.key),
            )
            lines, old = list(map(_line, ordered)), list(map(_line, before))
            if lines and lines != old:
                with replacing(path) as temporary:
                    # Without a time, so that the same records give the same bytes.
                    temporary.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
                    if list(map(_line, _read(temporary, paper)[0])) != lines:
                        raise OSError("it reads back differently")
            for single, changed in singles.items():
                if single.stat().st_mtime_ns == changed:  # else a newer record came meanwhile
                    single.unlink()
        return len(set(lines) - set(old))


@contextmanager
def _naming(problem: str, then: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"{problem} ({error.strerror or error}): earlier records are kept; "
            f"{MAKE_ROOM}, then {then}"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time pack a folder, since two would overwrite each other's file."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def check_writable(folder: Path, what: str, advice: str) -> None:
    """Refuse a folder, made if missing, into which no file of some size can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())  # a full disk may be detected only here
    except OSError as error:
        raise RecordError(
            f"{what} cannot be written to {folder} ({error.strerror or error}): {advice}"
        ) from error


def local_store(profile: str) -> RecordStore:
    """Return the store of this machine's records under a profile."""
    return RecordStore(paths.results_dir() / "local" / profile)


def reference_stores() -> dict[tuple[str, str], RecordStore]:
    """Return the stores of records that ship with the project, by (device, profile)."""
    stores: dict[tuple[str, str], RecordStore] = {}
    for root in paths.reference_dirs():
        for folder in filter(Path.is_dir, sorted(root.glob("*/*"))):
            where = (folder.parent.name, folder.name)
            stores[where] = RecordStore(folder, stores.get(where))
    return stores


def pack_reference(papers: Iterable[str], profiles: Iterable[str]) -> list[tuple[Path, int]]:
    """Fold this machine's records, which stay, into the packed references.

    A record goes to ``results/reference/DEVICE/PROFILE/PAPER.jsonl.gz`` of its own device.

    Returns each packed file that received records, and the number of new or newer ones in it.
    """
    packed = []
    for profile, paper in itertools.product(profiles, papers):
        records, problems = local_store(profile).read(paper)
        if problems:
            raise problems[0]
        by_device: dict[str, list[Record]] = {}
        for record in records:
            by_device.setdefault(record.device["slug"], []).append(record)
        for device, of_it in sorted(by_device.items()):
            if not re.fullmatch(r"\w[\w.-]*", device):
                where = local_store(profile).where(of_it[0])
                raise RecordError(f"record {where} has a device {device!r}, which names no folder")
            store = RecordStore(paths.results_dir() / "reference" / device / profile)
            if added := store.pack(paper, of_it):
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
    """Return the commit of this package's source and whether it had changes; None if unknown.

    It is the checkout's commit, or the commit from which an installed package was built, never that
    of a surrounding or a calling repository. ``$REPRO_COMMIT`` overrides it, for example for a copy
    without git; `RecordError` where that is no hash.
    """
    if given := os.environ.get("REPRO_COMMIT"):
        if not re.fullmatch("[0-9a-f]{7,40}", given):
            raise RecordError(f"$REPRO_COMMIT is {given!r}; give a commit's hash, or leave it out")
        return given, None
    return paths.built_from() if paths.INSTALLED else paths.checkout_state()


def now() -> str:
    """Return the time in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
