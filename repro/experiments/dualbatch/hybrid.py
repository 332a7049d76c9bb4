"""What does cycling the resolution gain and save over dual-batch learning alone?

The schedules are Tables 7 and 9, the trainings Table 8 with Figures 11 and 12, and Table 10.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import Check, Chosen, Exhibit, Results, Run, check
from repro.experiments.dualbatch.accuracy import (
    METRICS,
    Changes,
    accuracy_of,
    change,
    changes,
    gain,
    gains,
    outcome,
    plan_cell,
    table5_runs,
    virtual_time,
    wall_cell,
)
from repro.experiments.dualbatch.describing import facts, said_of, trained, whose
from repro.experiments.dualbatch.measured_plan import (
    epoch_seconds,
    kinds_of,
    over_turns,
    wall,
    whole_schedules,
)
from repro.experiments.dualbatch.settings import (
    CIFAR,
    IMAGENET,
    PAPER,
    PARTS,
    ROLE,
    SCHEMES,
    SECTION_5_2,
    SECTION_5_2_3,
    WORKERS,
    K,
    final,
    imagenet_training,
    mix,
    section51,
    section52,
    solved,
    solved_rows,
    table8_training,
)
from repro.experiments.judge import BySeed, Cases, Estimate, NotRun, cases
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAVINGS = {CIFAR: PAPER["claims"]["cifar_saving"], IMAGENET: PAPER["claims"]["imagenet_saving"]}
NOT_RUN = "not run"
_TABLES = {CIFAR: "table8", IMAGENET: "table10"}
# The time of the hybrid scheme over dual-batch learning's.
PAPER_RATIOS = {
    role: PAPER[table]["hybrid_s"] / PAPER[table]["dual_batch_s"] for role, table in _TABLES.items()
}


def schedule(results: Results, table: str) -> list[dict[str, Any]]:
    """Return, for each span of epochs of Table 7 or 9, ours and the paper's values by name."""
    part = PAPER["table6"]["cifar" if table == "table7" else "imagenet"]
    count = len(part["resolutions"])
    stages, spans = PAPER[table]["stages"], PAPER[table]["epochs"]
    rows = []
    for row in solved_rows(results, table):
        cycled = row["scheme"] == "hybrid"
        index = row["sub_stage"] - 1 if cycled else count - 1
        first = (row["stage"] - 1) * count
        last = first + count - 1
        span = spans[first + index] if cycled else [spans[first][0], spans[last][1]]
        batches = [part["small_batches"][0][index], part["large_batches"][index]]
        rows.append(
            {
                "scheme": row["scheme"],
                "stage": row["stage"],
                "sub_stage": row["sub_stage"] if cycled else None,
                "epochs": ([row["first"], row["last"]], span),
                "rate": (row["lr"], stages[row["stage"] - 1][1]),
                "batches": ([row["small_batch"], row["large_batch"]], batches),
                "resolution": (row["resolution"], part["resolutions"][index]),
                "dropout": (row["dropout"], PAPER[table]["dropouts"][index]),
            }
        )
    return rows


def schedule_table(results: Results, table: str) -> list[dict[str, Any]]:
    """Return Table 7 or 9: the setting of every epoch, for one small-batch worker."""
    columns: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "epochs": ("epochs", lambda span: f"{span[0]}-{span[1]}"),
        "rate": ("rate", lambda rate: f"{rate:g}"),
        "batches": ("B_S, B_L", lambda pair: f"{pair[0]}, {pair[1]}"),
        "resolution": ("resolution", int),
        "dropout": ("dropout", lambda share: f"{share:g}"),
    }
    rows = []
    for row in schedule(results, table):
        cells = {"scheme": row["scheme"], "stage": row["stage"]}
        cells["sub-stage"] = row["sub_stage"] or DASH
        for key, (heading, text) in columns.items():
            ours, paper = row[key]
            cells |= {f"{heading}, paper": text(paper), heading: text(ours)}
        rows.append(cells)
    return rows


def _same_schedule(table: str, source: str) -> Check:
    @check(
        f"The schedule is {source}'s: spans of epochs and batch sizes follow from the stages, "
        "resolutions and b / a that it is given"
    )
    def same(results: Results) -> tuple[bool, str]:
        rows = schedule(results, table)
        if not rows:
            raise NotRun("no records")
        equal = [row[key][0] == row[key][1] for row in rows for key in ("epochs", "batches")]
        evidence = f"{sum(equal)} of {len(equal)} spans of epochs and pairs of batch sizes"
        return all(equal), evidence

    return same


