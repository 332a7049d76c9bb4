"""Does mixing batch sizes gain accuracy, by which factor, and with the resolution cycled as well?

Tables 3, 5 and 8 with Figures 5 to 12. Two questions are our own. Is it the mix, or more updates?
By equations 2 to 5 all plans of one k make as many updates an epoch, so that four small-batch
workers are the baseline at equal updates. And does the gain stay at rates tuned for each mix?
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.dualbatch import real_workers, runs
from repro.experiments.dualbatch.cells import (
    batch_sizes,
    change,
    compared,
    final,
    gain,
    kept,
    outcome,
    scheme_rows,
    section51,
    section52,
)
from repro.experiments.dualbatch.labels import artefact, said_of, trained, whose
from repro.experiments.dualbatch.runs import FACTORS, PAPER, RATES, SCHEMES, WORKERS, K, mix
from repro.experiments.judge import Cases, Estimate, NotRun, cases
from repro.experiments.query import Results
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


def _draw(
    results: Results,
    curves: Mapping[str, Mapping[str, Records]],
    pairs: Mapping[str, Pairs],
    over: str,
) -> "Figure":
    """Draw curves by title and line, and the changes of both metrics over another training."""
    from repro.experiments.dualbatch import drawing

    drawn = {
        metric: {title: changes(results, of, metric) for title, of in pairs.items()}
        for metric in drawing.METRICS
    }
    ran = [record for lines in curves.values() for records in lines.values() for record in records]
    return drawing.draw_trainings(curves, drawn, whose(ran), over)


def _draw_gains(results: Results, panels: Mapping[str, Changes]) -> "Figure":
    """Draw gains of accuracy by title and mix of workers."""
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


# Table 3: the factor by which a worker's update counts.


def _by_factor(results: Results, n: int) -> dict[str, Records]:
    return {name: section51(results, K[1], n, factor) for factor, name in FACTORS.items()}


def table3(results: Results) -> list[dict[str, Any]]:
    """Final test loss and accuracy by model-update factor; gains are over none."""
    rows = []
    for paper, factor in itertools.product(PAPER["table3"], FACTORS):
        cells, label = _by_factor(results, paper["n_small"]), FACTORS[factor]
        power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[factor]
        values = [r.metrics["plans"][-1]["factor"] ** power for r in cells[label][:1]]
        row = {"workers": mix(paper["n_small"]), "factor": label}
        row |= {
            "value, paper": f"{paper[factor]['value']:.3f}",
            "value": Summary.of(values).text(3),
        }
        over = (cells["none"], paper["none"]) if factor != "none" else ()
        rows.append(row | outcome(results, cells[label], paper[factor], *over))
    return rows


def figures5_6(results: Results) -> "Figure":
    """Draw loss and accuracy by model-update factor, and their change over none."""
    curves, pairs = {}, {}
    for paper in PAPER["table3"]:
        title, cells = mix(paper["n_small"]), _by_factor(results, paper["n_small"])
        curves[title] = cells
        pairs[title] = {
            name: (cells[name], cells["none"], paper[factor], paper["none"])
            for factor, name in FACTORS.items()
            if factor != "none"
        }
    return _draw(results, curves, pairs, "no factor")


def factor_gains(results: Results) -> Cases:
    """d_S/d_L over none in all cases, its root in those where the paper sees a gain."""
    tried = [("linear", n) for n in range(1, WORKERS)] + [("sqrt", n) for n in range(2, WORKERS)]
    cells = {n: _by_factor(results, n) for n in range(1, WORKERS)}
    names = {f"{FACTORS[factor]}, n_S = {n}": (cells[n], FACTORS[factor]) for factor, n in tried}
    return compared(results, {name: (of[f], of["none"]) for name, (of, f) in names.items()})


TABLE3 = artefact("table3", table3, figures5_6, claims={"factor_gains": factor_gains})

# Table 5: the number of small-batch workers.


def paper_rows(k: float) -> dict[int, Mapping[str, float]]:
    """The paper's loss and accuracy by the number of small-batch workers."""
    rows = {row["n_small"]: row for row in PAPER["table5"]["rows"] if row["k"] == k}
    return {0: PAPER["table5"]["baseline"], **rows}


def _sections(results: Results) -> list[tuple[str, float, dict[int, Records]]]:
    """The trainings of Table 5 by k, then those with momentum kept: remark, k, and by number."""
    numbers = range(WORKERS + 1)
    found: list[tuple[str, float, dict[int, Records]]]
    found = [("", k, {n: section51(results, k, n) for n in numbers}) for k in K]
    again = {n: kept(results, n) for n in numbers}
    if again[0]:
        found.append((", momentum kept", K[1], {n: r for n, r in again.items() if r}))
    return found


def table5(results: Results) -> list[dict[str, Any]]:
    """Final test loss and accuracy by the number of small-batch workers."""
    rows = []
    for remark, k, cells in _sections(results):
        for n, records in cells.items():
            if not n and k != K[0] and not remark:
                continue  # the baseline is the same at any k
            row = {"k": f"{k if n else 1:g}{remark}", "workers": mix(n), **batch_sizes(records)}
            over = (cells[0], paper_rows(k)[0]) if n else ()
            rows.append(row | outcome(results, records, paper_rows(k)[n], *over))
    return rows


