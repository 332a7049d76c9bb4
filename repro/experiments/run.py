"""Carry out the runs of a plan that have no record, each into its record."""

import shlex
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from repro.experiments.arguments import check_device
from repro.experiments.design import LONG, SEEDS, LibraryMissing, Paper, Run
from repro.experiments.one_run import carry_out, load
from repro.experiments.progress import Forecast, Tally, in_words, took_before
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
    record_key,
)
from repro.report import printable
from repro.terminal import Bar

# Commands that compute nothing answer at once: torch and the datasets are imported where they work.

POLL_S = 0.2  # between two looks at a run that another process computes


@dataclass(frozen=True)
class Setting:
    """Where and how a plan is carried out."""

    profile: str
    device: str  # such as cpu
    root: str | None = None  # folder searched first for datasets
    seeds: tuple[int, ...] | None = None  # instead of the profile's
    retry_failed: bool = False  # whether runs that failed are run again
    choices: str = ""  # the command line's choices of runs, for the records' own command
    until: float | None = None  # by `time.monotonic`: nothing begins that would end later

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
    """A run with one of its seeds, the key of its record, and whether it is a measurement."""

    run: Run
    seed: int
    key: str
    measured: bool = False

    @property
    def name(self) -> str:
        """The same for all seeds of a run."""
        return identity(self.run.experiment, self.run.config, 0)

    def __str__(self) -> str:
        return f"{self.run} seed {self.seed}"


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
    steps: dict[str, tuple[int, Step]] = {}
    for run in runs:
        experiment = paper.experiments[run.experiment]
        data, measured = load(run.config, setting.root), experiment.measured(run.config)
        for place, seed in enumerate(setting.seeds_of(run)):
            key = record_key(
                paper.key,
                run.experiment,
                experiment.version,
                run.config,
                seed,
                fingerprint=data.fingerprint if data else None,
                device=machine if measured else None,
            )
            steps.setdefault(key, (place, Step(run, seed, key, measured)))
    # Seed 0 of all runs first: an interruption leaves complete tables.
    return [step for _, step in sorted(steps.values(), key=lambda item: item[0])]


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
    left = {step.key: step for step in steps}
    ahead = [step for step in steps if setting.wants(known.get(step.key))]
    forecast = Forecast(took_before(paper, store) if ahead else {})
    interactive = sys.stderr.isatty()
    with (
        accelerator.on(setting.device),
        Bar(paper.key, len(steps), shown=interactive) as bar,
        Workers(1, each_new=True) as own,
    ):
        say = bar.write if interactive else report
        execution = _Execution(
            paper, setting, store, known, bar, say, interactive, left, ahead, forecast
        )
        if workers:
            execution.share(workers)
        execution.finish(own, torch.get_num_threads())
    return execution.tally


