"""Does a growing batch scale further?

Figures 7, 8 and 11: speed-ups, the paper's, those of a model of its cluster, those of two
processes of ours, and those of jobs that a user recorded (``parallel --record``). The model is in
`projection`; where the time of a step goes is in `breakdown`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from repro.experiments.adaptive import projection
from repro.experiments.adaptive.batches import contrast
from repro.experiments.adaptive.settings import (
    CIFAR,
    DIV2K,
    NAMES,
    PAPER,
    PHANTOM,
    SCALE,
    parallel,
    ticks_of_two,
)
from repro.experiments.captions import caption
from repro.experiments.design import (
    Check,
    Chosen,
    Claim,
    Exhibit,
    Expectation,
    Results,
    Run,
    check,
    claim,
)
from repro.experiments.judging import (
    Gap,
    NotRun,
    Part,
    Verdict,
    combine,
    direction,
    equivalence,
    ratio,
)
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = Sequence[tuple[float, float]]

SIMULATED = (
    "SIMULATED: no cluster was at hand. The paper's cluster is a model with latency and bandwidth "
    'fitted to the speed-ups that the paper prints; "modelled from the other two" has not seen '
    "the one that it stands beside, without and with section VI-B's cost of small batches (7/6 of "
    "a sample a step); elsewhere that cost is fitted too, up to 7/6. Speed-ups do not tell "
    "summation and overlap apart: the sum is taken for free, the overlap for whole. Where the "
    "paper gives no schedule for its third method outside CIFAR-10 (batch doubled every "
    f"{PAPER[CIFAR]['scheduled']['every']} of {PAPER[CIFAR]['epochs']} epochs) the same share of "
    "the training is ASSUMED."
)
# The margin of the checks is ours, since the paper names none.
FORETOLD = 0.2  # of a speed-up, as a share: as of the steps of two processes


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the measured steps of one and of two processes."""
    return [parallel(profile)]


def measured(results: Results) -> dict[str, Any]:
    """Return the measured steps of processes by task, empty where there are none."""
    record = results.first("parallel")
    found: dict[str, Any] = record.metrics["tasks"] if record else {}
    return found


def measured_of(results: Results, task: str) -> dict[str, Any]:
    """Return the measured steps of a task.

    Raises:
        NotRun: There are none.
    """
    found: dict[str, Any] | None = measured(results).get(task)
    if found is None:
        raise NotRun("no records")
    return found


def samples_of(found: Mapping[str, Any], averaging: str) -> dict[int, list[float]]:
    """Return the seconds of a step in every turn, by batch size; ``none`` is one process."""
    steps = [step for step in found["steps"] if step["averaging"] == averaging]
    return {step["batch"]: step["samples_s"] for step in steps}


def jobs_of(results: Results, task: str) -> list[Record]:
    """Return the recorded jobs of a task, by device, model and number of processes."""
    found = [record for record in results.recorded if record.config["task"] == task]
    return sorted(found, key=lambda r: (*_kind(r), r.metrics["processes"]))


def _kind(record: Record) -> tuple[str, ...]:
    """Return what jobs have in common whose numbers of processes compare."""
    config = record.config
    sizes = f"{config['sizes'][0]} to {config['sizes'][-1]}"
    return record.device["name"], network_of(config), f"B = {sizes}", config["averaging"]


def jobs_by_kind(results: Results, task: str) -> dict[tuple[str, ...], list[Record]]:
    """Return the recorded jobs of a task whose numbers of processes compare, together."""
    found: dict[tuple[str, ...], list[Record]] = {}
    for record in jobs_of(results, task):
        found.setdefault(_kind(record), []).append(record)
    return found


def title_of(record: Record) -> str:
    """Return the title of the panel of recorded jobs of one kind, by one of them."""
    name, network, sizes, way = _kind(record)
    return f"RECORDED: {name[:32]},\n{network},\n{sizes}, {way}"


def network_of(config: Mapping[str, Any]) -> str:
    """Return the model of a configuration, with its options."""
    options = ", ".join(f"{k} {v}" for k, v in config["model"].items() if k != "name")
    return f"{config['model']['name']}{f' ({options})' if options else ''}"


def recorded_gap(record: Record, strategy: str) -> Gap:
    """Return a recorded job's speed-up of the paper's training over one process, as a ratio."""
    task, way = record.config["task"], record.config["averaging"]
    both = [projection.end_to_end(record.metrics, task, strategy, name) for name in ("none", way)]
    if record.metrics["processes"] == 1:
        both[1] = both[0]
    return ratio(both[0], both[1], trials="rounds")


