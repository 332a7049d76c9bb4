"""Where does the time of a step go?

Figure 9 has the parts of a step: measured on two processes, and modelled on many nodes. `scaling`
reads the measured steps; the model is in `projection`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.adaptive import projection
from repro.experiments.adaptive.describing import ROLES, called, network, papers_title
from repro.experiments.adaptive.scaling import (
    LAUNCHES,
    SIMULATED,
    launched,
    measured,
    measured_of,
    over,
    runs,
    samples_of,
    step_facts,
)
from repro.experiments.adaptive.settings import AVERAGING, DIV2K, PAPER, TASKS, ticks_of_two
from repro.experiments.captions import caption, panel
from repro.experiments.design import Exhibit, Results, check
from repro.experiments.judge import HALF, Case, Cases, Estimate, NotRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Margins of the checks are ours, since the paper names none.
BLOCKED = 0.1  # share of the time from which blocked time is significant: less is lost in a figure
SIMILAR = 0.25  # of two times, as a share: twice the nodes change their ratio by more than ×2.5
LESS = HALF  # share of the paper's effect that has to be there, as of what is measured


def steps_table(results: Results) -> list[dict[str, Any]]:
    """Return Figure 9 in numbers: where the time of a measured step goes."""
    return [
        {
            "task": task,
            "averaging": step["averaging"].replace("none", "one process"),
            "batch size": step["batch"],
            "processes": step["processes"],
            "step (ms)": f"{1e3 * step['total_s']:.2f}",
            "computation (ms)": f"{1e3 * step['computation_s']:.2f}",
            "communication (ms)": f"{1e3 * step['communication_s']:.2f}",
            "summation (ms)": f"{1e3 * step['summation_s']:.2f}",
            "blocked (ms)": f"{1e3 * step['blocked_s']:.2f}",
        }
        for task, measurement in measured(results).items()
        for step in measurement["steps"]
    ]


def nodes_table(results: Results) -> list[dict[str, Any]]:
    """Return Figure 9 on the modelled cluster of the paper, by nodes."""
    return [
        {
            "cost of small batches": f"{label}: {model.overhead_s:.2f} samples",
            "nodes": nodes,
            **{f"{name} (%)": f"{100 * value:.2f}" for name, value in row.items()},
        }
        for label, (model, rows) in projection.breakdowns().items()
        for nodes, row in rows.items()
    ]


# Blue, orange and near black, which the colour-blind tell apart; lighter is a part of a part.
PARTS: dict[str, dict[str, Any]] = {
    "computation": {"color": "#0072b2", "marker": "o"},
    "computation at B_m": {"color": "#7fb3e0", "marker": "^", "ls": "--"},
    "communication": {"color": "#e69f00", "marker": "s"},
    "blocked": {"color": "#1c2230", "marker": "D"},
}
SHARE = "before B_m"  # of all time: another quantity, in a panel of its own
STEP = ("computation", "blocked")  # what passes; communication goes on beside it


def figure9(results: Results) -> "Figure":
    """Draw where the time of measured steps goes, at the largest batch size of each task.

    A step is its computation and the time in which that is blocked; communication goes on beside.
    """
    from repro.plots import legend_below, new_axes

    panels = []
    pair = results.first("parallel")
    for task, measurement in measured(results).items():
        job = pair.config["jobs"][task] if pair is not None else {}
        panels.append((panel(ROLES[task], network(job), "random images"), measurement))
    columns = max(1, len(panels))
    drawn, axes = new_axes(1, columns, 3.5 * columns, 3.1)
    for axis, (name, measurement) in zip(axes[0], panels, strict=False):
        largest = max(step["batch"] for step in measurement["steps"])
        steps = [step for step in measurement["steps"] if step["batch"] == largest]
        for row, step in enumerate(steps):
            _draw_step(axis, row, step, LAUNCHES if launched(measurement) else "turns")
        ways = [step["averaging"].replace("_", "-") for step in steps]
        labels = [
            "1 process" if way == "none" else f"{step['processes']}, {way}"
            for way, step in zip(ways, steps, strict=True)
        ]
        axis.set_yticks(range(len(labels)), labels, fontsize=9)
        axis.invert_yaxis()
        axis.set_xlim(left=0)
        axis.grid(axis="y", visible=False)
        axis.set_title(f"{name}\nB = {largest}", fontsize=9)
        axis.set_xlabel("time of one step (ms)")
    legend_below(drawn, 4)
    return drawn


def _draw_step(axis: "Axes", row: int, step: Mapping[str, Any], trials: str) -> None:
    """Draw a step as one bar of what passes, and its communication below; whiskers: all trials."""
    left = 0.0
    for kind in STEP:
        value = 1e3 * step[f"{kind}_s"]
        look: dict[str, Any] = {"height": 0.4, "color": PARTS[kind]["color"]}
        axis.barh(row - 0.14, value, left=left, label=None if row else kind, **look)
        left += value
    look = {"height": 0.2, "color": PARTS["communication"]["color"]}
    label = None if row else "communication, beside it"
    axis.barh(row + 0.2, 1e3 * step["communication_s"], label=label, **look)
    turns = [1e3 * seconds for seconds in step["samples_s"]]
    middle, half = (min(turns) + max(turns)) / 2, (max(turns) - min(turns)) / 2
    whisker: dict[str, Any] = {
        "fmt": "none",
        "ecolor": "#8d99ae",
        "elinewidth": 2,
        "capsize": 4,
        "capthick": 2,
    }
    label = None if row else f"step, least to most of all {trials}"
    axis.errorbar([middle], [row - 0.14], xerr=[half], label=label, **whisker)


def nodes_figure(results: Results) -> "Figure":
    """Draw times over one node's computation on the modelled cluster; then shares of all time."""
    from repro.plots import legend_below, new_axes

    modelled = projection.breakdowns()
    columns = len(modelled) + 1
    drawn, axes = new_axes(1, columns, 3.4 * columns, 3.6)
    whose = f"{papers_title(DIV2K)}, its cluster SIMULATED"
    for axis, (label, (_, rows)) in zip(axes[0], modelled.items(), strict=False):
        for kind, part_look in PARTS.items():
            shown = [(n, row[kind]) for n, row in rows.items() if row[kind] > 1e-4]
            # In the legend in words.
            label = kind.replace("B_m", "the largest batch")
            axis.plot(*zip(*shown, strict=True), lw=1.6, ms=5, label=label, **part_look)
        ticks_of_two(axis, rows, "nodes")
        _in_percent(axis)
        axis.set_title(f"{whose}\ncost of small batches: {label}", fontsize=9)
        axis.set_ylabel("time over computation on 1 node")
    shares = axes[0, len(modelled)]
    for (label, (_, rows)), line in zip(modelled.items(), ("-", "--"), strict=True):
        values = [100 * row[SHARE] for row in rows.values()]
        look: dict[str, Any] = {"color": "#009e73", "marker": "v", "ms": 5, "ls": line}
        shares.plot(list(rows), values, label=f"before the largest batch, cost {label}", **look)
    ticks_of_two(shares, projection.NODES, "nodes")
    shares.set_ylim(bottom=0)
    shares.set_title(f"{whose}\ntime before the batch is largest", fontsize=9)
    shares.set_ylabel("share of all time (%)")
    legend_below(drawn, 3)
    return drawn


