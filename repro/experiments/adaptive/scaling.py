"""Does a growing batch scale further?

Figures 7, 8 and 11 have speed-ups: the paper's, those of a model of its cluster, and those of two
processes of ours. The model is in `projection`; `breakdown` says where the time of a step goes.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive import projection
from repro.experiments.adaptive.describing import ROLES, network, papers_title, stand_in
from repro.experiments.adaptive.settings import (
    CIFAR,
    DIV2K,
    NAMES,
    PAPER,
    PHANTOM,
    parallel,
    ticks_of_two,
)
from repro.experiments.captions import caption, panel
from repro.experiments.design import Check, Chosen, Exhibit, Results, Run, check
from repro.experiments.judge import Cases, Estimate, NotRun, in_turns
from repro.experiments.processes import of_processes
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIMULATED = "SIMULATED: no cluster was at hand."
LAUNCHES = "launches"  # of the processes that a measurement starts; by these it counts
# The margin of the checks is ours, since the paper names none.
NEAR = 0.2  # of a speed-up, as a share: as of the steps of two processes


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the measured steps of one and of two processes."""
    return [parallel(profile)]


def measured(results: Results) -> dict[str, Any]:
    """Return the measured steps of processes by task, empty where there are none.

    Turns of one launch share what it drew, such as where its memory lies: of several launches each
    counts once, by the medians of its turns; the difference of weights is the largest of all.
    """
    launches = results.processes("parallel")
    if not launches:
        return {}
    tasks: dict[str, Any] = of_processes(launches).metrics["tasks"]
    if len(launches) == 1:
        return tasks
    for name, task in tasks.items():
        own = [record.metrics["tasks"][name] for record in launches]
        steps = [
            step | {"samples_s": [statistics.median(one["steps"][n]["samples_s"]) for one in own]}
            for n, step in enumerate(task["steps"])
        ]
        difference = max(one["difference"] for one in own)
        tasks[name] = task | {"steps": steps, "difference": difference, "trials": LAUNCHES}
    return tasks


def measured_of(results: Results, task: str) -> dict[str, Any]:
    """Return the measured steps of a task.

    Raises:
        NotRun: There are none.
    """
    measurement: dict[str, Any] | None = measured(results).get(task)
    if measurement is None:
        raise NotRun("no records")
    return measurement


def launched(measurement: Mapping[str, Any]) -> bool:
    """Whether the seconds of a step are those of several launches, and not the turns of one."""
    return measurement.get("trials") == LAUNCHES


def over(
    first: Sequence[float],
    second: Sequence[float],
    measurement: Mapping[str, Any],
) -> Estimate:
    """Return seconds over others as a ratio; a launch or a turn compares with itself.

    Args:
        first: By turn or launch.
        second: Of the same ones.
        measurement: That both are of.
    """
    return in_turns(first, second, trials=LAUNCHES if launched(measurement) else "rounds")


def samples_of(measurement: Mapping[str, Any], averaging: str) -> dict[int, list[float]]:
    """Return the seconds of a step in every trial, by batch size; ``none`` is one process."""
    steps = [step for step in measurement["steps"] if step["averaging"] == averaging]
    return {step["batch"]: step["samples_s"] for step in steps}


def pace(measurement: Mapping[str, Any], task: str, strategy: str) -> Estimate:
    """Return the speed-up of processes over one for the paper's training, as a ratio.

    Args:
        measurement: Measured steps of a task.
        task: One of `settings.TASKS`.
        strategy: One of `projection.SCALED`.

    Raises:
        NotRun: There are no steps of several processes.
    """
    alone, together = (
        projection.end_to_end(dict(measurement), task, strategy, way)
        for way in ("none", projection.OURS)
    )
    return over(alone, together, measurement)


def step_facts(results: Results, task: str | None = None) -> Iterable[str]:
    """Yield what a caption warns of where steps were measured.

    Args:
        results: Of an artefact.
        task: The stand-in of this one alone.
    """
    pair = results.first("parallel")
    if pair is not None:
        jobs = pair.config["jobs"]
        names = [name for key in jobs if task in (None, key) for name in stand_in(jobs[key])]
        if names:
            yield f"STAND-IN: {', '.join(dict.fromkeys(names))}."
        yield "SYNTHETIC: random images."


