"""How long a paper's runs take on a machine and what memory they want, from committed records.

All are estimates: the seconds of reference records of the same kind of device, one by one, times
how much longer this machine takes for the training step of one of them. Where there is no
reference record of a kind of device there is no rate, and none is made up.
"""

import importlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from typing import Any

from repro.experiments import PAPERS, load_paper
from repro.experiments.arguments import choose_datasets, plan
from repro.experiments.design import COMPUTING_PROFILES, LONG, SEEDS, Paper
from repro.experiments.selftests import said
from repro.measure import accelerator
from repro.measure.machine import machine
from repro.records import Record, identity, reference_stores

_WARMUP, _LEAST, _STEPS, _ENOUGH_S = 2, 5, 40, 3.0
NO_RATE = "no committed rate"


@dataclass(frozen=True)
class Pace:
    """How long this machine takes for what a reference record measured.

    Attributes:
        ratio: Seconds here over the record's; above 1 this machine is slower. 1 if none was timed.
        what: What was timed, and by which record; why not, where nothing was.
    """

    ratio: float
    what: str


@dataclass(frozen=True)
class Estimate:
    """What a paper's runs under a profile come to.

    Attributes:
        paper: Its key.
        profile: Which one.
        runs: Runs with all their seeds, with the datasets at hand.
        known: Of these, how many have a reference record of their own; the others of an experiment
            count as the mean of its records.
        seconds: Of all runs; None without a rate.
        device_bytes: The most that a run takes on the device; None where that is not known.
        host_bytes: The most that a run swaps to the host; None where that is not known.
        fits: Whether both are there; None where nothing is known.
        source: What the numbers are computed from, or why there are none.
        data: The dataset of each task, empty where nothing serves it.
    """

    paper: str
    profile: str
    runs: int
    known: int
    seconds: float | None
    device_bytes: int | None
    host_bytes: int | None
    fits: bool | None
    source: str
    data: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def seconds_of(record: Record) -> float:
    """Return how long a record took; records tell whole seconds."""
    begun, ended = map(datetime.fromisoformat, (record.started, record.finished))
    return max(0.0, (ended - begun).total_seconds())


@cache
def _references(kind: str, paper: str) -> dict[tuple[str, str], list[Record]]:
    """Return a paper's reference records of a kind of device, by (device folder, profile)."""
    references = {}
    for origin, store in reference_stores().items():
        records = [record for record in store.load(paper) if record.device["type"] == kind]
        if records:
            references[origin] = records
    return references


def forget() -> None:
    """Read the reference records anew when they are next wanted."""
    _references.cache_clear()


def measure_pace(device: str) -> Pace:
    """Time a training step of a reference record again, for some seconds at most.

    It is of the paper whose ``selftest.py`` has `measured_step`.
    """
    why = f"no reference record of a {device.partition(':')[0]} device to compare with"
    for paper in PAPERS:
        module = importlib.import_module(f"repro.experiments.{paper}.selftest")
        for (folder, profile), records in _references(device.partition(":")[0], paper).items():
            if not hasattr(module, "measured_step"):
                continue
            try:
                measured = module.measured_step(records, device)
                if measured is not None:
                    record, then_s, step = measured
                    now_s = _median_s(step, record, device)
                    return Pace(
                        now_s / then_s,
                        f"a training step of {record.config['role']}, {paper} {profile}: "
                        f"{1e3 * now_s:.3g} ms here, {1e3 * then_s:.3g} ms on {folder}",
                    )
            except Exception as error:  # of the device, or of a record of another version
                why = said(error)
    return Pace(1.0, f"not measured: {why}")


def _median_s(step: Callable[[], Any], record: Record, device: str) -> float:
    times: list[float] = []
    with machine({"threads": record.device.get("threads")}, device), accelerator.on(device):
        begun = time.perf_counter()
        while len(times) < _STEPS and (
            len(times) < _LEAST or time.perf_counter() - begun < _ENOUGH_S
        ):
            accelerator.synchronize(device)
            start = time.perf_counter()
            step()
            accelerator.synchronize(device)
            times.append(time.perf_counter() - start)
    return statistics.median(times[_WARMUP:])


def estimate_all(
    device: str, device_bytes: int, host_bytes: int, pace: Pace, root: str | None
) -> list[Estimate]:
    """Estimate every paper under every profile.

    Args:
        device: Its one name.
        device_bytes: That may be taken there.
        host_bytes: That may be taken on the host.
        pace: See `measure_pace`.
        root: Folder searched first for datasets.
    """
    return [
        _estimate(paper, profile, device, (device_bytes, host_bytes), pace, root)
        for paper in map(load_paper, PAPERS)
        for profile in COMPUTING_PROFILES
        if profile != LONG or any(a.exhibit.long for a in paper.artefacts.values())
    ]


def _estimate(
    paper: Paper,
    profile: str,
    device: str,
    spaces: tuple[int, int],
    pace: Pace,
    root: str | None,
) -> Estimate:
    chosen = choose_datasets(paper, profile, (), root)
    runs = plan(paper, paper.artefacts.values(), profile, chosen)
    wanted = [
        (run.experiment, identity(run.experiment, run.config, seed))
        for run in runs
        for seed in (run.seeds if run.seeds is not None else SEEDS[profile])
    ]
    kind = device.partition(":")[0]
    references = {
        origin: records
        for origin, records in _references(kind, paper.key).items()
        if origin[1] == profile
    }
    # Of several devices the one that has most records.
    origin = max(references, key=lambda one: len(references[one]), default=None)
    records = references[origin] if origin else []
    took = {record.identity: seconds_of(record) for record in records}
    total, known, without = 0.0, 0, 0
    for experiment, name in wanted:
        others = [seconds_of(r) for r in records if r.experiment == experiment]
        known += name in took
        without += not others
        total += took.get(name, statistics.fmean(others) if others else 0.0)
    needed = _needs(paper, profile, kind, records)
    fits = None
    if any(need is not None for need in needed):
        fits = all((need or 0) <= space for need, space in zip(needed, spaces, strict=True))
    source = f"{NO_RATE} of a {kind} device"
    if origin:
        source = f"reference records of {origin[0]}, {known} of {len(wanted)} runs their own"
        if without:
            source += f", {without} not counted"
    return Estimate(
        paper.key,
        profile,
        len(wanted),
        known,
        total * pace.ratio if origin and math.isfinite(total) else None,
        *needed,
        fits,
        source,
        chosen,
    )


def _needs(
    paper: Paper, profile: str, kind: str, records: Sequence[Record]
) -> tuple[int | None, int | None]:
    """Return the most bytes that a run takes on the device and on the host, where it is known.

    A paper whose ``selftest.py`` has `needs` computes them; else the records' peaks tell.
    """
    module = importlib.import_module(f"repro.experiments.{paper.key}.selftest")
    if kind != "cpu" and hasattr(module, "needs"):
        needed: tuple[int | None, int | None] = module.needs(profile)
        return needed
    peak = max((r.peak_bytes for r in records if r.peak_bytes), default=None)
    return (None, peak) if kind == "cpu" else (peak, None)
