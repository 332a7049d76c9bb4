"""Does mixing batch sizes gain accuracy, by which factor, and with the resolution cycled as well?

Tables 3, 5 and 8 with Figures 5 to 12. Two questions are our own. Is it the mix, or more updates?
By equations 2 to 5 all plans of one k make as many updates an epoch, so that four small-batch
workers are the baseline at equal updates. And does the gain stay at rates tuned for each mix?
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import Results
from repro.experiments.dualbatch import runs
from repro.experiments.dualbatch.cells import (
    change,
    final,
    gain,
    kept,
    outcome,
    plan_cell,
    scheme_rows,
    section51,
    section52,
    virtual_time,
)
from repro.experiments.dualbatch.labels import exhibit, said_of, trained, whose
from repro.experiments.dualbatch.real_workers import saving
from repro.experiments.dualbatch.runs import (
    CIFAR,
    FACTORS,
    PAPER,
    RATES,
    SCHEMES,
    SEARCH,
    SEARCH_SEEDS,
    SEARCHED,
    SECTION_5_2,
    WORKERS,
    K,
    mix,
)
from repro.experiments.judge import Cases, Estimate, NotRun, cases
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIXED = range(1, WORKERS + 1)  # numbers of small-batch workers
SAME_TIME = 0.01  # of the time that k promises: batch sizes are whole, last batches short
UNTUNED = "untuned (edge of the grid)"
Records = Sequence[Record]
Changes = dict[str, tuple[Estimate | None, float]]  # by line: ours, None if not run; the paper's
# By line: trainings, those that they are compared with, and the paper's row of each.
Pairs = Mapping[str, tuple[Records, Records, Mapping[str, float], Mapping[str, float]]]


def changes(results: Results, pairs: Pairs, metric: str = "accuracy") -> Changes:
    """The change of a metric by line, ours and the paper's."""
    key = {"accuracy": "accuracy", "test_loss": "loss"}[metric]
    found = cases(pairs, lambda line: change(results, *pairs[line][:2], metric))
    return {
        line: (case if isinstance(case, Estimate) else None, ours[key] - base[key])
        for (line, case), (_, _, ours, base) in zip(found.items(), pairs.values(), strict=True)
    }


def _drawn(
    results: Results,
    groups: Mapping[str, Mapping[str, Records]],
    pairs: Mapping[str, Pairs],
    over: str,
) -> "Figure":
    from repro.experiments.dualbatch import drawing

    drawn = {
        metric: {title: changes(results, pairs[title], metric) for title in groups}
        for metric in drawing.METRICS
    }
    ran = [record for lines in groups.values() for records in lines.values() for record in records]
    return drawing.draw_trainings(groups, drawn, whose(ran), over)


# Table 3: the factor by which a worker's update counts.


def _by_factor(results: Results, n: int) -> dict[str, Records]:
    return {name: section51(results, K[1], n, factor) for factor, name in FACTORS.items()}


def table3(results: Results) -> list[dict[str, Any]]:
    """Final test loss and accuracy by model-update factor."""
    rows = []
    for paper in PAPER["table3"]:
        cells = _by_factor(results, paper["n_small"])
        for factor, label in FACTORS.items():
            records, over = cells[label], factor != "none"
            power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[factor]
            values = [record.metrics["plans"][-1]["factor"] ** power for record in records[:1]]
            rows.append(
                {
                    "workers": mix(paper["n_small"]),
                    "factor": label,
                    "value, paper": f"{paper[factor]['value']:.3f}",
                    "value": Summary.of(values).text(3),
                    **outcome(results, records, paper[factor], cells["none"], paper["none"], over),
                }
            )
    return rows


def figures5_6(results: Results) -> "Figure":
    """Draw loss and accuracy by model-update factor, and their change over none."""
    groups = {
        mix(paper["n_small"]): _by_factor(results, paper["n_small"]) for paper in PAPER["table3"]
    }
    pairs: dict[str, Pairs] = {
        mix(paper["n_small"]): {
            name: (cells[name], cells["none"], paper[factor], paper["none"])
            for factor, name in FACTORS.items()
            if factor != "none"
        }
        for paper, cells in zip(PAPER["table3"], groups.values(), strict=True)
    }
    return _drawn(results, groups, pairs, "no factor")


