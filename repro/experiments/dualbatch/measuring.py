"""Plans and schedules that are solved; times of steps, and memory, that are measured."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from repro import measure
from repro.datasets import EpochTimes
from repro.dualbatch import CyclicProgressiveSchedule, DualBatchPlan, Stage, SubStage
from repro.experiments.design import Config, Outcome
from repro.experiments.dualbatch.building import build_model, step_of
from repro.experiments.dualbatch.runs import PAPER, PARTS, STEPS_IN_A_ROW, WORKERS
from repro.experiments.dualbatch.training import plan_row


def solve(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Solve Table 2 or 6, or lay out the schedule of Table 7 or 9."""
    table = config["table"]
    if table == "table2":
        rows = _table2_rows(measure.TimeModel(PAPER["inferred"]["a"], PAPER["inferred"]["b"]))
    elif table == "table6":
        rows = [
            plan_row(sub.plan, sub.resolution)
            for part in PARTS.values()
            for subs in zip(*(_sub_stages(part, n) for n in range(WORKERS + 1)), strict=True)
            for sub in subs
        ]
    else:
        subs = _sub_stages("cifar" if table == "table7" else "imagenet", 1)
        rows = _spans(PAPER[table]["stages"], {"dual-batch": subs[-1:], "hybrid": subs})
    return Outcome({"rows": rows})