def recorded_points(results: Results, task: str, strategy: str) -> list[tuple[Record, float]]:
    """Return the speed-ups of recorded jobs whose processes the strategy's batch can all use."""
    own = PAPER[task][strategy]
    largest = own.get("max_batch", own["batch"]) / PAPER[task]["best"]["batch"]
    return [
        (record, math.exp(recorded_gap(record, strategy).mean))
        for record in jobs_of(results, task)
        if record.metrics["processes"] <= largest * record.config["sizes"][0]
    ]


def of_the_papers(record: Record) -> bool:
    """Whether a recorded job trains a model of the paper's at the paper's batch sizes."""
    config = record.config
    models = [SCALE[profile][config["task"]]["model"] for profile in ("gpu", "paper")]
    return (
        config["model"] in models and config["sizes"][0] == PAPER[config["task"]]["best"]["batch"]
    )


def step_facts(results: Results, scaling: bool, task: str | None = None) -> Iterable[str]:
    """Yield what measured steps and recorded jobs are of.

    Args:
        results: Of an artefact.
        scaling: Whether speed-ups are shown.
        task: The recorded jobs of this one alone.
    """
    recorded = list(results.recorded) if task is None else jobs_of(results, task)
    for record in recorded:
        found, config = record.metrics, record.config
        how = (
            "computation and averaging timed by themselves, by the device's events"
            if record.device["type"] != "cpu"
            else "parts of a step as its threads tell them"
        )
        yield (
            f"Recorded: {config['task']}, {network_of(config)}, batches of {config['sizes'][0]} to "
            f"{config['sizes'][-1]}, processes: {found['processes']}, machines: "
            f"{found['machines']}, each with {record.device['name']}, {config['averaging']}; {how}."
        )
    if recorded and scaling:
        yield "Recorded speed-ups are of measured steps and the paper's epochs to its target."
    pair = results.first("parallel")
    if pair is None:
        return
    yield (
        "Measured: training steps of one process, and of two on the same machine, on SYNTHETIC "
        "images (random numbers), 4 in a row, medians, in turns."
    )
    if scaling:
        yield (
            "Projected: the paper's schedule on SIMULATED nodes that compute and communicate like "
            "our processes, with our small model."
        )
    yield f"Processes on {pair.metrics['device']}."


def table(results: Results, task: str) -> list[dict[str, Any]]:
    """Return Figure 7, 8 or 11 in numbers: speed-ups, the paper's, modelled and measured."""
    here = measured(results).get(task)
    model = projection.fitted_here(here) if here else None
    rows = []
    for strategy in projection.SCALED:
        nodes, value = PAPER[task]["speedups"][strategy]
        low, high = sorted(projection.predicted(task, strategy))
        alone = projection.best_speedup(projection.fitted_to_paper(task), task, strategy)
        points = recorded_points(results, task, strategy)
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
        if results.recorded:
            told = [f"{value:.2f} on {r.metrics['processes']}" for r, value in points]
            row["recorded jobs"] = ", ".join(told) or DASH
        if model is not None:
            most, at = projection.largest_speedup(model, task, strategy)
            row["projected, our machine"] = f"{most:.1f} on {at} node{'s' * (at > 1)}"
        if here:
            said, found = projection.two_processes(here, task, strategy)
            row["two processes, projected"] = DASH if math.isnan(said) else f"{said:.2f}"
            row["two processes, measured"] = f"{found:.2f}"
        rows.append(row)
    return rows