def factor_gains(results: Results) -> Cases:
    """d_S/d_L over none in all cases, its root in those where the paper sees a gain."""
    names = {f"{FACTORS['linear']}, n_S = {n}": (n, "linear") for n in range(1, WORKERS)}
    names |= {f"{FACTORS['sqrt']}, n_S = {n}": (n, "sqrt") for n in range(2, WORKERS)}

    def over_none(name: str) -> Estimate:
        cells = _by_factor(results, names[name][0])
        return change(results, cells[FACTORS[names[name][1]]], cells["none"])

    return said_of(cases(names, over_none), trained(section51(results, K[1], 1)))


TABLE3 = exhibit(
    "table3",
    runs.table3,
    table3,
    figures5_6,
    claims={"factor_gains": factor_gains},
)

# Table 5: the number of small-batch workers.


def paper_rows(k: float) -> dict[int, Mapping[str, float]]:
    """The paper's loss and accuracy by the number of small-batch workers."""
    rows = {row["n_small"]: row for row in PAPER["table5"]["rows"] if row["k"] == k}
    return {0: PAPER["table5"]["baseline"], **rows}


def table5(results: Results) -> list[dict[str, Any]]:
    """Final test loss and accuracy by the number of small-batch workers."""
    base = section51(results, 1.0, 0)
    cells = [("1.00", 0, base, base)]
    cells += [(f"{k:.2f}", n, section51(results, k, n), base) for k in K for n in MIXED]
    again = f"{K[1]:.2f}, momentum kept"
    cells += [(again, n, kept(results, n), kept(results, 0)) for n in range(WORKERS + 1)]
    before, rows = virtual_time(base), []
    for name, n, records, compared in cells:
        if name == again and not records:
            continue
        paper = paper_rows(float(name.split(",")[0]))[n] if n else PAPER["table5"]["baseline"]
        virtual = virtual_time(records)
        ratio = f"{virtual / before:.3f}" if virtual and before else DASH
        rows.append(
            {
                "k": name,
                "workers": mix(n),
                "B_S": plan_cell(records, "small_batch"),
                "B_L": plan_cell(records, "large_batch"),
                **outcome(results, records, paper, compared, PAPER["table5"]["baseline"], n > 0),
                "virtual time over baseline": ratio,
            }
        )
    return rows


def over_large(results: Results, k: float) -> Pairs:
    """Each mix of workers and large batches alone."""
    base, paper = section51(results, k, 0), paper_rows(k)
    return {mix(n): (section51(results, k, n), base, paper[n], paper[0]) for n in MIXED}


def figures7_10(results: Results) -> "Figure":
    """Draw loss and accuracy by the number of small-batch workers, and their change."""
    numbers = range(WORKERS + 1)
    groups = {f"k = {k:g}": {mix(n): section51(results, k, n) for n in numbers} for k in K}
    pairs = {f"k = {k:g}": over_large(results, k) for k in K}
    return _drawn(results, groups, pairs, mix(0))


def _ends_at(results: Results, base: Records) -> str:
    if not base:
        return ""
    mean = np.mean(final(results, base, "accuracy"))
    return f"large batches alone end at {mean:.1f} %"


def gained(results: Results) -> Cases:
    """Each number from two on over the baseline, which all of them share."""
    base = section51(results, 1.0, 0)
    cells = {f"k = {k:g}, n_S = {n}": section51(results, k, n) for k in K for n in MIXED if n > 1}
    found = cases(cells, lambda name: change(results, cells[name], base))
    return said_of(found, trained(base), _ends_at(results, base))


def one_too_few(results: Results) -> Cases:
    """One small-batch worker over three at each k."""
    cells = {f"k = {k:g}": (section51(results, k, 1), section51(results, k, 3)) for k in K}
    found = cases(cells, lambda name: change(results, *cells[name]))
    return said_of(found, trained(section51(results, K[0], 1)))