def over_large(results: Results, k: float) -> Pairs:
    """Each mix of workers and large batches alone."""
    base, paper = section51(results, k, 0), paper_rows(k)
    return {mix(n): (section51(results, k, n), base, paper[n], paper[0]) for n in MIXED}


def figures7_10(results: Results) -> "Figure":
    """Draw loss and accuracy by the number of small-batch workers, and their change."""
    numbers = range(WORKERS + 1)
    curves = {f"k = {k:g}": {mix(n): section51(results, k, n) for n in numbers} for k in K}
    return _draw(results, curves, {f"k = {k:g}": over_large(results, k) for k in K}, mix(0))


def gained(results: Results) -> Cases:
    """Each number from two on over the baseline, which all of them share."""
    base = section51(results, 1.0, 0)
    numbers = range(2, WORKERS + 1)
    pairs = {f"k = {k:g}, n_S = {n}": (section51(results, k, n), base) for k in K for n in numbers}
    return compared(results, pairs, baseline=True)


def one_too_few(results: Results) -> Cases:
    """One small-batch worker over three at each k."""
    return compared(
        results, {f"k = {k:g}": (section51(results, k, 1), section51(results, k, 3)) for k in K}
    )


def _over_best(results: Results, metric: str, wanted: int, sign: int) -> Cases:
    """A number of small-batch workers over the best of the others: highest, or lowest if -1."""
    names = {f"k = {k:g}": k for k in K}
    others = [n for n in range(WORKERS + 1) if n != wanted]

    def over(name: str, n: int) -> Estimate:
        ours, other = (section51(results, names[name], m) for m in (wanted, n))
        label = f"{name}, n_S = {wanted} over {n}"
        found = change(results, ours, other, metric)
        return replace(found, candidates=len(others), label=label)

    def over_best(name: str) -> Estimate:
        return min((over(name, n) for n in others), key=lambda estimate: sign * estimate.mean)

    return said_of(cases(names, over_best), trained(section51(results, K[0], wanted)))


def extra_time(results: Results) -> tuple[bool, str]:
    """Ask whether a training takes k times the baseline's by the virtual clock."""
    times = {
        (k, n): [r.metrics["virtual_time_s"][-1] for r in records if r.metrics["virtual_time_s"]]
        for _, k, cells in _sections(results)[: len(K)]
        for n, records in cells.items()
    }
    ratios = {
        (k, n): float(np.mean(seconds) / np.mean(times[k, 0]))
        for (k, n), seconds in times.items()
        if n and seconds and times[k, 0]
    }
    if not ratios:
        raise NotRun("no records with a virtual time")
    said = ", ".join(f"k = {k:g}, n_S = {n}: {ratio:.3f}" for (k, n), ratio in ratios.items())
    return all(abs(ratio / k - 1) <= SAME_TIME for (k, _), ratio in ratios.items()), said


