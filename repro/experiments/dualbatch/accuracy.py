"""What does dual-batch learning gain, and by which factor are its updates best merged?

Tables 3 and 5, with Figures 5 to 10.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import LONG, Chosen, Exhibit, Results, Run, check
from repro.experiments.dualbatch.describing import facts, said_of, trained
from repro.experiments.dualbatch.settings import (
    KEPT,
    PAPER,
    WORKERS,
    K,
    final,
    mix,
    section51,
    table5_training,
    workers,
)
from repro.experiments.judge import BySeed, Cases, Estimate, NotRun, cases, difference
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FACTORS = {"linear": "d_S/d_L", "sqrt": "√(d_S/d_L)", "none": "none"}
SAME_TIME = 0.01  # of the time that k promises: batch sizes are whole, last batches short
METRICS = {"accuracy": ("accuracy", "points", 2), "test_loss": ("loss", "", 3)}
Cells = Mapping[Any, BySeed]  # a metric after the last epoch, of every seed
Changes = dict[str, tuple[Estimate | None, float]]  # by line: ours, None if not run; the paper's


def outcome(
    results: Results, records: Sequence[Record], paper: Mapping[str, float]
) -> dict[str, Any]:
    """Return the columns of final loss and accuracy, the paper's beside ours."""
    accuracy = final(results, records, "accuracy")
    return {
        "loss, paper": f"{paper['loss']:.3f}",
        "loss": Summary.of(final(results, records, "test_loss")).text(3),
        "accuracy, paper (%)": f"{paper['accuracy']:.1f}",
        "accuracy (%)": Summary.of(accuracy).text(),
        "n": len(accuracy),
    }


def gain(results: Results, records: Sequence[Record], base: Sequence[Record]) -> str:
    """Return the gain in points of accuracy with its interval, as a cell."""
    cells = {name: final(results, of, "accuracy") for name, of in (("", records), ("base", base))}
    try:
        return str(change(cells, "", "base"))
    except NotRun:
        return DASH


def plan_cell(records: Sequence[Record], name: str) -> str:
    """Return a batch size of the plans that a training went by, one for each resolution."""
    if not records:
        return DASH
    # B_L is the size that a plan was solved for, also where no worker has it.
    shares = name.replace("batch", "samples")
    values = [plan[name] if plan[shares] else None for plan in records[0].metrics["plans"]]
    return ", ".join(DASH if value is None else f"{value:,}" for value in values)


def virtual_time(records: Sequence[Record]) -> float | None:
    """Return the mean seconds of trainings by the virtual clock; a cluster has none."""
    series = [record.metrics["virtual_time_s"] for record in records]
    times = [values[-1] for values in series if values]
    return float(np.mean(times)) if times else None


def wall_cell(records: Sequence[Record]) -> str:
    """Return the seconds that trainings took, as a cell; simulated workers have none."""
    real = [record for record in records if record.config.get("engine", "local") != "local"]
    return Summary.of([r.metrics["wall_time_s"][-1] for r in real]).text() if real else DASH


def change(cells: Cells, first: Any, second: Any, metric: str = "accuracy") -> Estimate:
    """Return by how much one cell is above another, seed by seed.

    Raises:
        NotRun: One of them is empty, or they share no seed.
    """
    _, unit, digits = METRICS[metric]
    return difference(cells[first], cells[second], unit, digits)


def changes(
    cells: Cells,
    pairs: Mapping[str, tuple[Any, Any]],
    published: Mapping[str, float],
    metric: str = "accuracy",
) -> Changes:
    """Return by line what a cell is above another, and the paper's."""
    found = cases(pairs, lambda line: change(cells, *pairs[line], metric))
    return {
        line: (case if isinstance(case, Estimate) else None, published[line])
        for line, case in found.items()
    }


def accuracy_of(results: Results, records: Sequence[Record]) -> str:
    """Return the mean final accuracy as text.

    Raises:
        NotRun: There are no records.
    """
    if not records:
        raise NotRun("no records")
    return f"{float(np.mean(final(results, records, 'accuracy'))):.1f} %"