def figure(results: Results, task: str) -> "Figure":
    """Draw training time and speed-ups against the number of nodes, both logarithmic.

    Stars are the paper's speed-ups in the panel of its cluster, and those measured here in the
    panel of nodes like our processes. Bars there are predictions that have not seen the star
    beside them. Jobs that were recorded have a panel for each kind, with the projection of the
    largest.
    """
    from repro.plots import MARKERS, PALETTE, legend_below, new_axes

    samples = PAPER[task]["samples"]
    here = measured(results).get(task)
    papers = projection.fitted_to_paper(task)
    own = projection.fitted_here(here) if here else None
    models = {"paper's cluster": papers}
    if own is not None:
        models["nodes like our processes"] = own
    alone = papers.training_time(projection.paper_schedule(task, "best"), samples, 1)
    stars: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in models}
    panels: dict[str, dict[str, Line]] = {"time, paper's cluster": {}}
    panels |= {f"speed-up, {name}": {} for name in models}
    for strategy in projection.SCALED:
        schedule = projection.paper_schedule(task, strategy)
        nodes = projection.nodes_of(task, strategy)
        panels["time, paper's cluster"][strategy] = [
            (n, papers.training_time(schedule, samples, n) / alone) for n in nodes
        ]
        for name, model in models.items():
            speedups = [(n, model.speedup(schedule, samples, n)) for n in nodes]
            panels[f"speed-up, {name}"][strategy] = speedups
        at, value = PAPER[task]["speedups"][strategy]
        if at:
            stars["paper's cluster"][strategy] = (at, value)
        if here and own is not None:
            pace = projection.two_processes(here, task, strategy)[1]
            stars["nodes like our processes"][strategy] = (2.0, pace)
    colours = dict(zip(projection.SCALED, PALETTE, strict=False))
    jobs = jobs_by_kind(results, task)
    columns = len(panels) + len(jobs)
    drawn, axes = new_axes(1, columns, 3.5 * columns, 3.4)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=False):
        for (strategy, points), marker in zip(lines.items(), MARKERS, strict=False):
            look = {"color": colours[strategy], "marker": marker, "ms": 4, "lw": 1.5}
            axis.plot(*zip(*points, strict=True), label=f"{NAMES[strategy]}, modelled", **look)
        ticks_of_two(axis, [n for points in lines.values() for n, _ in points], "nodes")
        axis.set_yscale("log", base=2)
        axis.set_title(title, fontsize=9)
        timed = title.startswith("time")
        axis.set_ylabel("time over best fixed batch, 1 node" if timed else "speed-up")
    kinds = {"paper's cluster": "paper", "nodes like our processes": "measured"}
    for axis, (name, dots) in zip(axes[0, 1:], stars.items(), strict=False):
        for strategy, point in dots.items():
            look = {"color": colours[strategy], "marker": "*", "ms": 12, "mec": "white"}
            axis.plot(*point, ls="none", zorder=5, **look)
        if dots:
            axis.plot([], [], marker="*", ms=11, color="#48536a", ls="none", label=kinds[name])
    _draw_held_out(axes[0, 1], task, colours)
    for axis, own_jobs in zip(axes[0, len(panels) :], jobs.values(), strict=True):
        _draw_recorded(axis, own_jobs, task, colours)
    legend_below(drawn, 3)
    return drawn


def _draw_held_out(axis: "Axes", task: str, colours: Mapping[str, str]) -> None:
    """Draw what the other two strategies' speed-ups foretell of each, beside the paper's star."""
    label = "predicted from the other two (held out)"
    for strategy, colour in colours.items():
        if nodes := PAPER[task]["speedups"][strategy][0]:
            ends = projection.predicted(task, strategy)
            look: dict[str, Any] = {
                "color": colour,
                "marker": "_",
                "ms": 12,
                "mew": 1.5,
                "ls": ":",
                "zorder": 4,
            }
            axis.plot([nodes, nodes], sorted(ends), label=label, **look)


def _draw_recorded(
    axis: "Axes", jobs: Sequence[Record], task: str, colours: Mapping[str, str]
) -> None:
    """Draw the speed-ups of recorded jobs of one kind, and the projection of the largest."""
    config, samples = jobs[-1].config, PAPER[task]["samples"]
    model = projection.fitted_here(jobs[-1].metrics, averaging=config["averaging"])
    results = Results((), (), ())
    results.recorded = jobs
    shown = [1.0]
    for strategy, colour in colours.items():
        schedule = projection.paper_schedule(task, strategy)
        if model is not None:
            nodes = projection.nodes_of(task, strategy)
            speedups = [model.speedup(schedule, samples, n) for n in nodes]
            axis.plot(nodes, speedups, color=colour, ls="--", lw=1, label="projected from recorded")
            shown += nodes
        points = recorded_points(results, task, strategy)
        numbers = [float(record.metrics["processes"]) for record, _ in points]
        look: dict[str, Any] = {"color": colour, "marker": "*", "ms": 12, "mec": "white"}
        look |= {"ls": "none", "zorder": 5}
        axis.plot(numbers, [value for _, value in points], **look)
        shown += numbers
    axis.plot([], [], marker="*", ms=11, color="#48536a", ls="none", label="recorded")
    ticks_of_two(axis, shown, "processes")
    axis.set_yscale("log", base=2)
    axis.set_title(f"speed-up, {title_of(jobs[-1])}", fontsize=7)
    axis.set_ylabel("speed-up")


