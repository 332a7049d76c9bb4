"""Strong scaling: the model fitted to measured steps, to the paper's speed-ups, and projected."""

from typing import Any

from repro.adaptive import MeasuredStep, ScalingModel, StepCost
from repro.adaptive.scaling import Schedule
from repro.experiments.adaptive.grids import PAPER

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SCALED = ("best", "scheduled", "theta")
OURS = "all_to_all"  # the paper's way of averaging


def paper_schedule(task: str, strategy: str) -> list[tuple[int, int]]:
    """Return the paper's batch sizes and for how many epochs it used each."""
    own = PAPER[task][strategy]
    epochs = own.get("epochs", PAPER[task]["epochs"])
    if strategy in ("best", "linear"):
        return [(own["batch"], epochs)]
    every = PAPER[task]["interval"] if strategy == "theta" else own["every"]
    found, size, left = [], own["batch"], epochs
    while size < own["max_batch"]:
        found.append((size, every))
        size, left = 2 * size, left - every
    return [*found, (size, left)]


def nodes_of(task: str, strategy: str) -> list[int]:
    """Return the numbers of nodes that a strategy can use: at most its largest batch size."""
    own = PAPER[task][strategy]
    return [n for n in NODES if n <= own.get("max_batch", own["batch"])]


def overhead() -> float:
    """Return the cost of a step in samples, by section VI-B's example."""
    one, two = PAPER["section6b"]["one_sample_s"], PAPER["section6b"]["two_samples_s"]
    return float((2 * one - two) / (two - one))


def fitted_to_paper(task: str, left_out: str | None, small_batch: float) -> ScalingModel:
    """Fit the model to the paper's speed-ups of a task, all or all but one strategy's.

    Where the paper does not say how many nodes a speed-up takes, it is the best of all numbers: as
    many are tried in turn, and the fit of least error is taken.
    """
    points = [
        (paper_schedule(task, strategy), nodes, value)
        for strategy, (nodes, value) in PAPER[task]["speedups"].items()
        if strategy != left_out
    ]
    samples = PAPER[task]["samples"]
    choices = nodes_of(task, "best")[1:] if any(not nodes for _, nodes, _ in points) else [0]
    fits = []
    for choice in choices:
        known = [(schedule, nodes or choice, value) for schedule, nodes, value in points]
        model = ScalingModel.fit_speedups(known, samples, small_batch)
        error = sum(
            (model.speedup(schedule, samples, nodes) / value - 1) ** 2
            for schedule, nodes, value in known
        )
        fits.append((error, choice, model))
    return min(fits, key=lambda fit: fit[:2])[2]


def best_speedup(model: ScalingModel, task: str, strategy: str) -> float:
    """Return the modelled speed-up where the paper has it: at its nodes, or its largest."""
    nodes = PAPER[task]["speedups"][strategy][0]
    choices = [nodes] if nodes else nodes_of(task, strategy)
    schedule, samples = paper_schedule(task, strategy), PAPER[task]["samples"]
    return max(model.speedup(schedule, samples, n) for n in choices)


def largest_speedup(model: ScalingModel, task: str, strategy: str) -> tuple[float, int]:
    """Return the largest modelled speed-up, and on how many nodes it is reached."""
    schedule, samples = paper_schedule(task, strategy), PAPER[task]["samples"]
    return max((model.speedup(schedule, samples, n), n) for n in nodes_of(task, strategy))


def steps_of(found: dict[str, Any], averaging: str) -> list[MeasuredStep]:
    """Return the measured steps of a way of averaging; ``none`` is one process."""
    return [
        MeasuredStep(
            step["batch"], step["processes"], step["computation_s"], step["communication_s"],
            step["summation_s"], step["blocked_s"],
        )
        for step in found["steps"]
        if step["averaging"] == averaging
    ]  # fmt: skip


def fitted_here(found: dict[str, Any], without: int | None = None) -> ScalingModel:
    """Fit the model to what was measured of a task here, without the steps of one batch size.

    The steps left out are those of several processes; what one process computes is always known.
    """
    together = [step for step in steps_of(found, OURS) if step.batch_size != without]
    return ScalingModel.fit(
        [*steps_of(found, "none"), *together],
        [(size, processes, seconds) for size, processes, seconds in found["messages"][OURS]],
        found["gradient_bytes"],
        found["buckets"],
    )


def checked(found: dict[str, Any]) -> list[dict[str, float]]:
    """Return measured steps of two processes beside what the model says without them.

    Each step is modelled from the other batch sizes on two processes, and from one process.
    """
    alone = {step.batch_size: step for step in steps_of(found, "none")}
    return [
        {
            "batch": step.batch_size,
            "alone_s": alone[step.batch_size].computation_s,
            "measured_s": step.computation_s + step.blocked_s,
            "predicted_s": fitted_here(found, step.batch_size)
            .step(step.batch_size, step.processes)
            .total_s,
        }
        for step in steps_of(found, OURS)
    ]


def two_processes(found: dict[str, Any], task: str, strategy: str) -> tuple[float, float]:
    """Return the speed-up of two processes for the paper's schedule: modelled, and measured.

    Batch sizes are at the scale of what was measured; each step counts as often as the schedule
    has it. The modelled ones are those of `checked`, which have not seen what they are checked by.
    """
    rows = {int(row["batch"]): row for row in checked(found)}
    scale = min(rows) / PAPER[task]["best"]["batch"]
    totals = {"alone_s": 0.0, "measured_s": 0.0, "predicted_s": 0.0}
    for size, epochs in paper_schedule(task, strategy):
        row = rows[round(size * scale)]
        for name in totals:
            totals[name] += row[name] * epochs / size
    return totals["alone_s"] / totals["predicted_s"], totals["alone_s"] / totals["measured_s"]


def breakdown(model: ScalingModel, task: str, nodes: int) -> StepCost:
    """Return the modelled seconds of the paper's θ-adaptive training by kind."""
    schedule: Schedule = paper_schedule(task, "theta")
    return model.breakdown(schedule, PAPER[task]["samples"], nodes)