def steps_in_full(results: Results) -> Iterable[str]:
    """Yield how steps were measured and what is modelled, for the setup."""
    yield (
        f"Strong scaling is {SIMULATED} The paper's cluster is a model of latency and bandwidth "
        "that is fitted to the paper's speed-ups. What is predicted of a strategy comes from a fit "
        "to the other two alone, without and with section VI-B's cost of small batches "
        f"({projection.overhead():.2g} samples a step). From speed-ups alone nobody can separate "
        "the time of summing gradients from the share of communication that is hidden: the model "
        "takes the sum as free, and lets all computation hide communication. The paper gives a "
        "schedule of its third method for CIFAR-10 alone (the batch doubles every "
        f"{PAPER[CIFAR]['scheduled']['every']} of {PAPER[CIFAR]['epochs']} epochs); elsewhere the "
        "same share of the training is ASSUMED."
    )
    if results.first("parallel") is not None:
        launches = len(results.processes("parallel"))
        again = f", launched {launches} times" if launches > 1 else ""
        yield (
            "Steps are measured in one process and in two on the same machine, in turns, on "
            f"SYNTHETIC images (random numbers), four steps in a row{again}. More processes are "
            "projected: the paper's schedule on SIMULATED nodes that compute and communicate like "
            "these two."
        )


def table(results: Results, task: str) -> list[dict[str, Any]]:
    """Return Figure 7, 8 or 11 in numbers: speed-ups, the paper's, modelled and measured."""
    measurement = measured(results).get(task)
    model = projection.fitted_here(measurement) if measurement else None
    rows = []
    for strategy in projection.SCALED:
        nodes, value = PAPER[task]["speedups"][strategy]
        low, high = sorted(projection.predicted(task, strategy))
        alone = projection.best_speedup(projection.fitted_to_paper(task), task, strategy)
        possible = projection.nodes_of(task, strategy)
        row: dict[str, Any] = {
            "strategy": NAMES[strategy],
            "nodes": nodes or f"best of {possible[0]} to {possible[-1]}",
            "paper": f"{value:.2f}",
            "modelled from the other two": f"{low:.1f} to {high:.1f}",
            "fitted to all three": f"{alone:.1f}",
            "projected, our machine": DASH,
            "two processes, projected": DASH,
            "two processes, measured": DASH,
        }
        if model is not None:
            most, at = projection.largest_speedup(model, task, strategy)
            row["projected, our machine"] = f"{most:.1f} on {at} node{'s' * (at > 1)}"
        if measurement:
            said = projection.two_processes(measurement, task, strategy)
            reached = math.exp(pace(measurement, task, strategy).mean)
            row["two processes, projected"] = DASH if math.isnan(said) else f"{said:.2f}"
            row["two processes, measured"] = f"{reached:.2f}"
        rows.append(row)
    return rows


def figure(results: Results, task: str) -> "Figure":
    """Draw training time and speed-ups against the number of nodes, both logarithmic.

    Left the time by a fit to all of the paper's speed-ups. Then the paper's speed-ups, hollow,
    beside bands that have not seen them: a band comes from the other two strategies alone. Then
    what two processes measured here, solid with intervals, and what is projected from them.
    """
    from repro.experiments.adaptive.drawing import GREY, HOLLOW, LOOKS, SOLID, explain
    from repro.plots import legend_below, new_axes

    measurement = measured(results).get(task)
    columns = 2 + (measurement is not None)
    drawn, axes = new_axes(1, columns, 3.4 * columns, 3.7)
    panels = list(axes[0])
    explain(
        panels[0],
        *((NAMES[name], {**LOOKS[name], "ms": 6, "lw": 1.6}) for name in projection.SCALED),
        ("fit to all three of the paper's speed-ups", {"color": GREY, "ls": "--", "lw": 1.2}),
        ("paper", HOLLOW),
        ("predicted from the other two strategies (held out)", {"color": GREY, "band": True}),
    )
    _draw_time(panels[0], task)
    _draw_predicted(panels[1], task)
    if measurement is not None:
        job = results.need("parallel").config["jobs"][task]
        name = panel(ROLES[task], network(job), "random images")
        _draw_measured(panels[2], measurement, task)
        panels[2].set_title(f"{name}\nmeasured on 2 processes; more SIMULATED", fontsize=9)
        explain(panels[2], ("ours, measured (95 % interval)", SOLID))
    legend_below(drawn, 3)
    return drawn


