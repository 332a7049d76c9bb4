"""Carry out the runs of a plan that have no record, each into its record."""

import errno
import gc
import json
import os
import shlex
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache, partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from repro.experiments.arguments import check_device
from repro.experiments.design import (
    LONG,
    SEEDS,
    LibraryMissing,
    Outcome,
    Paper,
    Run,
    UsageError,
)
from repro.experiments.run_lock import locked
from repro.experiments.workers import WorkerDied, Workers
from repro.records import (
    CorruptRecordWarning,
    Record,
    RecordStore,
    commit_state,
    identity,
    library_versions,
    local_store,
    now,
    record_key,
    reference_stores,
)
from repro.report import printable
from repro.terminal import Bar

if TYPE_CHECKING:
    from repro.datasets import EpochTimes, ImageData

    Data = ImageData | EpochTimes

# Commands that compute nothing answer at once: torch and the datasets are imported where they work.

POLL_S = 0.2  # between two looks at a run that another process computes
_OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE}


@dataclass
class Tally:
    """How the runs of a plan ended.

    Attributes:
        done: Computed here and now.
        stood: Had a record before.
        elsewhere: Computed by another process meanwhile.
        out_of_memory: Of those computed here.
        failed: Of those computed here.
        failed_before: Of the others, those that failed then.
        left: Not begun, as it was time to end.
        left_out: Not computed, for a library that is not installed.
        missing: Why, each reason once: a library to install.
    """

    done: int = 0
    stood: int = 0
    elsewhere: int = 0
    out_of_memory: int = 0
    failed: int = 0
    failed_before: int = 0
    left: int = 0
    left_out: int = 0
    missing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = (
            f"{self.done} computed ({self.out_of_memory} out of memory, {self.failed} failed), "
            f"{self.stood} had a record"
        )
        if self.elsewhere:
            text += f", {self.elsewhere} computed by another process"
        if self.left:
            text += f", {self.left} left: the same command goes on"
        if self.left_out:
            text += f", {self.left_out} left out ({'; '.join(self.missing)})"
        if self.failed_before:
            text += f"; {self.failed_before} failed before, --retry-failed computes them again"
        return text


@dataclass(frozen=True)
class Setting:
    """Where and how a plan is carried out.

    Attributes:
        profile: Which one.
        device: Such as ``cpu``.
        root: Folder searched first for datasets.
        seeds: Instead of the profile's.
        retry_failed: Whether runs that failed are run again.
        choices: The command line's choices of runs, for the records' own command.
        until: When to begin no further run, on `time.monotonic`'s clock; one that would not end by
            then is not begun.
        expected_s: Seconds of a run that was never run anywhere.
    """

    profile: str
    device: str
    root: str | None = None
    seeds: tuple[int, ...] | None = None
    retry_failed: bool = False
    choices: str = ""
    until: float | None = None
    expected_s: float | None = None

    def command(self, target: str, dataset: str | None) -> str:
        """Return a command line that computes a record again."""
        parts = [f"python -m repro run {target} --profile {self.profile} --device {self.device}"]
        if dataset is not None:
            parts.append(f"--dataset {shlex.quote(dataset)}")
        if self.seeds is not None:
            listed = ",".join(map(str, self.seeds))
            parts.append(f"--seeds {listed}{',' if len(self.seeds) == 1 else ''}")
        return " ".join([*parts, *([self.choices] if self.choices else [])])

    def seeds_of(self, run: Run) -> tuple[int, ...]:
        """Return the seeds of a run: its own, those asked for, or the profile's."""
        if run.seeds is not None and (self.seeds is None or not run.by_processes):
            return run.seeds
        return self.seeds if self.seeds is not None else SEEDS[self.profile]

    def wants(self, known: Record | None) -> bool:
        """Whether a run with this record, or none, is to be computed."""
        return known is None or (self.retry_failed and known.status == "failed")


@dataclass(frozen=True)
class Step:
    """A run with one of its seeds, and the key of its record."""

    run: Run
    seed: int
    key: str

    @property
    def name(self) -> str:
        """The same for all seeds of a run."""
        return identity(self.run.experiment, self.run.config, 0)


