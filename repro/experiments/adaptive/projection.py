"""Strong scaling: the model fitted to measured steps, to the paper's speed-ups, and projected."""

import math
from functools import cache
from typing import TYPE_CHECKING, Any

from repro.experiments.adaptive.settings import DIV2K, PAPER

if TYPE_CHECKING:
    from repro.adaptive import MeasuredStep, ScalingModel

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SCALED = ("best", "scheduled", "theta")
OURS = "all_to_all"  # the paper's way of averaging


def paper_schedule(task: str, strategy: str) -> list[tuple[int, int]]:
    """Return the paper's batch sizes and for how many epochs it used each."""
    paper = PAPER[task][strategy]
    epochs = paper.get("epochs", PAPER[task]["epochs"])
    if "max_batch" not in paper:
        return [(paper["batch"], epochs)]
    every = PAPER[task]["interval"] if strategy == "theta" else paper["every"]
    schedule, size, left = [], paper["batch"], epochs
    while size < paper["max_batch"]:
        schedule.append((size, every))
        size, left = 2 * size, left - every
    return [*schedule, (size, left)]


def nodes_of(task: str, strategy: str) -> list[int]:
    """Return the numbers of nodes that a strategy can use: at most its largest batch size."""
    paper = PAPER[task][strategy]
    return [n for n in NODES if n <= paper.get("max_batch", paper["batch"])]


def overhead() -> float:
    """Return the cost of a step in samples, by section VI-B's example."""
    one, two = PAPER["section6b"]["one_sample_s"], PAPER["section6b"]["two_samples_s"]
    return float((2 * one - two) / (two - one))


@cache
def fitted_to_paper(
    task: str, left_out: str | None = None, overhead_samples: float | None = None
) -> "ScalingModel":
    """Fit the model to the paper's speed-ups of a task, all or all but one strategy's.

    Where the paper does not say how many nodes a speed-up takes, it is the largest on any number.

    Args:
        task: One of `settings.TASKS`.
        left_out: The strategy that is not fitted to.
        overhead_samples: Cost of a step in samples; None fits it, between 0 and `overhead`.
    """
    from repro.adaptive import ScalingModel

    points = [
        (paper_schedule(task, strategy), [nodes] if nodes else nodes_of(task, strategy), value)
        for strategy, (nodes, value) in PAPER[task]["speedups"].items()
        if strategy != left_out
    ]
    fixed = overhead_samples
    bounds = (0.0, overhead()) if fixed is None else (fixed, fixed)
    return ScalingModel.fit_speedups(points, PAPER[task]["samples"], bounds)


def predicted(task: str, strategy: str) -> tuple[float, float]:
    """Return a strategy's speed-up from the other two's, without and with section VI-B's cost."""
    models = [fitted_to_paper(task, strategy, o) for o in (0.0, overhead())]
    without, whole = (best_speedup(model, task, strategy) for model in models)
    return without, whole


def best_speedup(model: "ScalingModel", task: str, strategy: str) -> float:
    """Return the modelled speed-up where the paper has it: at its nodes, or its largest."""
    nodes = PAPER[task]["speedups"][strategy][0]
    choices = [nodes] if nodes else nodes_of(task, strategy)
    schedule, samples = paper_schedule(task, strategy), PAPER[task]["samples"]
    return max(model.speedup(schedule, samples, n) for n in choices)


def largest_speedup(model: "ScalingModel", task: str, strategy: str) -> tuple[float, int]:
    """Return the largest modelled speed-up, and on how many nodes it is reached."""
    schedule, samples = paper_schedule(task, strategy), PAPER[task]["samples"]
    return max((model.speedup(schedule, samples, n), n) for n in nodes_of(task, strategy))


def steps_of(measurement: dict[str, Any], averaging: str) -> "list[MeasuredStep]":
    """Return the measured steps of a way of averaging; ``none`` is one process."""
    from repro.adaptive import MeasuredStep

    return [
        MeasuredStep(
            # Here the thread that communicates also sums, so that sums can be hidden like it.
            step["batch"],
            step["processes"],
            step["computation_s"],
            step["communication_s"] + step["summation_s"],
            0.0,
            step["blocked_s"],
        )
        for step in measurement["steps"]
        if step["averaging"] == averaging
    ]


