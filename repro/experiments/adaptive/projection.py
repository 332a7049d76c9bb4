"""Models of strong scaling, fitted to the paper's speed-ups and to steps measured here."""

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from repro import adaptive
from repro.experiments.adaptive.runs import DIV2K, PAPER, paper_schedule

if TYPE_CHECKING:
    from repro.adaptive.scaling import StepCost

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SCALED = ("best", "scheduled", "theta")
OURS = "all_to_all"  # the paper's averaging


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
) -> "adaptive.ScalingModel":
    """Fit the model to the paper's speed-ups of a task, all or all but one strategy's.

    Where the paper does not say how many nodes a speed-up takes, it is the largest on any number.
    """
    points = [
        (paper_schedule(task, strategy), [nodes] if nodes else nodes_of(task, strategy), value)
        for strategy, (nodes, value) in PAPER[task]["speedups"].items()
        if strategy != left_out
    ]
    fixed = overhead_samples
    bounds = (0.0, overhead()) if fixed is None else (fixed, fixed)
    return adaptive.ScalingModel.fit_speedups(points, PAPER[task]["samples"], bounds)


def speedups(model: "adaptive.ScalingModel", task: str, strategy: str) -> dict[int, float]:
    """A strategy's modelled speed-ups by nodes, for the paper's schedule."""
    schedule, samples = paper_schedule(task, strategy), PAPER[task]["samples"]
    return {n: model.speedup(schedule, samples, n) for n in nodes_of(task, strategy)}


def held_out(task: str, strategy: str) -> list[dict[int, float]]:
    """A strategy's speed-ups by the other two's, without and with section VI-B's cost of a step."""
    models = [fitted_to_paper(task, strategy, cost) for cost in (0.0, overhead())]
    return [speedups(model, task, strategy) for model in models]


def breakdown() -> "dict[int, StepCost]":
    """By nodes, the times of the paper's θ-adaptive training on DIV2K (Figure 9)."""
    model, samples = fitted_to_paper(DIV2K), PAPER[DIV2K]["samples"]
    return {n: model.breakdown(paper_schedule(DIV2K, "theta"), samples, n) for n in NODES}


def fitted_here(
    measurement: Mapping[str, Any], without: int | None = None
) -> "adaptive.ScalingModel":
    """Fit the model to a task's steps measured here, without two processes' of one batch size."""
    steps = [
        adaptive.MeasuredStep(
            # Here the thread that communicates also sums, so that sums can be hidden like it.
            step["batch"],
            step["processes"],
            step["computation_s"],
            step["communication_s"] + step["summation_s"],
            step["blocked_s"],
        )
        for step in measurement["steps"]
        if step["averaging"] == "none" or (step["averaging"] == OURS and step["batch"] != without)
    ]
    return adaptive.ScalingModel.fit(
        steps,
        [(size, number, seconds) for size, number, seconds in measurement["messages"][OURS]],
        measurement["gradient_bytes"],
        measurement["buckets"],
    )


def samples_of(measurement: Mapping[str, Any], averaging: str) -> dict[int, list[float]]:
    """The seconds of a step in every trial, by batch size; ``none`` is one process."""
    steps = [step for step in measurement["steps"] if step["averaging"] == averaging]
    return {step["batch"]: step["samples_s"] for step in steps}


def end_to_end(
    measurement: Mapping[str, Any], task: str, strategy: str, averaging: str
) -> list[float]:
    """Seconds of the paper's training by measured steps at the scale of its own, by turn."""
    steps = samples_of(measurement, averaging)
    scale, samples = min(steps) / PAPER[task]["best"]["batch"], PAPER[task]["samples"]
    turns = [
        [epochs * math.ceil(samples / size) * seconds for seconds in steps[round(size * scale)]]
        for size, epochs in paper_schedule(task, strategy)
    ]
    return [math.fsum(turn) for turn in zip(*turns, strict=True)]
