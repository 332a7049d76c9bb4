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
from typing import TYPE_CHECKING, Any

from repro.experiments import forecast as forecasting
from repro.experiments.arguments import check_device
from repro.experiments.design import LONG, SEEDS, Outcome, Paper, Run, UsageError
from repro.experiments.outcome import LibraryMissing
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

POLL_S = 0.2  # between two looks at what another process computes
_OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE}


@dataclass
class Tally:
    """What became of a plan's runs.

    Attributes:
        done: Computed here and now.
        stood: Had a record before.
        elsewhere: Computed by another process meanwhile.
        out_of_memory: Of those computed here.
        failed: Of those computed here.
        failed_before: Of the others, those whose record says that they failed.
        left: Not begun, as it was time to end.
        left_out: Not computed, for a library that is not installed.
        missing: Why, each reason once: what to install.
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
            f"{self.stood} stood already"
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
        retry_failed: Whether what failed is run again.
        choices: What the command line said of runs, for the records' own command.
        until: When to begin no further run, on `time.monotonic`'s clock; one that would not end by
            then is not begun.
        expected_s: What a run takes that was never run anywhere.
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
        if self.choices:
            parts.append(self.choices)
        return " ".join(parts)

    def seeds_of(self, run: Run) -> tuple[int, ...]:
        """Return the seeds of a run: its own, those asked for, or the profile's."""
        if run.seeds is not None and (self.seeds is None or not run.by_processes):
            return run.seeds
        return self.seeds if self.seeds is not None else SEEDS[self.profile]


@dataclass(frozen=True)
class Step:
    """A run with one of its seeds, and the key of its record."""

    run: Run
    seed: int
    key: str


def survey(
    paper: Paper, runs: Sequence[Run], setting: Setting, store: RecordStore
) -> tuple[list[Step], dict[str, Record]]:
    """Return all that a plan comes to, seed by seed, and the records that there are, by key.

    Where something is left to compute, it is made sure that its records can be written.

    Raises:
        RecordError: Records cannot be written, or something else lies in the place of one.
        UsageError: The device is not there.
    """
    steps = _steps(paper, runs, setting)
    records, problems = store.read(paper.key)
    known = {record.key: record for record in records}
    missing = [step for step in steps if _is_left(known.get(step.key), setting)]
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

    machine = _machine(describe_device(setting.device)["name"], library_versions())
    steps = []
    for run in runs:
        experiment = paper.experiments[run.experiment]
        data = load(run.config, setting.root)
        for seed in setting.seeds_of(run):
            key = record_key(
                paper.key,
                run.experiment,
                experiment.version,
                run.config,
                seed,
                fingerprint=data.fingerprint if data else None,
                device=machine if experiment.measured(run.config) else None,
            )
            steps.append(Step(run, seed, key))
    # Seed by seed: whatever stops it early leaves whole tables with a smaller n.
    return sorted(steps, key=lambda step: step.run.place_of(step.seed))


def _is_left(known: Record | None, setting: Setting) -> bool:
    return known is None or (setting.retry_failed and known.status == "failed")


