"""Plan, see what is missing, compute, record: the runs of papers that have no record yet."""

import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from repro.experiments import arguments
from repro.experiments.design import (
    LONG,
    RAY_ADDRESS,
    SEEDS,
    Artefact,
    LibraryMissing,
    Paper,
    Run,
    UsageError,
)
from repro.experiments.one_run import carry_out, load
from repro.experiments.processes import WorkerDied, Workers, default_count, locked, undisturbed
from repro.records import (
    MAKE_ROOM,
    CorruptRecordWarning,
    Record,
    RecordStore,
    check_writable,
    commit_state,
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
    changed: arguments.Choices = ()  # keys and values of --set
    until: float | None = None  # by `time.monotonic`: nothing begins later
    expected_s: float = 0.0  # of a run: above 0 nothing is begun that would end after `until`

    def command(self, target: str, dataset: str | None) -> str:
        """Return a command line that computes a record again."""
        parts = ["python", "-m", "repro", "run", target]
        parts += ["--profile", self.profile, "--device", self.device]
        if dataset is not None:
            parts += ["--dataset", dataset]
        if self.seeds is not None:
            parts += ["--seeds", "".join(f"{seed}," for seed in self.seeds)]
        for key, value in self.changed:
            parts += ["--set", f"{key}={value}"]
        return shlex.join(parts)

    def seeds_of(self, run: Run) -> tuple[int, ...]:
        """Return the seeds of a run: its own, those asked for, or the profile's."""
        if run.seeds is not None and (self.seeds is None or not run.by_processes):
            return run.seeds
        return self.seeds if self.seeds is not None else SEEDS[self.profile]

    def wants(self, step: "Step") -> bool:
        """Whether a run is to be computed."""
        return step.before is None or (self.retry_failed and step.before.status == "failed")

    def has_time(self, longest_s: float = 0.0) -> bool:
        """Whether another run may begin, given how long the longest took so far."""
        ahead_s = max(self.expected_s, longest_s) if self.expected_s else 0.0
        return self.until is None or time.monotonic() + ahead_s < self.until


@dataclass(frozen=True)
class Step:
    """A run with one of its seeds."""

    run: Run
    seed: int
    key: str  # of its record
    measured: bool = False  # whether it is a measurement
    before: Record | None = None  # the record that it has already

    def __str__(self) -> str:
        return f"{self.run} seed {self.seed}"


@dataclass
class Tally:
    """How the runs of a plan ended."""

    done: int = 0  # computed here and now
    stood: int = 0  # had a record before, or another process made it meanwhile
    out_of_memory: int = 0  # of those computed here
    failed: int = 0  # of those computed here
    failed_before: int = 0  # of the others, those that failed then
    left: int = 0  # not begun, as it was time to end
    left_out: list[str] = field(default_factory=list)  # of each: the library that is not installed

    def __str__(self) -> str:
        text = (
            f"{self.done} computed ({self.out_of_memory} out of memory, {self.failed} failed), "
            f"{self.stood} had a record"
        )
        if self.left:
            text += f", {self.left} left: the same command goes on"
        if self.left_out:
            text += f", {len(self.left_out)} left out ({'; '.join(dict.fromkeys(self.left_out))})"
        if self.failed_before:
            text += f"; {self.failed_before} failed before, --retry-failed computes them again"
        return text


def compute(
    named: Sequence[tuple[Paper, Sequence[Artefact]]],
    setting: Setting,
    kept: arguments.Choices = (),
    wanted: Sequence[str] = (),
    address: str | None = None,
    workers: int | None = None,
    tell: Callable[[str], None] = print,
) -> int:
    """Compute the records that are not there yet; everything is checked before anything runs.

    `kept` is of ``--only``; `wanted` are datasets, instead of the best at hand; `address` is of a
    Ray cluster; `workers` are processes for runs that measure nothing; `tell` gets a line on each
    paper. Returns how many runs failed, now or before, or were left out.
    """
    from repro.datasets import DatasetError

    if setting.device != "cpu" and (workers or 1) > 1:
        raise UsageError(
            f"--workers is {workers}, and runs on {setting.device} share its memory: leave it "
            "out, or give --device cpu"
        )
    plans = []
    for paper, artefacts in named:
        chosen = arguments.choose_datasets(paper, setting.profile, wanted, setting.root)
        runs = arguments.plan(paper, artefacts, setting.profile, chosen, setting.changed, kept)
        plans.append((paper, runs, ", ".join(filter(None, chosen.values())) or "none"))
    if address is not None:
        every = [(paper.experiments[r.experiment], r) for paper, runs, _ in plans for r in runs]
        if not any(experiment.on_ray(run.config) for experiment, run in every):
            raise UsageError(
                f"--address is {address!r}, and no run of the plan uses Ray; add --set engine=ray"
            )
        os.environ[RAY_ADDRESS] = address
    try:
        for paper, runs, _ in plans:
            survey(paper, runs, setting, local_store(setting.profile))
    except DatasetError as lacking:
        if setting.profile != "paper":
            raise
        advice = "--data-stand-in goes on with what is at hand in its place"
        raise UsageError(f"{str(lacking).rstrip('.')}; {advice}") from lacking
    failed = 0
    with Workers(workers or default_count(setting.profile, setting.device)) as side_by_side:
        for paper, runs, used in plans:
            tally = execute(paper, runs, setting, workers=side_by_side)
            tell(f"{paper.key}, profile {setting.profile}: {tally}; data: {used}")
            failed += tally.failed + tally.failed_before + len(tally.left_out)
    return failed


def survey(paper: Paper, runs: Sequence[Run], setting: Setting, store: RecordStore) -> list[Step]:
    """Return all steps of a plan, seed by seed, with the records that there are.

    Where something is left to compute, a `RecordError` says that its records cannot be written, or
    that something else lies in the place of one.
    """
    records, problems = store.read(paper.key)
    steps = _steps(paper, runs, setting, {record.key: record for record in records})
    missing = [step for step in steps if setting.wants(step)]
    for step in missing:
        store.find(paper.key, step.run.experiment, step.key)
    if missing:
        check_writable(store.folder / paper.key, f"records of {paper.key}", MAKE_ROOM)
        commit_state()
    for problem in problems:  # of files that are in nobody's way
        warnings.warn(str(problem), CorruptRecordWarning, stacklevel=2)
    return steps


def _steps(
    paper: Paper, runs: Sequence[Run], setting: Setting, known: Mapping[str, Record]
) -> list[Step]:
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
            steps.setdefault(key, (place, Step(run, seed, key, measured, known.get(key))))
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

    Running out of memory and failing are results and are recorded; the others go on. Runs that need
    a library that is not installed are left out, without a record. A run that another process
    computes is waited for at the end (see `locked`), and computed here if that process dies.
    Runs that measure nothing are given to `workers`, where there are any; all others follow when
    those have ended, one at a time in this process. Under `long` each measurement has a process of
    its own, as processes repeat it, unless its experiment `shares`.
    """
    import torch

    store = store or local_store(setting.profile)
    setting = replace(setting, device=arguments.check_device(setting.device))
    if setting.device == "cpu" and setting.profile in ("smoke", "quick", LONG):
        # Such small models gain nothing from a second thread, and lose much to waiting for it
        # where another process wants the core.
        torch.set_num_threads(1)
    steps = survey(paper, runs, setting, store)
    interactive = sys.stderr.isatty()
    with Bar(paper.key, len(steps), shown=interactive) as bar, Workers(1, each_new=True) as own:
        left = {step.key: step for step in steps}
        say = bar.write if interactive else report
        make = partial(settle, paper, setting, store)
        given = paper, setting, store.folder.parent, make
        execution = _Execution(*given, bar, say, interactive, left)
        for step in steps:
            if step.before and not setting.wants(step):
                execution.account(step, (step.before, None))
        if workers:
            execution.share(workers)
        execution.finish(own)
    return execution.tally


@dataclass
class _Execution:
    """The state of one call of `execute`."""

    paper: Paper
    setting: Setting
    folder: Path  # in which one run at a time measures, see `undisturbed`
    make: Callable[..., Made]  # computes a run and writes its record, see `settle`
    bar: Bar
    report: Callable[[str], None]
    interactive: bool
    left: dict[str, Step]  # that are not dealt with, by key
    tally: Tally = field(default_factory=Tally)
    longest_s: float = 0.0  # of the runs computed so far
    waited: bool = False

    def _tell(self, said: str, step: Step | None = None) -> None:
        of = f" {step}" if step else ""
        self.report(printable(f"{self.paper.key}{of}: {said}"))  # an error may have any text

    def account(self, step: Step, made: Made) -> None:
        """Count a run that has ended; nothing where another process is still at it."""
        if made is None:
            return
        del self.left[step.key]
        self.bar.step()
        if isinstance(made, LibraryMissing):
            if str(made) not in self.tally.left_out:
                self._tell(f"left out, like all that need it: {made}", step)
            self.tally.left_out.append(str(made))
            return
        record, took_s = made
        failed = record.status == "failed"
        if took_s is None:
            self.tally.stood += 1
            self.tally.failed_before += failed
            if failed:
                why = (record.error or "").partition("\n")[0]
                self._tell(f"failed before, again with --retry-failed: {why}", step)
            return
        self.tally.done += 1
        self.longest_s = max(self.longest_s, took_s)
        self.tally.out_of_memory += record.status == "out_of_memory"
        self.tally.failed += failed
        if failed or not self.interactive:
            why = f": {record.error}" if failed else ""
            self._tell(f"{record.status} ({took_s:.1f} s){why}", step)

    def share(self, workers: Workers) -> None:
        """Give the missing runs that measure nothing to processes."""
        steps = [step for step in self.left.values() if not step.measured]
        if len(steps) < 2:
            return
        while self.setting.has_time(self.longest_s):
            with undisturbed(self.folder, measured=False) as free:
                if free:
                    return self._give(workers, steps)
            self._wait()

    def _give(self, workers: Workers, steps: Sequence[Step]) -> None:
        try:
            for step, made in workers.map(
                self.make, steps, lambda _: self.setting.has_time(self.longest_s)
            ):
                self.account(step, made)
        except WorkerDied as died:
            self._tell(f"{died}; what is left is computed by this process")

    def finish(self, own: Workers) -> None:
        """Compute all runs that are left, and wait for those of other processes."""
        while self.left:
            for step in list(self.left.values()):
                self.bar.say(str(step.run))
                if self.setting.has_time(self.longest_s):
                    with undisturbed(self.folder, step.measured) as free:
                        made = self._made(step, own) if free else self.make(step, compute=False)
                    self.account(step, made)
                else:
                    self.tally.left += 1
                    del self.left[step.key]
            if self.left:
                self._wait()

    def _wait(self) -> None:
        if not self.waited:
            left = f"{len(self.left)} runs are left"
            self._tell(f"waiting for other processes that compute or measure; {left}")
            self.waited = True
        time.sleep(POLL_S)

    def _made(self, step: Step, own: Workers) -> Made:
        """Compute a run, under `long` a measurement in a process of its own."""
        shares = self.paper.experiments[step.run.experiment].shares
        if self.setting.profile == LONG and step.measured and not shares:
            try:
                ((_, made),) = own.map(self.make, [step])
                return made
            except WorkerDied as died:
                self._tell(f"{died}; it is computed by this process", step)
        return self.make(step)


def settle(
    paper: Paper, setting: Setting, store: RecordStore, step: Step, compute: bool = True
) -> Made:
    """Compute a run and write its record.

    Returns the record and the seconds that it took, None where another process has made it since;
    the error where a library is not installed; nothing while another process computes it, or where
    it may not `compute`.
    """
    from repro.measure import accelerator

    path = store.path(paper.key, step.run.experiment, step.key)
    with accelerator.on(setting.device), locked(path) as mine:
        if not mine:
            return None
        existing = store.find(paper.key, step.run.experiment, step.key)
        if existing is not None and existing != step.before:
            return existing, None
        if not compute:
            return None
        start = time.perf_counter()
        try:
            record = carry_out(paper, step, setting)
        except LibraryMissing as lacks:
            return lacks
        store.write(record)
        return record, time.perf_counter() - start


def seconds_of(record: Record) -> float:
    """Return how long a record took; records tell whole seconds."""
    begun, ended = map(datetime.fromisoformat, (record.started, record.finished))
    return max(0.0, (ended - begun).total_seconds())
