"""Plans solved from times measured in the run itself: trained, and timed with real workers.

Real processes on Ray need a core, or an accelerator, each: where they share one, their times are
of waiting for each other.
"""

import itertools
import os
from collections import defaultdict
from functools import cache, partial
from typing import Any

import torch

from repro import dualbatch
from repro.datasets import ImageData
from repro.dualbatch import DualBatchPlan, train_dual_batch
from repro.dualbatch.shares import Batches
from repro.experiments.design import RAY_ADDRESS, Config, Outcome, cluster_error
from repro.experiments.dualbatch.building import build_model, compute_of, plan_of
from repro.experiments.dualbatch.measuring import fitted
from repro.experiments.dualbatch.training import train
from repro.measure import TimeModel, Timing, accelerator
from repro.measure.host import cores

TWO = 2  # workers with a core or an accelerator each
RATE = 0.01  # of trainings on random numbers, whose times alone count


def train_own_plan(config: Config, seed: int, data: ImageData, device: str) -> Outcome:
    """Train by the plan for steps timed here; where there is none, the reason is the result."""
    torch.manual_seed(seed)
    setting = {**config, **config["measured"], "classes": data.num_classes}
    measured, timings = _line(setting, setting["resolution"], device)
    (entry,) = config["sub_stages"]
    solution, plan = _solved(entry["plan"], measured)
    if plan is None:
        return Outcome(solution, timings=timings)
    own = entry["plan"] | {"a": measured["a"], "b": measured["b"]}
    trained = train({**config, "sub_stages": [entry | {"plan": own}]}, seed, data, device)
    return Outcome(trained.metrics | solution, timings=timings | dict(trained.timings))


def planned_again(config: Config, metrics: Config) -> dict[str, Any]:
    """The metrics of `train_own_plan` that follow from a and b as it measured them."""
    if metrics["a"] is None:
        return {}
    (entry,) = config["sub_stages"]
    return _solved(entry["plan"], {"a": metrics["a"], "b": metrics["b"], "error": None})[0]


def _line(config: Config, resolution: int, device: str) -> tuple[dict[str, Any], dict[str, Timing]]:
    """A and b of steps timed now, or the error why there is no line; and the timings."""
    try:
        fit, timed = fitted(config, resolution, (), config["repeats"], device)
    except ValueError as error:  # times of larger batches that are no longer
        return {"a": None, "b": None, "error": str(error)}, {}
    return {"a": fit.a, "b": fit.b, "error": None}, dict(timed)


def _solved(entry: Config, measured: Config) -> tuple[dict[str, Any], DualBatchPlan | None]:
    """The metrics of a plan for the times measured, or the error why there is none; the plan."""
    if measured["error"] is not None:
        return {**measured, "plan": None}, None
    try:
        plan = plan_of({**entry, "a": measured["a"], "b": measured["b"]})
    except ValueError as error:
        return {**measured, "plan": None, "error": str(error)}, None
    names = ("small_batch", "large_batch", "small_samples", "large_samples")
    return {**measured, "plan": {name: getattr(plan, name) for name in names}}, plan


