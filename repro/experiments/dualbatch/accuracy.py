"""What does dual-batch learning gain, and by which factor are its updates best merged?

Tables 3 and 5, with Figures 5 to 10.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import (
    Chosen,
    Exhibit,
    Expectation,
    Results,
    Run,
    check,
    claim,
)
from repro.experiments.dualbatch.describing import facts
from repro.experiments.dualbatch.settings import (
    PAPER,
    WORKERS,
    K,
    final,
    mix,
    section51,
    table5_training,
    workers,
)
from repro.experiments.intervals import Gap, NotRun, Spread, difference
from repro.experiments.judging import Part, Verdict, combine, direction, each, in_all_cases
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FACTORS = {"linear": "d_S/d_L", "sqrt": "√(d_S/d_L)", "none": "none"}
SAME_TIME = 0.01  # of the time that k promises: batch sizes are whole, last batches short
METRICS = {"accuracy": ("accuracy", "points", 2), "test_loss": ("loss", "", 3)}
Cells = Mapping[Any, Sequence[float]]  # a metric after the last epoch, of every seed


def outcome(records: Sequence[Record], paper: Mapping[str, float]) -> dict[str, Any]:
    """Return the columns of final loss and accuracy, the paper's beside ours."""
    accuracy = final(records, "accuracy")
    return {
        "loss, paper": f"{paper['loss']:.3f}",
        "loss": Summary.of(final(records, "test_loss")).text(3),
        "accuracy, paper (%)": f"{paper['accuracy']:.1f}",
        "accuracy (%)": Summary.of(accuracy).text(),
        "n": len(accuracy),
    }


def gain(records: Sequence[Record], base: Sequence[Record]) -> str:
    """Return the gain in points of accuracy with Welch's interval, as a cell."""
    if not records or not base:
        return DASH
    return str(difference(final(records, "accuracy"), final(base, "accuracy")))


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


def change(cells: Cells, first: Any, second: Any, spread: Spread, metric: str = "accuracy") -> Gap:
    """Return by how much one cell is above another, with the spread of all cells.

    Raises:
        NotRun: One of them is empty.
    """
    _, unit, digits = METRICS[metric]
    return difference(cells[first], cells[second], spread, unit, digits)


def changes(
    cells: Cells,
    pairs: Mapping[str, tuple[Any, Any]],
    published: Mapping[str, float],
    spread: Spread,
    metric: str,
) -> dict[str, tuple[Gap | None, float]]:
    """Return by line what a cell is above another, None where it was not run, and the paper's."""
    by_line: dict[str, tuple[Gap | None, float]] = {}
    for line, (first, second) in pairs.items():
        ran = cells[first] and cells[second]
        gap = change(cells, first, second, spread, metric) if ran else None
        by_line[line] = (gap, published[line])
    return by_line


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
                    **outcome(records, paper[scheme]),
                    "over none, paper": f"{points:+.1f}" if other else DASH,
                    "over none": gain(records, cells["none"]) if other else DASH,
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
                Spread.pooled(cells.values()),
                metric,
            )
    return drawing.draw_factors(groups, drawn, "no factor")


def _factor_cells(results: Results, metric: str) -> dict[tuple[int, str], list[float]]:
    return {
        (paper["n_small"], factor): final(records, metric)
        for paper in PAPER["table3"]
        for factor, records in _by_factor(results, paper["n_small"]).items()
    }


def _factors(
    results: Results, expected: Expectation, better: str, worse: str, numbers: Sequence[int]
) -> Verdict:
    """Judge one factor over another, in all of some numbers of small-batch workers."""
    cells = _factor_cells(results, "accuracy")
    spread = Spread.pooled(cells.values())
    cases: dict[str, tuple[Gap, float | None]] = {}
    for paper in PAPER["table3"]:
        if (n := paper["n_small"]) in numbers:
            gap = change(cells, (n, better), (n, worse), spread)
            published = paper[better]["accuracy"] - paper[worse]["accuracy"]
            cases[f"n_S = {n}:"] = (gap, published)
    return in_all_cases(cases, sign=expected.sign)


@claim(
    "linear_factor",
    "The factor d_S/d_L gains accuracy in all cases over none",
    "Section 5.1.2",
)
def linear_factor(results: Results, expected: Expectation) -> Verdict:
    """Judge d_S/d_L against none."""
    return _factors(results, expected, "linear", "none", (1, 2, 3))


@claim(
    "root_factor",
    "The factor √(d_S/d_L) gains accuracy over none with two and three small-batch workers",
    "Section 5.1.2",
)
def root_factor(results: Results, expected: Expectation) -> Verdict:
    """Judge √(d_S/d_L) against none."""
    return _factors(results, expected, "sqrt", "none", (2, 3))


@claim(
    "root_below_linear",
    "√(d_S/d_L) is less accurate than d_S/d_L with one and with three small-batch workers",
    "Section 5.1.2",
)
def root_below_linear(results: Results, expected: Expectation) -> Verdict:
    """Judge √(d_S/d_L) against d_S/d_L."""
    return _factors(results, expected, "sqrt", "linear", (1, 3))


TABLE3 = Exhibit(
    long=True,
    runs=table3_runs,
    table=table3,
    figure=figures5_6,
    caption=caption(
        f"After the last epoch, k = {K[1]:g}. Over none: points with Welch's interval; verdicts "
        "and figure pool the spread of all cells.",
        facts,
    ),
    claims=(linear_factor, root_factor, root_below_linear),
)