def _over_best(results: Results, metric: str, wanted: int, sign: int) -> Cases:
    """A number of small-batch workers over the best of the others: highest, or lowest if -1."""
    names = {f"k = {k:g}": k for k in K}
    others = [n for n in range(WORKERS + 1) if n != wanted]

    def over_best(name: str) -> Estimate:
        ours = section51(results, names[name], wanted)
        over = [
            replace(
                change(results, ours, section51(results, names[name], n), metric),
                candidates=len(others),
                label=f"{name}, n_S = {wanted} over {n}",
            )
            for n in others
        ]
        return min(over, key=lambda estimate: sign * estimate.mean)

    return said_of(cases(names, over_best), trained(section51(results, K[0], wanted)))


def extra_time(results: Results) -> tuple[bool, str]:
    """Ask whether a training takes k times the baseline's."""
    before = virtual_time(section51(results, 1.0, 0))
    ratios = {
        (k, n): time / before
        for k, n in itertools.product(K, MIXED)
        if before and (time := virtual_time(section51(results, k, n)))
    }
    if not ratios:
        raise NotRun("no records with a virtual time")
    said = ", ".join(f"k = {k:g}, n_S = {n}: {ratio:.3f}" for (k, n), ratio in ratios.items())
    return all(abs(ratio / k - 1) <= SAME_TIME for (k, _), ratio in ratios.items()), said


TABLE5 = exhibit(
    "table5",
    runs.table5,
    table5,
    figures7_10,
    claims={
        "gain": gained,
        "one_too_few": one_too_few,
        "three_best": lambda results: _over_best(results, "accuracy", 3, 1),
        "lowest_loss": lambda results: _over_best(results, "test_loss", 1, -1),
    },
    checks={"extra_time": extra_time},
)

# Table 8: the resolution cycled as well.


def over_baseline(results: Results, scheme: str) -> Pairs:
    """Each mix of workers by a scheme and large batches alone, uncycled."""
    base, paper = section52(results, "dual-batch", 0), PAPER["table8"]
    return {
        mix(n): (section52(results, scheme, n), base, row, paper["dual_batch"][0])
        for n, row in enumerate(paper[SCHEMES[scheme]])
        if n or scheme != "dual-batch"
    }


def figures11_12(results: Results) -> "Figure":
    """Draw loss and accuracy of both schemes, and their change over the baseline."""
    numbers = range(WORKERS + 1)
    groups = {s: {mix(n): section52(results, s, n) for n in numbers} for s in SCHEMES}
    pairs = {scheme: over_baseline(results, scheme) for scheme in SCHEMES}
    return _drawn(results, groups, pairs, f"{mix(0)}, uncycled")


def _hybrid_over(results: Results, base: Callable[[int], tuple[str, int]]) -> Cases:
    """The hybrid scheme over another training, by the number of small-batch workers."""
    cells = {
        f"n_S = {n}": (section52(results, "hybrid", n), section52(results, *base(n))) for n in MIXED
    }
    found = cases(cells, lambda name: change(results, *cells[name]))
    return said_of(found, trained(section52(results, "hybrid", 1)))


def hybrid_gain(results: Results) -> Cases:
    """The hybrid scheme with three small-batch workers over large batches alone."""
    ours, base = section52(results, "hybrid", 3), section52(results, "dual-batch", 0)
    found = cases(["n_S = 3"], lambda _: change(results, ours, base))
    return said_of(found, trained(ours), _ends_at(results, base))


TABLE8 = exhibit(
    "table8",
    runs.table8,
    lambda results: scheme_rows(results, "table8", SECTION_5_2, "dual-batch"),
    figures11_12,
    claims={
        "accuracy": lambda results: _hybrid_over(results, lambda n: ("dual-batch", n)),
        "gain": hybrid_gain,
        "over_cyclic": lambda results: _hybrid_over(results, lambda n: ("hybrid", 0)),
        "saving": saving(CIFAR),
    },
)

# What dual batches gain, on one picture.


