"""Plan the runs of artefacts, carry out those without a record, gather results."""

import errno
import gc
import json
import math
import os
import re
import shlex
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro import paths
from repro.experiments import claims
from repro.experiments.design import (
    COMPUTING_PROFILES,
    PROFILES,
    SEEDS,
    Artefact,
    Experiment,
    Outcome,
    Paper,
    Run,
    UsageError,
)
from repro.records import (
    CorruptRecordWarning,
    Record,
    RecordStore,
    check_writable,
    commit_state,
    library_versions,
    local_store,
    now,
    record_key,
)
from repro.report import printable
from repro.source_code import present

if TYPE_CHECKING:
    from repro.datasets import EpochTimes, ImageData

    Data = ImageData | EpochTimes

# Commands that compute nothing answer at once: torch and the datasets are imported where they work.

POLL_S = 0.2  # between two looks at what another process computes
_OF_THE_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EMFILE, errno.ENFILE}


def default_profile() -> str:
    """Return ``gpu`` where CUDA is present and ``quick`` where it is not."""
    import torch

    return "gpu" if torch.cuda.is_available() else "quick"


def default_device() -> str:
    """Return ``cuda`` where it is present and ``cpu`` where it is not."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_profile(profile: str, computing: bool = True) -> str:
    """Return `profile` if it exists, and computes where that is asked."""
    allowed = COMPUTING_PROFILES if computing else PROFILES
    if profile not in allowed:
        hint = "; 'view' shows records and computes none" if profile == "view" else ""
        raise UsageError(f"unknown profile {profile!r}; choose {', '.join(allowed)}{hint}")
    return profile


def check_device(device: str) -> str:
    """Return the one name of a device that is there: ``cpu`` or ``cuda:0``, ``cuda:1``, ...

    Raises:
        UsageError: There is no such device.
    """
    import torch

    count = torch.cuda.device_count()
    if device in ("cpu", "cpu:0"):
        return "cpu"
    number = re.fullmatch(r"cuda(?::(0|[1-9][0-9]*))?", device) if isinstance(device, str) else None
    # A long number is none of a device, and int() refuses it.
    if number and len(number[1] or "0") < 5 and int(number[1] or 0) < count:
        return f"cuda:{number[1] or 0}"
    raise UsageError(
        f"device {_shortened(device)} is not available here; allowed are 'cpu'"
        + (f" and 'cuda:0' to 'cuda:{count - 1}'" if count else " (no CUDA device is present)")
    )


def user_path(text: str, option: str) -> Path:
    """Return the path that was given; ``~`` and ``~NAME`` stand for a home folder.

    Raises:
        UsageError: There is no such user, or the text is empty.
    """
    try:
        if text.strip():
            return Path(text).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{option} is {text!r}, and there is no such user; give a path") from error
    raise UsageError(f"{option} is empty; leave it out, or give the path of a file")


def check_target(path: Path, what: str) -> None:
    """Refuse a path that no file can be written to, before it takes work to find out.

    Raises:
        UsageError: A folder or something else that is no file lies there.
        RecordError: Its folder cannot be made or written.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise UsageError(f"{what} {str(path)!r}: {error.strerror}; give another path") from error
    if mode is not None and not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise UsageError(f"{what} {str(path)!r} is {kind}; give the path of a file")
    check_writable(path.parent, what, "free some space, make it writable, or give another path")


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def check_data(root: str | None) -> str | None:
    """Return `root` if it is a folder or None, and `$REPRO_DATA`, where it is set, is one."""
    if problem := paths.data_problem(root):
        raise UsageError(problem)
    return root


def choose_datasets(
    paper: Paper, profile: str, wanted: Sequence[str] = (), root: str | None = None
) -> dict[str, str]:
    """Choose a dataset for each task of a paper: one asked for by name, else the best at hand.

    A paper that measures kernels on random numbers has no tasks, and takes none.

    Raises:
        UsageError: A name is unknown, or serves no task of the paper.
    """
    from repro import datasets

    check_data(root)
    tasks = paper.datasets[profile]
    served = sorted({name for names in tasks.values() for name in names} | {"synthetic"})
    for name in wanted:
        if name not in datasets.NAMES:
            raise UsageError(f"unknown dataset {name!r}; choose among {', '.join(datasets.NAMES)}")
        if tasks and name not in served:
            raise UsageError(
                f"dataset {name!r} serves no experiment of {paper.key} under the profile "
                f"{profile!r}; choose among {', '.join(served)}"
            )
    present = set(datasets.available(root))
    if datasets.find_times(root) is not None:
        present.add(datasets.TIMES)
    chosen = {}
    for task, names in tasks.items():
        asked = [name for name in wanted if name in names or name == "synthetic"]
        # A task that nothing can stand in for is left out, and its artefacts say "not run".
        chosen[task] = (asked or [name for name in names if name in present] or [""])[0]
        several = [name for name in asked if name != "synthetic"]
        if len(several) > 1:
            raise UsageError(
                f"datasets {' and '.join(map(repr, several))} serve the same task of {paper.key}, "
                f"{task}; give one of them"
            )
    return chosen