def schemes(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Lay out the first stages of Table 7 by each scheme of Table 1."""
    both = _sub_stages("cifar", config["n_small"])
    subs = {
        "dual-batch learning": both[-1:],
        "cyclic progressive learning": _sub_stages("cifar", 0),
        "hybrid scheme": both,
    }
    rows = _spans(PAPER["table7"]["stages"][: config["stages"]], subs)
    for row in rows:
        row["rate"], *sizes = (row.pop(name) for name in ("lr", "small_batch", "large_batch"))
        row["batches"] = [size for size in sizes if size]
    return Outcome({"rows": rows})


def _sub_stages(part: str, n_small: int) -> list[SubStage]:
    """The plans of Table 6 at each resolution, with the dropout of Table 7 or 9."""
    table, k, samples = PAPER["table6"][part], PAPER["table6"]["k"], PAPER[f"{part}_samples"]
    dropouts = PAPER["table7" if part == "cifar" else "table9"]["dropouts"]
    subs = []
    for side, large, dropout in zip(
        table["resolutions"], table["large_batches"], dropouts, strict=True
    ):
        model = measure.TimeModel(1.0, PAPER["inferred"][f"ratio_{side}"])
        plan = DualBatchPlan.solve(model, k, n_small, WORKERS - n_small, large, samples)
        subs.append(SubStage(side, dropout, plan))
    return subs


def _spans(
    stages: Sequence[Sequence[float]], schemes: Mapping[str, Sequence[SubStage]]
) -> list[dict[str, Any]]:
    """The spans of epochs that have the same settings, and those."""
    names = ("stage", "sub_stage", "resolution", "dropout", "lr", "small_batch", "large_batch")
    rows = []
    for scheme, subs in schemes.items():
        schedule = CyclicProgressiveSchedule([Stage(int(n), rate) for n, rate in stages], subs)
        for _, span in itertools.groupby(schedule, lambda s: (s.stage, s.sub_stage)):
            epochs = list(span)
            row = {name: getattr(epochs[0], name) for name in names}
            row |= {"scheme": scheme, "first": epochs[0].epoch, "last": epochs[-1].epoch}
            rows.append(row)
    return rows


def _table2_rows(model: measure.TimeModel) -> list[dict[str, Any]]:
    sizes, rows = (PAPER["table2"]["large_batch"], PAPER["cifar_samples"]), PAPER["table2"]["rows"]
    pairs = [(row["k"], row["n_small"]) for row in rows]
    plans = [DualBatchPlan.solve(model, k, n, WORKERS - n, *sizes, "floor") for k, n in pairs]
    return [plan_row(plan, None) for plan in plans]


def times(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Time steps, passes and shares on random images, and fit a line (Figures 3, 4, Table 4)."""
    torch.manual_seed(seed)
    repeats, samples = config["repeats"], config["samples"]
    sizes = config["batch_sizes"] if config["passes"] is True else config["passes"]
    fits, passes, timings = [], [], dict[str, measure.Timing]()
    for side in config["resolutions"]:
        pairs = [(n, samples) for n in sizes]
        fit, timed = fitted(config, side, pairs, max(3, repeats // 2), device)
        timings |= {f"{side}px, {name}": timing for name, timing in timed.items()}
        fits.append({"resolution": side, "a": fit.a, "b": fit.b, "seconds": list(fit.seconds)})
        passes.append([_predicted(fit, n, samples, timed) for n in sizes])
    epochs = {
        str(side): _pass(config, side, batch, samples, device)
        for side, batch in zip(config["resolutions"], config["large_batches"], strict=True)
    }
    timed = measure.time_interleaved(epochs, warmup=1, repeats=repeats, device=device)
    timings |= {f"epoch at {side}px": timing for side, timing in timed.items()}
    epoch_s = {side: timing.median_s for side, timing in timed.items()}
    shares = _shares(config, fits[-1], device)
    metrics = {"fits": fits, "passes": passes, "epoch_s": epoch_s, "shares": shares}
    return Outcome(metrics, timings=timings)


def fitted(
    config: Config, resolution: int, passes: Iterable[tuple[int, int]], repeats: int, device: str
) -> tuple[measure.TimeModel, dict[str, measure.Timing]]:
    """Fit the time model to steps, in turns with passes of (batch, samples); all are timed.

    Where a busy machine makes smaller batches look slower, all is measured again, twice as often;
    `ValueError` where they still do in four times the repeats.
    """
    sizes = config["batch_sizes"]
    runs = {f"step of {n}": (n, STEPS_IN_A_ROW * n) for n in sizes}
    runs |= {f"{n}, {samples}": (n, samples) for n, samples in passes}
    steps = {name: _pass(config, resolution, *run, device) for name, run in runs.items()}
    for turns in (repeats, 2 * repeats, 4 * repeats):
        timed = measure.time_interleaved(steps, warmup=1, repeats=turns, device=device)
        seconds = [timed[f"step of {n}"].median_s / STEPS_IN_A_ROW for n in sizes]
        with suppress(ValueError):
            return measure.TimeModel.fit(sizes, seconds), timed
    return measure.TimeModel.fit(sizes, seconds), timed


def _predicted(
    fit: measure.TimeModel, batch: int, samples: int, timed: Mapping[str, measure.Timing]
) -> dict[str, Any]:
    """The measured time of a pass, and the time model's."""
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
    """A pass over so many samples, with the last batch as short as it is."""
    model = build_model(config, config["classes"], device)
    full, rest = divmod(samples, batch)
    steps = [step_of(config, model, resolution, batch, device)] * full if full else []
    steps += [step_of(config, model, resolution, rest, device)] if rest else []

    def run() -> None:
        for step in steps:
            step()

    return run


def _shares(config: Config, fit: Mapping[str, Any], device: str) -> list[dict[str, Any]]:
    """Time the shares of plans solved with the fitted model, as Table 4 does."""
    model, side = measure.TimeModel(fit["a"], fit["b"]), fit["resolution"]
    large, samples = config["plan_large_batch"], config["samples"]
    rows: list[dict[str, Any]] = []
    for k, n_small in itertools.product(config["plan_k"], range(1, WORKERS + 1)):
        row = {"k": k, "n_small": n_small}
        try:
            plan = DualBatchPlan.solve(model, k, n_small, WORKERS - n_small, large, samples)
        except ValueError as error:  # there may be none for the times of this device
            rows.append(row | {"error": str(error)})
            continue
        rows += [
            row | {"kind": kind, "batch": plan.batch_of(kind), "samples": plan.share_of(kind)}
            for kind in dict.fromkeys(plan.kinds)
        ]
    pairs = dict.fromkeys((row["batch"], row["samples"]) for row in rows if "batch" in row)
    again, timed = fitted(config, side, pairs, config["repeats"], device)
    for row in rows:
        if "batch" in row:
            row |= _predicted(again, row["batch"], row["samples"], timed)
    return rows


def published(config: Config, seed: int, data: EpochTimes, device: str) -> Outcome:
    """Fit the time model to the authors' raw measurements (Figures 3 and 4)."""
    batches = sorted({row["batch"] for row in PAPER["table4"]["rows"]})
    allowed = PAPER["claims"]["time_error"] / 100
    fits = {}
    for framework, seconds in data.seconds.items():
        sizes = np.arange(1, len(seconds) + 1)
        per_batch = seconds / np.ceil(data.samples / sizes)
        fit = measure.TimeModel.fit(sizes.tolist(), per_batch.tolist())
        predicted = np.array([fit.epoch_time(int(n), data.samples) for n in sizes])
        errors = seconds / predicted - 1
        worst = int(np.abs(errors).argmax())
        shown = list(range(20, len(seconds) + 1, 20))
        fits[framework] = {
            "a": fit.a,
            "b": fit.b,
            "plan_errors": {str(n): float(errors[n - 1]) for n in batches if n <= len(seconds)},
            "largest_error": float(np.abs(errors[worst])),
            "largest_at": worst + 1,
            "share_beyond": float((np.abs(errors) > allowed).mean()),
            "r_squared": float(np.corrcoef(sizes, per_batch)[0, 1] ** 2),
            "table2": [row["small_batch"] for row in _table2_rows(measure.TimeModel(fit.a, fit.b))],
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
    sizes, meter = config["batch_sizes"], partial(measure.MemoryMeter, device)
    peaks = measure.comparable_peaks([_two_steps(config, n, device, meter) for n in sizes])
    fit = measure.LinearMemoryModel.fit(sizes, peaks)
    limit = config["limit_bytes"] or int(config["limit_over_largest_probe"] * peaks[-1])
    predicted = fit.largest_batch(limit)
    measured = measure.largest_batch(
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
            "beyond": [
                [n, _two_steps(config, n, device, meter).peak_reserved_bytes] for n in beyond
            ],
        },
        peak_bytes=peaks[-1],
    )


def _two_steps(config: Config, batch: int, device: str, watched: Callable[..., Any]) -> Any:
    """Take two steps within a context of the model: in the first the optimizer makes its state."""
    model = build_model(config, config["classes"], device)
    step = step_of(config, model, config["resolution"], batch, device)
    with watched(model) as meter:
        step()
        step()
    return meter


def _fits(config: Config, batch: int, limit: int, device: str) -> bool:
    try:
        if device == "cpu":
            _two_steps(config, batch, device, partial(measure.MemoryBudget, limit, device))
        else:  # the limit is on all that is there
            with measure.MemoryBudget(limit, device):
                _two_steps(config, batch, device, nullcontext)
    except Exception as error:
        if not measure.is_out_of_memory(error):
            raise
        return False
    return True
