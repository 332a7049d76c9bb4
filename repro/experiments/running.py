"""Plan the runs of artefacts, carry out those without a record, gather results."""

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from repro import paths
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
    Record,
    RecordStore,
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
    """Return `device` if it is there."""
    from repro.measure import describe_device

    try:
        describe_device(device)
    except (ValueError, RuntimeError) as error:
        raise UsageError(str(error).splitlines()[0]) from error
    return device


def choose_datasets(
    paper: Paper, profile: str, wanted: Sequence[str] = (), root: str | None = None
) -> dict[str, str]:
    """Choose a dataset for each task of a paper: one asked for by name, else the best at hand.

    A paper that measures kernels on random numbers has no tasks, and takes none.

    Raises:
        UsageError: A name is unknown, or serves no task of the paper.
    """
    from repro import datasets

    if root is not None and not paths.data_roots(root)[0].is_dir():
        raise UsageError(f"data folder {str(root)!r} does not exist; leave it out, or give another")
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
        allowed = paper.options.get(key)
        if allowed is not None and text not in allowed:
            raise UsageError(f"unknown {key} {text!r}; choose among {', '.join(allowed)}")
        value = text if any(isinstance(one, str) for one in present_) else _parsed(text)
        kinds = {type(one) for one in present_ if one is not None}
        if kinds and type(value) not in kinds and not (float in kinds and type(value) is int):
            example = next(one for one in present_ if one is not None)
            raise UsageError(f"{key}={text} is of another type than {key}={_text(example)}")
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


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
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
    if text is None or not text.strip():
        return None
    try:
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
            f"seeds are {text!r}; give how many (3), or a list of distinct ones from 0 (0,5,7)"
        )
    return numbers


@dataclass
class Tally:
    """What became of a plan's runs."""

    done: int = 0
    stood: int = 0
    out_of_memory: int = 0
    failed: int = 0

    def __str__(self) -> str:
        return (
            f"{self.done} computed ({self.out_of_memory} out of memory, {self.failed} failed), "
            f"{self.stood} stood already"
        )


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
            parts.append(f"--dataset {dataset}")
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
    in both, also of a failure that stands.
    """
    import torch
    from tqdm import tqdm

    from repro.measure import describe_device

    store = store or local_store(setting.profile)
    store.sweep()
    describe_device(setting.device)  # an absent device is said before anything starts
    if setting.device == "cpu" and setting.profile in ("smoke", "quick"):
        # Such small models gain nothing from a second thread, and lose much to waiting for it
        # where another process wants the core.
        torch.set_num_threads(1)
    steps = [(run, seed) for run in runs for seed in setting.seeds_of(run)]
    # Seed by seed: whatever stops it early leaves whole tables with a smaller n.
    steps.sort(key=lambda step: step[1])
    known = {
        key: record for record in store.load(paper.key) for key in standing_keys(paper, record)
    }
    interactive = sys.stderr.isatty()
    tally = Tally()

    def tell(line: str) -> None:
        line = printable(line)  # an error says whatever it likes
        tqdm.write(line, file=sys.stderr) if interactive else report(line)

    with tqdm(steps, unit="run", disable=not interactive, desc=paper.key) as bar:
        for run, seed in bar:
            experiment = paper.experiments[run.experiment]
            bar.set_postfix_str(str(run))
            data = load(run.config, setting.root)
            key = _key(paper, experiment, run, seed, setting, data)
            name = f"{paper.key} {run} seed {seed}"
            standing = known.get(key)
            if standing and not (setting.retry_failed and standing.status == "failed"):
                tally.stood += 1
                if standing.status == "failed":
                    tally.failed += 1
                    tell(f"{name}: failed before, again with --retry-failed: {standing.error}")
                continue
            start = time.perf_counter()
            record = _carry_out(paper, experiment, run, seed, setting, data, key)
            store.write(record)
            known[key] = record
            tally.done += 1
            tally.out_of_memory += record.status == "out_of_memory"
            tally.failed += record.status == "failed"
            why = f": {record.error}" if record.status == "failed" else ""
            if why or not interactive:
                tell(f"{name}: {record.status} ({time.perf_counter() - start:.1f} s){why}")
    return tally


def load_data(runs: Sequence[Run], root: str | None) -> None:
    """Load the datasets of a plan, so that a missing or damaged one is said before it starts."""
    for run in runs:
        load(run.config, root)


def _carry_out(
    paper: Paper,
    experiment: Experiment,
    run: Run,
    seed: int,
    setting: Setting,
    data: "Data | None",
    key: str,
) -> Record:
    import torch

    from repro.experiments.replay import recording
    from repro.measure import describe_device, is_out_of_memory

    started = now()
    status, error, outcome = "ok", None, Outcome({})
    # A hook would cost the time that other experiments measure.
    with recording() if experiment.trains else nullcontext() as first:
        try:
            outcome = experiment.function(run.config, seed, data, setting.device)
        except UsageError:  # of the machine, not of the method: no result
            raise
        except Exception as problem:
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
        key=key,
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


def _key(
    paper: Paper,
    experiment: Experiment,
    run: Run,
    seed: int,
    setting: Setting,
    data: "Data | None",
) -> str:
    from repro.measure import describe_device

    name = describe_device(setting.device)["name"]
    return record_key(
        paper.key,
        experiment.name,
        run.config,
        seed,
        fingerprint=data.fingerprint if data else None,
        code=code_of(experiment, run.config),
        device=_machine(name, library_versions()) if experiment.measures else None,
    )


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