def plan(
    paper: Paper, artefacts: Iterable[Artefact], profile: str, chosen: Mapping[str, str]
) -> list[Run]:
    """Return the runs that the artefacts need, each once."""
    return list(
        dict.fromkeys(run for artefact in artefacts for run in artefact.runs(profile, chosen))
    )


Choices = Sequence[tuple[str, str]]


def parse_choice(text: str) -> tuple[str, str]:
    """Read ``KEY=VALUE``.

    Raises:
        UsageError: There is no equals sign.
    """
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise UsageError(f"{text!r} is not of the form KEY=VALUE, such as mini_batch=64")
    return key, value


def only(runs: Sequence[Run], choices: Choices) -> list[Run]:
    """Return the runs whose configuration has one of the values of every key that is named.

    Args:
        runs: A plan.
        choices: Keys and values, as text; several of one key admit any of them.

    Raises:
        UsageError: No run has that key, or that value of it.
    """
    kept = list(runs)
    for key in dict.fromkeys(key for key, _ in choices):
        wanted = [value for name, value in choices if name == key]
        present_ = {_text(run.config[key]) for run in runs if key in run.config}
        for value in wanted:
            if value not in present_:
                known = ", ".join(sorted(present_, key=_naturally))
                advice = f"choose among {known}" if known else _keys_advice(runs)
                raise UsageError(f"no run of the plan has {key}={value}; {advice}")
        kept = [run for run in kept if key in run.config and _text(run.config[key]) in wanted]
    return kept