@dataclass
class _Execution:
    """The state of one call of `execute`."""

    paper: Paper
    setting: Setting
    store: RecordStore
    known: Mapping[str, Record]  # by key, before
    bar: Bar
    report: Callable[[str], None]
    interactive: bool
    left: dict[str, Step]  # that are not dealt with, by key
    ahead: list[Step]  # of those, the ones to compute
    forecast: Forecast
    tally: Tally = field(default_factory=Tally)
    side_by_side: int = 1

    def _tell(self, said: str, step: Step | None = None) -> None:
        of = f" {step}" if step else ""
        self.report(printable(f"{self.paper.key}{of}: {said}"))  # an error may have any text

    def _end(self, step: Step) -> None:
        """Note that a run needs nothing more."""
        del self.left[step.key]
        self.bar.advance()

    def _note_failure(self, step: Step, record: Record) -> None:
        if record.status == "failed":
            self.tally.failed_before += 1
            why = next(iter((record.error or "").splitlines()), "")
            self._tell(f"failed before, again with --retry-failed: {why}", step)

    def _account(self, step: Step, made: Made) -> None:
        """Count a run that has ended; nothing where another process is still at it."""
        if made is None:
            return
        self._end(step)
        self.ahead.remove(step)
        if isinstance(made, LibraryMissing):
            self.tally.left_out += 1
            if str(made) not in self.tally.missing:
                self.tally.missing.append(str(made))
                self._tell(f"left out, like all that need it: {made}", step)
            return
        record, took_s = made
        if took_s is None:
            self.tally.elsewhere += 1
            self._note_failure(step, record)
            return
        self.tally.done += 1
        self.tally.out_of_memory += record.status == "out_of_memory"
        self.tally.failed += record.status == "failed"
        self.forecast.learn(step.name, took_s)
        left = f"left: {in_words(self._left_s())}" if self.ahead else ""
        self.bar.say(left)
        why = f": {record.error}" if record.status == "failed" else ""
        if why or not self.interactive:
            left = f"; {left}" if left else ""
            self._tell(f"{record.status} ({took_s:.1f} s){left}{why}", step)

    def _left_s(self) -> float | None:
        """Return the expected seconds of all runs that are left."""
        total = 0.0
        for step in self.ahead:
            seconds = self.forecast.expected(step.name)
            if seconds is None:
                return None
            total += seconds / (1 if step.measured else self.side_by_side)
        return total

    def _is_time_for(self, step: Step) -> bool:
        needed = self.forecast.expected(step.name) or 0.0
        return self.setting.until is None or time.monotonic() + needed <= self.setting.until

    def share(self, workers: Workers) -> None:
        """Give the missing runs that measure nothing to processes, the longest of a seed first."""
        shared = [step for step in self.ahead if not step.measured]
        if len(shared) < 2:
            return
        self.side_by_side = workers.count
        self.bar.say(f"{workers.count} processes")
        before = self.forecast.before
        places = {seed: n for n, seed in enumerate(dict.fromkeys(step.seed for step in shared))}
        shared.sort(key=lambda step: (places[step.seed], -before.get(step.name, 0.0)))
        work = partial(settle, self.paper, self.setting, self.store)
        pairs = [(step, self.known.get(step.key)) for step in shared]
        try:
            for (step, _), made in workers.map(work, pairs, lambda one: self._is_time_for(one[0])):
                self._account(step, made)
        except WorkerDied as died:
            self._tell(f"{died}; what is left is computed by this process")

    def finish(self, own: Workers, threads: int) -> None:
        """Compute all runs that are left, and wait for those of other processes."""
        waiting = False
        while self.left:
            for step in list(self.left.values()):
                self._finish_one(step, own, threads)
            if self.left and not waiting:
                self._tell(f"waiting for {len(self.left)} runs of other processes")
                waiting = True
            if self.left:
                time.sleep(POLL_S)

    def _finish_one(self, step: Step, own: Workers, threads: int) -> None:
        self.bar.say(str(step.run))
        before = self.known.get(step.key)
        if before and not self.setting.wants(before):
            self.tally.stood += 1
            self._note_failure(step, before)
            self._end(step)
        elif not self._is_time_for(step):
            self.tally.left += 1
            del self.left[step.key]
        else:
            self._account(step, self._made(step, before, own, threads))

    def _made(self, step: Step, before: Record | None, own: Workers, threads: int) -> Made:
        """Compute a run, under `long` a measurement in a process of its own."""
        shares = self.paper.experiments[step.run.experiment].shares
        if self.setting.profile == LONG and step.measured and not shares:
            work = partial(_settle_apart, self.paper, self.setting, self.store, threads)
            try:
                ((_, made),) = own.map(work, [(step, before)])
                return made
            except WorkerDied as died:
                self._tell(f"{died}; it is computed by this process", step)
        return settle(self.paper, self.setting, self.store, (step, before))


def settle(
    paper: Paper, setting: Setting, store: RecordStore, work: tuple[Step, Record | None]
) -> Made:
    """Compute a run and write its record, unless another process does or did so.

    `work` is the run, and the record that it had when all were looked through.

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
