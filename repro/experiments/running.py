"""Plan the runs of artefacts, carry out those without a record, gather results."""

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from tqdm import tqdm

from repro import datasets, paths
from repro.experiments.design import (
    COMPUTING_PROFILES,
    PROFILES,
    SEEDS,
    Artefact,
    Experiment,
    Outcome,
    Paper,
    Run,
)
from repro.measure import describe_device, is_out_of_memory
from repro.records import (
    Record,
    RecordStore,
    commit_state,
    library_versions,
    local_store,
    now,
    record_key,
    source_hash,
)

Data = datasets.ImageData | datasets.EpochTimes
ENGINES = ("local", "ray")
RAY_ADDRESS = "REPRO_RAY_ADDRESS"  # of the cluster that trainings on Ray use; empty: one is started


class UsageError(ValueError):
    """Something was asked for that does not exist; the text names what does."""


def default_profile() -> str:
    """Return ``gpu`` where CUDA is present and ``quick`` where it is not."""
    return "gpu" if torch.cuda.is_available() else "quick"


def default_device() -> str:
    """Return ``cuda`` where it is present and ``cpu`` where it is not."""
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


def only_mini_batches(runs: Sequence[Run], sizes: Sequence[int]) -> list[Run]:
    """Return the runs with one of these mini-batch sizes; all where none is given.

    Raises:
        UsageError: A size is below 1, or no run has it.
    """
    present = {run.config["mini_batch"] for run in runs if "mini_batch" in run.config}
    for size in sizes:
        if size < 1 or size not in present:
            allowed = ", ".join(str(known) for known in sorted(present))
            advice = f"choose among {allowed}" if allowed else "none of these runs has one"
            raise UsageError(f"mini-batch size {size} is not in the plan; {advice}")
    return [run for run in runs if not sizes or run.config.get("mini_batch") in sizes]


def with_engine(runs: Sequence[Run], engine: str | None) -> list[Run]:
    """Return the runs with another engine of dual-batch learning's trainings; None leaves them.

    Raises:
        UsageError: There is no such engine, or no run that has one.
    """
    if engine is None:
        return list(runs)
    if engine not in ENGINES:
        raise UsageError(f"unknown engine {engine!r}; choose among {', '.join(ENGINES)}")
    if not any("engine" in run.config for run in runs):
        raise UsageError("none of these runs has an engine; those of dualbatch's tables have")
    return list(
        dict.fromkeys(
            replace(run, config=run.config | {"engine": engine}) if "engine" in run.config else run
            for run in runs
        )
    )


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
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
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
    """Where and how a plan is carried out."""

    profile: str
    device: str
    root: str | None = None
    seeds: tuple[int, ...] | None = None
    retry_failed: bool = False

    def command(self, target: str, dataset: str | None) -> str:
        """Return a command line that computes a record again."""
        parts = [f"python -m repro run {target} --profile {self.profile} --device {self.device}"]
        if dataset is not None:
            parts.append(f"--dataset {dataset}")
        if self.seeds is not None:
            listed = ",".join(map(str, self.seeds))
            parts.append(f"--seeds {listed}{',' if len(self.seeds) == 1 else ''}")
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
    progress bar on a terminal, and a line per computed run elsewhere.
    """
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
    interactive = sys.stderr.isatty()
    tally = Tally()
    with tqdm(steps, unit="run", disable=not interactive, desc=paper.key) as bar:
        for run, seed in bar:
            experiment = paper.experiments[run.experiment]
            bar.set_postfix_str(_label(run))
            data = _load(run.config, setting.root)
            key = _key(paper, experiment, run, seed, setting, data)
            standing = store.get(paper.key, experiment.name, key)
            if standing and not (setting.retry_failed and standing.status == "failed"):
                tally.stood += 1
                tally.failed += standing.status == "failed"
                continue
            start = time.perf_counter()
            record = _carry_out(paper, experiment, run, seed, setting, data, key)
            store.write(record)
            tally.done += 1
            tally.out_of_memory += record.status == "out_of_memory"
            tally.failed += record.status == "failed"
            if not interactive:
                seconds = time.perf_counter() - start
                report(f"{paper.key} {_label(run)} seed {seed}: {record.status} ({seconds:.1f} s)")
            elif record.status == "failed":
                tqdm.write(f"failed: {_label(run)} seed {seed}: {record.error}", file=sys.stderr)
    return tally


def load_data(runs: Sequence[Run], root: str | None) -> None:
    """Load the datasets of a plan, so that a missing or damaged one is said before it starts."""
    for run in runs:
        _load(run.config, root)


def _carry_out(
    paper: Paper,
    experiment: Experiment,
    run: Run,
    seed: int,
    setting: Setting,
    data: Data | None,
    key: str,
) -> Record:
    started = now()
    status, error, outcome = "ok", None, Outcome({})
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
    )


def _key(
    paper: Paper,
    experiment: Experiment,
    run: Run,
    seed: int,
    setting: Setting,
    data: Data | None,
) -> str:
    device = None
    if experiment.measures:
        versions = library_versions()
        libraries = f"torch {versions['torch']}, torchvision {versions['torchvision']}"
        device = f"{describe_device(setting.device)['name']}, {libraries}"
    return record_key(
        paper.key,
        experiment.name,
        run.config,
        seed,
        fingerprint=data.fingerprint if data else None,
        code=code_of(experiment, run.config),
        device=device,
    )


def code_of(experiment: Experiment, config: Mapping[str, Any]) -> str:
    """Return the hash of the source that an experiment runs for a configuration."""
    return _source_hash(tuple(experiment.modules(config)))


@cache
def _source_hash(modules: tuple[str, ...]) -> str:
    return source_hash(modules)


def _load(config: Mapping[str, Any], root: str | None) -> Data | None:
    wanted = config.get("dataset")
    return None if wanted is None else _load_cached(json.dumps(wanted, sort_keys=True), root)


def _asked_for(data: Data) -> str | None:
    return None if isinstance(data, datasets.EpochTimes) else data.name


@cache
def _load_cached(wanted: str, root: str | None) -> Data:
    options = json.loads(wanted)
    if options["name"] == datasets.TIMES:
        return datasets.load_times(root)
    return datasets.load(options.pop("name"), root, **options)


def _label(run: Run) -> str:
    parts = [run.experiment]
    named = ("role", "table", "scheme", "k", "n_small", "factor", "engine", "resolution",
             "mini_batch", "micro_batch", "layer", "setting", "mode", "limit_mib",
             "policy", "task", "strategy", "stands_for")  # fmt: skip
    for name in named:
        if run.config.get(name) is not None:
            parts.append(f"{name.replace('_', '-')} {run.config[name]}")
    return " ".join(parts)
