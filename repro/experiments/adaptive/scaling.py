"""Does a growing batch scale further?

Figures 7, 8 and 11 have speed-ups: the paper's, those of a model of its cluster, and those of two
processes of ours. The model is in `projection`; `steps` says where the time of a step goes.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive import projection, runs
from repro.experiments.adaptive.runs import CIFAR, DIV2K, NAMES, PAPER, PHANTOM, paper_schedule
from repro.experiments.adaptive.trainings import (
    ROLES,
    looks,
    network,
    papers_title,
    point,
    stand_in,
    ticks_of_two,
)
from repro.experiments.captions import caption, panel
from repro.experiments.design import Check, Exhibit, Results, check
from repro.experiments.judge import Cases, Estimate, NotRun, in_turns
from repro.experiments.processes import of_processes
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIMULATED = "SIMULATED: no cluster was at hand."
LAUNCHES = "launches"  # of the processes that a measurement starts; by these it counts
# The margin of the checks is ours, since the paper names none.
NEAR = 0.2  # of a speed-up, as a share: as of the steps of two processes


def measured(results: Results) -> dict[str, Any]:
    """The measured steps of processes by task, empty where there are none.

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
    """The measured steps of a task.

    Raises:
        NotRun: There are none.
    """
    results.need("parallel")
    found: dict[str, Any] = measured(results)[task]
    return found


def over(
    first: Sequence[float], second: Sequence[float], measurement: Mapping[str, Any]
) -> Estimate:
    """Seconds over others as a ratio; a launch or a turn compares with itself."""
    return in_turns(first, second, trials=measurement.get("trials", "rounds"))


def samples_of(measurement: Mapping[str, Any], averaging: str) -> dict[int, list[float]]:
    """The seconds of a step in every trial, by batch size; ``none`` is one process."""
    steps = [step for step in measurement["steps"] if step["averaging"] == averaging]
    return {step["batch"]: step["samples_s"] for step in steps}


def pace(measurement: Mapping[str, Any], task: str, strategy: str) -> Estimate:
    """The speed-up of two processes over one for the paper's training, as a ratio.

    Raises:
        NotRun: There are no steps of several processes.
    """
    ways = ("none", projection.OURS)
    alone, together = (projection.end_to_end(measurement, task, strategy, way) for way in ways)
    return over(alone, together, measurement)


def step_facts(results: Results, task: str | None = None) -> Iterable[str]:
    """Yield the warnings of a caption where steps were measured, of one task or of all."""
    record = results.first("parallel")
    if record is not None:
        jobs = record.config["jobs"]
        names = [name for key in jobs if task in (None, key) for name in stand_in(jobs[key])]
        if names:
            yield f"STAND-IN: {', '.join(dict.fromkeys(names))}."
        yield "SYNTHETIC: random images."


def table(results: Results, task: str) -> list[dict[str, Any]]:
    """Figure 7, 8 or 11 in numbers: speed-ups, the paper's, modelled and measured."""
    measurement, rows = measured(results).get(task), []
    for strategy in projection.SCALED:
        nodes, value = PAPER[task]["speedups"][strategy]
        low, high = sorted(projection.predicted(task, strategy))
        possible = projection.nodes_of(task, strategy)
        gap = pace(measurement, task, strategy) if measurement else None
        rows.append(
            {
                "strategy": NAMES[strategy],
                "nodes": nodes or f"best of {possible[0]} to {possible[-1]}",
                "paper": f"{value:.2f}",
                "modelled from the other two": f"{low:.1f} to {high:.1f}",
                "two processes, measured": str(gap) if gap else DASH,
                "n": gap.n if gap else 0,
            }
        )
    return rows