def table3_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return trainings at the larger k by number of small-batch workers and factor."""
    return [
        table5_training(profile, chosen, K[1], n_small, factor)
        for n_small in range(1, WORKERS)
        for factor in FACTORS
    ]


def _by_factor(results: Results, n_small: int) -> dict[str, list[Record]]:
    return {scheme: section51(results, K[1], n_small, scheme) for scheme in FACTORS}


def table3(results: Results) -> list[dict[str, Any]]:
    """Return final test loss and accuracy by model-update factor."""
    rows = []
    for paper in PAPER["table3"]:
        cells = _by_factor(results, paper["n_small"])
        for scheme, label in FACTORS.items():
            records = cells[scheme]
            points = paper[scheme]["accuracy"] - paper["none"]["accuracy"]
            other = scheme != "none"
            factor = records[0].metrics["plans"][-1]["factor"] if records else None
            value = {"linear": factor, "sqrt": factor and factor**0.5, "none": 1.0}[scheme]
            rows.append(
                {
                    "(n_S, n_L)": workers(paper["n_small"]),
                    "factor": label,
                    "value, paper": f"{paper[scheme]['value']:.3f}",
                    "value": f"{value:.3f}" if value and records else DASH,
                    **outcome(results, records, paper[scheme]),
                    "over none, paper": f"{points:+.1f}" if other else DASH,
                    "over none": gain(results, records, cells["none"]) if other else DASH,
                }
            )
    return rows


def figures5_6(results: Results) -> "Figure":
    """Draw loss and accuracy by model-update factor, and what a factor changes over none."""
    from repro.experiments.dualbatch import drawing

    others = [factor for factor in FACTORS if factor != "none"]
    lines = drawing.FACTORS
    groups, drawn = {}, {metric: {} for metric in METRICS}  # type: ignore[var-annotated]
    for paper in PAPER["table3"]:
        n, title = paper["n_small"], mix(paper["n_small"])
        trained = _by_factor(results, n)
        groups[title] = {lines[factor]: trained[factor] for factor in FACTORS}
        for metric, (key, _, _) in METRICS.items():
            cells = _factor_cells(results, metric)
            drawn[metric][title] = changes(
                cells,
                {lines[factor]: ((n, factor), (n, "none")) for factor in others},
                {lines[factor]: paper[factor][key] - paper["none"][key] for factor in others},
                metric,
            )
    return drawing.draw_factors(groups, drawn, "no factor")


def _factor_cells(results: Results, metric: str) -> dict[tuple[int, str], BySeed]:
    return {
        (paper["n_small"], factor): final(results, records, metric)
        for paper in PAPER["table3"]
        for factor, records in _by_factor(results, paper["n_small"]).items()
    }


def factor_gains(results: Results) -> Cases:
    """Compare d_S/d_L with none in all cases, its root in those where the paper sees a gain."""
    cells = _factor_cells(results, "accuracy")
    names = {f"{FACTORS['linear']}, n_S = {n}": (n, "linear") for n in range(1, WORKERS)}
    names |= {f"{FACTORS['sqrt']}, n_S = {n}": (n, "sqrt") for n in range(2, WORKERS)}
    found = cases(names, lambda name: change(cells, names[name], (names[name][0], "none")))
    return said_of(found, trained(section51(results, K[1], 1)))


TABLE3 = Exhibit(
    long=True,
    runs=table3_runs,
    table=table3,
    figure=figures5_6,
    caption=caption(
        f"After the last epoch, k = {K[1]:g}. Over none: points, seed by seed.",
        facts,
    ),
    claims={"factor_gains": factor_gains},
)


# Small-batch workers, at the larger k, that are trained again with momentum kept, and the seeds.
KEPT_RUNS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "quick": ((0, 2, 3, WORKERS), None),
    LONG: ((0, WORKERS), (0, 1, 2, 3)),
}


def table5_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the baseline and trainings by k and number of small-batch workers.

    Some are trained again with momentum kept, where the profile begins it anew in each share.
    """
    baseline = table5_training(profile, chosen, 1.0, 0)
    runs = [baseline] + [
        table5_training(profile, chosen, k, n_small) for k in K for n_small in range(1, WORKERS + 1)
    ]
    numbers, seeds = KEPT_RUNS.get(profile, ((), None))
    changed = {"setting": KEPT, "optimizer_state": "kept"}
    for run in [table5_training(profile, chosen, K[1], n) for n in numbers]:
        label = f"{run.label}, momentum kept"
        runs.append(replace(run, config=run.config | changed, seeds=seeds, label=label))
    return runs