def _in_percent(axis: "Axes") -> None:
    """Make a y axis logarithmic, from 0.01 % to 100 %, the same in every panel."""
    ticks = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    axis.set_yscale("log")
    axis.set_ylim(5e-5, 2.0)
    axis.set_yticks(ticks, [f"{100 * tick:g} %" for tick in ticks])
    axis.minorticks_off()


def few_samples(results: Results) -> Cases:
    """Compare the time of a sample in the smallest step with the largest's, on one process.

    The paper's effect is its own cost of a step in samples, at our sizes.
    """
    found: dict[str, Case] = {}
    for task in TASKS:
        if task not in measured(results):
            found[task] = NotRun("no records")
            continue
        measurement = measured_of(results, task)
        times = samples_of(measurement, "none")
        few, many = min(times), max(times)
        small, large = ([time / size for time in times[size]] for size in (few, many))
        label = f"{task}, {_network(results, task)}: time of a sample at B = {few} over {many}"
        found[f"{task}, {few} over {many}"] = replace(over(small, large, measurement), label=label)
    return found


def _network(results: Results, task: str) -> str:
    return called(results.need("parallel").config["jobs"][task])


def averaging_ratios(results: Results) -> dict[str, Estimate]:
    """Return the time of a step with the paper's averaging over that with an allreduce, by case."""
    gaps: dict[str, Estimate] = {}
    for task, measurement in measured(results).items():
        ours, plain = (samples_of(measurement, way) for way in (AVERAGING[1], AVERAGING[0]))
        for size in ours:
            gap = over(ours[size], plain[size], measurement)
            label = f"{task}, {_network(results, task)}, B = {size}"
            gaps[f"{task}, B = {size}"] = replace(gap, label=label)
    return gaps


