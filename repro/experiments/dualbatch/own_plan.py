"""Plans solved from times measured in the run itself, trained and timed: what is executed.

Real processes on Ray need a core, or an accelerator, each: where they would share one their times
would be of waiting for each other.
"""

import itertools
import os
from collections import defaultdict
from functools import partial
from typing import Any

import torch

from repro.datasets import ImageData
from repro.dualbatch import (
    Commit,
    CyclicProgressiveSchedule,
    DualBatchPlan,
    Share,
    Stage,
    SubStage,
    largest_k,
    train_dual_batch,
)
from repro.dualbatch.worker import Batches
from repro.experiments.dualbatch.building import Config, build_model, low_precision, plan_of
from repro.experiments.dualbatch.experiments import _fitted, train
from repro.experiments.outcome import RAY_ADDRESS, Outcome, UsageError
from repro.measure import TimeModel, Timing, accelerator

TWO = 2  # workers with a core or an accelerator each
RATE = 0.01  # of trainings on random numbers, whose times alone count


def train_own_plan(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Fit the time model to steps on this device, solve the plan with it, and train by the plan.

    Where no such plan exists nothing is trained, and why is the result.
    """
    assert data is not None
    torch.manual_seed(seed)
    measured = config["measured"] | {"classes": data.num_classes}
    setting = config | measured
    fit, timed = _fitted(setting, measured["resolution"], {}, measured["repeats"], device)
    timings = dict(timed)
    (entry,) = config["sub_stages"]
    own = entry["plan"] | {"a": fit.a, "b": fit.b}
    found = {"a": fit.a, "b": fit.b, "seconds": list(fit.seconds)} | _solved(own)
    if found["error"] is not None:
        return Outcome(found, timings=timings)
    trained = train(config | {"sub_stages": [entry | {"plan": own}]}, seed, data, device)
    return Outcome(trained.metrics | found, timings=timings | dict(trained.timings))


def _solved(entry: Config) -> dict[str, Any]:
    """Return the plan's sizes and shares, or why there is none."""
    try:
        plan = plan_of(entry)
    except ValueError as error:  # also of times that no line with a cost of a step fits
        return {"error": str(error), "plan": None, "k_max": _largest_k(entry)}
    sizes = {
        "small_batch": plan.small_batch,
        "large_batch": plan.large_batch,
        "small_samples": plan.small_samples,
        "large_samples": plan.large_samples,
    }
    return {"error": None, "plan": sizes, "k_max": _largest_k(entry)}


def _largest_k(entry: Config) -> float | None:
    if entry["a"] <= 0 or entry["b"] <= 0:
        return None
    model = TimeModel(entry["a"], entry["b"])
    return largest_k(model, entry["n_small"], entry["n_large"], entry["large_batch"])


class RandomImages:
    """Random numbers as the mini-batches of any share: one batch of each size, used again.

    Args:
        classes: Of the labels.
        device: Where they are drawn.
    """

    def __init__(self, classes: int, device: str) -> None:
        self.classes, self.device = classes, device
        self._made: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, share: Share) -> Batches:
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
    """Return how many workers have a core, or an accelerator, to themselves."""
    if accelerator.is_accelerator(device):
        return accelerator.count(device)
    if hasattr(os, "sched_getaffinity"):  # not everywhere
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def wall_times(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Time epochs of two real workers by plans solved from times measured here, in turns.

    Every round has one epoch of each kind: large batches alone, the plan of each k, and the plans
    at lower resolutions. The first round warms up.
    """
    torch.manual_seed(seed)
    there = devices_here(device)
    if there < TWO:
        return Outcome({"devices": there, "parts": {}})
    from repro.dualbatch.cluster import ClusterError, connected

    address = os.environ.get(RAY_ADDRESS) or None
    needed = {"CPU": TWO, "GPU": TWO if accelerator.is_accelerator(device) else 0}
    parts: dict[str, Any] = {}
    timings: dict[str, Timing] = {}
    try:
        with connected(address, needed, 2**26):
            for name, own in config["parts"].items():
                parts[name], more = _part(config | own, seed, device, address)
                timings |= {f"{name}, {key}": value for key, value in more.items()}
    except ClusterError as error:
        raise UsageError(str(error)) from error  # it says nothing of the method
    return Outcome({"devices": there, "parts": parts}, timings=timings)


def _part(
    config: Config, seed: int, device: str, address: str | None
) -> tuple[dict[str, Any], dict[str, Timing]]:
    """Measure one task: its time models, its plans, and epochs by them."""
    sides = config["resolutions"]
    fits = {}
    timings: dict[str, Timing] = {}
    for side in sides:
        fits[side], timed = _fitted(config, side, {}, config["repeats"], device)
        timings |= {f"{side}px, {key}": value for key, value in timed.items()}
    epochs: list[dict[str, Any]] = []
    for side, large in zip(sides, config["large_batches"], strict=True):
        ks = config["k"] if side == sides[-1] else config["k"][:1]
        epochs += [_entry(config, fits[side], side, large, k) for k in ks]
    epochs.append({"resolution": sides[-1], "k": 1.0, "error": None})
    found: dict[str, Any] = {
        "fits": [{"resolution": s, "a": f.a, "b": f.b} for s, f in fits.items()],
        "epochs": epochs,
        "seconds": {},
    }
    subs = [
        SubStage(e["resolution"], None, _plan(config, fits, e)) for e in epochs if not e["error"]
    ]
    for sync in config["syncs"]:
        log, schedule = _run(config, subs, sync, seed, device, address)
        seconds = share_seconds(log, schedule, len(subs))
        kept = [e for e in epochs if not e["error"]]
        found["seconds"][sync] = [
            {"resolution": e["resolution"], "k": e["k"], "by_worker_s": seconds.get(place, [])}
            for place, e in enumerate(kept, 1)
        ]
        found[f"{sync}_round_s"] = rounds(log, len(subs), sync)
    return found, timings


def _entry(config: Config, fit: TimeModel, side: int, large: int, k: float) -> dict[str, Any]:
    arguments = {
        "a": fit.a,
        "b": fit.b,
        "k": k,
        "n_small": 1,
        "n_large": TWO - 1,
        "large_batch": large,
        "samples": config["samples"],
    }
    return {"resolution": side, "k": k, **_solved(arguments), "arguments": arguments}


def _plan(config: Config, fits: dict[int, TimeModel], entry: Config) -> DualBatchPlan:
    if "arguments" in entry:
        return plan_of(entry["arguments"])
    # Large batches alone, as a plan of the same two workers.
    large, samples = config["large_batches"][-1], config["samples"]
    share = samples // TWO
    return DualBatchPlan(
        fits[entry["resolution"]], 1.0, 1, TWO - 1, samples, large, large, share, share, 1.0
    )


def _run(
    config: Config, subs: list[SubStage], sync: str, seed: int, device: str, address: str | None
) -> tuple[list[Commit], CyclicProgressiveSchedule]:
    stages = [Stage(len(subs), RATE)] * (1 + config["rounds"])
    schedule = CyclicProgressiveSchedule(stages, subs)
    plan = subs[-1].plan
    assert plan is not None
    result = train_dual_batch(
        partial(build_model, config, config["classes"]),
        RandomImages(config["classes"], device),
        plan,
        schedule,
        sync=sync,
        engine="ray",
        seed=seed,
        device=device,
        autocast=low_precision(config),
        channels_last=config["channels_last"],
        address=address,
    )
    return result.log, schedule


def share_seconds(
    log: list[Commit], schedule: CyclicProgressiveSchedule, warmup: int
) -> dict[int, list[list[float]]]:
    """Return, by sub-stage, the seconds of each worker's shares, from pull to merge.

    Args:
        log: Of a training; a share begins when the version that it pulled was there.
        schedule: Of that training.
        warmup: Shares of each worker that do not count.
    """
    workers = 1 + max(commit.worker for commit in log)
    found: dict[int, list[list[float]]] = defaultdict(lambda: [[] for _ in range(workers)])
    for commit in log:
        if commit.iteration < warmup:
            continue
        setting = schedule.at_progress(commit.pulled / workers)
        start = log[commit.pulled - 1].time_s
        found[setting.sub_stage][commit.worker].append(commit.time_s - start)
    return dict(found)


def rounds(log: list[Commit], length: int, sync: str) -> list[float]:
    """Return the seconds of every round of `length` shares a worker, but the first.

    Until the last worker has ended it under ``bsp``; by the slowest worker's own clock under
    ``asp``, where nobody waits for a round's end.
    """
    by_worker: dict[int, list[float]] = defaultdict(list)
    for commit in log:
        by_worker[commit.worker].append(commit.time_s)
    ends = [times[length - 1 :: length] for times in by_worker.values()]
    if sync == "bsp":
        ends = [[max(same) for same in zip(*ends, strict=True)]]
    spans = [[b - a for a, b in itertools.pairwise(own)] for own in ends]
    slowest = max(range(len(spans)), key=lambda number: sum(spans[number]))
    return spans[slowest]