def _draw_time(axis: "Axes", task: str) -> None:
    """Draw the training time by the fit to all of the paper's speed-ups, which is no prediction."""
    from repro.experiments.adaptive.drawing import LOOKS, in_powers_of_two

    model, samples = projection.fitted_to_paper(task), PAPER[task]["samples"]
    alone = model.training_time(projection.paper_schedule(task, "best"), samples, 1)
    shown: list[float] = []
    for strategy in projection.SCALED:
        schedule, nodes = (
            projection.paper_schedule(task, strategy),
            projection.nodes_of(task, strategy),
        )
        times = [model.training_time(schedule, samples, n) / alone for n in nodes]
        axis.plot(nodes, times, ls="--", lw=1.2, color=LOOKS[strategy]["color"])
        shown += times
    in_powers_of_two(axis, shown)
    ticks_of_two(axis, projection.NODES, "nodes")
    axis.set_title(f"{papers_title(task)}\nits cluster SIMULATED, fitted", fontsize=9)
    axis.set_ylabel("time over the best batch's on 1 node")


def predicted_lines(task: str, strategy: str) -> list[list[float]]:
    """Return a strategy's speed-ups by nodes as the other two's predict them.

    Returns:
        Two lines over `projection.nodes_of`: without and with section VI-B's cost of small batches.
    """
    schedule, samples = projection.paper_schedule(task, strategy), PAPER[task]["samples"]
    nodes = projection.nodes_of(task, strategy)
    models = [
        projection.fitted_to_paper(task, strategy, cost) for cost in (0.0, projection.overhead())
    ]
    return [[model.speedup(schedule, samples, n) for n in nodes] for model in models]


def _draw_predicted(axis: "Axes", task: str) -> None:
    """Draw the paper's speed-ups, what predicts each, and the fit that has seen all."""
    from repro.experiments.adaptive.drawing import LOOKS, in_powers_of_two, papers_point

    fit, samples = projection.fitted_to_paper(task), PAPER[task]["samples"]
    shown = [1.0]
    for strategy in projection.SCALED:
        schedule, nodes = (
            projection.paper_schedule(task, strategy),
            projection.nodes_of(task, strategy),
        )
        colour = LOOKS[strategy]["color"]
        low, high = np.sort(predicted_lines(task, strategy), axis=0)
        # As wide as a line at least, where both say the same.
        axis.fill_between(nodes, low / 1.03, high * 1.03, color=colour, alpha=0.25, lw=0)
        fitted = [fit.speedup(schedule, samples, n) for n in nodes]
        axis.plot(nodes, fitted, ls="--", lw=1.2, color=colour)
        at, value = PAPER[task]["speedups"][strategy]
        if at:
            papers_point(axis, at, value, LOOKS[strategy])
        else:  # on how many nodes the paper does not say
            axis.plot([nodes[0], nodes[-1]], [value] * 2, ls="-.", lw=1.2, color=colour)
            axis.text(nodes[-1], value / 1.04, f"paper: {value:g}, nodes not given", ha="right",
                      va="top", fontsize=7, color=colour)  # fmt: skip
        shown += [*low, *high, *fitted, value]
    in_powers_of_two(axis, shown)
    ticks_of_two(axis, projection.NODES, "nodes")
    axis.set_title(f"{papers_title(task)}\nits cluster SIMULATED, predicted", fontsize=9)
    axis.set_ylabel("speed-up over 1 node")