@cache
def _random(size: int, side: int, classes: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(size, 3, side, side, device=device)
    return images, torch.randint(classes, (size,), device=device)


def _random_data(classes: int, device: str, share: dualbatch.Share) -> Batches:
    """Yield random numbers as the mini-batches of a share, the same ones for each size."""
    assert share.resolution is not None
    for indices in share.indices.split(share.batch_size):
        yield _random(len(indices), share.resolution, classes, device)


def wall_times(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Time epochs of two real workers in turns, each kind of epoch by a plan of its own.

    Every round has one epoch of each kind; the first round warms up. Under ``bsp`` each kind is
    timed, under ``asp`` whole rounds. A kind without ``a`` and ``b`` has a plan for times measured
    here, or the reason why there is none.
    """
    torch.manual_seed(seed)
    gpu = accelerator.is_accelerator(device)
    devices = accelerator.count(device) if gpu else cores()
    if devices < TWO:
        return Outcome({"devices": devices, "parts": []})
    from repro.dualbatch.cluster import connected

    address = os.environ.get(RAY_ADDRESS) or None
    parts: list[dict[str, Any]] = []
    timings: dict[str, Timing] = {}
    try:
        with connected(address, {"CPU": TWO, "GPU": TWO if gpu else 0}, 2**26):
            for number, part in enumerate(config["parts"]):
                metrics, more = _part({**config, **part}, seed, device, address)
                parts.append(metrics)
                timings |= {f"part {number}, {key}": value for key, value in more.items()}
    except dualbatch.ClusterError as error:
        raise cluster_error(error) from error
    return Outcome({"devices": devices, "parts": parts}, timings=timings)


def _part(
    config: Config, seed: int, device: str, address: str | None
) -> tuple[dict[str, Any], dict[str, Timing]]:
    """Measure one model's times, solve its plans, and time epochs by them."""
    kinds, samples = config["epochs"], config["samples"]
    lines: dict[int, dict[str, Any]] = {}
    timings: dict[str, Timing] = {}
    solved: list[dict[str, Any]] = []
    plans: dict[int, DualBatchPlan] = {}
    for number, kind in enumerate(kinds):
        measured, side = {"a": kind["a"], "b": kind["b"], "error": None}, kind["resolution"]
        if kind["a"] is None:
            if side not in lines:
                lines[side], timed = _line(config, side, device)
                timings |= {f"{side}px, {key}": value for key, value in timed.items()}
            measured = lines[side]
        if kind["k"] == 1:  # large batches alone; real workers have no virtual clock
            large, share, unused = kind["large_batch"], samples // TWO, TimeModel(1.0, 0.0)
            solved.append({**measured, "error": None, "plan": None})
            sizes = (samples, large, large, share, share)
            plans[number] = DualBatchPlan(unused, 1.0, 1, TWO - 1, *sizes, update_factor=1.0)
            continue
        entry = {"k": kind["k"], "large_batch": kind["large_batch"], "samples": samples}
        entry |= {"n_small": 1, "n_large": TWO - 1}
        metrics, plan = _solved(entry, measured)
        solved.append(metrics)
        if plan is not None:
            plans[number] = plan
    shares_s, round_s = dict[str, Any](), dict[str, list[float]]()
    for sync, wanted in config["syncs"].items():
        chosen = [number for number in plans if kinds[number]["in"] in wanted]
        subs = [dualbatch.SubStage(kinds[n]["resolution"], None, plans[n]) for n in chosen]
        stages = [dualbatch.Stage(len(subs), RATE)] * (1 + config["rounds"])
        log = train_dual_batch(
            partial(build_model, config, config["classes"]),
            partial(_random_data, config["classes"], device),
            plans[chosen[-1]],
            dualbatch.CyclicProgressiveSchedule(stages, subs),
            sync=sync,
            engine="ray",
            seed=seed,
            device=device,
            address=address,
            **compute_of(config),
        ).log
        if sync == "bsp":
            seconds = share_seconds(log, len(subs))
            shares_s = dict(zip(map(str, chosen), seconds, strict=True))
        else:
            round_s[sync] = round_seconds(log, len(subs))
    return {"solved": solved, "shares_s": shares_s, "round_s": round_s}, timings


def share_seconds(log: list[dualbatch.Commit], kinds: int) -> list[list[list[float]]]:
    """Seconds of shares from pull to merge with a barrier, by kind of epoch and worker.

    Of each round of `kinds` shares but the first; a share begins when its version was there.
    """
    workers = 1 + max(commit.worker for commit in log)
    by_kind: list[list[list[float]]] = [[[] for _ in range(workers)] for _ in range(kinds)]
    for commit in log:
        if commit.iteration >= kinds:
            seconds = commit.time_s - log[commit.pulled - 1].time_s
            by_kind[commit.iteration % kinds][commit.worker].append(seconds)
    return by_kind


def round_seconds(log: list[dualbatch.Commit], kinds: int) -> list[float]:
    """Seconds of every round of `kinds` shares but the first without a barrier: the slower's."""
    ends: dict[int, list[float]] = defaultdict(list)
    for commit in log:
        if commit.iteration % kinds == kinds - 1:
            ends[commit.worker].append(commit.time_s)
    spans = [[b - a for a, b in itertools.pairwise(times)] for times in ends.values()]
    return max(spans, key=sum)
