"""Records of a GPU that is at hand for some minutes: missing ones, the most valuable first.

The list is ``gpu.toml``. A piece is computed by a process of its own, which is ended where a run
takes far too long; then another goes on, with that run last. Every run writes its record as it
ends; an archive of all records is written anew while more are computed.
"""

import math
import os
import signal
import sqlite3
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import BytesIO
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from repro.experiments import arguments, find_artefacts, load_paper
from repro.experiments import run as running
from repro.experiments.design import SEEDS, Paper, Run, UsageError
from repro.experiments.processes import Workers, end_with
from repro.experiments.query import LOCAL, find_source
from repro.measure.checks import is_whole
from repro.measure.files import cache_folder, replacing
from repro.measure.host import cores
from repro.records import RecordStore, commit_state, local_store

LIST = Path(__file__).with_name("gpu.toml")
ARCHIVE, LOG, DOCTOR = "records.tar.gz", "log.txt", "doctor.json"
TIMES = "*-experiments.sqlite"  # in the folder of caches: times that later pieces use
_DOCTOR_S = 120.0  # at most; it took 17 s by an H100
_STARTING_S = 12.0  # of a process: torch, the device, decoded images
_LAST_ARCHIVE_S = 5.0
_BETWEEN_ARCHIVES_S = 10.0
_GENEROUS = 3.0  # a run is ended after so many times what it is expected to take, and a minute
_TRIES = 3  # processes for a piece


@dataclass(frozen=True, eq=False)
class Piece:
    """Some runs of one artefact."""

    name: str  # a letter of the list
    artefact: str  # PAPER/ARTEFACT
    seconds: float  # expected of one run on an H100
    experiments: Sequence[str] = ()  # only their runs; all by default
    # Values of a configuration by key, as for ``run --only``; a run has one of each.
    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    seeds: str | None = None  # as for ``run --seeds``; None for the runs' own or the profile's
    at_once: int = 1  # how many runs share the device; those that are measured have it alone
    data: Sequence[str] = ()  # the datasets that are needed

    def __str__(self) -> str:
        values = [f"{key} {', '.join(map(str, some))}" for key, some in self.only.items()]
        return "; ".join([f"{self.name} {self.artefact}", *self.experiments, *values])