def with_changes(paper: Paper, runs: Sequence[Run], choices: Choices) -> list[Run]:
    """Return the runs with other values of what their configuration has; the rest as they are.

    Args:
        paper: Says which values some keys may have.
        runs: A plan.
        choices: Keys and values, as text; a value is read as JSON where it is such.

    Raises:
        UsageError: No run has that key, the value is of another type, or not allowed.
    """
    for key, text in choices:
        present_ = [run.config[key] for run in runs if _is_plain(run.config.get(key, ...))]
        if not present_:
            raise UsageError(f"no run of the plan has a {key!r} to set; {_keys_advice(runs)}")
        if sum(key == other for other, _ in choices) > 1:
            raise UsageError(f"{key} is set twice; give it one value")
        allowed = paper.options.get(key)
        if allowed is not None and text not in allowed:
            raise UsageError(f"unknown {key} {text!r}; choose among {', '.join(allowed)}")
        value = text if any(isinstance(one, str) for one in present_) else _parsed(text)
        kinds = {type(one) for one in present_ if one is not None}
        if kinds and type(value) not in kinds and not (float in kinds and type(value) is int):
            example = next(one for one in present_ if one is not None)
            raise UsageError(f"{key}={text} is of another type than {key}={_text(example)}")
        if isinstance(value, str) and allowed is None:
            texts = sorted({one for one in present_ if isinstance(one, str)} | _texts(paper, key))
            if value not in texts:
                raise UsageError(f"unknown {key} {text!r}; choose among {', '.join(texts)}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(key, value, present_)
        runs = list(
            dict.fromkeys(
                replace(run, config=run.config | {key: value})
                if _is_plain(run.config.get(key, ...))
                else run
                for run in runs
            )
        )
    return list(runs)


def _keys_advice(runs: Sequence[Run]) -> str:
    keys = sorted({key for run in runs for key, value in run.config.items() if _is_plain(value)})
    return f"their keys are {', '.join(keys)}" if keys else "its runs have no such keys"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _texts(paper: Paper, key: str) -> set[str]:
    """Return the texts that a key has in any run of a paper."""
    found = set()
    for profile in COMPUTING_PROFILES:
        chosen = {task: names[-1] for task, names in paper.datasets[profile].items()}
        for run in plan(paper, paper.artefacts.values(), profile, chosen):
            if isinstance(run.config.get(key), str):
                found.add(run.config[key])
    return found


def _check_number(key: str, value: float, present_: Sequence[Any]) -> None:
    """Refuse a number that none of a plan's is like: not finite, below 0, no count."""
    numbers = [n for n in present_ if isinstance(n, int | float) and not isinstance(n, bool)]
    such = f"; give one such as {_text(min(numbers))}" if numbers else ""
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{key}={value} is no finite number{such}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UsageError(f"{key}={_shortened(value)} is beyond 64 bits{such}")
    if numbers and value < 0 <= min(numbers):
        raise UsageError(f"{key}={value} is below 0{such}")
    # Counts and sizes start at one, where the plan's do; a rate or a margin may be 0.
    if numbers and value == 0 and all(isinstance(n, int) and n > 0 for n in numbers):
        raise UsageError(f"{key}={value} leaves nothing to run{such}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _naturally(text: str) -> tuple[bool, float, str]:
    value = _parsed(text)
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0, text


def parse_seeds(text: str | None) -> tuple[int, ...] | None:
    """Read a number of seeds (``3`` is 0, 1, 2) or a list (``0,5,7`` or ``5,``); None stays None.

    Raises:
        UsageError: The text is neither.
    """
    if text is None or not str(text).strip():
        return None
    text = str(text)  # a notebook may have a number for it
    try:
        if not text.isascii():  # int() reads digits of every script
            raise ValueError
        numbers = tuple(int(part) for part in text.removesuffix(",").split(","))
    except ValueError:
        numbers = ()
    if "," not in text:
        count = numbers[0] if numbers and numbers[0] <= 1000 else 0
        numbers = tuple(range(count))
    # numpy's generators take seeds of 32 bits.
    outside = not numbers or min(numbers) < 0 or max(numbers) >= 2**32
    if outside or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"seeds are {_shortened(text)}; give how many (3), or a list of distinct ones from 0 "
            "to 4294967295 (0,5,7)"
        )
    return numbers


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
    """

    done: int = 0
    stood: int = 0
    elsewhere: int = 0
    out_of_memory: int = 0
    failed: int = 0
    failed_before: int = 0

    def __str__(self) -> str:
        text = (
            f"{self.done} computed ({self.out_of_memory} out of memory, {self.failed} failed), "
            f"{self.stood} stood already"
        )
        if self.elsewhere:
            text += f", {self.elsewhere} computed by another process"
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
    """

    profile: str
    device: str
    root: str | None = None
    seeds: tuple[int, ...] | None = None
    retry_failed: bool = False
    choices: str = ""

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
        if run.seeds is not None:
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
    """Return all that a plan comes to, seed by seed, and the records that stand, by key.

    Where something is left to compute, it is made sure that its records can be written.

    Raises:
        RecordError: Records cannot be written, or something else lies in the place of one.
        UsageError: The device is not there.
    """
    steps = _steps(paper, runs, setting)
    records, problems = store.read(paper.key)
    known = {key: record for record in records for key in standing_keys(paper, record)}
    missing = [step for step in steps if _is_left(known.get(step.key), setting)]
    for step in missing:
        store.find(paper.key, step.run.experiment, step.key)
    if missing:
        store.check_writable(paper.key)
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
        code = code_of(experiment, run.config)
        for seed in setting.seeds_of(run):
            key = record_key(
                paper.key,
                run.experiment,
                run.config,
                seed,
                fingerprint=data.fingerprint if data else None,
                code=code,
                device=machine if experiment.measures else None,
            )
            steps.append(Step(run, seed, key))
    # Seed by seed: whatever stops it early leaves whole tables with a smaller n.
    return sorted(steps, key=lambda step: step.seed)


def _is_left(standing: Record | None, setting: Setting) -> bool:
    return standing is None or (setting.retry_failed and standing.status == "failed")


def execute(
    paper: Paper,
    runs: Sequence[Run],
    setting: Setting,
    store: RecordStore | None = None,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> Tally:
    """Carry out the runs that have no record yet; each writes its record as it ends.

    Running out of memory and failing are results and are recorded; the others go on. Shows a
    progress bar on a terminal, and a line per computed run elsewhere; why a run failed is said
    in both, also of a failure that stands. What another process computes at the same time is left
    to it (see `claims`), and waited for at the end; where that one dies, it is computed here.

    Raises:
        UsageError: The device is not there, or the machine lacks something that a run needs.
        RecordError: Records cannot be written.
    """
    import torch
    from tqdm import tqdm

    store = store or local_store(setting.profile)
    setting = replace(setting, device=check_device(setting.device))
    store.sweep()
    claims.sweep(store.folder)
    if setting.device == "cpu" and setting.profile in ("smoke", "quick"):
        # Such small models gain nothing from a second thread, and lose much to waiting for it
        # where another process wants the core.
        torch.set_num_threads(1)
    steps, known = survey(paper, runs, setting, store)
    interactive = sys.stderr.isatty()
    tally = Tally()

    def tell(line: str) -> None:
        line = printable(line)  # an error says whatever it likes
        tqdm.write(line, file=sys.stderr) if interactive else report(line)

    def named(step: Step) -> str:
        return f"{paper.key} {step.run} seed {step.seed}"

    def note(step: Step, record: Record) -> None:
        if record.status == "failed":
            tally.failed_before += 1
            why = _first_line(record.error)
            tell(f"{named(step)}: failed before, again with --retry-failed: {why}")

    def settle(step: Step) -> None:
        """Compute a run that is claimed, unless another process did so since the survey."""
        before = known.get(step.key)
        found = store.find(paper.key, step.run.experiment, step.key)
        if found is not None and found != before:
            tally.elsewhere += 1
            note(step, found)
            return
        start = time.perf_counter()
        record = _carry_out(paper, step, setting)
        store.write(record)
        known[step.key] = record
        done.add(step.key)
        tally.done += 1
        tally.out_of_memory += record.status == "out_of_memory"
        tally.failed += record.status == "failed"
        why = f": {record.error}" if record.status == "failed" else ""
        if why or not interactive:
            tell(f"{named(step)}: {record.status} ({time.perf_counter() - start:.1f} s){why}")

    done: set[str] = set()
    current = torch.cuda.device(setting.device) if setting.device != "cpu" else nullcontext()
    with (
        current,
        tqdm(total=len(steps), unit="run", disable=not interactive, desc=paper.key) as bar,
    ):
        left, waiting = steps, False
        while left:
            taken = []
            for step in left:
                bar.set_postfix_str(str(step.run))
                standing = known.get(step.key)
                if standing and (step.key in done or not _is_left(standing, setting)):
                    tally.stood += 1
                    note(step, standing)
                    bar.update()
                    continue
                path = store.path(paper.key, step.run.experiment, step.key)
                with claims.claimed(path) as mine:
                    if mine:
                        settle(step)
                        bar.update()
                    else:
                        taken.append((step, claims.holder(path)))
            left = [step for step, _ in taken]
            if left and not waiting:
                who = ", ".join(sorted({holder for _, holder in taken}))
                tell(f"{paper.key}: waiting for {len(left)} runs that are computed by {who}")
                waiting = True
            if left:
                time.sleep(POLL_S)
    return tally


def _first_line(text: str | None) -> str:
    return next(iter((text or "").splitlines()), "")


def load_data(runs: Sequence[Run], root: str | None) -> None:
    """Load the datasets of a plan, so that a missing or damaged one is said before it starts."""
    for run in runs:
        load(run.config, root)


def _carry_out(paper: Paper, step: Step, setting: Setting) -> Record:
    import torch

    from repro.experiments.replay import recording
    from repro.measure import describe_device, is_out_of_memory

    run, seed = step.run, step.seed
    experiment = paper.experiments[run.experiment]
    data = load(run.config, setting.root)
    started = now()
    status, error, outcome = "ok", None, Outcome({})
    with (
        noting_interrupts() as interrupted,
        # A hook would cost the time that other experiments measure.
        recording() if experiment.trains else nullcontext() as first,
    ):
        try:
            outcome = experiment.function(run.config, seed, data, setting.device)
        except Exception as problem:
            raise_if_no_result(problem, interrupted)
            status = "out_of_memory" if is_out_of_memory(problem) else "failed"
            error = f"{type(problem).__name__}: {problem}"
            if status == "failed":
                error += "\n" + "".join(traceback.format_tb(problem.__traceback__)[-2:])
    if status != "ok":
        gc.collect()  # a model in a cycle with its error would take memory from the next run
    if setting.device.startswith("cuda"):
        torch.cuda.empty_cache()
    commit, dirty = commit_state()
    return Record(
        key=step.key,
        paper=paper.key,
        experiment=experiment.name,
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
        code=code_of(experiment, run.config),
        device=describe_device(setting.device),
        versions=library_versions(),
        commit=commit,
        dirty=dirty,
        started=started,
        finished=now(),
        command=setting.command(paper.key, None if data is None else _asked_for(data)),
        entry=experiment.entry,
        first_steps=first.fingerprint() if first is not None and status == "ok" else None,
    )


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
    return f"{device}, torch {versions.get('torch')}, torchvision {versions.get('torchvision')}"


def standing_keys(paper: Paper, record: Record) -> list[str]:
    """Return the keys of all runs that a record spares: one for each code it stands under."""
    experiment = paper.experiments.get(record.experiment)
    if experiment is None:
        return []
    machine = _machine(record.device["name"], record.versions) if experiment.measures else None
    fingerprint = record.dataset["fingerprint"] if record.dataset else None
    return [
        record_key(
            paper.key,
            record.experiment,
            record.config,
            record.seed,
            fingerprint=fingerprint,
            code=code,
            device=machine,
        )
        for code in record.codes
    ]


def code_of(experiment: Experiment, config: Mapping[str, Any]) -> str:
    """Return the hash of the source that an experiment runs for a configuration."""
    return present().hash_of(experiment.entry, config)


def is_current(paper: Paper, record: Record) -> bool:
    """Whether a record stands under the present code."""
    experiment = paper.experiments.get(record.experiment)
    return experiment is not None and code_of(experiment, record.config) in record.codes


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
