"""The experiments of dual-batch learning: what is executed and measured."""

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from repro.datasets import EpochTimes, ImageData
from repro.dualbatch import (
    CyclicProgressiveSchedule,
    DualBatchPlan,
    Stage,
    SubStage,
    train_dual_batch,
)
from repro.experiments.dualbatch.building import (
    Config,
    TrainingData,
    build_model,
    clock_of,
    compute_of,
    plan_of,
    schedule_of,
    state_of,
    step_of,
    training_step,
)
from repro.experiments.outcome import RAY_ADDRESS, Outcome, no_record, reported
from repro.measure import (
    MemoryBudget,
    MemoryMeter,
    MemoryModel,
    TimeModel,
    Timing,
    comparable_peaks,
    is_out_of_memory,
    largest_batch,
    time_interleaved,
)

WORKERS: int = reported("dualbatch")["workers"]
STEPS_IN_A_ROW = 5


def solve(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Solve Table 2 or 6, or lay out the schedule of Table 7 or 9."""
    paper = reported("dualbatch")
    table = config["table"]
    if table in ("table7", "table9"):
        return Outcome({"rows": _schedule_rows(table)})
    if table == "table2":
        model = TimeModel(paper["inferred"]["a"], paper["inferred"]["b"])
        return Outcome({"rows": _table2_rows(model)})
    rows: list[dict[str, Any]] = []
    for data_name in ("cifar", "imagenet"):
        part = paper["table6"][data_name]
        for side, large in zip(part["resolutions"], part["large_batches"], strict=True):
            model = TimeModel(1.0, paper["inferred"][f"ratio_{side}"])
            for n_small in range(WORKERS + 1):
                plan = DualBatchPlan.solve(
                    model,
                    paper["table6"]["k"],
                    n_small,
                    WORKERS - n_small,
                    large,
                    paper[f"{data_name}_samples"],
                )
                rows.append(_plan_row(plan, side))
    return Outcome({"rows": rows})


def _table2_rows(model: TimeModel) -> list[dict[str, Any]]:
    paper = reported("dualbatch")
    large, samples = paper["table2"]["large_batch"], paper["cifar_samples"]
    return [
        _plan_row(
            DualBatchPlan.solve(
                model, row["k"], row["n_small"], WORKERS - row["n_small"], large, samples, "floor"
            ),
            None,
        )
        for row in paper["table2"]["rows"]
    ]


def _plan_row(plan: DualBatchPlan, resolution: int | None) -> dict[str, Any]:
    return {
        "resolution": resolution,
        "k": plan.k,
        "n_small": plan.n_small,
        "small_batch": plan.small_batch,
        "large_batch": plan.large_batch,
        "small_samples": plan.small_samples,
        "large_samples": plan.large_samples,
        "factor": plan.update_factor,
    }


def _schedule_rows(table: str) -> list[dict[str, Any]]:
    paper = reported("dualbatch")
    part = paper["table6"]["cifar" if table == "table7" else "imagenet"]
    sides, dropouts = part["resolutions"], paper[table]["dropouts"]
    samples = paper["cifar_samples" if table == "table7" else "imagenet_samples"]
    subs = []
    for side, large, dropout in zip(sides, part["large_batches"], dropouts, strict=True):
        model = TimeModel(1.0, paper["inferred"][f"ratio_{side}"])
        plan = DualBatchPlan.solve(model, paper["table6"]["k"], 1, WORKERS - 1, large, samples)
        subs.append(SubStage(side, dropout, plan))
    stages = [Stage(int(epochs), lr) for epochs, lr in paper[table]["stages"]]
    rows = []
    for scheme, sub_stages in (("dual-batch", subs[-1:]), ("hybrid", subs)):
        schedule = CyclicProgressiveSchedule(stages, sub_stages)
        for _, group in itertools.groupby(schedule, key=lambda s: (s.stage, s.sub_stage)):
            epochs = list(group)
            first = epochs[0]
            rows.append(
                {
                    "scheme": scheme,
                    "stage": first.stage,
                    "sub_stage": first.sub_stage,
                    "first": first.epoch,
                    "last": epochs[-1].epoch,
                    "lr": first.lr,
                    "resolution": first.resolution,
                    "dropout": first.dropout,
                    "small_batch": first.small_batch,
                    "large_batch": first.large_batch,
                }
            )
    return rows


def train(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Train by the baseline, dual-batch learning or the hybrid scheme (Tables 3, 5, 8, 10)."""
    assert data is not None
    images = TrainingData(config, data, device)
    schedule = schedule_of(config)
    cluster: dict[str, Any] = {}
    if config["engine"] == "ray":
        cluster = {"address": os.environ.get(RAY_ADDRESS) or None}
    run = partial(
        train_dual_batch,
        partial(build_model, config, data.num_classes),
        images,
        plan_of(config["sub_stages"][-1]["plan"]),
        schedule,
        sync=config["sync"],
        factor=config["factor"],
        seed=seed,
        device=device,
        optimizer_state=state_of(config),
        **compute_of(config),
    )
    evaluate = images.evaluation(config, device)
    try:
        result = run(engine=config["engine"], evaluate=evaluate, **clock_of(config), **cluster)
    except RuntimeError as error:
        if type(error).__name__ != "ClusterError":  # whose module needs Ray
            raise
        raise no_record(error) from error
    same = None
    if config.get("verify"):
        followed = run(follow=result.log).state
        same = all(torch.equal(followed[name], result.state[name]) for name in followed)
    history = result.history
    walls = [0.0, *(epoch.wall_time_s for epoch in history)]
    virtual = None if config["engine"] == "ray" else [e.virtual_time_s for e in history]
    held_out = [epoch.metrics["held_out"] for epoch in history] if config.get("held_out") else None
    return Outcome(
        metrics={
            "accuracy": [epoch.metrics["accuracy"] for epoch in history],
            "test_loss": [epoch.metrics["test_loss"] for epoch in history],
            "train_loss": [epoch.train_loss for epoch in history],
            "resolution": [epoch.resolution for epoch in history],
            "virtual_time_s": virtual,
            "wall_time_s": walls[1:],
            "plans": [_plan_row(plan_of(e["plan"]), e["resolution"]) for e in config["sub_stages"]],
            "commits": len(result.log),
            "same_weights": same,
            "staleness": [commit.staleness for commit in result.log],
        }
        | ({"held_out": held_out} if held_out else {}),
        timings={"epoch": Timing(tuple(b - a for a, b in itertools.pairwise(walls)), warmup=0)},
    )


def times(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Time steps, whole passes and workers' shares, and fit the time model (Figures 3, 4, Table 4).

    Images are random numbers on the device. What is compared is timed in turns, steps several in
    a row as in training.
    """
    torch.manual_seed(seed)
    repeats = config["repeats"]
    fits: list[dict[str, Any]] = []
    passes: list[list[dict[str, Any]]] = []
    timings: dict[str, Timing] = {}
    for resolution in config["resolutions"]:
        sizes = config["batch_sizes"] if config["passes"] is True else config["passes"] or []
        runs = {
            f"{n}, {d}": _pass(config, resolution, n, d, device)
            for n, d in ((n, config["samples"]) for n in sizes)
        }
        fit, timed = _fitted(config, resolution, runs, max(3, repeats // 2), device)
        timings |= {f"{resolution}px, {name}": timing for name, timing in timed.items()}
        fits.append(
            {"resolution": resolution, "a": fit.a, "b": fit.b, "seconds": list(fit.seconds)}
        )
        passes.append([_predicted(fit, n, config["samples"], timed) for n in sizes])
    each = list(zip(config["resolutions"], config["large_batches"], strict=True))
    epochs = {
        str(side): _pass(config, side, batch, config["samples"], device) for side, batch in each
    }
    timed = time_interleaved(epochs, warmup=1, repeats=repeats, device=device)
    timings |= {f"epoch at {name}px": timing for name, timing in timed.items()}
    epoch_s = {str(side): timed[str(side)].median_s for side, _ in each}
    shares = _shares(config, fits[-1], device) if "plan_k" in config else []
    return Outcome(
        {"fits": fits, "passes": passes, "epoch_s": epoch_s, "shares": shares}, timings=timings
    )


def _fitted(
    config: Config,
    resolution: int,
    others: dict[str, Callable[[], None]],
    repeats: int,
    device: str,
) -> tuple[TimeModel, dict[str, Timing]]:
    """Fit the time model to steps, in turns with other runs; the timings are of both.

    Where a busy machine makes smaller batches look slower, all is measured again, twice as often.
    """
    sizes = config["batch_sizes"]
    rows = {f"step of {n}": _pass(config, resolution, n, STEPS_IN_A_ROW * n, device) for n in sizes}
    most = 4 * repeats
    while True:
        timed = time_interleaved(rows | others, warmup=1, repeats=repeats, device=device)
        steps = [timed[f"step of {n}"].median_s / STEPS_IN_A_ROW for n in sizes]
        try:
            return TimeModel.fit(sizes, steps), timed
        except ValueError:
            if repeats >= most:
                raise
            repeats = min(most, 2 * repeats)


def _predicted(
    fit: TimeModel, batch: int, samples: int, timed: dict[str, Timing]
) -> dict[str, Any]:
    """Return the measured time of a pass beside what the model predicts."""
    return {
        "batch": batch,
        "samples": samples,
        "measured_s": timed[f"{batch}, {samples}"].median_s,
        "equation2_s": fit.epoch_time(batch, samples),
        "equation3_s": fit.epoch_time(batch, samples, approximate=True),
        "predicted_s": fit.pass_time(batch, samples),
    }


def _pass(
    config: Config, resolution: int, batch: int, samples: int, device: str
) -> Callable[[], None]:
    """Return a pass over so many samples, with the last batch as short as it is."""
    model = build_model(config, config["classes"]).to(device).train()
    full, rest = divmod(samples, batch)
    step = step_of(config, model, resolution, batch, device) if full else None
    last = step_of(config, model, resolution, rest, device) if rest else None

    def run() -> None:
        for _ in range(full):
            step()  # type: ignore[misc]
        if last is not None:
            last()

    return run


def _shares(config: Config, fit: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """Time the shares of plans solved with the fitted model, as Table 4 does."""
    model, side = TimeModel(fit["a"], fit["b"]), fit["resolution"]
    rows: list[dict[str, Any]] = []
    for k, n_small in itertools.product(config["plan_k"], range(1, WORKERS + 1)):
        row: dict[str, Any] = {"k": k, "n_small": n_small}
        try:
            plan = DualBatchPlan.solve(
                model, k, n_small, WORKERS - n_small, config["plan_large_batch"], config["samples"]
            )
        except ValueError as error:  # there may be none for the times of this device
            rows.append(row | {"error": str(error)})
            continue
        for kind in dict.fromkeys(plan.kinds):
            pair = {"batch": plan.batch_of(kind), "samples": plan.share_of(kind)}
            rows.append(row | {"kind": kind} | pair)
    pairs = dict.fromkeys((row["batch"], row["samples"]) for row in rows if "batch" in row)
    runs = {f"{n}, {d}": _pass(config, side, n, d, device) for n, d in pairs}
    again, timed = _fitted(config, side, runs, config["repeats"], device)
    for row in rows:
        if "batch" in row:
            row |= _predicted(again, row["batch"], row["samples"], timed)
    return rows


def published(config: Config, seed: int, data: EpochTimes | None, device: str) -> Outcome:
    """Fit the time model to the authors' raw measurements (Figures 3 and 4)."""
    assert data is not None
    batches = sorted({row["batch"] for row in reported("dualbatch")["table4"]["rows"]})
    fits = {}
    for framework, seconds in data.seconds.items():
        sizes = np.arange(1, len(seconds) + 1)
        per_batch = seconds / np.ceil(data.samples / sizes)
        fit = TimeModel.fit(sizes.tolist(), per_batch.tolist())
        predicted = np.array([fit.epoch_time(int(n), data.samples) for n in sizes])
        errors = seconds / predicted - 1
        worst = int(np.abs(errors).argmax())
        allowed = reported("dualbatch")["claims"]["time_error"] / 100
        shown = list(range(20, len(seconds) + 1, 20))
        fits[framework] = {
            "a": fit.a,
            "b": fit.b,
            "plan_errors": {str(n): float(errors[n - 1]) for n in batches if n <= len(seconds)},
            "largest_error": float(np.abs(errors[worst])),
            "largest_at": worst + 1,
            "share_beyond": float((np.abs(errors) > allowed).mean()),
            "r_squared": float(np.corrcoef(sizes, per_batch)[0, 1] ** 2),
            "table2": [row["small_batch"] for row in _table2_rows(TimeModel(fit.a, fit.b))],
            "median_error": float(np.median(np.abs(errors))),
            "batches": shown,
            "per_batch_s": [float(per_batch[n - 1]) for n in shown],
            "epoch_s": [float(seconds[n - 1]) for n in shown],
            "predicted_s": [float(predicted[n - 1]) for n in shown],
        }
    return Outcome({"frameworks": fits})


def memory(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Fit the memory model and find the largest batch under a limit (Figure 13)."""
    torch.manual_seed(seed)
    sizes = config["batch_sizes"]
    peaks = comparable_peaks([_measured(config, n, device) for n in sizes])
    fit = MemoryModel.fit(sizes, peaks)
    limit = config["limit_bytes"] or int(config["limit_over_largest_probe"] * peaks[-1])
    predicted = fit.max_batch(limit)
    measured = largest_batch(
        lambda n: _fits(config, n, limit, device), guess=predicted, growth=1.125, within=100
    )
    beyond = [n for n in (predicted // 2, min(predicted, measured)) if n > sizes[-1]]
    return Outcome(
        metrics={
            "batch_sizes": sizes,
            "peaks": peaks,
            "fixed_bytes": fit.fixed_bytes,
            "bytes_per_sample": fit.bytes_per_sample,
            "limit_bytes": limit,
            "predicted_max": predicted,
            "measured_max": measured,
            "beyond": [[n, _measured(config, n, device).peak_reserved_bytes] for n in beyond],
        },
        peak_bytes=peaks[-1],
    )


def _measured(config: Config, batch: int, device: str) -> MemoryMeter:
    model = build_model(config, config["classes"]).to(device).train()
    step = step_of(config, model, config["resolution"], batch, device)
    with MemoryMeter(device, resident=model) as meter:
        step()
        step()  # in the first one the optimizer makes its state
    return meter


def _fits(config: Config, batch: int, limit: int, device: str) -> bool:
    try:
        if device == "cpu":
            model = build_model(config, config["classes"]).train()
            step = step_of(config, model, config["resolution"], batch, device)
            with MemoryBudget(limit, device, resident=model):
                step()
                step()
        else:
            with MemoryBudget(limit, device):
                step = training_step(config, config["resolution"], batch, device)
                step()
                step()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True