def fitted_here(measurement: dict[str, Any], without: int | None = None) -> "ScalingModel | None":
    """Fit the model to what was measured of a task here, without the steps of one batch size.

    The steps left out are those of several processes; what one process computes is always known.
    None where nothing was measured together, or times do not grow with the samples: steps of a
    toy model cost the same whatever they compute, and two processes slow each other down.
    """
    from repro.adaptive import ScalingModel

    together = [step for step in steps_of(measurement, OURS) if step.batch_size != without]
    if not together:
        return None
    try:
        return ScalingModel.fit(
            [*steps_of(measurement, "none"), *together],
            [(size, number, seconds) for size, number, seconds in measurement["messages"][OURS]],
            measurement["gradient_bytes"],
            measurement["buckets"],
        )
    except ValueError:
        return None


def checked(measurement: dict[str, Any]) -> list[dict[str, float]]:
    """Return measured steps of two processes beside what the model says without them.

    Each step is modelled from the other batch sizes on two processes, and from one process.
    """
    alone = {step.batch_size: step for step in steps_of(measurement, "none")}
    models = [
        (step, fitted_here(measurement, step.batch_size)) for step in steps_of(measurement, OURS)
    ]
    return [
        {
            "batch": step.batch_size,
            "alone_s": alone[step.batch_size].computation_s,
            "measured_s": step.computation_s + step.blocked_s,
            "predicted_s": model.step(step.batch_size, step.processes).total_s
            if model
            else float("nan"),
        }
        for step, model in models
    ]


def two_processes(measurement: dict[str, Any], task: str, strategy: str) -> float:
    """Return the modelled speed-up of two processes for the paper's schedule.

    Batch sizes are at the scale of what was measured; each step counts as often as the schedule
    has it. The modelled steps are those of `checked`, which have not seen what they are checked by;
    NaN where there is no model.
    """
    rows = {int(row["batch"]): row for row in checked(measurement)}
    scale = min(rows) / PAPER[task]["best"]["batch"]
    totals = {"alone_s": 0.0, "predicted_s": 0.0}
    for size, epochs in paper_schedule(task, strategy):
        row = rows[round(size * scale)]
        for name in totals:
            totals[name] += row[name] * epochs * math.ceil(PAPER[task]["samples"] / size)
    return totals["alone_s"] / totals["predicted_s"]


def end_to_end(
    measurement: dict[str, Any], task: str, strategy: str, averaging: str
) -> list[float]:
    """Return the seconds of the paper's training by measured steps, one value for each turn.

    Its epochs to the target are the paper's, and so are the mini-batches of an epoch: what is
    measured at the scale of other batch sizes counts as often as the paper's own.
    """
    steps = {
        s["batch"]: s["samples_s"] for s in measurement["steps"] if s["averaging"] == averaging
    }
    if not steps:
        return []
    scale = min(steps) / PAPER[task]["best"]["batch"]
    counts = {
        size: epochs * math.ceil(PAPER[task]["samples"] / size)
        for size, epochs in paper_schedule(task, strategy)
    }
    turns = [
        [count * seconds for seconds in steps[round(size * scale)]]
        for size, count in counts.items()
    ]
    return [math.fsum(turn) for turn in zip(*turns, strict=True)]


def breakdown(model: "ScalingModel", nodes: int) -> dict[str, float]:
    """Return where the time of the paper's θ-adaptive training on DIV2K goes (Figure 9).

    Returns:
        Computation, computation at B = B_m, communication and blocked time, over the computation
        on one node; and the share of all time that passes before the batch is B_m.
    """
    samples, schedule = PAPER[DIV2K]["samples"], paper_schedule(DIV2K, "theta")
    alone = model.breakdown(schedule, samples, 1).computation_s
    whole = model.breakdown(schedule, samples, nodes)
    last = model.breakdown(schedule[-1:], samples, nodes)
    return {
        "computation": whole.computation_s / alone,
        "computation at B_m": last.computation_s / alone,
        "communication": whole.communication_s / alone,
        "blocked": whole.blocked_s / alone,
        "before B_m": 1 - last.total_s / whole.total_s,
    }


def breakdowns() -> "dict[str, tuple[ScalingModel, dict[int, dict[str, float]]]]":
    """Return the paper's modelled cluster and its `breakdown` by nodes, for each cost of small
    batches: fitted, and section VI-B's.
    """
    modelled = {}
    for label, cost in (("fitted", None), ("section VI-B's", overhead())):
        model = fitted_to_paper(DIV2K, None, cost)
        modelled[label] = model, {nodes: breakdown(model, nodes) for nodes in NODES}
    return modelled