@dataclass
class Forecast:
    """Expected seconds of runs, by their name, from earlier ones.

    Attributes:
        before: Seconds of earlier runs here, else of reference records.
        unknown_s: Seconds of a run of which nothing is known.
    """

    before: dict[str, float]
    unknown_s: float | None = None
    _here: dict[str, list[float]] = field(default_factory=dict)

    def learn(self, name: str, seconds: float) -> None:
        """Note the seconds of a run here and now."""
        self._here.setdefault(name, []).append(seconds)

    def expected(self, name: str) -> float | None:
        """Return the expected seconds of a run, None where nothing is known of any run.

        A run that is only known from before is scaled by the others' ratio of here to before; one
        that is not known at all takes the mean of those here, `unknown_s`, or the mean before.
        """
        if name in self._here:
            return fmean(self._here[name])
        if name in self.before:
            both = [n for n in self._here if self.before.get(n)]
            here = sum(fmean(self._here[n]) for n in both)
            pace = here / sum(self.before[n] for n in both) if both else 1.0
            return self.before[name] * min(4.0, max(0.25, pace))  # of short runs it says little
        means = [fmean(seconds) for seconds in self._here.values()]
        if not means and self.unknown_s is not None:
            return self.unknown_s
        means = means or list(self.before.values())
        return fmean(means) if means else None


def in_words(seconds: float | None) -> str:
    """Return a remaining time in words, as coarse as it is known."""
    if seconds is None:
        return "for an unknown time"
    minutes = round(seconds / 60)
    if minutes < 2:
        return "about a minute" if seconds > 20 else "less than a minute"
    return f"about {minutes} min" if minutes < 120 else f"about {minutes / 60:.1f} h"


def survey(
    paper: Paper, runs: Sequence[Run], setting: Setting, store: RecordStore
) -> tuple[list[Step], dict[str, Record]]:
    """Return all steps of a plan, seed by seed, and the records that there are, by key.

    Where something is left to compute, it is made sure that its records can be written.

    Raises:
        RecordError: Records cannot be written, or something else lies in the place of one.
        UsageError: The device is not there.
    """
    steps = _steps(paper, runs, setting)
    records, problems = store.read(paper.key)
    known = {record.key: record for record in records}
    missing = [step for step in steps if setting.wants(known.get(step.key))]
    for step in missing:
        store.find(paper.key, step.run.experiment, step.key)
    if missing:
        store.check_writable(paper.key)
        commit_state()
    for problem in problems:  # of files that are in nobody's way
        warnings.warn(str(problem), CorruptRecordWarning, stacklevel=2)
    return steps, known


def _steps(paper: Paper, runs: Sequence[Run], setting: Setting) -> list[Step]:
    from repro.measure import describe_device

    torch = library_versions().get("torch")
    machine = f"{describe_device(setting.device)['name']}, torch {torch}"
    steps: list[tuple[int, Step]] = []
    for run in runs:
        experiment = paper.experiments[run.experiment]
        data = load(run.config, setting.root)
        for place, seed in enumerate(setting.seeds_of(run)):
            key = record_key(
                paper.key,
                run.experiment,
                experiment.version,
                run.config,
                seed,
                fingerprint=data.fingerprint if data else None,
                device=machine if experiment.measured(run.config) else None,
            )
            steps.append((place, Step(run, seed, key)))
    # Seed 0 of all runs first: an interruption leaves complete tables.
    return [step for _, step in sorted(steps, key=lambda item: item[0])]


Made = tuple[Record, float | None] | LibraryMissing | None  # see `settle`