def _draw_measured(axis: "Axes", measurement: dict[str, Any], task: str) -> None:
    """Draw what two processes measured, and what is projected from it."""
    from repro.experiments.adaptive.drawing import GREY, LOOKS, in_powers_of_two, our_point

    model, samples = projection.fitted_here(measurement), PAPER[task]["samples"]
    shown = [1.0]
    for number, strategy in enumerate(projection.SCALED):
        colour = LOOKS[strategy]["color"]
        if model is not None:
            schedule, nodes = (
                projection.paper_schedule(task, strategy),
                projection.nodes_of(task, strategy),
            )
            projected = [model.speedup(schedule, samples, n) for n in nodes]
            axis.plot(nodes, projected, ls=":", lw=1.4, color=colour)
            shown += projected
        gap = pace(measurement, task, strategy)
        low, high = map(math.exp, gap.interval())
        at = 2 * 1.05 ** (number - 1)  # beside each other
        our_point(axis, at, math.exp(gap.mean), LOOKS[strategy], (low, high))
        shown += [value for value in (math.exp(gap.mean), low, high) if value > 0]
    axis.axhline(1.0, color=GREY, lw=1, zorder=1)
    label = "projected: a fit to our measured steps (SIMULATED)"
    axis.plot([], [], ls=":", lw=1.4, color=GREY, label=label)
    in_powers_of_two(axis, shown)
    ticks_of_two(axis, projection.NODES, "processes")
    axis.set_ylabel("speed-up over 1 process")


_CALLED = {
    "best": "the best fixed batch",
    "scheduled": "an adaptive batch at a fixed rate",
    "theta": "θ-adaptive training",
}


def predicts(task: str, strategy: str) -> Check:
    """Return the check that the other two strategies' speed-ups predict a strategy's own."""

    @check(
        f"The speed-ups of the other two strategies predict that of {_CALLED[strategy]} within "
        f"{100 * NEAR:g} %, so that one model has all of the paper's numbers (SIMULATED)"
    )
    def near(results: Results) -> tuple[bool, str]:
        paper = PAPER[task]["speedups"][strategy][1]
        values = projection.predicted(task, strategy)
        said = " and ".join(f"{value:.1f} (×{value / paper:.2f})" for value in values)
        near = all(abs(math.log(value / paper)) <= math.log1p(NEAR) for value in values)
        return near, f"{said}, without and with VI-B's cost; paper {paper:g}"

    return near


def scales_further(task: str) -> Check:
    """Return the check that θ-adaptive training scales further than the other two."""

    @check(
        "θ-adaptive training scales further than the other two, by the model fitted to those two: "
        "it has the large batch for longer, and no less of the nodes"
    )
    def further(results: Results) -> tuple[bool, str]:
        paper = PAPER[task]["speedups"]
        others = max(paper["best"][1], paper["scheduled"][1])
        values = projection.predicted(task, "theta")
        said = " and ".join(f"{value:.1f}" for value in values)
        return min(values) > others, f"{said}, without and with VI-B's cost; others {others:g}"

    return further


def speedup(results: Results, task: str) -> Cases:
    """Return how many nodes the paper's speed-up of each strategy takes: no cluster was at hand.

    Where the paper does not give their number, it is at least the speed-up.
    """
    paper = PAPER[task]["speedups"]
    needed = {key: paper[key][0] or math.ceil(paper[key][1]) for key in projection.SCALED}
    return {NAMES[key]: NotRun(f"needs a cluster of {n} nodes") for key, n in needed.items()}


def _exhibit(task: str) -> Exhibit:
    return Exhibit(
        long=True,
        runs=runs,
        table=partial(table, task=task),
        figure=partial(figure, task=task),
        caption=caption(
            f"{SIMULATED} A band has not seen the paper's value beside it; a dashed line is fitted "
            "to all three.",
            partial(step_facts, task=task),
        ),
        claims={"speedup": partial(speedup, task=task)},
        checks=(
            scales_further(task),
            *(predicts(task, name) for name in reversed(projection.SCALED)),
        ),
    )


FIGURE7, FIGURE8, FIGURE11 = (_exhibit(task) for task in (DIV2K, PHANTOM, CIFAR))
