"""Plans solved from times measured in the run itself: trained, and timed with real workers.

Real processes on Ray need a core, or an accelerator, each: where they share one, their times are
of waiting for each other.
"""

import itertools
import os
from collections import defaultdict
from functools import partial
from typing import Any

import torch

from repro import dualbatch
from repro.datasets import ImageData
from repro.dualbatch import DualBatchPlan, train_dual_batch
from repro.dualbatch.shares import Batches
from repro.experiments.design import RAY_ADDRESS, Outcome, cluster_error
from repro.experiments.dualbatch.building import Config, build_model, compute_of, plan_of
from repro.experiments.dualbatch.measuring import fitted
from repro.experiments.dualbatch.training import train
from repro.measure import TimeModel, Timing, accelerator
from repro.measure.host import cores

TWO = 2  # workers with a core or an accelerator each
RATE = 0.01  # of trainings on random numbers, whose times alone count


def train_own_plan(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Train by the plan for steps timed here; where there is none, the reason is the result."""
    assert data is not None
    torch.manual_seed(seed)
    setting = {**config, **config["measured"], "classes": data.num_classes}
    measured, timings = _line(setting, setting["resolution"], setting["repeats"], device)
    (entry,) = config["sub_stages"]
    solution = _solved(entry["plan"], measured)
    if solution["error"] is not None:
        return Outcome(solution, timings=timings)
    plan = entry["plan"] | {"a": measured["a"], "b": measured["b"]}
    trained = train({**config, "sub_stages": [entry | {"plan": plan}]}, seed, data, device)
    return Outcome(trained.metrics | solution, timings=timings | dict(trained.timings))


def planned_again(config: Config, metrics: Config) -> dict[str, Any]:
    """The metrics of `train_own_plan` that follow from a and b as it measured them."""
    if metrics["a"] is None:
        return {}
    (entry,) = config["sub_stages"]
    return _solved(entry["plan"], {"a": metrics["a"], "b": metrics["b"], "error": None})


def _line(
    config: Config, resolution: int, repeats: int, device: str
) -> tuple[dict[str, Any], dict[str, Timing]]:
    """A and b of steps timed now, or the error why there is no line; and the timings."""
    try:
        fit, timed = fitted(config, resolution, {}, repeats, device)
    except ValueError as error:  # times of larger batches that are no longer
        return {"a": None, "b": None, "error": str(error)}, {}
    return {"a": fit.a, "b": fit.b, "error": None}, dict(timed)


def _solved(entry: Config, measured: Config) -> dict[str, Any]:
    """A plan's sizes and shares for the times measured, or the error why there is none."""
    solution = {**measured, "plan": None, "k_max": None}
    if measured["error"] is not None:
        return solution
    entry = {**entry, "a": measured["a"], "b": measured["b"]}
    if entry["b"] > 0:
        sizes = (entry["n_small"], entry["n_large"], entry["large_batch"])
        solution["k_max"] = dualbatch.largest_k(TimeModel(entry["a"], entry["b"]), *sizes)
    try:
        plan = plan_of(entry)
    except ValueError as error:
        return solution | {"error": str(error)}
    names = ("small_batch", "large_batch", "small_samples", "large_samples")
    return solution | {"plan": {name: getattr(plan, name) for name in names}}


class RandomImages:
    """Random numbers as the mini-batches of any share: one batch of each size, used again."""

    def __init__(self, classes: int, device: str) -> None:
        self.classes, self.device = classes, device
        self._made: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, share: dualbatch.Share) -> Batches:
        """Yield the mini-batches of a share."""
        assert share.resolution is not None
        for piece in share.indices.split(share.batch_size):
            size = (len(piece), share.resolution)
            if size not in self._made:
                images = torch.randn(size[0], 3, size[1], size[1], device=self.device)
                labels = torch.randint(self.classes, (size[0],), device=self.device)
                self._made[size] = images, labels
            yield self._made[size]


def devices_here(device: str) -> int:
    """The number of workers that have a core, or an accelerator, to themselves."""
    if accelerator.is_accelerator(device):
        return accelerator.count(device)
    return cores()


