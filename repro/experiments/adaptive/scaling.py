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

from repro.experiments import view
from repro.experiments.adaptive import projection, read, runs
from repro.experiments.adaptive.runs import CIFAR, DIV2K, NAMES, PAPER, PHANTOM
from repro.experiments.design import Artefact
from repro.experiments.judge import Cases, Estimate, NotRun, paired_ratio
from repro.experiments.query import Results, of_processes
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAUNCHES = "launches"  # of the processes that a measurement starts; by these it counts
NEAR = 0.2  # of a speed-up, as a share: the checks' margin is ours, as of steps of two processes


def measured(results: Results) -> dict[str, Any]:
    """The measured steps of processes by task, empty where there are none.

    Turns of one launch correlate: of several launches each counts once, by the medians of its
    turns; the difference of weights is the largest of all.
    """
    launches = results.ok("parallel")
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


def over(
    first: Sequence[float], second: Sequence[float], measurement: Mapping[str, Any]
) -> Estimate:
    """Seconds over others as a ratio; a launch or a turn compares with itself."""
    return paired_ratio(first, second, trials=measurement.get("trials", "rounds"))


def samples_of(measurement: Mapping[str, Any], averaging: str) -> dict[int, list[float]]:
    """The seconds of a step in every trial, by batch size; ``none`` is one process."""
    steps = [step for step in measurement["steps"] if step["averaging"] == averaging]
    return {step["batch"]: step["samples_s"] for step in steps}


def pace(measurement: Mapping[str, Any], task: str, strategy: str) -> Estimate:
    """The speed-up of two processes over one for the paper's training, as a ratio."""
    ways = ("none", projection.OURS)
    alone, together = (projection.end_to_end(measurement, task, strategy, way) for way in ways)
    return over(alone, together, measurement)


def warnings(results: Results, task: str | None = None) -> Iterable[str]:
    """Yield the warnings of a caption where steps were measured, of one task or of all."""
    record = results.first("parallel")
    if record is not None:
        jobs = record.config["jobs"].items()
        if names := read.stand_ins(job for key, job in jobs if task in (None, key)):
            yield f"STAND-IN: {', '.join(names)}."
        yield "SYNTHETIC: random images."


def panel(results: Results, task: str) -> str:
    """The title of a panel of steps that were measured here."""
    ours = read.network(results.need("parallel").config["jobs"][task])
    return view.panel(read.ROLES[task], ours, "random images")


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
    """Draw speed-ups against the number of nodes, both logarithmic.

    Left the paper's, hollow, with bands that have not seen them: a band comes from the other two
    strategies alone. Right those of two processes here, with intervals.
    """
    from repro.experiments.adaptive import draw
    from repro.plots import legend_below, new_axes

    measurement = measured(results).get(task)
    drawn, axes = new_axes(1, 1 + bool(measurement), 9.2 if measurement else 7, 3.7)
    speed, *here = axes[0]
    fit = projection.fitted_to_paper(task)
    for number, strategy in enumerate(projection.SCALED):
        look, colour = draw.LOOKS[strategy], draw.LOOKS[strategy]["color"]
        fitted, (at, value) = (
            projection.speedups(fit, task, strategy),
            PAPER[task]["speedups"][strategy],
        )
        models = projection.held_out(task, strategy)
        both = [[*projection.speedups(held, task, strategy).values()] for held in models]
        low, high = np.sort(both, axis=0)
        # As wide as a line at least, where both say the same.
        speed.fill_between([*fitted], low / 1.03, high * 1.03, color=colour, alpha=0.25, lw=0)
        speed.plot([*fitted], [*fitted.values()], "--", color=colour, label=NAMES[strategy])
        if at:
            draw.point(speed, at, value, look)
        else:
            speed.axhline(value, ls="-.", color=colour, label=f"paper: {value}, nodes not given")
        if measurement:
            gap, place = pace(measurement, task, strategy), 2 * 1.05 ** (number - 1)
            interval = np.exp(gap.interval()).tolist()
            draw.point(here[0], place, math.exp(gap.mean), look, interval)
    speed.plot([], [], "--", color=draw.GREY, label="fit to all three")
    speed.plot([], [], **draw.PAPERS)
    band = "predicted from the other two (held out)"
    speed.fill_between([], [], [], color=draw.GREY, alpha=0.25, lw=0, label=band)
    speed.set_title(f"{read.papers_title(task)}\nits cluster SIMULATED", fontsize=9)
    draw.ticks_of_two(speed, projection.NODES, "nodes")
    draw.powers_of_two(speed)
    speed.set_ylabel("speed-up over 1 node")
    for axis in here:
        axis.plot([], [], "o-", color=draw.GREY, label="ours, measured (95 % interval)")
        axis.set_title(panel(results, task), fontsize=9)
        draw.ticks_of_two(axis, (1, 2, 4), "processes")
        axis.set_ylabel("speed-up over 1 process")
    legend_below(drawn, 3)
    return drawn


def predicts(results: Results, task: str, strategy: str) -> tuple[bool, str]:
    """Compare a strategy's speed-up with those that the other two strategies predict."""
    paper = PAPER[task]["speedups"][strategy][1]
    values = projection.predicted(task, strategy)
    said = " and ".join(f"{value:.1f} (×{value / paper:.2f})" for value in values)
    holds = all(abs(math.log(value / paper)) <= math.log1p(NEAR) for value in values)
    return holds, f"{said}, without and with VI-B's cost; paper {paper:g}"


def scales_further(results: Results, task: str) -> tuple[bool, str]:
    """Compare θ-adaptive training's predicted speed-up with the paper's other two."""
    paper = PAPER[task]["speedups"]
    others = max(paper["best"][1], paper["scheduled"][1])
    values = projection.predicted(task, "theta")
    said = " and ".join(f"{value:.1f}" for value in values)
    return min(values) > others, f"{said}, without and with VI-B's cost; others {others:g}"


def speedup(results: Results, task: str) -> Cases:
    """The nodes that the paper's speed-up of each strategy takes: no cluster was at hand.

    Where the paper does not give their number, it is at least the speed-up.
    """
    paper = PAPER[task]["speedups"]
    needed = {key: paper[key][0] or math.ceil(paper[key][1]) for key in projection.SCALED}
    return {NAMES[key]: NotRun(f"needs a cluster of {n} nodes") for key, n in needed.items()}


def _artefact(name: str, task: str) -> Artefact:
    predictions = {
        f"predicts_{key}": partial(predicts, task=task, strategy=key)
        for key in reversed(projection.SCALED)
    }
    return read.artefact(
        name,
        plan=runs.parallel,
        rows=partial(table, task=task),
        draw=partial(figure, task=task),
        facts=partial(warnings, task=task),
        claims={"speedup": partial(speedup, task=task)},
        checks={"scales_further": partial(scales_further, task=task), **predictions},
    )


FIGURE7, FIGURE8 = _artefact("figure7", DIV2K), _artefact("figure8", PHANTOM)
FIGURE11 = _artefact("figure11", CIFAR)