def kept(results: Results, n_small: int) -> list[Record]:
    """Return the trainings of a mix at the larger k with momentum kept from share to share."""
    return results.ok("train", setting=KEPT, n_small=n_small)


def paper_cells(k: float) -> dict[int, Mapping[str, float]]:
    """Return the paper's loss and accuracy by the number of small-batch workers."""
    rows = {row["n_small"]: row for row in PAPER["table5"]["rows"] if row["k"] == k}
    return {0: PAPER["table5"]["baseline"], **rows}


def table5(results: Results) -> list[dict[str, Any]]:
    """Return final test loss and accuracy by the number of small-batch workers."""
    base = section51(results, 1.0, 0)
    before = virtual_time(base)
    paper = PAPER["table5"]["baseline"]
    rows = [(1.0, 0, paper)]
    rows += [(row["k"], row["n_small"], row) for row in PAPER["table5"]["rows"]]
    table_rows = []
    for k, n_small, published in rows:
        records = section51(results, k, n_small)
        virtual = virtual_time(records)
        points = published["accuracy"] - paper["accuracy"]
        table_rows.append(
            {
                "k": f"{k:.2f}",
                "(n_S, n_L)": workers(n_small),
                "B_S": plan_cell(records, "small_batch"),
                "B_L": plan_cell(records, "large_batch"),
                **outcome(results, records, published),
                "gain, paper": f"{points:+.1f}" if n_small else DASH,
                "gain": gain(results, records, base) if n_small else DASH,
                "virtual time over baseline": f"{virtual / before:.3f}"
                if virtual and before
                else DASH,
                "wall (s)": wall_cell(records),
            }
        )
    for n_small, published in paper_cells(K[1]).items():
        if records := kept(results, n_small):
            row = {"k": f"{K[1]:.2f}, momentum kept", "(n_S, n_L)": workers(n_small)}
            row |= outcome(results, records, published)
            if n_small:
                row["gain"] = gain(results, records, kept(results, 0))
            table_rows.append(dict.fromkeys(table_rows[0], DASH) | row)
    return table_rows


def figures7_10(results: Results) -> "Figure":
    """Draw loss and accuracy by the number of small-batch workers, and what they gain."""
    from repro.experiments.dualbatch import drawing

    groups = {
        f"k = {k:g}": {mix(n): section51(results, k, n) for n in range(WORKERS + 1)} for k in K
    }
    drawn = {metric: {f"k = {k:g}": gains(results, k, metric) for k in K} for metric in METRICS}
    ticks = {mix(n): str(n) for n in range(1, WORKERS + 1)}
    return drawing.draw_trainings(groups, drawn, mix(0), ticks, "small-batch workers, of 4")


def gains(results: Results, k: float, metric: str = "accuracy") -> Changes:
    """Return what a metric gains over large batches alone, by the mix of workers, and the paper's.

    None where it was not run.
    """
    cells, paper, key = finals(results, metric), paper_cells(k), METRICS[metric][0]
    return changes(
        cells,
        {mix(n): ((k, n), (k, 0)) for n in range(1, WORKERS + 1)},
        {mix(n): paper[n][key] - paper[0][key] for n in range(1, WORKERS + 1)},
        metric,
    )


