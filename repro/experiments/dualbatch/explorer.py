"""Any plan, live: its batch sizes, shares and factor, and what every worker does when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from repro import plots
from repro.dualbatch import DualBatchPlan, largest_k
from repro.experiments.dualbatch.settings import PAPER, WORKERS
from repro.measure import TimeModel

COLOURS = {"large": "#1f6fb4", "small": "#e07a3f"}


@dataclass(frozen=True)
class Setting:
    """What a plan is solved for: times of a device, and samples of an epoch."""

    name: str
    times: TimeModel
    samples: int


def paper_setting() -> Setting:
    """Return the setting of Table 2: ResNet-18 on CIFAR-100, GTX 1080."""
    inferred = PAPER["inferred"]
    times = TimeModel(inferred["a"], inferred["b"])
    return Setting("ResNet-18, GTX 1080", times, PAPER["cifar_samples"])


def solve(setting: Setting, k: float, n_small: int, large_batch: int) -> DualBatchPlan | str:
    """Return the plan, or in words why there is none."""
    try:
        return DualBatchPlan.solve(
            setting.times, k, n_small, WORKERS - n_small, large_batch, setting.samples, "floor"
        )
    except ValueError as error:
        return str(error)


def describe(plan: DualBatchPlan | str) -> str:
    """Return a plan in a few words, or why there is none."""
    if isinstance(plan, str):
        return f"no such plan: {plan}"
    parts = [f"(n_S, n_L) = ({plan.n_small}, {plan.n_large}), k = {plan.k:g}"]
    if plan.n_small:
        parts.append(f"B_S = {plan.small_batch}, d_S = {plan.small_samples:,}")
    if plan.n_large:
        parts.append(f"B_L = {plan.large_batch}, d_L = {plan.large_samples:,}")
    parts.append(f"factor {plan.update_factor:.3f}")
    times = " and ".join(f"{plan.time_of(kind):.3f}" for kind in dict.fromkeys(plan.kinds))
    return "; ".join([*parts, f"predicted {times} s"])


def _steps(plan: DualBatchPlan, worker: int) -> list[tuple[float, float]]:
    kind = plan.kinds[worker]
    batch, left = plan.batch_of(kind), plan.share_of(kind)
    spans, now = [], 0.0
    while left > 0:
        seconds = plan.time_model.predict(min(batch, left))
        spans.append((now, seconds))
        now, left = now + seconds, left - batch
    return spans


def draw(plan: DualBatchPlan) -> Figure:
    """Draw the predicted steps of every worker in one epoch."""
    spans = [{"kind": kind, "steps": _steps(plan, i)} for i, kind in enumerate(plan.kinds)]
    names = [f"worker {i}, {kind}" for i, kind in enumerate(plan.kinds)]
    baseline = plan.time_model.pass_time(plan.large_batch, round(plan.samples / plan.n))
    return draw_workers(spans, names, baseline)


def draw_choices(setting: Setting, large_batch: int, plan: DualBatchPlan | None) -> Figure:
    """Draw B_S against k for every number of small-batch workers."""
    lines = {}
    for n_small in range(1, WORKERS + 1):
        top = min(1.3, largest_k(setting.times, n_small, WORKERS - n_small, large_batch))
        points = []
        for step in range(1, 61):
            k = 1 + (top - 1) * step / 60
            found = solve(setting, k, n_small, large_batch)
            if isinstance(found, DualBatchPlan) and found.small_batch:
                points.append((k, float(found.small_batch)))
        lines[f"n_S = {n_small}"] = points
    chosen = (plan.k, float(plan.small_batch)) if plan and plan.small_batch else None
    return draw_frontier(lines, chosen)


def draw_all(setting: Setting, large_batch: int, plan: DualBatchPlan | str) -> list[Figure]:
    """Return the figures of a plan; none where there is none."""
    if isinstance(plan, str):
        return []
    return [draw(plan), draw_choices(setting, large_batch, plan)]


def draw_workers(
    spans: Sequence[Mapping[str, Any]], names: Sequence[str], baseline_s: float
) -> Figure:
    """Draw what every worker does in the first epochs, step by step.

    Args:
        spans: Of each worker: ``kind``, and ``steps``, (start, seconds) of every step.
        names: One for each worker.
        baseline_s: Seconds of an epoch in which all workers have large batches.
    """
    figure, axes = plots.new_axes(1, 1, 9.5, 1.5 + 0.42 * len(spans))
    axis = axes[0, 0]
    named: set[str] = set()
    for row, span in enumerate(spans):
        label = f"{span['kind']}-batch worker: a step" if span["kind"] not in named else None
        named.add(span["kind"])
        axis.broken_barh(
            span["steps"],
            (row - 0.36, 0.72),
            color=COLOURS[span["kind"]],
            edgecolor="white",
            lw=0.3,
            label=label,
        )
    axis.axvline(
        baseline_s, color="#c0392b", ls="--", lw=1.2, label="an epoch with large batches alone"
    )
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set_xlim(left=0)
    axis.set_xlabel("predicted time of one epoch (s)")
    plots.legend_below(figure, 3)
    return figure


def draw_frontier(
    lines: Mapping[str, Sequence[tuple[float, float]]], chosen: tuple[float, float] | None
) -> Figure:
    """Draw B_S against k for every number of small-batch workers, and the chosen plan."""
    figure, axes = plots.new_axes(1, 1, 5.2, 3.2)
    axis = axes[0, 0]
    for (label, points), colour in zip(lines.items(), plots.PALETTE[1:], strict=False):
        if points:
            axis.plot(*zip(*points, strict=True), color=colour, lw=1.5, label=label)
    if chosen is not None:
        axis.plot(*chosen, "o", color="#c0392b", ms=8, label="chosen", zorder=5)
    axis.set(xlabel="extra training time ratio k", ylabel="small batch size B_S")
    axis.set_ylim(bottom=0)
    plots.legend_below(figure, 5)
    return figure