def _gain_panels(results: Results) -> dict[str, Changes]:
    panels = {
        f"{100 * (k - 1):.0f} % more time (Table 5)": changes(results, over_large(results, k))
        for k in K
    }
    hybrid = changes(results, over_baseline(results, "hybrid"))
    del hybrid[mix(0)]  # which has no small batches
    return panels | {"resolution cycled as well (Table 8)": hybrid}


def gains_table(results: Results) -> list[dict[str, Any]]:
    """The gains that are drawn."""
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


def _draw_panels(results: Results, panels: Mapping[str, Changes]) -> "Figure":
    from repro.experiments.dualbatch import drawing

    figure, axes = drawing.plots.new_axes(1, len(panels), 9.8, 3.9)
    for axis, (title, drawn) in zip(axes[0], panels.items(), strict=True):
        drawing.draw_changes(axis, drawn)
        drawing.titled(axis, f"paper and ours:\n{title}", 36)
    axes[0, 0].set_ylabel("gain of accuracy (points)")
    drawing.on_one_scale(axes[0])
    figure.suptitle(drawing.both(whose(section51(results, 1.0, 0))), fontsize=9)
    drawing.plots.legend_below(figure, 2)
    return figure


GAINS = exhibit(
    "gains",
    runs.gains,
    gains_table,
    lambda results: _draw_panels(results, _gain_panels(results)),
)

# Is it the mix of batch sizes that gains, or more updates?


def updates_over_baseline(record: Record) -> float:
    """The updates of an epoch over those of large batches alone."""
    plan, asked = record.metrics["plans"][-1], record.config["sub_stages"][-1]["plan"]
    n, large = record.config["n_small"], asked["large_batch"]
    small = n * plan["small_samples"] / plan["small_batch"] if n else 0.0
    rest = (WORKERS - n) * plan["large_samples"] / large if n < WORKERS else 0.0
    return (small + rest) / (asked["samples"] / large)


def at_equal_updates(results: Results, k: float) -> Pairs:
    """Each mix of workers and as many updates of one batch size."""
    same, paper = section51(results, k, WORKERS), paper_rows(k)
    numbers = range(1, WORKERS)
    return {mix(n): (section51(results, k, n), same, paper[n], paper[WORKERS]) for n in numbers}


def updates_table(results: Results) -> list[dict[str, Any]]:
    """Accuracy by k and mix, the number of updates, and the gain of mixing alone."""
    sections: list[tuple[float, str, Callable[[int], Records]]] = [
        *((k, "", partial(section51, results, k)) for k in K),
        (K[1], ", momentum kept", partial(kept, results)),
    ]
    rows = []
    for (k, more, select), n in itertools.product(sections, range(WORKERS + 1)):
        records, paper = select(n), paper_rows(k)
        if more and not records:
            continue
        mixed = 0 < n < WORKERS
        points = paper[n]["accuracy"] - paper[WORKERS]["accuracy"]
        rows.append(
            {
                "k": f"{k:g}" if n else "1",
                "workers": mix(n) + more,
                "updates over baseline's": f"{updates_over_baseline(records[0]):.2f}"
                if records
                else DASH,
                **outcome(results, records, paper[n], select(0), paper[0], n > 0),
                "at equal updates, paper": f"{points:+.1f}" if mixed else DASH,
                "at equal updates": gain(results, records, select(WORKERS)) if mixed else DASH,
            }
        )
    return rows


def draw_updates(results: Results) -> "Figure":
    """Draw gains over large batches, and over as many updates of one batch size."""
    panels = {f"k = {k:g}: over large batches": changes(results, over_large(results, k)) for k in K}
    for k in K:
        title = f"k = {k:g}: over as many updates of one size"
        panels[title] = changes(results, at_equal_updates(results, k))
    return _draw_panels(results, panels)


UPDATES = exhibit(
    "updates",
    runs.table5,
    updates_table,
    draw_updates,
)

# Does the gain stay at rates tuned for each mix?


def at_rate(results: Results, n: int, rate: float) -> list[Record]:
    """The trainings of a mix at a multiple of the paper's rates."""
    return results.ok("train", setting=SEARCH, n_small=n, rate=rate)