def figure(results: Results, task: str) -> "Figure":
    """Draw training time and speed-ups against the number of nodes, both logarithmic.

    Left the time by a fit to all of the paper's speed-ups. Then the paper's speed-ups, hollow,
    beside bands that have not seen them: a band comes from the other two strategies alone. Then
    what two processes measured here, solid with intervals, and what is projected from them.
    """
    from repro.plots import HOLLOW, legend_below, new_axes

    measurement = measured(results).get(task)
    drawn, axes = new_axes(1, 2 + (measurement is not None), 10.2 if measurement else 6.8, 3.7)
    time, speed, *here = axes[0]
    fit, own = projection.fitted_to_paper(task), looks()
    alone = fit.training_time(paper_schedule(task, "best"), PAPER[task]["samples"], 1)
    for strategy in projection.SCALED:
        look, colour = own[strategy], own[strategy]["color"]
        schedule, nodes = paper_schedule(task, strategy), projection.nodes_of(task, strategy)
        times = [fit.training_time(schedule, PAPER[task]["samples"], n) / alone for n in nodes]
        time.plot(nodes, times, ls="--", lw=1.2, color=colour)
        time.plot([], [], label=NAMES[strategy], **look)
        lines = [
            list(projection.speedups(model, task, strategy).values())
            for model in projection.held_out(task, strategy)
        ]
        low, high = np.sort(lines, axis=0)
        # As wide as a line at least, where both say the same.
        speed.fill_between(nodes, low / 1.03, high * 1.03, color=colour, alpha=0.25, lw=0)
        fitted = projection.speedups(fit, task, strategy)
        speed.plot(list(fitted), list(fitted.values()), ls="--", lw=1.2, color=colour)
        at, value = PAPER[task]["speedups"][strategy]
        if at:
            point(speed, at, value, look)
        else:
            speed.axhline(value, ls="-.", color=colour, label=f"paper: {value}, nodes not given")
    grey = "#48536a"
    time.plot([], [], "--", color=grey, label="fit to all three of the paper's speed-ups")
    time.plot([], [], label="paper", **{**HOLLOW, "ls": "none"})
    band = "predicted from the other two strategies (held out)"
    time.fill_between([], [], [], color=grey, alpha=0.25, lw=0, label=band)
    for axis, what in ((time, "fitted"), (speed, "predicted")):
        axis.set_title(f"{papers_title(task)}\nits cluster SIMULATED, {what}", fontsize=9)
    time.set_ylabel("time over the best batch's on 1 node")
    speed.set_ylabel("speed-up over 1 node")
    for axis in here:
        _draw_measured(axis, measurement, task)
        name = panel(ROLES[task], network(results.need("parallel").config["jobs"][task]))
        axis.set_title(
            f"{name}, random images\nmeasured on 2 processes; more SIMULATED", fontsize=9
        )
    for axis in axes[0]:
        ticks_of_two(axis, projection.NODES, "processes" if axis in here else "nodes")
        powers_of_two(axis)
    legend_below(drawn, 3)
    return drawn


def powers_of_two(axis: Any) -> None:
    """Make a y axis logarithmic, with ticks such as 1/4, 1 and 4."""
    from matplotlib.ticker import FuncFormatter

    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}")
    )


def _draw_measured(axis: Any, measurement: Any, task: str) -> None:
    """Draw what two processes measured, and what is projected from it."""
    model = projection.fitted_here(measurement)
    for number, strategy in enumerate(projection.SCALED):
        look = looks()[strategy]
        if model is not None:
            projected = projection.speedups(model, task, strategy)
            axis.plot(list(projected), list(projected.values()), ls=":", color=look["color"])
        gap = pace(measurement, task, strategy)
        at = 2 * 1.05 ** (number - 1)  # beside each other
        point(axis, at, math.exp(gap.mean), look, np.exp(gap.interval()).tolist())
    axis.axhline(1.0, color="#48536a", lw=1, zorder=1)
    axis.plot([], [], ":", color="#48536a", label="projected: a fit to our steps (SIMULATED)")
    axis.plot([], [], "o-", color="#48536a", label="ours, measured (95 % interval)")
    axis.set_ylabel("speed-up over 1 process")


_CALLED = {
    "best": "the best fixed batch",
    "scheduled": "an adaptive batch at a fixed rate",
    "theta": "θ-adaptive training",
}


def predicts(task: str, strategy: str) -> Check:
    """The check that the other two strategies' speed-ups predict a strategy's own."""

    @check(
        f"The speed-ups of the other two strategies predict that of {_CALLED[strategy]} within "
        f"{100 * NEAR:g} %, so that one model has all of the paper's numbers (SIMULATED)"
    )
    def near(results: Results) -> tuple[bool, str]:
        paper = PAPER[task]["speedups"][strategy][1]
        values = projection.predicted(task, strategy)
        said = " and ".join(f"{value:.1f} (×{value / paper:.2f})" for value in values)
        holds = all(abs(math.log(value / paper)) <= math.log1p(NEAR) for value in values)
        return holds, f"{said}, without and with VI-B's cost; paper {paper:g}"

    return near


def scales_further(task: str) -> Check:
    """The check that θ-adaptive training scales further than the other two."""

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
    """The nodes that the paper's speed-up of each strategy takes: no cluster was at hand.

    Where the paper does not give their number, it is at least the speed-up.
    """
    paper = PAPER[task]["speedups"]
    needed = {key: paper[key][0] or math.ceil(paper[key][1]) for key in projection.SCALED}
    why = "needs a job of {} processes (parallel --record); no job was recorded"
    return {NAMES[key]: NotRun(why.format(n)) for key, n in needed.items()}


def _exhibit(task: str) -> Exhibit:
    return Exhibit(
        long=True,
        runs=runs.parallel,
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