def execute(
    paper: Paper,
    runs: Sequence[Run],
    setting: Setting,
    store: RecordStore | None = None,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    workers: Workers | None = None,
) -> Tally:
    """Carry out the runs that have no record yet; each writes its record as it ends.

    Running out of memory and failing are results and are recorded; the others go on. Shows a
    progress bar on a terminal, and a line per computed run elsewhere; both say why a run failed,
    now or before. Runs that need a library that is not installed are left out, without a record. A
    run that another process computes is waited for at the end (see `run_lock`), and computed here
    if that process dies.
    Runs that measure nothing are given to `workers`, where there are any; all others follow when
    those have ended, one at a time in this process. Under `long` each measurement has a process of
    its own, as processes repeat it, unless its experiment `shares`.

    Raises:
        UsageError: The device is not there, or the machine lacks something that a run needs.
        RecordError: Records cannot be written.
    """
    import torch

    from repro.measure import accelerator

    store = store or local_store(setting.profile)
    setting = replace(setting, device=check_device(setting.device))
    if setting.device == "cpu" and setting.profile in ("smoke", "quick", LONG):
        # Such small models gain nothing from a second thread, and lose much to waiting for it
        # where another process wants the core.
        torch.set_num_threads(1)
    steps, known = survey(paper, runs, setting, store)
    interactive = sys.stderr.isatty()
    with (
        accelerator.on(setting.device),
        Bar(paper.key, len(steps), shown=interactive) as bar,
        Workers(1, each_new=True) as own,
    ):
        execution = _Execution(paper, setting, store, steps, known, bar, report, interactive)
        if workers:
            execution.share(workers)
        execution.finish(own, torch.get_num_threads())
    return execution.tally


class _Execution:
    """The state of one call of `execute`."""

    def __init__(
        self,
        paper: Paper,
        setting: Setting,
        store: RecordStore,
        steps: Sequence[Step],
        known: dict[str, Record],
        bar: Bar,
        report: Callable[[str], None],
        interactive: bool,
    ) -> None:
        self.paper, self.setting, self.store = paper, setting, store
        self.steps, self.known = steps, known
        self._bar, self._report, self._interactive = bar, report, interactive
        self.tally = Tally()
        self._counted: set[str] = set()
        missing = [step for step in steps if setting.wants(known.get(step.key))]
        self._ahead = Counter(step.name for step in missing)
        self._forecast = Forecast(_took_before(paper, store) if missing else {}, setting.expected_s)
        self._side_by_side = 1

    def _tell(self, line: str) -> None:
        line = printable(line)  # an error may have any text
        self._bar.write(line) if self._interactive else self._report(line)

    def _named(self, step: Step) -> str:
        return f"{self.paper.key} {step.run} seed {step.seed}"

    def _measured(self, step: Step) -> bool:
        return self.paper.experiments[step.run.experiment].measured(step.run.config)

    def _note_failure(self, step: Step, record: Record) -> None:
        if record.status == "failed":
            self.tally.failed_before += 1
            why = next(iter((record.error or "").splitlines()), "")
            self._tell(f"{self._named(step)}: failed before, again with --retry-failed: {why}")

    def _account(self, step: Step, made: Made) -> bool:
        """Count a run that has ended; return False where another process is still at it."""
        if made is None:
            return False
        self._counted.add(step.key)
        self._bar.advance()
        self._ahead.subtract([step.name])
        if isinstance(made, LibraryMissing):
            self.tally.left_out += 1
            if str(made) not in self.tally.missing:
                self.tally.missing.append(str(made))
                self._tell(f"{self._named(step)}: left out, like all that need it: {made}")
            return True
        record, took_s = made
        self.known[step.key] = record
        if took_s is None:
            self.tally.elsewhere += 1
            self._note_failure(step, record)
            return True
        self.tally.done += 1
        self.tally.out_of_memory += record.status == "out_of_memory"
        self.tally.failed += record.status == "failed"
        self._forecast.learn(step.name, took_s)
        left = f"left: {in_words(self._left_s())}" if self._ahead.total() else ""
        self._bar.say(left)
        why = f": {record.error}" if record.status == "failed" else ""
        if why or not self._interactive:
            left = f"; {left}" if left else ""
            self._tell(f"{self._named(step)}: {record.status} ({took_s:.1f} s){left}{why}")
        return True

    def _left_s(self) -> float | None:
        """Return the expected seconds of all runs that are left."""
        alone = {step.name for step in self.steps if self._measured(step)}
        total = 0.0
        for name, count in (+self._ahead).items():
            seconds = self._forecast.expected(name)
            if seconds is None:
                return None
            total += seconds * count / (1 if name in alone else self._side_by_side)
        return total

    def _is_time_for(self, step: Step) -> bool:
        if self.setting.until is None:
            return True
        needed = self._forecast.expected(step.name) or 0.0
        return time.monotonic() + needed <= self.setting.until

    def share(self, workers: Workers) -> None:
        """Give the missing runs that measure nothing to processes, the longest of a seed first."""
        shared = [
            (step, self.known.get(step.key))
            for step in self.steps
            if not self._measured(step) and self.setting.wants(self.known.get(step.key))
        ]
        if len(shared) < 2:
            return
        self._side_by_side = workers.count
        self._bar.say(f"{workers.count} processes")
        before = self._forecast.before
        places = {key: n for n, key in enumerate(dict.fromkeys(s.seed for s, _ in shared))}
        shared.sort(key=lambda work: (places[work[0].seed], -before.get(work[0].name, 0.0)))
        work = partial(settle, self.paper, self.setting, self.store)
        try:
            for (step, _), made in workers.map(work, shared, lambda one: self._is_time_for(one[0])):
                self._account(step, made)
        except WorkerDied as died:
            self._tell(f"{self.paper.key}: {died}; what is left is computed by this process")

    def finish(self, own: Workers, threads: int) -> None:
        """Compute all runs that are left, and wait for those of other processes."""
        left, waiting = [step for step in self.steps if step.key not in self._counted], False
        while left:
            left = [step for step in left if not self._finish_one(step, own, threads)]
            if left and not waiting:
                self._tell(f"{self.paper.key}: waiting for {len(left)} runs of other processes")
                waiting = True
            if left:
                time.sleep(POLL_S)

    def _finish_one(self, step: Step, own: Workers, threads: int) -> bool:
        self._bar.say(str(step.run))
        before = self.known.get(step.key)
        if before and not self.setting.wants(before):
            self.tally.stood += 1
            self._note_failure(step, before)
            self._bar.advance()
            return True
        if not self._is_time_for(step):
            self.tally.left += 1
            return True
        apart = self._measured(step) and not self.paper.experiments[step.run.experiment].shares
        if self.setting.profile == LONG and apart:
            work = partial(_settle_apart, self.paper, self.setting, self.store, threads)
            try:
                ((_, made),) = own.map(work, [(step, before)])
                return self._account(step, made)
            except WorkerDied as died:
                self._tell(f"{self._named(step)}: {died}; it is computed by this process")
        return self._account(step, settle(self.paper, self.setting, self.store, (step, before)))