def wall_times(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Time epochs of two real workers in turns, each kind of epoch by a plan of its own.

    Every round has one epoch of each kind; the first round warms up. Kinds are told apart under
    ``bsp``, where both workers have the same kind at a time; under ``asp`` whole rounds are timed.
    Plans are solved from times measured here where a kind has no ``a`` and ``b``; where no such
    plan exists, the reason is noted.
    """
    torch.manual_seed(seed)
    devices = devices_here(device)
    if devices < TWO:
        return Outcome({"devices": devices, "parts": []})
    from repro.dualbatch.cluster import ClusterError, connected

    address = os.environ.get(RAY_ADDRESS) or None
    needed = {"CPU": TWO, "GPU": TWO if accelerator.is_accelerator(device) else 0}
    parts: list[dict[str, Any]] = []
    timings: dict[str, Timing] = {}
    try:
        with connected(address, needed, 2**26):
            for number, part in enumerate(config["parts"]):
                metrics, more = _part({**config, **part}, seed, device, address)
                parts.append(metrics)
                timings |= {f"part {number}, {key}": value for key, value in more.items()}
    except ClusterError as error:
        raise cluster_error(error) from error
    return Outcome({"devices": devices, "parts": parts}, timings=timings)


def _part(
    config: Config, seed: int, device: str, address: str | None
) -> tuple[dict[str, Any], dict[str, Timing]]:
    """Measure one model's times, solve its plans, and time epochs by them."""
    lines: dict[int, dict[str, Any]] = {}
    timings: dict[str, Timing] = {}
    for side in {kind["resolution"]: None for kind in config["epochs"] if kind["a"] is None}:
        lines[side], timed = _line(config, side, config["repeats"], device)
        timings |= {f"{side}px, {key}": value for key, value in timed.items()}
    solved: list[dict[str, Any]] = []
    plans: dict[int, DualBatchPlan] = {}
    for number, kind in enumerate(config["epochs"]):
        given = {"a": kind["a"], "b": kind["b"], "error": None}
        measured = lines[kind["resolution"]] if kind["a"] is None else given
        entry = {key: kind[key] for key in ("k", "large_batch")}
        entry |= {"n_small": 1, "n_large": TWO - 1, "samples": config["samples"]}
        if kind["k"] == 1:
            solved.append({**measured, "error": None, "plan": None, "k_max": None})
            plans[number] = alone(kind["large_batch"], config["samples"])
            continue
        solved.append(_solved(entry, measured))
        if solved[-1]["error"] is None:
            plans[number] = plan_of({**entry, "a": measured["a"], "b": measured["b"]})
    metrics: dict[str, Any] = {"solved": solved, "shares_s": {}, "round_s": {}}
    for sync, wanted in config["syncs"].items():
        chosen = [number for number in plans if config["epochs"][number]["in"] in wanted]
        subs = [
            dualbatch.SubStage(config["epochs"][n]["resolution"], None, plans[n]) for n in chosen
        ]
        log = _run(config, subs, sync, seed, device, address)
        if sync == "bsp":
            seconds = share_seconds(log, len(subs))
            metrics["shares_s"] = dict(zip(map(str, chosen), seconds, strict=True))
        else:
            metrics["round_s"][sync] = round_seconds(log, len(subs))
    return metrics, timings


def alone(large: int, samples: int) -> DualBatchPlan:
    """Large batches alone, as a plan of the same two workers."""
    share = samples // TWO
    unused = TimeModel(1.0, 0.0)  # real workers have no virtual clock
    return DualBatchPlan(unused, 1.0, 1, TWO - 1, samples, large, large, share, share, 1.0)


def _run(
    config: Config,
    subs: list[dualbatch.SubStage],
    sync: str,
    seed: int,
    device: str,
    address: str | None,
) -> list[dualbatch.Commit]:
    stages = [dualbatch.Stage(len(subs), RATE)] * (1 + config["rounds"])
    plan = subs[-1].plan
    assert plan is not None
    result = train_dual_batch(
        partial(build_model, config, config["classes"]),
        RandomImages(config["classes"], device),
        plan,
        dualbatch.CyclicProgressiveSchedule(stages, subs),
        sync=sync,
        engine="ray",
        seed=seed,
        device=device,
        **compute_of(config),
        address=address,
    )
    return result.log


def share_seconds(log: list[dualbatch.Commit], kinds: int) -> list[list[list[float]]]:
    """Seconds of shares from pull to merge, of a training with a barrier.

    By kind of epoch, of which `kinds` are a round, then by worker, each round's but the first. A
    share begins when the version that it pulled was there.
    """
    workers = 1 + max(commit.worker for commit in log)
    by_kind: list[list[list[float]]] = [[[] for _ in range(workers)] for _ in range(kinds)]
    for commit in log:
        if commit.iteration >= kinds:
            seconds = commit.time_s - log[commit.pulled - 1].time_s
            by_kind[commit.iteration % kinds][commit.worker].append(seconds)
    return by_kind


def round_seconds(log: list[dualbatch.Commit], kinds: int) -> list[float]:
    """Seconds of every round but the first, of a training without a barrier.

    Each worker goes through rounds of `kinds` shares by itself; of the worker that is the slower in
    all.
    """
    ends: dict[int, list[float]] = defaultdict(list)
    for commit in log:
        if commit.iteration % kinds == kinds - 1:
            ends[commit.worker].append(commit.time_s)
    spans = [[b - a for a, b in itertools.pairwise(times)] for times in ends.values()]
    return max(spans, key=sum)