def execute(  # noqa: C901 (its parts share the bar, the tally and what is known)
    paper: Paper,
    runs: Sequence[Run],
    setting: Setting,
    store: RecordStore | None = None,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    workers: Workers | None = None,
) -> Tally:
    """Carry out the runs that have no record yet; each writes its record as it ends.

    Running out of memory and failing are results and are recorded; the others go on. Shows a
    progress bar on a terminal, and a line per computed run elsewhere; why a run failed is said
    in both, also of a failure that stands. Runs that need a library that is not installed are left
    out, without a record; it is said once what to install. What another process computes at the
    same time is left to it (see `run_lock`), and waited for at the end; where that one dies, it is
    computed here.
    Runs that measure nothing are given to `workers`, where there are any; all others follow when
    those have ended, one at a time in this process; under `long` each measurement has a process of
    its own, since it is processes that repeat it, but where an experiment `shares`.

    Raises:
        UsageError: The device is not there, or the machine lacks something that a run needs.
        RecordError: Records cannot be written.
    """
    import torch

    from repro.measure import accelerator

    store = store or local_store(setting.profile)
    setting = replace(setting, device=check_device(setting.device))
    if setting.device == "cpu" and setting.profile in ("smoke", "quick", "long"):
        # Such small models gain nothing from a second thread, and lose much to waiting for it
        # where another process wants the core.
        torch.set_num_threads(1)
    steps, known = survey(paper, runs, setting, store)
    interactive = sys.stderr.isatty()
    tally = Tally()

    def tell(line: str) -> None:
        line = printable(line)  # an error says whatever it likes
        bar.write(line) if interactive else report(line)

    def named(step: Step) -> str:
        return f"{paper.key} {step.run} seed {step.seed}"

    def note(step: Step, record: Record) -> None:
        if record.status == "failed":
            tally.failed_before += 1
            why = _first_line(record.error)
            tell(f"{named(step)}: failed before, again with --retry-failed: {why}")

    def account(step: Step, record: Record, took_s: float | None) -> None:
        """Count a record that was made after the survey: here, unless `took_s` is None."""
        known[step.key] = record
        counted.add(step.key)
        bar.advance()
        ahead.subtract([_name(step.run)])
        if took_s is None:
            tally.elsewhere += 1
            note(step, record)
            return
        tally.done += 1
        tally.out_of_memory += record.status == "out_of_memory"
        tally.failed += record.status == "failed"
        forecast.learn(_name(step.run), took_s)
        rest = forecast.left(+ahead, alone)
        rest_told = f"; left: {forecasting.in_words(rest)}" if ahead.total() else ""
        bar.say(rest_told.removeprefix("; "))
        why = f": {record.error}" if record.status == "failed" else ""
        if why or not interactive:
            tell(f"{named(step)}: {record.status} ({took_s:.1f} s){rest_told}{why}")

    def goes_on(step: Step) -> bool:
        if setting.until is None:
            return True
        needed = forecast.expected(_name(step.run)) or 0.0
        return time.monotonic() + needed <= setting.until

    def leave_out(step: Step, lacks: LibraryMissing) -> None:
        counted.add(step.key)
        bar.advance()
        ahead.subtract([_name(step.run)])
        tally.left_out += 1
        if str(lacks) not in tally.missing:
            tally.missing.append(str(lacks))
            tell(f"{named(step)}: left out, like all that need it: {lacks}")

    def compute(
        step: Step, before: Record | None
    ) -> tuple[Record, float | None] | LibraryMissing | None:
        experiment, work = paper.experiments[step.run.experiment], (step, before)
        if setting.profile == LONG and experiment.apart(step.run.config):
            try:
                apart = partial(_settle_apart, paper, setting, store, torch.get_num_threads())
                ((_, made),) = own.map(apart, [work])
                return made
            except WorkerDied as died:
                tell(f"{named(step)}: {died}; it is computed by this process")
        return settle(paper, setting, store, work)

    missing = [step for step in steps if _is_left(known.get(step.key), setting)]
    ahead = Counter(_name(step.run) for step in missing)
    alone = {
        _name(step.run)
        for step in missing
        if paper.experiments[step.run.experiment].measured(step.run.config)
    }
    took = _took_before(paper, store) if missing else {}
    forecast = forecasting.Forecast(took, workers.count if workers else 1, setting.expected_s)
    counted: set[str] = set()
    with (
        accelerator.on(setting.device),
        Bar(paper.key, len(steps), shown=interactive) as bar,
        Workers(1, each_new=True) as own,
    ):
        shared = [
            (step, known.get(step.key))
            for step in steps
            if not paper.experiments[step.run.experiment].measured(step.run.config)
            and _is_left(known.get(step.key), setting)
        ]
        if workers and len(shared) > 1:
            bar.say(f"{workers.count} processes")
            shared.sort(key=lambda work: -took.get(_name(work[0].run), 0.0))  # the longest first
            shared.sort(key=lambda work: work[0].run.place_of(work[0].seed))
            try:
                for (step, _), made in workers.map(
                    partial(settle, paper, setting, store), shared, lambda work: goes_on(work[0])
                ):
                    if isinstance(made, LibraryMissing):
                        leave_out(step, made)
                    elif made is not None:
                        account(step, *made)
            except WorkerDied as died:
                tell(f"{paper.key}: {died}; what is left is computed by this process")
        left, waiting = steps, False
        while left:
            taken = []
            for step in left:
                if step.key in counted:
                    continue
                bar.say(str(step.run))
                before = known.get(step.key)
                if before and not _is_left(before, setting):
                    tally.stood += 1
                    counted.add(step.key)
                    note(step, before)
                    bar.advance()
                    continue
                if not goes_on(step):
                    tally.left += 1
                    continue
                made = compute(step, before)
                if isinstance(made, LibraryMissing):
                    leave_out(step, made)
                elif made is not None:
                    account(step, *made)
                else:
                    taken.append(step)
            left = taken
            if left and not waiting:
                tell(f"{paper.key}: waiting for {len(left)} runs that another process computes")
                waiting = True
            if left:
                time.sleep(POLL_S)
    return tally