def all_to_all_faster(results: Results) -> Cases:
    """Compare steps of two processes in turns, at every batch size.

    Raises:
        NotRun: The processes leave no core for what communicates, so that nothing can be hidden.
    """
    record = results.need("parallel")
    cores = re.fullmatch(r"cpu-(\d+)-cores", record.device["slug"])
    processes = record.config["processes"]
    if cores and int(cores[1]) < 2 * processes:
        raise NotRun(
            f"{processes} processes on {cores[1]} cores leave no core free to communicate while "
            "others compute, so that no averaging can hide its communication"
        )
    return averaging_ratios(results)


def steps_predicted(results: Results) -> Cases:
    """Compare steps of two processes, as the model has them from other sizes, with measured ones.

    What a launch draws is common to its sizes. The prediction is taken as it is.
    """
    found: dict[str, Case] = {}
    for task in TASKS:
        if task not in measured(results):
            found[task] = NotRun("no records")
            continue
        measurement = measured_of(results, task)
        times = samples_of(measurement, projection.OURS)
        for row in projection.checked(measurement):
            size, said = int(row["batch"]), row["predicted_s"]
            name = f"{task}, B = {size}"
            if math.isnan(said):
                found[name] = NotRun("measured times do not grow with the samples")
                continue
            gap = over([said] * len(times[size]), times[size], measurement)
            label = f"{task}, {_network(results, task)}, B = {size}"
            found[name] = replace(gap, label=label)
    return found


@check("The three ways of averaging give the same weights")
def same_weights(results: Results) -> tuple[bool, str]:
    """Compare weights after batches that grow."""
    largest = {task: measured_of(results, task)["difference"] for task in TASKS}
    said = "; ".join(f"{task}: largest difference {value:.1g}" for task, value in largest.items())
    return all(value <= 1e-6 for value in largest.values()), said


def _blocked(row: Mapping[str, float]) -> float:
    return row["blocked"] / (row["computation"] + row["blocked"])


_SIGNIFICANT = PAPER["section6b"]["blocked_from_nodes"]
_NOT_LINEAR = PAPER["section6b"]["not_linear_from_nodes"]