def best_rate(results: Results, n: int) -> float | None:
    """The rate with the best mean accuracy on held-out images; None where not all were run."""
    held_out = {
        rate: [
            record.metrics["held_out"][-1]
            for record in at_rate(results, n, rate)
            if record.seed in SEARCH_SEEDS
        ]
        for rate in RATES
    }
    if not all(held_out.values()):
        return None
    return max(RATES, key=lambda rate: float(np.mean(held_out[rate])))


def tuned_gain(results: Results, n: int) -> Estimate:
    """The gain over large batches alone, each at its own rate; seeds that chose it do not judge.

    Raises:
        NotRun: Not all rates were run, a best rate lies at an end of the grid, or only the
            trainings that chose the rates were run.
    """
    cells: list[Records] = []
    for m in (n, 0):
        rate = best_rate(results, m)
        if rate is None:
            raise NotRun("not all rates were run")
        if rate in (RATES[0], RATES[-1]):
            raise NotRun(f"{mix(m)}: {UNTUNED}")
        cells.append([r for r in at_rate(results, m, rate) if r.seed not in SEARCH_SEEDS])
    if not all(cells):
        raise NotRun("every seed chose the rates, and none is left to judge them")
    return change(results, cells[0], cells[1])


def rates_table(results: Results) -> list[dict[str, Any]]:
    """Accuracy by mix and rate, on images held out and on test images."""
    rows = []
    for n, rate in itertools.product(SEARCHED, RATES):
        records, best = at_rate(results, n, rate), rate == best_rate(results, n)
        edge = f"; {UNTUNED}" if rate in (RATES[0], RATES[-1]) else ""
        tuned = DASH
        if n and best:
            try:
                tuned = str(tuned_gain(results, n))
            except NotRun as missing:
                tuned = f"not run: {missing}"
        rows.append(
            {
                "workers": mix(n),
                "rate over the paper's": f"{rate:g}" + f" (best{edge})" * best,
                "accuracy on images held out (%)": _mean(results, records, "held_out"),
                "accuracy on test images (%)": _mean(results, records, "accuracy"),
                "gain over large batches, both tuned": tuned,
                "n": len(records),
            }
        )
    return rows


def _mean(results: Results, records: Records, metric: str) -> str:
    return Summary.of(final(results, records, metric)).text()


def draw_rates(results: Results) -> "Figure":
    """Draw accuracy by rate for each mix: on images held out, and on test images."""
    from repro.experiments.dualbatch import drawing

    figure, axes = drawing.plots.new_axes(1, 2, 9.8, 3.6)
    ran = [record for n in SEARCHED for rate in RATES for record in at_rate(results, n, rate)]
    title = f"{whose(ran)}; bars: ± 1 deviation; circled: best, {UNTUNED} at an end"
    figure.suptitle(title, fontsize=9)
    images = {"held_out": "images held out", "accuracy": "test images"}
    for axis, (metric, name) in zip(axes[0], images.items(), strict=True):
        for number, n in enumerate(SEARCHED):
            cells = {rate: final(results, at_rate(results, n, rate), metric) for rate in RATES}
            sums = {rate * 1.03**number: Summary.of(cell) for rate, cell in cells.items() if cell}
            means = [cell.mean for cell in sums.values()]
            bars = [np.nan_to_num(cell.std) for cell in sums.values()]
            axis.errorbar(list(sums), means, bars, lw=1.4, label=mix(n), **drawing.STYLES[mix(n)])
            if best := best_rate(results, n):
                mean = Summary.of(cells[best]).mean
                axis.plot(best * 1.03**number, mean, "o", ms=14, mfc="none", mec="#6b7686")
        axis.set_xscale("log", base=2)
        axis.set_xticks(RATES, [f"×{rate:g}" for rate in RATES])
        axis.set_xlabel("rate over the paper's")
        drawing.titled(axis, f"ours: accuracy on {name}")
    axes[0, 0].set_ylabel("accuracy (%)")
    drawing.on_one_scale(axes[0])
    drawing.plots.legend_below(figure, len(SEARCHED))
    return figure


RATE_SEARCH = exhibit(
    "rates",
    runs.rates,
    rates_table,
    draw_rates,
)