def _name(run: Run) -> str:
    return identity(run.experiment, run.config, 0)


def _took_before(paper: Paper, local: RecordStore) -> dict[str, float]:
    """Return the seconds that runs took, whatever the version: here, else by the references."""
    took = {}
    for store in (*reference_stores().values(), local):
        for record in store.read(paper.key)[0]:
            spans = [datetime.fromisoformat(at) for at in (record.started, record.finished)]
            name = identity(record.experiment, record.config, 0)
            took[name] = (spans[1] - spans[0]).total_seconds()
    return took


def settle(
    paper: Paper, setting: Setting, store: RecordStore, work: tuple[Step, Record | None]
) -> tuple[Record, float | None] | LibraryMissing | None:
    """Compute a run and write its record, unless another process does or did so.

    Args:
        paper: The run's paper.
        setting: Where and how.
        store: Where records lie.
        work: The run, and the record that it had when all were looked through.

    Returns:
        The record and the seconds that it took, None where another process has made it since;
        the error where a library is not installed; nothing where another process is at it.
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
            record = _carry_out(paper, step, setting)
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
) -> tuple[Record, float | None] | LibraryMissing | None:
    """Do what `settle` does in a process of its own."""
    import torch

    from repro.measure import accelerator

    torch.set_num_threads(threads)
    with accelerator.on(setting.device):
        return settle(paper, setting, store, work)


def _first_line(text: str | None) -> str:
    return next(iter((text or "").splitlines()), "")


def record_of(paper: Paper, run: Run, seed: int, setting: Setting) -> Record:
    """Carry out one run that no plan has, and return its record, which is not written."""
    run = replace(run, seeds=(seed,))
    (step,) = _steps(paper, [run], setting)
    return _carry_out(paper, step, setting)


def load_data(runs: Sequence[Run], root: str | None) -> None:
    """Load the datasets of a plan, so that a missing or damaged one is said before it starts."""
    for run in runs:
        load(run.config, root)


def _carry_out(paper: Paper, step: Step, setting: Setting) -> Record:
    from repro.experiments.replay import recording
    from repro.measure import accelerator, describe_device, is_out_of_memory
    from repro.measure.accelerator import HostMemoryError

    run, seed = step.run, step.seed
    experiment = paper.experiments[run.experiment]
    data = load(run.config, setting.root)
    started = now()
    status, error, outcome = "ok", None, Outcome({})
    with (
        noting_interrupts() as interrupted,
        # A hook would cost the time that other experiments measure.
        recording() if experiment.trains else nullcontext() as first,
        algorithms_timed(run.config),
    ):
        try:
            outcome = experiment.function(run.config, seed, data, setting.device)
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
        config=run.config,
        seed=seed,
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
    """Note every Ctrl-C inside: what it ends may turn it into an error of its own."""
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
    """Raise what says nothing of a method: an interruption, a full disk, a missing cluster."""
    if interrupted:
        raise KeyboardInterrupt from problem
    if isinstance(problem, UsageError):
        raise problem
    if isinstance(problem, OSError) and problem.errno in _OF_THE_MACHINE:
        where = f" ({problem.filename})" if problem.filename else ""
        raise UsageError(
            f"a run was given up, for {os.strerror(problem.errno)}{where}: what was computed "
            "stands; mend that, then run again to go on"
        ) from problem


def _machine(device: str, versions: Mapping[str, str]) -> str:
    return f"{device}, torch {versions.get('torch')}"


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