def table5_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the baseline, and trainings by k and number of small-batch workers."""
    baseline = table5_training(profile, chosen, 1.0, 0)
    return [baseline] + [
        table5_training(profile, chosen, k, n_small) for k in K for n_small in range(1, WORKERS + 1)
    ]


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
                **outcome(records, published),
                "gain, paper": f"{points:+.1f}" if n_small else DASH,
                "gain": gain(records, base) if n_small else DASH,
                "virtual time over baseline": f"{virtual / before:.3f}"
                if virtual and before
                else DASH,
                "wall (s)": wall_cell(records),
            }
        )
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


def gains(
    results: Results, k: float, metric: str = "accuracy"
) -> dict[str, tuple[Gap | None, float]]:
    """Return what a metric gains over large batches alone, by the mix of workers, and the paper's.

    None where it was not run.
    """
    cells, paper, key = finals(results, metric), paper_cells(k), METRICS[metric][0]
    return changes(
        cells,
        {mix(n): ((k, n), (k, 0)) for n in range(1, WORKERS + 1)},
        {mix(n): paper[n][key] - paper[0][key] for n in range(1, WORKERS + 1)},
        pooled_spread(cells),
        metric,
    )


def finals(results: Results, metric: str) -> dict[tuple[float, int], list[float]]:
    """Return a metric after the last epoch by k and number, the baseline under each k."""
    return {(k, n): final(section51(results, k, n), metric) for k in K for n in range(WORKERS + 1)}


def pooled_spread(cells: Mapping[tuple[float, int], list[float]]) -> Spread:
    """Return the spread of all cells; the baseline stands under each k, and counts once."""
    return Spread.pooled(values for (k, n), values in cells.items() if n or k == K[0])


ENOUGH = range(2, WORKERS + 1)  # small-batch workers that gain accuracy in the paper
LEAST, MOST = (
    end(row["accuracy"] for row in PAPER["table5"]["rows"] if row["n_small"] in ENOUGH)
    - PAPER["table5"]["baseline"]["accuracy"]
    for end in (min, max)
)


@claim(
    "gain",
    f"Two small-batch workers or more gain accuracy (the paper {LEAST:.1f} to {MOST:.1f} points)",
    "Section 5.1.3",
)
def gained(results: Results, expected: Expectation) -> Verdict:
    """Judge each number from two on over the baseline, which all of them share."""
    by_k = {k: gains(results, k) for k in K}
    settings = {f"k = {k:g}, n_S = {n}": (k, mix(n)) for k in K for n in ENOUGH}

    def judge(name: str) -> Part:
        k, workers_of = settings[name]
        gap, published = by_k[k][workers_of]
        if gap is None:
            raise NotRun("no records")
        return direction(f"{name}:", gap, published, sign=expected.sign)

    return combine(each(settings, judge))


@claim("one_too_few", "One small-batch worker gains less accuracy than three", "Section 5.1.3")
def one_too_few(results: Results, expected: Expectation) -> Verdict:
    """Judge one against three at each k."""
    cells = finals(results, "accuracy")
    names = {f"k = {k:g}, one over three": k for k in K}

    def judge(name: str) -> Part:
        k = names[name]
        gap = change(cells, (k, 1), (k, 3), pooled_spread(cells))
        published = paper_cells(k)[1]["accuracy"] - paper_cells(k)[3]["accuracy"]
        return direction(f"{name}:", gap, published, sign=expected.sign)

    return combine(each(names, judge))


def _best(results: Results, expected: Expectation, metric: str, wanted: int) -> Verdict:
    """Judge whether a number of small-batch workers beats the best of the others, at each k.

    The other is chosen for its mean: the interval is widened for that.
    """
    key = METRICS[metric][0]
    cells = finals(results, metric)
    names = {f"k = {k:g}": k for k in K}

    def judge(name: str) -> Part:
        k = names[name]
        others = {n: float(np.mean(cells[k, n])) for n in range(WORKERS + 1) if cells[k, n]}
        if len(others) <= WORKERS:  # the best of some is not the best of all
            raise NotRun("no records")
        del others[wanted]
        paper = {n: row[key] for n, row in paper_cells(k).items()}
        best = max(others, key=lambda n: expected.sign * others[n])
        published = max((paper[n] for n in others), key=lambda v: expected.sign * v)
        return direction(
            f"{name}, n_S = {wanted} over {best}:",
            change(cells, (k, wanted), (k, best), pooled_spread(cells), metric),
            paper[wanted] - published,
            sign=expected.sign,
            candidates=len(others),
        )

    return combine(each(names, judge))


@claim("three_best", "Three small-batch workers end with the highest accuracy", "Section 5.1.3")
def three_best(results: Results, expected: Expectation) -> Verdict:
    """Judge three against the best of the others."""
    return _best(results, expected, "accuracy", 3)


@claim("lowest_loss", "One small-batch worker ends with the lowest test loss", "Section 5.1.3")
def lowest_loss(results: Results, expected: Expectation) -> Verdict:
    """Judge one against the lowest of the others."""
    return _best(results, expected, "test_loss", 1)


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
        "After the last epoch. Gain: points over 4 large with warm-up, Welch's interval; verdicts "
        "and figure pool the spread of all cells.",
        facts,
    ),
    claims=(gained, one_too_few, three_best, lowest_loss),
    checks=(extra_time,),
)