_CALLED = {
    "best": "the best fixed batch",
    "scheduled": "an adaptive batch at a fixed rate",
    "theta": "θ-adaptive training",
}


def foretold(task: str, strategy: str) -> Check:
    """Return the check that the other two strategies' speed-ups foretell a strategy's own."""

    @check(
        f"The speed-ups of the other two strategies foretell how far {_CALLED[strategy]} scales "
        f"within {100 * FORETOLD:g} %, so that the paper's numbers fit one cluster (SIMULATED; our "
        "question)"
    )
    def near(results: Results) -> tuple[bool, str]:
        paper = PAPER[task]["speedups"][strategy][1]
        values = projection.predicted(task, strategy)
        said = " and ".join(f"{value:.1f} (×{value / paper:.2f})" for value in values)
        near = all(abs(math.log(value / paper)) <= math.log1p(FORETOLD) for value in values)
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


_WHERE = {DIV2K: "Section VI-A", PHANTOM: "Section VI-A", CIFAR: "Section VI-C"}


def reaches(task: str, strategy: str) -> Claim:
    """Return the claim that a strategy reaches the paper's speed-up over one node."""
    nodes, value = PAPER[task]["speedups"][strategy]
    at = f"on {nodes} nodes" if nodes else "(on how many nodes is not said)"
    # A speed-up is at most the number of processes.
    least = nodes or math.ceil(value)

    @claim(
        f"{strategy}_speedup",
        f"{_CALLED[strategy]} reaches a speed-up of {value:.2f} {at}",
        _WHERE[task],
    )
    def judge_speedup(results: Results, expected: Expectation) -> Verdict:
        # Toys scale otherwise.
        points = [p for p in recorded_points(results, task, strategy) if of_the_papers(p[0])]
        found = [point for point in points if point[0].metrics["processes"] >= least]
        if not found:
            largest = max(points, key=lambda p: p[0].metrics["processes"], default=None)
            told = "no job was recorded"
            if largest is not None:
                told = (
                    f"the largest job that was recorded has {largest[0].metrics['processes']}, "
                    f"with a speed-up of {largest[1]:.2f}"
                )
            raise NotRun(f"needs a job of {least} processes (parallel --record); {told}")
        record, _ = max(found, key=lambda point: point[1])
        name = f"{record.metrics['processes']} processes: speed-up over one"
        gap = recorded_gap(record, strategy)
        return combine([direction(name, gap, value, sign=expected.sign)])

    return judge_speedup


def steps_foretold(task: str) -> Claim:
    """Return the claim that the model predicts steps of two processes that it has not seen."""

    @claim(
        "steps_foretold",
        "The model of strong scaling predicts steps of two processes (our question)",
        "none",
    )
    def judge_steps(results: Results, expected: Expectation) -> Verdict:
        found = measured_of(results, task)
        said = {int(row["batch"]): row["predicted_s"] for row in projection.checked(found)}
        said = {size: value for size, value in said.items() if not math.isnan(value)}
        if not said:
            raise NotRun("measured times do not grow with the samples")
        times = samples_of(found, projection.OURS)
        logs = [[math.log(said[size] / time) for time in times[size]] for size in said]

        def judge(size: int) -> Part:
            # The steps of all sizes share their spread; the prediction is taken as it stands.
            gap = contrast(logs, [float(size == other) for other in said], trials="rounds")
            return equivalence(f"B = {size}: predicted over measured", gap, expected.allowed())

        return combine([judge(size) for size in said])

    return judge_steps


def _exhibit(task: str, note: str = "") -> Exhibit:
    return Exhibit(
        runs=runs,
        table=partial(table, task=task),
        figure=partial(figure, task=task),
        caption=caption(
            f"Speed-ups over one node, by strategy.{note} {SIMULATED}",
            partial(step_facts, scaling=True, task=task),
        ),
        claims=(steps_foretold(task), *(reaches(task, name) for name in projection.SCALED)),
        checks=(
            scales_further(task),
            *(foretold(task, name) for name in reversed(projection.SCALED)),
        ),
        recorded=("nodes",),
    )


FIGURE7, FIGURE8 = _exhibit(DIV2K), _exhibit(PHANTOM)
FIGURE11 = _exhibit(
    CIFAR,
    " The paper does not say on how many nodes the best fixed batch reaches "
    f"{PAPER[CIFAR]['speedups']['best'][1]:.2f}.",
)