@dataclass(frozen=True, eq=False)
class Planned:
    """A piece with its runs."""

    piece: Piece
    paper: Paper
    runs: Sequence[Run]  # all, each with its seeds
    left: Sequence[Run]  # those that have no record, with the seeds that lack it
    without: Sequence[str]  # the datasets that are not at hand

    @property
    def measured(self) -> bool:
        """Whether a run is a measurement, so that each has the device for itself."""
        return any(self.paper.experiments[r.experiment].measured(r.config) for r in self.runs)

    @property
    def seconds(self) -> float:
        """Expected of the runs that are left."""
        at_once = 1 if self.measured else self.piece.at_once
        return self.piece.seconds * -(-_count(self.left) // at_once)

    def row(self) -> dict[str, Any]:
        """Describe it for a table."""
        data = [f"{name} (not here)" if name in self.without else name for name in self.piece.data]
        return {
            "piece": str(self.piece),
            "runs": _count(self.runs),
            "missing": _count(self.left),
            "minutes": f"{self.seconds / 60:.1f}",
            "on the device": "alone" if self.measured else f"{self.piece.at_once} at once",
            "data": ", ".join(data) or "none",
        }


def _count(runs: Sequence[Run]) -> int:
    return sum(len(run.seeds or ()) for run in runs)


def read(path: Path, only: Sequence[str] = ()) -> list[Piece]:
    """Read a list of pieces in TOML, or only those of some names, papers or artefacts.

    `UsageError`, whose text names the place, where it is no such list, or has no such piece.
    """
    try:
        pieces = [Piece(**row) for row in tomllib.loads(path.read_text(encoding="utf-8"))["piece"]]
        named = {p: {p.name, p.artefact, p.artefact.partition("/")[0]} for p in pieces}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is no list of pieces ({error}); see {LIST}") from error
    for piece in pieces:
        try:
            known = find_artefacts(piece.artefact)[0].experiments
        except UsageError as error:
            raise UsageError(f"{path}, piece {piece.name}: {error}") from error
        if unknown := ", ".join(set(piece.experiments) - known.keys()):
            raise UsageError(
                f"{path}, piece {piece.name}: there is no experiment {unknown}; choose among "
                f"{', '.join(known)}"
            )
        seconds = piece.seconds if isinstance(piece.seconds, int | float) else math.nan
        if not (is_whole(piece.at_once, 1) and 0 < seconds < math.inf):
            raise UsageError(
                f"{path}, piece {piece.name}: at_once is {piece.at_once!r} and seconds "
                f"{piece.seconds!r}; give a whole number of at least 1, and seconds above 0"
            )
    names = set[str]().union(*named.values())
    if not pieces or set(only) - names:
        letters = ", ".join(dict.fromkeys(piece.name for piece in pieces))
        lacking = ", ".join(name for name in only if name not in names)
        raise UsageError(f"{path} has no piece {lacking}; give a paper, an artefact, {letters}")
    return [piece for piece in pieces if not only or named[piece].intersection(only)]


def plan(
    pieces: Sequence[Piece], profile: str, device: str | None, root: str | None
) -> list[Planned]:
    """Look up the runs of pieces, and which have no record.

    Records of this machine and those under ``results/reference`` count. A measurement counts if it
    is of a device with the name of this one, or of any where `device` is None. Measurements of a
    paper that another device has begun, and this one has not, come last.
    """
    from repro import datasets
    from repro.measure import describe_device

    present = datasets.available(root)
    name = describe_device(device)["name"] if device else None
    planned: list[Planned] = []
    for piece in pieces:
        paper, artefacts = find_artefacts(piece.artefact)
        # Data that is not at hand is named all the same, so that the list can be shown.
        chosen = arguments.choose_datasets(paper, profile, piece.data, root)
        runs = arguments.plan(paper, artefacts, profile, chosen)
        runs = [run for run in runs if run.experiment in (piece.experiments or paper.experiments)]
        choices = [(key, str(value)) for key, some in piece.only.items() for value in some]
        runs = arguments.only(runs, choices)
        seeds = arguments.parse_seeds(piece.seeds)
        runs = [replace(run, seeds=seeds or run.seeds or SEEDS[profile]) for run in runs]
        recorded = _recorded(paper, profile, name)
        left = []
        for run in runs:
            if lacking := [s for s in run.seeds or () if run.identity(s) not in recorded]:
                left.append(replace(run, seeds=tuple(lacking)))
        without = [name for name in piece.data if name not in present]
        planned.append(Planned(piece, paper, runs, left, without))
    return sorted(
        planned, key=lambda one: one.measured and _begun_elsewhere(one.paper, profile, name)
    )


def _recorded(paper: Paper, profile: str, device: str | None) -> set[str]:
    """Return the identities of runs that need not be computed.

    A run that failed elsewhere is tried again, since it may have been mended; one that failed here
    is not.
    """
    found = set()
    for (where, _), records in find_source(paper, profile).records.items():
        for record in records:
            measured = paper.experiments[record.experiment].measured(record.config)
            ours = not measured or device in (None, record.device["name"])
            if ours and (where == LOCAL or record.status != "failed"):
                found.add(record.identity)
    return found


def _begun_elsewhere(paper: Paper, profile: str, device: str | None) -> bool:
    """Whether another device has measured a part of a paper, and this one, if any, has not."""
    names = {
        record.device["name"]
        for records in find_source(paper, profile).records.values()
        for record in records
        if paper.experiments[record.experiment].measured(record.config)
    }
    return bool(names) and device not in {None, *names}


def compute(
    pieces: Sequence[Piece],
    setting: running.Setting,
    minutes: float,
    folder: Path,
    tell: Callable[[str], None],
) -> bool:
    """Run the doctor, then compute missing records until the time is over.

    The folder gets the archive, the log and the doctor's findings, which are not made anew where
    they are there. Returns whether neither the doctor nor a piece failed, as far as there was time
    and data for it.
    """
    if not 0 < minutes < 10_000:
        raise UsageError(f"--minutes is {minutes:g}; give a number above 0 and below 10,000")
    end = time.monotonic() + 60 * minutes - _LAST_ARCHIVE_S
    commit, _ = commit_state()  # refuses a wrong $REPRO_COMMIT before any piece would
    planned = plan(pieces, setting.profile, setting.device, setting.root)
    folder.mkdir(parents=True, exist_ok=True)

    def say(line: str) -> None:
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")
        tell(line)

    if commit is None:
        say("records will name no commit: this is a copy without git, and $REPRO_COMMIT is not set")
    missing = [one for one in planned if one.left]
    if not missing:
        say("nothing is missing: all runs have a record")
    well = True
    with _archiving(local_store(setting.profile), folder):
        decoding = _decode([one for one in missing if not one.without], setting.root)
        if missing and not (folder / DOCTOR).exists():
            line, well = _doctor(setting, folder, end)
            say(line)
        for one in missing:
            if one.without:
                say(f"{one.piece}: left out, for {', '.join(one.without)} is not here")
                continue
            data = {str(run.config.get("dataset")) for run in one.left}
            for dataset, process in decoding.items():
                if one.measured or dataset in data:
                    process.join(max(0.0, end - time.monotonic()))
            well = _tried(one, setting, folder / LOG, end, say) and well
    return well


def _tried(
    one: Planned, setting: running.Setting, log: Path, end: float, say: Callable[[str], None]
) -> bool:
    """Compute a piece; where its process died go on with what is left. Return whether all is well.

    The run that was at work comes last then.
    """
    piece, left, well = one.piece, list(one.left), True
    timed = replace(setting, until=end, expected_s=piece.seconds)
    for _ in range(_TRIES):
        if time.monotonic() + _STARTING_S + piece.seconds > end:
            say(f"{piece}: no time for it")
            break
        start, work = time.monotonic(), (_compute, one.paper.key, timed, piece.at_once, log, left)
        outcome = _watched(work, _GENEROUS * piece.seconds + 60, end)
        said, ended_well = outcome or ("a run took too long, or its process died", False)
        well = well and ended_well
        say(f"{piece}: {said} ({time.monotonic() - start:.0f} s)")
        if outcome is not None:
            break
        (again,) = plan([piece], setting.profile, setting.device, setting.root)
        left = [*again.left[1:], *again.left[:1]]
        if len(left) < 2:
            break
    return well


def _watched(work: tuple[Any, ...], limit_s: float, end: float) -> tuple[str, bool] | None:
    """Call a function in a process, with a function that tells of progress before its arguments.

    Returns its result; None where it died, told nothing for `limit_s` seconds, or was at it in the
    end. What it started ends with it.
    """
    spawning = get_context("spawn")
    ends, alive = spawning.Pipe(duplex=False)
    told, telling = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_tell, args=(ends, telling, *work))
    process.start()
    telling.close()
    try:
        while told.poll(max(0.0, min(limit_s, end - time.monotonic()))):
            if isinstance(result := told.recv(), tuple):
                return result
    except EOFError:
        pass
    finally:
        alive.close()
        process.kill()
        with suppress(ProcessLookupError):  # it has a group of its own, see `end_with`
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return None


