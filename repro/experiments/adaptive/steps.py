"""Where does the time of a step go? Figure 9, on two processes of ours and on the modelled cluster.

`scaling` reads the measured steps; the model is in `projection`.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.adaptive import projection, read, runs, scaling
from repro.experiments.adaptive.runs import AVERAGING, DIV2K, PAPER, TASKS
from repro.experiments.adaptive.scaling import measured, over, samples_of
from repro.experiments.judge import HALF, Case, Cases, NotRun
from repro.experiments.query import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Margins of the checks are ours, since the paper names none.
BLOCKED = 0.1  # share of the time from which blocked time is significant: less is lost in a figure
SIMILAR = 0.25  # of two times, as a share: twice the nodes change their ratio by more than ×2.5
LESS = HALF  # share of the paper's effect that has to be there, as of measured effects
PARTS = ("computation", "communication", "blocked")


def steps_table(results: Results) -> list[dict[str, Any]]:
    """Figure 9 in numbers: the parts of measured steps."""
    return [
        {
            "task": task,
            "averaging": step["averaging"].replace("none", "one process"),
            "batch size": step["batch"],
            "processes": step["processes"],
            **{f"{part} (ms)": f"{1e3 * step[f'{part}_s']:.2f}" for part in ("total", *PARTS)},
            "n": len(step["samples_s"]),
        }
        for task, measurement in measured(results).items()
        for step in measurement["steps"]
    ]


def nodes_table(results: Results) -> list[dict[str, Any]]:
    """Figure 9 on the modelled cluster of the paper, by nodes."""
    return [
        {
            "cost of small batches": f"{label}: {model.overhead_s:.2f} samples",
            "nodes": nodes,
            **{f"{name} (%)": f"{100 * value:.2f}" for name, value in row.items()},
        }
        for label, (model, rows) in projection.breakdowns().items()
        for nodes, row in rows.items()
    ]


def figure9(results: Results) -> "Figure":
    """Draw where the time of measured steps goes, at the largest batch size of each task.

    A step is its computation and the time in which that is blocked; communication, the thin bar
    below, goes on meanwhile.
    """
    from repro.plots import legend_below, new_axes, styles

    tasks = measured(results)
    drawn, axes = new_axes(1, max(1, len(tasks)), 3.5 * max(1, len(tasks)), 3.1)
    colours = {part: look["color"] for part, look in styles(PARTS).items()}
    for axis, (task, measurement) in zip(axes[0], tasks.items(), strict=False):
        largest = max(step["batch"] for step in measurement["steps"])
        steps = [step for step in measurement["steps"] if step["batch"] == largest]
        ways = [step["averaging"].replace("_", "-") for step in steps]
        labels = ["1 process" if way == "none" else f"2, {way}" for way in ways]
        rows = np.arange(len(steps))
        ms = {part: np.array([1e3 * step[f"{part}_s"] for step in steps]) for part in PARTS}
        places: dict[str, tuple[float, Any, float]] = {
            "computation": (0.4, 0, -0.14),
            "communication": (0.2, 0, 0.2),
            "blocked": (0.4, ms["computation"], -0.14),
        }
        for part, (height, left, shift) in places.items():
            axis.barh(rows + shift, ms[part], height, left, color=colours[part], label=part)
        axis.set_yticks(rows, labels, fontsize=9)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set_title(f"{scaling.panel(results, task)}\nB = {largest}", fontsize=9)
        axis.set_xlabel("time of one step (ms)")
    legend_below(drawn, 3)
    return drawn


def nodes_figure(results: Results) -> "Figure":
    """Draw times over one node's computation on the modelled cluster, for either cost."""
    from repro.experiments.adaptive.draw import ticks_of_two
    from repro.plots import legend_below, new_axes, styles

    modelled = projection.breakdowns()
    drawn, axes = new_axes(1, len(modelled), 8.4, 3.6)
    for axis, (label, (_, rows)) in zip(axes[0], modelled.items(), strict=True):
        for kind, look in styles((*PARTS, "computation at B_m")).items():
            shown = {n: 100 * row[kind] for n, row in rows.items() if row[kind] > 1e-4}
            name = kind.replace("B_m", "the largest batch")
            axis.plot(list(shown), list(shown.values()), lw=1.6, ms=5, label=name, **look)
        axis.set_yscale("log")
        whose = f"{read.papers_title(DIV2K)}, its cluster SIMULATED"
        axis.set_title(f"{whose}\ncost of small batches: {label}", fontsize=9)
        axis.set_ylabel("time over computation on 1 node (%)")
        ticks_of_two(axis, projection.NODES, "nodes")
    legend_below(drawn, 4)
    return drawn


