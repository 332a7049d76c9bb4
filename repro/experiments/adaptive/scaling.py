"""Does a growing batch scale further, and where does the time of a step go? Figures 7 to 9, 11."""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from repro.experiments import view
from repro.experiments.adaptive import projection, read, runs
from repro.experiments.adaptive.runs import AVERAGING, CIFAR, DIV2K, NAMES, PAPER, PHANTOM
from repro.experiments.design import Artefact
from repro.experiments.judge import Case, Cases, Estimate, NotRun, paired_ratio
from repro.experiments.query import Results, of_processes
from repro.plots import HOLLOW, INK, legend_below, new_axes, styles

PARTS = ("computation", "blocked", "communication")
Measurement = Mapping[str, Any]  # of a task: its steps, messages, bytes and buckets


def measured(results: Results) -> dict[str, Any]:
    """The measured steps by task; of several launches each counts once, by its medians."""
    launches = results.ok("parallel")
    if not launches:
        return {}
    tasks: dict[str, Any] = of_processes(launches).metrics["tasks"]
    for name, task in tasks.items() if len(launches) > 1 else ():
        task["trials"] = "launches"
        for number, step in enumerate(task["steps"]):
            own = [r.metrics["tasks"][name]["steps"][number]["samples_s"] for r in launches]
            step["samples_s"] = list(map(statistics.median, own))
    return tasks


def over(first: Sequence[float], second: Sequence[float], measurement: Measurement) -> Estimate:
    """Seconds over others as a ratio; a launch or a turn compares with itself."""
    return paired_ratio(first, second, trials=measurement.get("trials", "rounds"))


def pace(measurement: Measurement, task: str, strategy: str) -> Estimate:
    """The speed-up of two processes over one for the paper's training, as a ratio."""
    ways = ("none", projection.OURS)
    alone, together = (projection.end_to_end(measurement, task, strategy, way) for way in ways)
    return over(alone, together, measurement)


def panel(results: Results, task: str) -> str:
    """The title of a panel of steps that were measured here."""
    ours = read.network(results.need("parallel").config["jobs"][task])
    return view.panel(read.ROLES[task], ours, "random images")


# Figures 7, 8 and 11: speed-ups.


def table(results: Results, task: str) -> Iterator[dict[str, Any]]:
    """Speed-ups: the paper's, modelled and measured."""
    measurement = measured(results).get(task)
    for strategy in projection.SCALED:
        nodes, value = PAPER[task]["speedups"][strategy]
        held_out = projection.held_out(task, strategy)
        low, high = sorted(own[nodes] if nodes else max(own.values()) for own in held_out)
        gap = pace(measurement, task, strategy) if measurement else None
        yield {
            "strategy": NAMES[strategy],
            "nodes": nodes or f"best of 1 to {projection.nodes_of(task, strategy)[-1]}",
            "paper": f"{value:.2f}",
            "modelled from the other two": f"{low:.1f} to {high:.1f}",
            "two processes, measured": gap and str(gap),
            "n": gap.n if gap else 0,
        }