def _took_before(paper: Paper, local: RecordStore) -> dict[str, float]:
    """Return the seconds of earlier runs, of any version: here, else of the references."""
    return {
        identity(record.experiment, record.config, 0): seconds_of(record)
        for store in (*reference_stores().values(), local)
        for record in store.read(paper.key)[0]
    }


def seconds_of(record: Record) -> float:
    """Return how long a record took; records tell whole seconds."""
    begun, ended = map(datetime.fromisoformat, (record.started, record.finished))
    return max(0.0, (ended - begun).total_seconds())


def settle(
    paper: Paper, setting: Setting, store: RecordStore, work: tuple[Step, Record | None]
) -> Made:
    """Compute a run and write its record, unless another process does or did so.

    Args:
        paper: The run's paper.
        setting: Where and how.
        store: Where records lie.
        work: The run, and the record that it had when all were looked through.

    Returns:
        The record and the seconds that it took, None where another process has made it since; the
        error where a library is not installed; nothing while another process computes it.
    """
    step, before = work
    with locked(store.path(paper.key, step.run.experiment, step.key)) as mine:
        if not mine:
            return None
        existing = store.find(paper.key, step.run.experiment, step.key)
        if existing is not None and existing != before:
            return existing, None
        start = time.perf_counter()
        try:
            record = carry_out(paper, step, setting)
        except LibraryMissing as lacks:
            return lacks
        store.write(record)
        return record, time.perf_counter() - start


def _settle_apart(
    paper: Paper,
    setting: Setting,
    store: RecordStore,
    threads: int,
    work: tuple[Step, Record | None],
) -> Made:
    """Do the same in a process of its own."""
    import torch

    from repro.measure import accelerator

    torch.set_num_threads(threads)
    with accelerator.on(setting.device):
        return settle(paper, setting, store, work)