def _schedule(table: str, source: str) -> Exhibit:
    return Exhibit(
        runs=lambda profile, chosen: [solved(table)],
        table=partial(schedule_table, table=table),
        caption=caption(
            "The epochs of our schedule, joined where they are alike; one small-batch worker.",
            facts,
        ),
        checks=(_same_schedule(table, source),),
    )


TABLE7 = _schedule("table7", "Table 7")
TABLE9 = _schedule("table9", "Table 9")


def table8_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return trainings by scheme and number of small-batch workers, and epochs on the wall."""
    trainings = [
        table8_training(profile, chosen, n_small, scheme == "hybrid")
        for scheme in SCHEMES
        for n_small in range(WORKERS + 1)
    ]
    # What real workers take does not depend on how long they train.
    return [*trainings, wall(profile)]


def table8(results: Results) -> list[dict[str, Any]]:
    """Return dual-batch learning beside the hybrid scheme."""
    paper = PAPER["table8"]
    base = section52(results, 0, "dual-batch")
    rows = []
    for scheme, key in SCHEMES.items():
        for n_small, published in enumerate(paper[key]):
            records = section52(results, n_small, scheme)
            points = published["accuracy"] - paper["dual_batch"][0]["accuracy"]
            first = scheme == "dual-batch" and n_small == 0
            rows.append(
                {
                    "scheme": scheme,
                    "n_S": n_small,
                    "B_S": plan_cell(records, "small_batch"),
                    "B_L": plan_cell(records, "large_batch"),
                    **outcome(results, records, published),
                    "gain, paper": DASH if first else f"{points:+.1f}",
                    "gain": DASH if first else gain(results, records, base),
                    "virtual (s)": _seconds(virtual_time(records)),
                    "wall (s)": wall_cell(records),
                }
            )
    return rows + _totals(results, "table8", SECTION_5_2)


def _totals(results: Results, table: str, setting: str) -> list[dict[str, Any]]:
    """Return a row a scheme: seconds of a whole training, the paper's and our mean over n_S."""
    rows = []
    for scheme, key in SCHEMES.items():
        trained = [section52(results, n, scheme, setting) for n in range(1, WORKERS + 1)]
        every = [record for records in trained for record in records]
        row: dict[str, Any] = {
            "scheme": f"{scheme}, whole training",
            "n_S": f"1 to {WORKERS}" if every else DASH,
            "time, paper (s)": f"{PAPER[table][f'{key}_s']:,}",
            "virtual (s)": _seconds(virtual_time(every)),
            "wall (s)": wall_cell(every) if every else NOT_RUN,
        }
        rows.append(row)
    return rows


def _seconds(value: float | None) -> str:
    return DASH if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def figures11_12(results: Results) -> "Figure":
    """Draw loss and accuracy of both schemes, and what they change over the baseline."""
    from repro.experiments.dualbatch import drawing

    numbers = range(WORKERS + 1)
    groups = {
        scheme: {mix(n): section52(results, n, scheme) for n in numbers} for scheme in SCHEMES
    }
    drawn = {metric: over_baseline(results, metric) for metric in METRICS}
    ticks = {mix(n): str(n) for n in numbers}
    over = f"{mix(0)}, uncycled"
    return drawing.draw_trainings(groups, drawn, over, ticks, "small-batch workers, of 4")


def over_baseline(results: Results, metric: str = "accuracy") -> dict[str, Changes]:
    """Return what a metric gains over large batches alone, by scheme and mix, and the paper's.

    None where it was not run.
    """
    cells, key, paper = _cells(results, metric), METRICS[metric][0], PAPER["table8"]
    gained = {}
    for scheme, name in SCHEMES.items():
        pairs = {mix(n): ((scheme, n), _BASELINE) for n in range(WORKERS + 1)}
        if scheme == _BASELINE[0]:
            del pairs[mix(0)]
        published = {
            mix(n): row[key] - paper["dual_batch"][0][key] for n, row in enumerate(paper[name])
        }
        gained[scheme] = changes(cells, pairs, published, metric)
    return gained


_BASELINE = ("dual-batch", 0)


def _cells(
    results: Results, metric: str = "accuracy", setting: str = SECTION_5_2
) -> dict[tuple[str, int], BySeed]:
    return {
        (scheme, n): final(results, section52(results, n, scheme, setting), metric)
        for scheme in SCHEMES
        for n in range(WORKERS + 1)
    }