def figure(results: Results, task: str) -> Any:
    """Draw speed-ups by nodes: a band comes from the other two strategies alone."""
    measurement = measured(results).get(task)
    drawn, axes = new_axes(1, 1, 7, 4)
    axis, fit = axes[0, 0], projection.fitted_to_paper(task)
    for number, strategy in enumerate(projection.SCALED):
        look, (at, value) = read.LOOKS[NAMES[strategy]], PAPER[task]["speedups"][strategy]
        fitted, colour = projection.speedups(fit, task, strategy), look["color"]
        low, high = np.sort([[*own.values()] for own in projection.held_out(task, strategy)], 0)
        # As wide as a line at least, where both say the same.
        axis.fill_between([*fitted], low / 1.03, high * 1.03, color=colour, alpha=0.25, lw=0)
        axis.plot([*fitted], [*fitted.values()], "--", color=colour, label=NAMES[strategy])
        if at:
            read.point(axis, at, value, look)
        else:
            axis.axhline(value, ls="-.", color=colour, label=f"paper: {value}, nodes not given")
        if measurement:
            read.point(axis, 2 * 1.05 ** (number - 1), pace(measurement, task, strategy), look)
    axis.plot([], [], **{**HOLLOW, "ls": "none", "label": "paper"})
    band = "predicted from the other two (held out)"
    axis.fill_between([], [], [], color=INK, alpha=0.25, lw=0, label=band)
    title = f"paper: {read.ROLES[task]}, {read.DATA[task]}, its cluster SIMULATED"
    if measurement:
        axis.plot([], [], "o-", color=INK, label="ours, two processes (95 % interval)")
        title += f"\n{panel(results, task)}"
    axis.set_title(title, fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(projection.NODES)
    for own in (axis.xaxis, axis.yaxis):
        own.set_major_formatter("{x:g}")
    axis.set(xlabel="nodes", ylabel="speed-up over 1 node, or 1 process")
    legend_below(drawn, 2)
    return drawn


def speedup(results: Results, task: str) -> Cases:
    """The nodes that the paper's speed-up of each strategy takes: no cluster was at hand."""
    paper = PAPER[task]["speedups"]
    needed = {key: paper[key][0] or math.ceil(paper[key][1]) for key in projection.SCALED}
    return {NAMES[key]: NotRun(f"needs a cluster of {n} nodes") for key, n in needed.items()}


def _artefact(name: str, task: str) -> Artefact:
    return read.artefact(
        name,
        plan=runs.parallel,
        rows=partial(table, task=task),
        draw=partial(figure, task=task),
        facts=partial(read.warnings, task=task),
        claims={"speedup": partial(speedup, task=task)},
    )


FIGURE7, FIGURE8 = _artefact("figure7", DIV2K), _artefact("figure8", PHANTOM)
FIGURE11 = _artefact("figure11", CIFAR)

# Figure 9: the parts of a step.


def steps_table(results: Results) -> Iterator[dict[str, Any]]:
    """The parts of measured steps."""
    for task, measurement in measured(results).items():
        for step in measurement["steps"]:
            yield {
                "task": task,
                "averaging": step["averaging"].replace("none", "one process"),
                "batch size": step["batch"],
                **{f"{part} (ms)": f"{1e3 * step[f'{part}_s']:.2f}" for part in ("total", *PARTS)},
                "n": len(step["samples_s"]),
            }


def figure9(results: Results) -> Any:
    """Draw where the time of measured steps goes, at the largest batch size of each task."""
    tasks, colours = measured(results), styles(PARTS)
    drawn, axes = new_axes(1, max(1, len(tasks)), 3.5 * max(1, len(tasks)), 3.1)
    for axis, (task, measurement) in zip(axes[0], tasks.items(), strict=False):
        largest = max(step["batch"] for step in measurement["steps"])
        steps = [step for step in measurement["steps"] if step["batch"] == largest]
        rows, left = np.arange(len(steps)), np.zeros(len(steps))
        for part, height, shift in zip(PARTS, (0.4, 0.4, 0.2), (-0.14, -0.14, 0.2), strict=True):
            ms = np.array([1e3 * step[f"{part}_s"] for step in steps])
            start = left if part == "blocked" else 0
            axis.barh(rows + shift, ms, height, start, color=colours[part]["color"], label=part)
            left = left + ms
        ways = [step["averaging"].replace("none", "1 process") for step in steps]
        axis.set_yticks(rows, ways)
        axis.invert_yaxis()
        axis.set_title(f"{panel(results, task)}\nB = {largest}", fontsize=9)
        axis.set_xlabel("time of one step (ms)")
    legend_below(drawn, 3)
    return drawn


def few_samples(results: Results) -> Cases:
    """The time of a sample in the smallest step over the largest's, on one process."""
    found: dict[str, Case] = {}
    for task, measurement in measured(results).items():
        times = projection.samples_of(measurement, "none")
        few, many = min(times), max(times)
        small, large = ([time / size for time in times[size]] for size in (few, many))
        label = f"{task}: time of a sample at B = {few} over {many}"
        found[f"{task}, {few} over {many}"] = over(small, large, measurement).named(label)
    return found


def all_to_all_faster(results: Results) -> Cases:
    """The time of a step with the paper's averaging over that with an allreduce, at every size."""
    record = results.need("parallel")
    cores = re.fullmatch(r"cpu-(\d+)-cores", record.device["slug"])
    processes = record.config["processes"]
    if cores and int(cores[1]) < 2 * processes:
        raise NotRun(
            f"{processes} processes on {cores[1]} cores leave no core free to communicate while "
            "others compute, so that no averaging can hide its communication"
        )
    gaps: dict[str, Case] = {}
    for task, measurement in measured(results).items():
        plain, ours = (projection.samples_of(measurement, way) for way in AVERAGING[:2])
        for size in ours:
            gaps[f"{task}, B = {size}"] = over(ours[size], plain[size], measurement)
    return gaps


def steps_predicted(results: Results) -> Cases:
    """Steps of two processes, as the model has them from other sizes, over measured ones."""
    found: dict[str, Case] = {}
    for task, measurement in measured(results).items():
        for size, times in projection.samples_of(measurement, projection.OURS).items():
            case: Case = NotRun("measured times do not grow with the samples")
            with suppress(ValueError):
                model = projection.fitted_here(measurement, without=size)
                said = model.step(size, measurement["processes"]).total_s
                case = over([said] * len(times), times, measurement)
            found[f"{task}, B = {size}"] = case
    return found


def same_weights(results: Results) -> tuple[bool, str]:
    """Compare weights after batches that grow, by all three ways of averaging."""
    results.need("parallel")
    launches = [record.metrics["tasks"] for record in results.ok("parallel")]
    largest = {task: max(own[task]["difference"] for own in launches) for task in launches[0]}
    said = "; ".join(f"{task}: largest difference {value:.1g}" for task, value in largest.items())
    return all(value <= 1e-6 for value in largest.values()), said


FIGURE9 = read.artefact(
    "figure9",
    plan=runs.parallel,
    rows=steps_table,
    draw=figure9,
    claims={
        "few_samples": few_samples,
        "all_to_all_faster": all_to_all_faster,
        "steps_predicted": steps_predicted,
    },
    checks={"same_weights": same_weights},
)

# Figure 9 on the modelled cluster of the paper.


def nodes_table(results: Results) -> Iterator[dict[str, Any]]:
    """By nodes, computation, communication and blocked time, over one node's computation."""
    costs = projection.breakdown()
    for nodes, cost in costs.items():
        shares = {part: getattr(cost, f"{part}_s") / costs[1].computation_s for part in PARTS}
        yield {"nodes": nodes, **{f"{part} (%)": f"{100 * s:.2f}" for part, s in shares.items()}}


BREAKDOWN = read.artefact("breakdown", plan=runs.parallel, rows=nodes_table, facts=lambda _: ())