@check(
    f"Blocked time becomes significant at {_SIGNIFICANT} nodes (section VI-B; SIMULATED; more than "
    f" {100 * BLOCKED:g} % of the time, and no more at a quarter of them), with "
    "either cost of small batches"
)
def blocked(results: Results) -> tuple[bool, str]:
    """Compare the share of blocked time on the modelled cluster with what is significant."""
    holds, said = [], []
    for label, (_, rows) in projection.breakdowns().items():
        shares = {n: _blocked(rows[n]) for n in (_SIGNIFICANT // 4, _SIGNIFICANT)}
        few, many = shares.values()
        holds.append(many > BLOCKED >= few)
        listed = ", ".join(f"{100 * share:.0f} % on {n}" for n, share in shares.items())
        said.append(f"cost {label}: {listed}")
    return all(holds), "; ".join(said)


@check("Blocked time only grows with the nodes: no smaller share of the time on twice as many")
def blocked_grows(results: Results) -> tuple[bool, str]:
    """Compare the shares where blocked time is to become significant and on twice the nodes."""
    shares = [
        [_blocked(rows[n]) for n in (_SIGNIFICANT, 2 * _SIGNIFICANT)]
        for _, rows in projection.breakdowns().values()
    ]
    said = "; ".join(f"{100 * a:.0f} % and {100 * b:.0f} %" for a, b in shares)
    return all(b >= a for a, b in shares), f"on {_SIGNIFICANT} and {2 * _SIGNIFICANT} nodes: {said}"


@check(
    f"Communication takes as long as computation at {_SIGNIFICANT} nodes (section VI-B; SIMULATED; "
    f"within {100 * SIMILAR:g} %), with either cost of small batches"
)
def communication(results: Results) -> tuple[bool, str]:
    """Compare communication with computation on the modelled cluster."""
    ratios = {
        label: rows[_SIGNIFICANT]["communication"] / rows[_SIGNIFICANT]["computation"]
        for label, (_, rows) in projection.breakdowns().items()
    }
    said = "; ".join(f"cost {label}: ×{ratio:.2f}" for label, ratio in ratios.items())
    return all(abs(math.log(ratio)) <= math.log1p(SIMILAR) for ratio in ratios.values()), said


@check(
    f"Computation at B_m falls less than linearly from {_NOT_LINEAR} nodes on (section VI-B; "
    "SIMULATED; by the cost of small batches that is fitted to the speed-ups, and at "
    f"least {100 * LESS:g} % of what the paper's times of one and two samples would have it short)"
)
def not_linear(results: Results) -> tuple[bool, str]:
    """Compare the factor by which computation falls on twice the nodes with the linear one of 2.

    With the paper's times as the cost of small batches the fall could not be linear.
    """
    cost, rows = projection.overhead(), projection.breakdowns()["fitted"][1]
    largest = PAPER[DIV2K]["theta"]["max_batch"]
    holds, said = [], []
    for nodes in (_NOT_LINEAR, 2 * _NOT_LINEAR):
        falls = rows[nodes]["computation at B_m"] / rows[2 * nodes]["computation at B_m"] / 2
        samples = largest / nodes
        paper = (samples + cost) / (samples / 2 + cost) / 2
        holds.append(math.log(falls) <= LESS * math.log(paper))
        said.append(f"{nodes} to {2 * nodes} nodes ×{falls:.2f} (by the paper's ×{paper:.2f})")
    return all(holds), f"fall over a linear one: {'; '.join(said)}"


FIGURE9 = Exhibit(
    long=True,
    runs=runs,
    table=steps_table,
    figure=figure9,
    caption=caption(
        "Medians of all turns or launches. Blocked: gradients are under way, and nothing is "
        "computed meanwhile. all-to-all is the paper's averaging.",
        step_facts,
    ),
    claims={
        "few_samples": few_samples,
        "all_to_all_faster": all_to_all_faster,
        "steps_predicted": steps_predicted,
    },
    checks=(same_weights,),
)
BREAKDOWN = Exhibit(
    runs=runs,
    table=nodes_table,
    figure=nodes_figure,
    caption=caption(
        f"{SIMULATED} The paper's θ-adaptive training of EDSR on its cluster, a model that is "
        "fitted to its speed-ups.",
        lambda results: (),
    ),
    checks=(blocked, blocked_grows, communication, not_linear),
)
