"""Strong scaling: the model fitted to measured steps, to the paper's speed-ups, and projected."""

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from repro.experiments.adaptive.runs import DIV2K, PAPER, paper_schedule

if TYPE_CHECKING:
    from repro.adaptive import MeasuredStep, ScalingModel

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SCALED = ("best", "scheduled", "theta")
OURS = "all_to_all"  # the paper's way of averaging


def nodes_of(task: str, strategy: str) -> list[int]:
    """The numbers of nodes that a strategy can use: at most its largest batch size."""
    paper = PAPER[task][strategy]
    return [n for n in NODES if n <= paper.get("max_batch", paper["batch"])]


def overhead() -> float:
    """The cost of a step in samples, by section VI-B's example."""
    one, two = PAPER["section6b"]["one_sample_s"], PAPER["section6b"]["two_samples_s"]
    return float((2 * one - two) / (two - one))


@cache
def fitted_to_paper(
    task: str, left_out: str | None = None, overhead_samples: float | None = None
) -> "ScalingModel":
    """Fit the model to the paper's speed-ups of a task, all or all but one strategy's.

    Where the paper does not say how many nodes a speed-up takes, it is the largest on any number.
    The cost of a step, in samples, is fitted between 0 and `overhead` where it is None.
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


def speedups(model: "ScalingModel", task: str, strategy: str) -> dict[int, float]:
    """A strategy's modelled speed-ups by nodes, for the paper's schedule."""
    schedule, samples = paper_schedule(task, strategy), PAPER[task]["samples"]
    return {n: model.speedup(schedule, samples, n) for n in nodes_of(task, strategy)}


def held_out(task: str, strategy: str) -> "list[ScalingModel]":
    """The models fitted to the other two strategies, without and with section VI-B's cost."""
    return [fitted_to_paper(task, strategy, cost) for cost in (0.0, overhead())]


def predicted(task: str, strategy: str) -> tuple[float, float]:
    """A strategy's speed-up from the other two's, without and with section VI-B's cost.

    At the paper's nodes; where it names none, the largest on any number.
    """
    nodes = PAPER[task]["speedups"][strategy][0]
    by_nodes = [speedups(model, task, strategy) for model in held_out(task, strategy)]
    without, whole = (own[nodes] if nodes else max(own.values()) for own in by_nodes)
    return without, whole


def _steps_of(measurement: Mapping[str, Any], averaging: str) -> "list[MeasuredStep]":
    """The measured steps of a way of averaging; ``none`` is one process."""
    from repro.adaptive import MeasuredStep

    return [
        MeasuredStep(
            # Here the thread that communicates also sums, so that sums can be hidden like it.
            step["batch"],
            step["processes"],
            step["computation_s"],
            step["communication_s"] + step["summation_s"],
            step["blocked_s"],
        )
        for step in measurement["steps"]
        if step["averaging"] == averaging
    ]


def fitted_here(
    measurement: Mapping[str, Any], without: int | None = None
) -> "ScalingModel | None":
    """Fit the model to a task's steps measured here, without those of one batch size.

    Steps of several processes are left out; those of one process are always known.
    None where nothing was measured together, or times do not grow with the samples: steps of a
    toy model cost the same whatever they compute, and two processes slow each other down.
    """
    from repro.adaptive import ScalingModel

    together = [step for step in _steps_of(measurement, OURS) if step.batch_size != without]
    if not together:
        return None
    try:
        return ScalingModel.fit(
            [*_steps_of(measurement, "none"), *together],
            [(size, number, seconds) for size, number, seconds in measurement["messages"][OURS]],
            measurement["gradient_bytes"],
            measurement["buckets"],
        )
    except ValueError:
        return None


def steps_without(measurement: Mapping[str, Any]) -> dict[int, float]:
    """Seconds of a step of two processes, as the model has them without that step, by batch size.

    Each step is modelled from the other batch sizes on two processes, and from one process; NaN
    where there is no model.
    """
    found = {}
    for step in _steps_of(measurement, OURS):
        model, size = fitted_here(measurement, step.batch_size), step.batch_size
        found[size] = model.step(size, step.processes).total_s if model else math.nan
    return found


def end_to_end(
    measurement: Mapping[str, Any], task: str, strategy: str, averaging: str
) -> list[float]:
    """Seconds of the paper's training by measured steps, one value for each turn.

    Its epochs to the target are the paper's, and so are the mini-batches of an epoch: a step at the
    scale of other batch sizes counts as often as the paper's own.
    """
    every = [step for step in measurement["steps"] if step["averaging"] == averaging]
    steps = {step["batch"]: step["samples_s"] for step in every}
    if not steps:
        return []
    scale, samples = min(steps) / PAPER[task]["best"]["batch"], PAPER[task]["samples"]
    turns = [
        [epochs * math.ceil(samples / size) * seconds for seconds in steps[round(size * scale)]]
        for size, epochs in paper_schedule(task, strategy)
    ]
    return [math.fsum(turn) for turn in zip(*turns, strict=True)]


def breakdown(model: "ScalingModel", nodes: int) -> dict[str, float]:
    """Where the time of the paper's θ-adaptive training on DIV2K goes (Figure 9).

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
    """The paper's modelled cluster and its `breakdown` by nodes, for each cost of small batches.

    The cost is fitted, or section VI-B's.
    """
    costs = {"fitted": None, "section VI-B's": overhead()}
    models = {label: fitted_to_paper(DIV2K, None, cost) for label, cost in costs.items()}
    return {
        label: (model, {nodes: breakdown(model, nodes) for nodes in NODES})
        for label, model in models.items()
    }