def _by_number(results: Results, base: Callable[[int], tuple[str, int]]) -> Cases:
    """Compare the hybrid scheme with another training, by the number of small-batch workers."""
    cells = _cells(results)
    names = {f"n_S = {n}": n for n in range(1, WORKERS + 1)}
    found = cases(names, lambda name: change(cells, ("hybrid", names[name]), base(names[name])))
    return said_of(found, trained(section52(results, 1, "hybrid")))


def accuracy(results: Results) -> Cases:
    """Compare with dual-batch learning, by the number of small-batch workers."""
    return _by_number(results, lambda n: ("dual-batch", n))


def over_cyclic(results: Results) -> Cases:
    """Compare with no small-batch workers, both with the resolution cycled."""
    return _by_number(results, lambda n: ("hybrid", 0))


def hybrid_gain(results: Results) -> Estimate:
    """Return what the hybrid scheme with three small-batch workers gains over the baseline.

    Raises:
        NotRun: One of them has no records.
    """
    return change(_cells(results), ("hybrid", 3), _BASELINE)


def gain_over_baseline(results: Results) -> Cases:
    """Compare the hybrid scheme with three small-batch workers with large batches alone."""
    found = cases(["n_S = 3"], lambda _: hybrid_gain(results))
    base = section52(results, 0, "dual-batch")
    ends = f"large batches alone end at {accuracy_of(results, base)}" if base else ""
    return said_of(found, trained(section52(results, 3, "hybrid")), ends)


def cycled(results: Results, role: str) -> Estimate:
    """Return the time of the hybrid scheme over dual-batch learning's by real workers.

    Raises:
        NotRun: Nothing was timed.
    """
    hybrid, dual, name = whole_schedules(results, role)
    return replace(over_turns(results, hybrid, dual), label=name)


def saving(role: str) -> Callable[[Results], Cases]:
    """Return what compares the times of whole schedules, at the resolutions of a task."""
    return lambda results: said_of({role: cycled(results, role)})


TABLE8 = Exhibit(
    long=True,
    runs=table8_runs,
    table=table8,
    figure=figures11_12,
    caption=caption(
        "Gain: seed by seed over dual-batch, n_S = 0; hybrid, n_S = 0, is cyclic progressive "
        "learning alone.",
        facts,
    ),
    claims={
        "accuracy": accuracy,
        "gain": gain_over_baseline,
        "over_cyclic": over_cyclic,
        "saving": saving(CIFAR),
    },
)


def table10_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the timing of real workers, and the trainings where ImageNet is at hand."""
    runs = [wall(profile)]
    if chosen.get(IMAGENET):
        runs += [
            imagenet_training(profile, chosen, n_small, scheme == "hybrid")
            for scheme in SCHEMES
            for n_small in range(WORKERS + 1)
        ]
    return runs


def table10(results: Results) -> list[dict[str, Any]]:
    """Return the trainings on ImageNet, and epochs of real workers at its three resolutions."""
    rows: list[dict[str, Any]] = []
    base = section52(results, 0, "hybrid", SECTION_5_2_3)
    for scheme, key in SCHEMES.items():
        for n_small, published in enumerate(PAPER["table10"][key]):
            records = section52(results, n_small, scheme, SECTION_5_2_3)
            is_base = scheme == "hybrid" and n_small == 0
            points = published["accuracy"] - PAPER["table10"]["hybrid"][0]["accuracy"]
            cells = outcome(results, records, published)
            if not records:
                cells |= {"loss": NOT_RUN, "accuracy (%)": NOT_RUN}
            rows.append(
                {
                    "scheme": scheme,
                    "n_S": n_small,
                    **cells,
                    "gain, paper": DASH if is_base else f"{points:+.1f}",
                    "gain": DASH if is_base else gain(results, records, base),
                }
            )
    rows += _totals(results, "table10", SECTION_5_2_3)
    record = results.first("wall")
    if record is None or not record.metrics["parts"]:
        return rows
    kinds = kinds_of(results, IMAGENET)
    seconds = [Summary.of(epoch_seconds(kind)) for kind in kinds]
    sides = PAPER["table6"][PARTS[IMAGENET]]["resolutions"]
    for kind, taken, side in zip(kinds, seconds, sides, strict=True):
        rows.append(
            {
                "scheme": f"an epoch at {kind['resolution']} px (the paper's {side})",
                "wall (s)": taken.text(3),
                "over the highest": f"{taken.mean / seconds[-1].mean:.2f}",
            }
        )
    return rows


def figure10(results: Results) -> "Figure":
    """Draw the time that cycling the resolution takes over the highest one alone."""
    from repro import plots
    from repro.experiments.dualbatch import drawing

    rows: list[tuple[str, float | None, float | None, tuple[float, float] | None]] = []
    for role in PARTS:
        label = f"at {role}'s resolutions"
        try:
            ratio = cycled(results, role)
        except NotRun:
            rows.append((label, PAPER_RATIOS[role], None, None))
            continue
        low, high = map(math.exp, ratio.interval())
        rows.append((label, PAPER_RATIOS[role], math.exp(ratio.mean), (low, high)))
    xlabel = "time of the hybrid scheme over dual-batch learning's (ratio)"
    figure = plots.effects(rows, xlabel, log=False)
    ran = whose(results.ok("wall"), "two real workers, SYNTHETIC images")
    drawing.titled(figure.axes[0], f"{ran}\npaper: {ROLE}, four workers with a GPU each", 100)
    return figure


ENOUGH = range(WORKERS // 2 + 1, WORKERS + 1)  # small-batch workers: "more than two"


def _imagenet(results: Results, numbers: Sequence[int]) -> Cases:
    """Compare both schemes with the paper's baseline, the hybrid scheme with n_S = 0."""
    cells = _cells(results, setting=SECTION_5_2_3)
    if not any(cells.values()):
        raise NotRun("trained under the profile paper alone, which needs ImageNet")
    names = {f"{scheme}, n_S = {n}": (scheme, n) for scheme in SCHEMES for n in numbers}
    found = cases(names, lambda name: change(cells, names[name], ("hybrid", 0)))
    return said_of(found)