def _tell(ends: Connection, telling: Connection, function: Callable[..., Any], *work: Any) -> None:
    end_with(ends)
    telling.send(function(telling.send, *work))


def _compute(
    tell: Callable[[str], None],
    key: str,
    setting: running.Setting,
    at_once: int,
    log: Path,
    runs: list[Run],
) -> tuple[str, bool]:
    """Carry out runs in a process of their own; `tell` is called as each ends.

    Returns a line on them, and whether none failed.
    """

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if "CUDA error:" in line:  # after which nothing works in this process
            os._exit(1)
        tell(line)

    with log.open("a", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    import torch

    torch.set_num_threads(max(1, cores() // at_once))
    paper = load_paper(key)
    try:
        with Workers(at_once) as workers:
            tally = running.execute(paper, runs, setting, report=report, workers=workers)
        return str(tally), not (tally.failed or tally.left_out)
    except Exception as error:  # such as a library that is not here: the next piece may do
        return f"not run: {type(error).__name__}: {error}", False


def _decode(planned: Sequence[Planned], root: str | None) -> dict[str, Any]:
    """Decode the datasets of all pieces into the cache, each by a process; those, by dataset."""
    processes: dict[str, Any] = {}
    for one in planned:
        for run in one.left:
            dataset = run.config.get("dataset")
            if dataset and dataset["name"] in one.piece.data and str(dataset) not in processes:
                target = partial(running.load, {"dataset": dataset}, root)
                process = get_context("spawn").Process(target=target, daemon=True)
                process.start()
                processes[str(dataset)] = process
    return processes


def _doctor(setting: running.Setting, folder: Path, end: float) -> tuple[str, bool]:
    """Write the doctor's findings; a line on them, and whether all self-tests passed."""
    command = [sys.executable, "-m", "repro", "doctor", "--json", "--device", setting.device]
    if setting.root is not None:
        command += ["--data", setting.root]
    start = time.monotonic()
    try:
        with replacing(folder / DOCTOR) as temporary, temporary.open("wb") as found:
            limit_s = max(1.0, min(_DOCTOR_S, end - start))
            done = subprocess.run(command, stdout=found, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"doctor: ended after {time.monotonic() - start:.0f} s", False
    word = f"FAILED ({done.returncode})" if done.returncode else "all self-tests passed"
    line = f"doctor: {word} ({time.monotonic() - start:.0f} s), see {DOCTOR}"
    return line, done.returncode == 0


@contextmanager
def _archiving(store: RecordStore, folder: Path) -> Iterator[None]:
    """Write the archive every few seconds in which there is a new record, and at the end."""
    done = threading.Event()
    written: set[tuple[Path, float]] = set()

    def write() -> None:
        files = sorted(store.folder.glob("*/*.json"))
        found = {(file, file.stat().st_mtime) for file in (*files, *cache_folder().glob(TIMES))}
        if found - written:
            with (
                replacing(folder / ARCHIVE) as temporary,
                tarfile.open(temporary, "w:gz") as archive,
            ):
                for path in files:
                    archive.add(path, str(path.relative_to(store.folder.parent)))
                for path in cache_folder().glob(TIMES):
                    try:
                        with closing(sqlite3.connect(path)) as times:  # while others write to it
                            content = times.serialize()
                    except sqlite3.Error:  # locked, or still empty: records matter more
                        continue
                    entry = tarfile.TarInfo(path.name)
                    entry.size = len(content)
                    archive.addfile(entry, BytesIO(content))
            written.update(found)

    def keep_writing() -> None:
        while not done.wait(_BETWEEN_ARCHIVES_S):
            with suppress(OSError):  # such as a full disk: perhaps there is room the next time
                write()

    thread = threading.Thread(target=keep_writing, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        write()