def load_data(runs: Sequence[Run], root: str | None) -> None:
    """Load the datasets of a plan, so that a missing or damaged one is named before it starts."""
    for run in runs:
        load(run.config, root)


def carry_out(paper: Paper, step: Step, setting: Setting) -> Record:
    """Carry out one run, and return its record, which is not written."""
    from repro.experiments.replay import recording
    from repro.measure import accelerator, describe_device, is_out_of_memory
    from repro.measure.accelerator import HostMemoryError

    experiment, config = paper.experiments[step.run.experiment], step.run.config
    data = load(config, setting.root)
    started = now()
    status, error, outcome = "ok", None, Outcome({})
    with (
        noting_interrupts() as interrupted,
        # A hook would cost the time that other experiments measure.
        recording() if experiment.trains else nullcontext() as first,
        algorithms_timed(config),
    ):
        try:
            outcome = experiment.function(config, step.seed, data, setting.device)
        except Exception as problem:
            raise_if_no_result(problem, interrupted)
            out_of_memory = is_out_of_memory(problem) or isinstance(problem, HostMemoryError)
            status = "out_of_memory" if out_of_memory else "failed"
            error = f"{type(problem).__name__}: {problem}"
            if status == "failed":
                error += "\n" + "".join(traceback.format_tb(problem.__traceback__)[-2:])
    if status != "ok":
        gc.collect()  # a model in a cycle with its error would take memory from the next run
    accelerator.empty_cache(setting.device)
    commit, dirty = commit_state()
    return Record(
        key=step.key,
        paper=paper.key,
        experiment=experiment.name,
        version=experiment.version,
        config=config,
        seed=step.seed,
        status=status,
        error=error,
        metrics=outcome.metrics,
        timings={
            name: {"samples_s": list(timing.samples_s), "warmup": timing.warmup}
            for name, timing in outcome.timings.items()
        },
        peak_bytes=outcome.peak_bytes,
        dataset=None
        if data is None
        else {
            "name": data.record_name,
            "fingerprint": data.fingerprint,
            "provenance": data.provenance,
            "kind": data.kind,
        },
        device=describe_device(setting.device),
        versions=library_versions(),
        commit=commit,
        dirty=dirty,
        started=started,
        finished=now(),
        command=setting.command(paper.key, None if data is None else _asked_for(data)),
        first_steps=first.fingerprint() if first is not None and status == "ok" else None,
    )


@contextmanager
def algorithms_timed(config: Mapping[str, Any]) -> Iterator[None]:
    """Let cuDNN time its algorithms for each new shape where the configuration says so.

    Where steps are captured in a graph, this is done before.
    """
    import torch

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = config.get("benchmark", before)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def noting_interrupts() -> Iterator[list[int]]:
    """Note every Ctrl-C inside: code that it ends may turn it into an error of its own."""
    noted: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield noted  # it is another thread's, or ignored
        return

    def note(number: int, frame: Any) -> Any:
        noted.append(number)
        return before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def raise_if_no_result(problem: Exception, interrupted: Sequence[int]) -> None:
    """Raise an error that is no result of a method: an interruption, a full disk, no cluster."""
    if interrupted:
        raise KeyboardInterrupt from problem
    if isinstance(problem, UsageError):
        raise problem
    if isinstance(problem, OSError) and problem.errno in _OF_THE_MACHINE:
        where = f" ({problem.filename})" if problem.filename else ""
        raise UsageError(
            f"a run was given up, for {os.strerror(problem.errno)}{where}: the records so far are "
            "kept; mend that, then run again to go on"
        ) from problem


def load(config: Mapping[str, Any], root: str | None) -> "Data | None":
    """Load the dataset that a configuration names, once in a process; None where it has none."""
    wanted = config.get("dataset")
    return None if wanted is None else _load_cached(json.dumps(wanted, sort_keys=True), root)


def _asked_for(data: "Data") -> str | None:
    from repro.datasets import TIMES

    return None if data.name == TIMES else data.name  # those are found, not chosen


@cache
def _load_cached(wanted: str, root: str | None) -> "Data":
    from repro import datasets

    options = json.loads(wanted)
    if options["name"] == datasets.TIMES:
        return datasets.load_times(root)
    return datasets.load(options.pop("name"), root, **options)