def finals(results: Results, metric: str) -> dict[tuple[float, int], BySeed]:
    """Return a metric after the last epoch by k and number, the baseline under each k."""
    return {
        (k, n): final(results, section51(results, k, n), metric)
        for k in K
        for n in range(WORKERS + 1)
    }


ENOUGH = range(2, WORKERS + 1)  # small-batch workers that gain accuracy in the paper
LEAST, MOST = (
    end(row["accuracy"] for row in PAPER["table5"]["rows"] if row["n_small"] in ENOUGH)
    - PAPER["table5"]["baseline"]["accuracy"]
    for end in (min, max)
)


def gained(results: Results) -> Cases:
    """Compare each number from two on with the baseline, which all of them share."""
    cells = finals(results, "accuracy")
    names = {f"k = {k:g}, n_S = {n}": (k, n) for k in K for n in ENOUGH}
    found = cases(names, lambda name: change(cells, names[name], (names[name][0], 0)))
    base = section51(results, 1.0, 0)
    ends = f"large batches alone end at {accuracy_of(results, base)}" if base else ""
    return said_of(found, trained(base), ends)


def one_too_few(results: Results) -> Cases:
    """Compare one with three at each k."""
    cells = finals(results, "accuracy")
    names = {f"k = {k:g}": k for k in K}
    found = cases(names, lambda name: change(cells, (names[name], 1), (names[name], 3)))
    return said_of(found, trained(section51(results, K[0], 1)))


def best_of(results: Results, metric: str, wanted: int, sign: int) -> Cases:
    """Compare a number of small-batch workers with the best of the others, at each k.

    Args:
        results: Of Table 5.
        metric: By which it is to be the best.
        wanted: The number.
        sign: 1 where the highest is best, -1 where the lowest is.
    """
    cells = finals(results, metric)
    others = [n for n in range(WORKERS + 1) if n != wanted]
    names = {f"k = {k:g}": k for k in K}

    def over_best(name: str) -> Estimate:
        k = names[name]
        over = [
            replace(
                change(cells, (k, wanted), (k, n), metric),
                candidates=len(others),
                label=f"{name}, n_S = {wanted} over {n}",
            )
            for n in others
        ]
        return min(over, key=lambda estimate: sign * estimate.mean)

    return said_of(cases(names, over_best), trained(section51(results, K[0], wanted)))


def three_best(results: Results) -> Cases:
    """Compare three with the most accurate of the others."""
    return best_of(results, "accuracy", 3, 1)


def lowest_loss(results: Results) -> Cases:
    """Compare one with the lowest test loss of the others."""
    return best_of(results, "test_loss", 1, -1)


@check(
    f"The extra training time is k, to {100 * SAME_TIME:g} %, by the virtual clock: that has the "
    "plan's own a and b, so that only rounding and short last batches can differ"
)
def extra_time(results: Results) -> tuple[bool, str]:
    """Ask whether a training takes k times the baseline's."""
    before = virtual_time(section51(results, 1.0, 0))
    holds, said = [], []
    for k in K:
        times = [virtual_time(section51(results, k, n)) for n in range(1, WORKERS + 1)]
        ratios = [time / before for time in times if time and before]
        if ratios:
            holds += [abs(ratio / k - 1) <= SAME_TIME for ratio in ratios]
            said.append(f"k = {k:g}: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    if not said:
        raise NotRun("no records with a virtual time")
    return all(holds), "; ".join(said)


TABLE5 = Exhibit(
    long=True,
    runs=table5_runs,
    table=table5,
    figure=figures7_10,
    caption=caption(
        "After the last epoch. Gain: points over 4 large with warm-up, seed by seed, of the seeds "
        "after the first look alone.",
        facts,
    ),
    claims={
        "gain": gained,
        "one_too_few": one_too_few,
        "three_best": three_best,
        "lowest_loss": lowest_loss,
    },
    checks=(extra_time,),
)