def few_samples(results: Results) -> Cases:
    """The time of a sample in the smallest step over the largest's, on one process.

    The paper's effect is its own cost of a step in samples, at our sizes.
    """
    results.need("parallel")
    found: dict[str, Case] = {}
    for task, measurement in measured(results).items():
        times = samples_of(measurement, "none")
        few, many = min(times), max(times)
        small, large = ([time / size for time in times[size]] for size in (few, many))
        label = f"{task}: time of a sample at B = {few} over {many}"
        found[f"{task}, {few} over {many}"] = replace(over(small, large, measurement), label=label)
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
        plain, ours = (samples_of(measurement, way) for way in AVERAGING[:2])
        for size in ours:
            gaps[f"{task}, B = {size}"] = over(ours[size], plain[size], measurement)
    return gaps


def steps_predicted(results: Results) -> Cases:
    """Steps of two processes, as the model has them from other sizes, over measured ones.

    Randomness of a launch is common to its sizes. The prediction is taken as it is.
    """
    results.need("parallel")
    found: dict[str, Case] = {}
    for task, measurement in measured(results).items():
        times = samples_of(measurement, projection.OURS)
        for size, said in projection.steps_without(measurement).items():
            name = f"{task}, B = {size}"
            if math.isnan(said):
                found[name] = NotRun("measured times do not grow with the samples")
                continue
            found[name] = over([said] * len(times[size]), times[size], measurement)
    return found


def same_weights(results: Results) -> tuple[bool, str]:
    """Compare weights after batches that grow."""
    results.need("parallel")
    largest = {task: measured(results)[task]["difference"] for task in TASKS}
    said = "; ".join(f"{task}: largest difference {value:.1g}" for task, value in largest.items())
    return all(value <= 1e-6 for value in largest.values()), said


def blocked_share(row: Mapping[str, float]) -> float:
    """The share of blocked time in a modelled step."""
    return row["blocked"] / (row["computation"] + row["blocked"])


Rows = Mapping[int, Mapping[str, float]]  # by nodes, the parts of `projection.breakdown`


def _modelled(
    results: Results, compare: Callable[[Rows, int], tuple[bool, str]]
) -> tuple[bool, str]:
    """Compare the modelled cluster's parts at the paper's nodes, with either cost of batches."""
    nodes = PAPER["section6b"]["blocked_from_nodes"]
    found = {label: compare(rows, nodes) for label, (_, rows) in projection.breakdowns().items()}
    said = "; ".join(f"cost {label}: {text}" for label, (_, text) in found.items())
    return all(holds for holds, _ in found.values()), said


def blocked(rows: Rows, nodes: int) -> tuple[bool, str]:
    """Ask for a significant share of blocked time, and for less at a quarter of the nodes."""
    few, many = (blocked_share(rows[n]) for n in (nodes // 4, nodes))
    said = f"{100 * few:.0f} % on {nodes // 4}, {100 * many:.0f} % on {nodes}"
    return many > BLOCKED >= few, said


def grows(rows: Rows, nodes: int) -> tuple[bool, str]:
    """Ask for no smaller share of blocked time on twice the nodes."""
    few, many = (blocked_share(rows[n]) for n in (nodes, 2 * nodes))
    return many >= few, f"{100 * few:.0f} % on {nodes}, {100 * many:.0f} % on {2 * nodes}"


def similar(rows: Rows, nodes: int) -> tuple[bool, str]:
    """Ask whether communication takes as long as computation."""
    ratio = rows[nodes]["communication"] / rows[nodes]["computation"]
    return abs(math.log(ratio)) <= math.log1p(SIMILAR), f"×{ratio:.2f}"


def not_linear(results: Results) -> tuple[bool, str]:
    """Compare the factor by which computation falls on twice the nodes with the linear one of 2.

    With the paper's times as the cost of small batches the fall could not be linear.
    """
    cost, rows = projection.overhead(), projection.breakdowns()["fitted"][1]
    largest, begin = PAPER[DIV2K]["theta"]["max_batch"], PAPER["section6b"]["not_linear_from_nodes"]
    holds, said = [], []
    for nodes in (begin, 2 * begin):
        falls = rows[nodes]["computation at B_m"] / rows[2 * nodes]["computation at B_m"] / 2
        samples = largest / nodes
        paper = (samples + cost) / (samples / 2 + cost) / 2
        holds.append(math.log(falls) <= LESS * math.log(paper))
        said.append(f"{nodes} to {2 * nodes} nodes ×{falls:.2f} (by the paper's ×{paper:.2f})")
    return all(holds), f"fall over a linear one: {'; '.join(said)}"


FIGURE9 = read.artefact(
    "figure9",
    plan=runs.parallel,
    rows=steps_table,
    draw=figure9,
    facts=scaling.warnings,
    claims={
        "few_samples": few_samples,
        "all_to_all_faster": all_to_all_faster,
        "steps_predicted": steps_predicted,
    },
    checks={"same_weights": same_weights},
)
BREAKDOWN = read.artefact(
    "breakdown",
    plan=runs.parallel,
    rows=nodes_table,
    draw=nodes_figure,
    facts=lambda results: (),
    checks={
        "blocked": partial(_modelled, compare=blocked),
        "grows": partial(_modelled, compare=grows),
        "similar": partial(_modelled, compare=similar),
        "not_linear": not_linear,
    },
)