def imagenet_accuracy(results: Results) -> Cases:
    """Compare three and four small-batch workers with none."""
    return _imagenet(results, ENOUGH)


def imagenet_loss(results: Results) -> Cases:
    """Compare one and two small-batch workers with none."""
    return _imagenet(results, range(1, ENOUGH[0]))


TABLE10 = Exhibit(
    long=True,
    runs=table10_runs,
    table=table10,
    figure=figure10,
    caption=caption(
        "Trainings run under the profile paper alone. Gain: over hybrid, n_S = 0. Last rows and "
        "figure: epochs of two real workers, at scale.",
        facts,
    ),
    claims={
        "saving": saving(IMAGENET),
        "imagenet_accuracy": imagenet_accuracy,
        "imagenet_loss": imagenet_loss,
    },
)


def gains_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the trainings of Tables 5 and 8."""
    tables = [*table5_runs(profile, chosen), *table8_runs(profile, chosen)]
    return [run for run in tables if run.experiment == "train"]


def gains_table(results: Results) -> list[dict[str, Any]]:
    """Return the gains that are drawn."""
    return [
        {
            "trained with": title,
            "workers": mixed,
            "gain, paper (points)": f"{paper:+.1f}",
            "gain (points)": DASH if gap is None else str(gap),
        }
        for title, drawn in _gain_panels(results).items()
        for mixed, (gap, paper) in drawn.items()
    ]


def _gain_panels(results: Results) -> dict[str, Changes]:
    panels = {f"{100 * (k - 1):.0f} % more time (Table 5)": gains(results, k) for k in K}
    hybrid = dict(over_baseline(results)["hybrid"])
    del hybrid[mix(0)]  # which has no small batches
    panels["resolution cycled as well (Table 8)"] = hybrid
    return panels


def draw_gains(results: Results) -> "Figure":
    """Draw the gain over large batches alone with its 95 % intervals, the paper's beside ours."""
    from repro import plots
    from repro.experiments.dualbatch import drawing

    panels = _gain_panels(results)
    figure, axes = plots.new_axes(1, len(panels), 9.8, 3.9)
    ticks = {mix(n): str(n) for n in range(1, WORKERS + 1)}
    for axis, (title, drawn) in zip(axes[0], panels.items(), strict=True):
        drawing.draw_changes(axis, drawn, ticks)
        axis.set_title(f"paper and ours:\n{title}", fontsize=11)
        axis.set_xlabel(f"workers with small batches, of {WORKERS}")
    axes[0, 0].set_ylabel("gain of accuracy over\nlarge batches alone (points)")
    drawing.on_one_scale(axes[0])
    ran = whose(section51(results, 1.0, 0))
    figure.suptitle(drawing.both(ran, curves=False), fontsize=9)
    plots.legend_below(figure, 2)
    return figure


GAINS = Exhibit(
    long=True,
    runs=gains_runs,
    table=gains_table,
    figure=draw_gains,
    caption=caption(
        "Points of accuracy after the last epoch over large batches alone, intervals of 95 %; "
        "Tables 5 and 8 have the accuracies.",
        facts,
    ),
)