TABLE5 = artefact(
    "table5",
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


def table8(results: Results) -> list[dict[str, Any]]:
    """Both schemes by the number of small-batch workers, and the time of real workers."""
    rows = scheme_rows(results, "table8", runs.SECTION_5_2, "dual-batch")
    return [*rows, real_workers.saving_row(results, runs.CIFAR)]


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
    curves = {s: {mix(n): section52(results, s, n) for n in numbers} for s in SCHEMES}
    pairs = {scheme: over_baseline(results, scheme) for scheme in SCHEMES}
    return _draw(results, curves, pairs, f"{mix(0)}, uncycled")


def _hybrid_over(results: Results, base: Callable[[int], tuple[str, int]]) -> Cases:
    """The hybrid scheme over another training, by the number of small-batch workers."""
    hybrid = {n: section52(results, "hybrid", n) for n in MIXED}
    pairs = {f"n_S = {n}": (of, section52(results, *base(n))) for n, of in hybrid.items()}
    return compared(results, pairs)


def hybrid_gain(results: Results) -> Cases:
    """The hybrid scheme with three small-batch workers over large batches alone."""
    base = section52(results, "dual-batch", 0)
    return compared(results, {"n_S = 3": (section52(results, "hybrid", 3), base)}, baseline=True)


TABLE8 = artefact(
    "table8",
    table8,
    figures11_12,
    claims={
        "accuracy": lambda results: _hybrid_over(results, lambda n: ("dual-batch", n)),
        "gain": hybrid_gain,
        "over_cyclic": lambda results: _hybrid_over(results, lambda n: ("hybrid", 0)),
        "saving": real_workers.saving(runs.CIFAR),
    },
)

# The gains of dual batches, on one picture.


def _gain_panels(results: Results) -> dict[str, Changes]:
    titles = {f"{100 * (k - 1):.0f} % more time (Table 5)": over_large(results, k) for k in K}
    panels = {title: changes(results, pairs) for title, pairs in titles.items()}
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


GAINS = artefact("gains", gains_table, lambda results: _draw_gains(results, _gain_panels(results)))

# Is it the mix of batch sizes that gains, or more updates?


def updates_over_baseline(record: Record) -> float:
    """The updates of an epoch over those of large batches alone."""
    plan, asked = record.metrics["plans"][-1], record.config["sub_stages"][-1]["plan"]
    n, large = record.config["n_small"], asked["large_batch"]
    small = n * plan["small_samples"] / plan["small_batch"] if n else 0.0
    rest = (WORKERS - n) * plan["large_samples"] / large if n < WORKERS else 0.0
    return float((small + rest) / (asked["samples"] / large))


def updates_table(results: Results) -> list[dict[str, Any]]:
    """Accuracy by k and mix, the number of updates, and the gain of mixing alone."""
    rows = []
    for remark, k, cells in _sections(results):
        for n, records in cells.items():
            if not n and k != K[0] and not remark:
                continue  # the baseline is the same at any k
            updates = Summary.of(map(updates_over_baseline, records[:1])).text()
            row = {
                "k": f"{k if n else 1:g}{remark}",
                "workers": mix(n),
                "updates over baseline's": updates,
            }
            paper = paper_rows(k)
            over = (cells[0], paper[0]) if n else ()
            row |= outcome(results, records, paper[n], *over)
            if 0 < n < WORKERS:
                points = paper[n]["accuracy"] - paper[WORKERS]["accuracy"]
                row["at equal updates, paper"] = f"{points:+.1f}"
                row["at equal updates"] = gain(results, records, cells[WORKERS])
            rows.append(row)
    return rows


def draw_updates(results: Results) -> "Figure":
    """Draw gains over large batches, and over as many updates of one batch size."""
    panels = {f"k = {k:g}: over large batches": changes(results, over_large(results, k)) for k in K}
    for k in K:
        same, paper = section51(results, k, WORKERS), paper_rows(k)
        pairs = {
            mix(n): (section51(results, k, n), same, paper[n], paper[WORKERS])
            for n in range(1, WORKERS)
        }
        panels[f"k = {k:g}: over as many updates of one size"] = changes(results, pairs)
    return _draw_gains(results, panels)


UPDATES = artefact("updates", updates_table, draw_updates)

# Does the gain stay at rates tuned for each mix?


def _at_rate(results: Results, n: int, rate: float) -> list[Record]:
    return results.ok("train", setting=runs.SEARCH, n_small=n, rate=rate)


def best_rate(results: Results, n: int) -> float | None:
    """The rate with the best mean accuracy on held-out images; None where not all were run."""
    held_out = {
        rate: [
            record.metrics["held_out"][-1]
            for record in _at_rate(results, n, rate)
            if record.seed in runs.SEARCH_SEEDS
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
        cells.append([r for r in _at_rate(results, m, rate) if r.seed not in runs.SEARCH_SEEDS])
    if not all(cells):
        raise NotRun("every seed chose the rates, and none is left to judge them")
    return change(results, cells[0], cells[1])


def rates_table(results: Results) -> list[dict[str, Any]]:
    """Accuracy by mix and rate, on images held out and on test images."""
    rows = []
    for n, rate in itertools.product(runs.SEARCHED, RATES):
        records, best = _at_rate(results, n, rate), rate == best_rate(results, n)
        edge = f"; {UNTUNED}" if rate in (RATES[0], RATES[-1]) else ""
        row = {"workers": mix(n), "rate over the paper's": f"{rate:g}{f' (best{edge})' * best}"}
        for images, metric in (("images held out", "held_out"), ("test images", "accuracy")):
            mean = Summary.of(final(results, records, metric)).text()
            row[f"accuracy on {images} (%)"] = mean
        if n and best:
            try:
                told = str(tuned_gain(results, n))
            except NotRun as missing:
                told = f"not run: {missing}"
            row["gain over large batches, both tuned"] = told
        rows.append(row | {"n": len(records)})
    return rows


def draw_rates(results: Results) -> "Figure":
    """Draw accuracy by rate for each mix: on images held out, and on test images."""
    from repro.experiments.dualbatch import drawing

    cells = {mix(n): {rate: _at_rate(results, n, rate) for rate in RATES} for n in runs.SEARCHED}
    ran = [record for line in cells.values() for records in line.values() for record in records]
    panels = {
        f"accuracy on {images}\n{whose(ran)}; bars: ± 1 deviation": {
            name: {rate: final(results, records, metric) for rate, records in line.items()}
            for name, line in cells.items()
        }
        for metric, images in (("held_out", "images held out"), ("accuracy", "test images"))
    }
    figure, axes = drawing.draw_means(panels, "rate over the paper's", "accuracy (%)")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(RATES, [f"×{rate:g}" for rate in RATES])
    best = {n: best_rate(results, n) for n in runs.SEARCHED}
    told = [f"{mix(n)} ×{rate:g}" for n, rate in best.items() if rate]
    edge = f"; {UNTUNED} at an end" if told else ""
    figure.suptitle(f"best on images held out: {', '.join(told) or 'not run'}{edge}", fontsize=9)
    return figure


RATE_SEARCH = artefact("rates", rates_table, draw_rates)
