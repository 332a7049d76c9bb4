"""Does mixing batch sizes gain accuracy, by which factor, and with the resolution cycled as well?

Tables 3, 5, 8 and 10 with Figures 5 to 12. Two questions are our own. Is it the mix, or more
updates? By equations 2 to 5 all plans of one k make as many updates an epoch, so that four
small-batch workers are the baseline at equal updates. And does the gain stay at rates tuned for
each mix?
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from repro import plots
from repro.experiments.dualbatch import cells, runs
from repro.experiments.dualbatch.cells import Line
from repro.experiments.dualbatch.real_workers import cycled
from repro.experiments.dualbatch.runs import CIFAR, FACTORS, IMAGENET, KS, PAPER, WORKERS, K, mix
from repro.experiments.judge import Cases, Estimate, NotRun, cases
from repro.experiments.query import Results
from repro.report import summary

ALL = range(WORKERS + 1)  # numbers of small-batch workers
Groups = dict[str, dict[str, Line]]  # by title, then by a name of `cells.STYLES`
Pairs = Mapping[str, tuple[tuple[str, str], tuple[str, str]]]  # by case, titles and names of lines


def table(results: Results, of: Callable[[Results], Groups], columns: str) -> list[dict[str, Any]]:
    """Final test loss and accuracy of groups of lines, whose columns are named first."""
    group, name = columns.split(", ")
    return [
        {group: title, name: each, **cells.outcome(results, line)}
        for title, lines in of(results).items()
        for each, line in lines.items()
    ]


def draw(results: Results, of: Callable[[Results], Groups], over: str = "") -> "plots.Figure":
    """Draw gains, a column for each group; `over` another training with our curves by epoch."""
    groups = of(results)
    metrics = {"accuracy": "ours: accuracy (%)", "test_loss": "ours: test loss"} if over else {}
    rows, columns = 1 + len(metrics), max(1, len(groups))
    figure, axes = plots.new_axes(rows, columns, 9.8, 7.4 if over else 3.9)
    ran = [record for lines in groups.values() for line in lines.values() for record in line[0]]
    paper = f"paper (hollow): {cells.ROLE}, CIFAR-100"
    figure.suptitle(f"{paper}; {cells.whose(ran)} (solid; bars: 95 % interval)", fontsize=9)
    for (above, *below), (title, lines) in zip(axes.T, groups.items(), strict=True):
        _draw_gains(above, results, {n: line for n, line in lines.items() if line.base})
        above.set_title(f"{title}{f': gain over {over}' if over else ''}", fontsize=8)
        for axis, metric in zip(below, metrics, strict=True):
            axis.set_xlabel("epoch")
            for name, line in lines.items():
                curves = [record.metrics[metric] for record in line.records]
                if curves:
                    mean = np.mean(curves, axis=0)
                    look = cells.STYLES[name] | {"label": name, "markevery": max(1, len(mean) // 8)}
                    axis.plot(range(1, 1 + len(mean)), mean, **look)
    for row, name in zip(axes, ["gain of accuracy (points)", *metrics.values()], strict=True):
        cells.on_one_scale(row, name)
    plots.legend_below(figure, 6)
    return figure


def _draw_gains(axis: "plots.Axes", results: Results, lines: cells.Lines) -> None:
    """Draw gains next to each other, the paper's hollow, ours on their 95 % intervals."""
    axis.axhline(0, color=plots.INK, lw=1, label="_no gain")
    gains = [cells.gain(results, line) for line in lines.values()]
    places = np.arange(len(gains))
    axis.plot(places - 0.14, [paper for _, paper in gains], label="paper", **plots.HOLLOW)
    for x, name, (ours, _) in zip(places + 0.14, lines, gains, strict=True):
        if ours is not None:
            axis.plot([x], [ours.mean], ms=8, label="_ours", **cells.STYLES[name])
            axis.vlines(x, *ours.interval(), color=cells.STYLES[name]["color"], lw=2)
    axis.set_xticks(places, [name.replace(", ", ",\n") for name in lines], fontsize=7)
    axis.margins(0.12)


def compare(results: Results, of: Callable[[Results], Groups], pairs: Pairs) -> Cases:
    """By case, the accuracy of one line over another's."""
    groups = of(results)
    trained = {
        case: (groups[title][name].records, groups[base][other].records)
        for case, ((title, name), (base, other)) in pairs.items()
    }
    return cases(pairs, lambda case: cells.change(results, *trained[case]))


# Table 3: the factor by which a worker's update counts.


def by_factor(results: Results) -> Groups:
    """The trainings of Table 3 by mix and factor, compared with no factor."""
    groups = {}
    for paper in PAPER["table3"]:
        n = paper["n_small"]
        trained = {
            name: Line(cells.section51(results, K[1], n, f), paper[f])
            for f, name in FACTORS.items()
        }
        groups[mix(n)] = cells.lines_over(trained, trained["none"])
    return groups


# d_S/d_L in all cases, its root in those where the paper sees a gain.
_TRIED = [("linear", n) for n in range(1, WORKERS)] + [("sqrt", n) for n in range(2, WORKERS)]
OVER_NONE = {
    f"{FACTORS[f]}, n_S = {n}": ((mix(n), FACTORS[f]), (mix(n), "none")) for f, n in _TRIED
}
TABLE3 = cells.artefact(
    "table3",
    rows=partial(table, of=by_factor, columns="workers, factor"),
    draw=partial(draw, of=by_factor, over="no factor"),
    claims={"factor_gains": partial(compare, of=by_factor, pairs=OVER_NONE)},
)

# Table 5: the number of small-batch workers.


def by_mix(results: Results, k: float) -> dict[str, Line]:
    """The trainings at one k by mix, compared with large batches alone."""
    paper = {row["n_small"]: row for row in PAPER["table5"]["rows"] if row["k"] == k}
    paper[0] = PAPER["table5"]["baseline"]
    trained = {mix(n): Line(cells.section51(results, k, n), paper[n]) for n in ALL}
    return cells.lines_over(trained, trained[mix(0)])


def by_k(results: Results) -> Groups:
    """The trainings of Table 5 by k."""
    return {name: by_mix(results, k) for name, k in KS.items()}


def over_best(results: Results, metric: str, wanted: int, sign: int) -> Cases:
    """A number of small-batch workers over the best of the others: highest, or lowest if -1."""
    groups = by_k(results)

    def best(name: str) -> Estimate:
        trained = {n: groups[name][mix(n)].records for n in ALL}
        ours = trained.pop(wanted)
        over = {n: cells.change(results, ours, base, metric) for n, base in trained.items()}
        closest = min(over, key=lambda n: sign * over[n].mean)
        label = f"{name}, n_S = {wanted} over {closest}"
        return replace(over[closest], candidates=len(over), label=label)

    return cases(groups, best)


_GAINS = itertools.product(KS, range(2, WORKERS + 1))
OVER_LARGE = {f"{k}, n_S = {n}": ((k, mix(n)), (k, mix(0))) for k, n in _GAINS}
TABLE5 = cells.artefact(
    "table5",
    rows=partial(table, of=by_k, columns="k, workers"),
    draw=partial(draw, of=by_k, over=mix(0)),
    claims={
        "gain": partial(compare, of=by_k, pairs=OVER_LARGE),
        "one_too_few": partial(compare, of=by_k, pairs={k: ((k, mix(1)), (k, mix(3))) for k in KS}),
        "three_best": partial(over_best, metric="accuracy", wanted=3, sign=1),
        "lowest_loss": partial(over_best, metric="test_loss", wanted=1, sign=-1),
    },
)

# Tables 8 and 10: the resolution cycled as well.


def by_scheme(results: Results, role: str = CIFAR) -> Groups:
    """Both schemes by mix, compared with the paper's baseline: four large-batch workers."""
    table, setting, base = "table8", runs.SECTION_5_2, "dual-batch"
    if role == IMAGENET:
        table, setting, base = "table10", runs.SECTION_5_2_3, "hybrid"
    trained = {
        scheme: {
            mix(n): Line(results.ok("train", setting=setting, n_small=n, scheme=scheme), row)
            for n, row in enumerate(PAPER[table][key])
        }
        for scheme, key in runs.SCHEMES.items()
    }
    return {scheme: cells.lines_over(of, trained[base][mix(0)]) for scheme, of in trained.items()}


_HYBRID = {f"n_S = {n}": ("hybrid", mix(n)) for n in ALL[1:]}
OVER_DUAL = {case: (line, ("dual-batch", line[1])) for case, line in _HYBRID.items()}
OVER_CYCLIC = {case: (line, ("hybrid", mix(0))) for case, line in _HYBRID.items()}
OVER_BASE = {"n_S = 3": (("hybrid", mix(3)), ("dual-batch", mix(0)))}
TABLE8 = cells.artefact(
    "table8",
    rows=partial(table, of=by_scheme, columns="scheme, workers"),
    draw=partial(draw, of=by_scheme, over=f"{mix(0)}, uncycled"),
    claims={
        "accuracy": partial(compare, of=by_scheme, pairs=OVER_DUAL),
        "gain": partial(compare, of=by_scheme, pairs=OVER_BASE),
        "over_cyclic": partial(compare, of=by_scheme, pairs=OVER_CYCLIC),
        "saving": lambda results: cases([CIFAR], partial(cycled, results)),
    },
)


def imagenet(results: Results, numbers: Sequence[int]) -> Cases:
    """Both schemes over the paper's baseline, hybrid with n_S = 0."""
    if not results.ok("train", setting=runs.SECTION_5_2_3):
        raise NotRun("trained under the profile paper alone, which needs ImageNet")
    trained = itertools.product(runs.SCHEMES, numbers)
    pairs = {f"{by}, n_S = {n}": ((by, mix(n)), ("hybrid", mix(0))) for by, n in trained}
    return compare(results, partial(by_scheme, role=IMAGENET), pairs)


TABLE10 = cells.artefact(
    "table10",
    rows=partial(table, of=partial(by_scheme, role=IMAGENET), columns="scheme, workers"),
    claims={
        "saving": lambda results: cases([IMAGENET], partial(cycled, results)),
        "imagenet_accuracy": partial(imagenet, numbers=(3, 4)),  # "more than two"
        "imagenet_loss": partial(imagenet, numbers=(1, 2)),
    },
)

# The gains of dual batches in one table; and is it the mix that gains, or more updates?


def gain_groups(results: Results) -> Groups:
    """The gains of Tables 5 and 8 over large batches alone."""
    return by_k(results) | {"resolution cycled as well": by_scheme(results)["hybrid"]}


def update_groups(results: Results) -> Groups:
    """The gains of mixes over as many updates; with momentum kept, over large batches."""
    groups = {}
    for k, lines in by_k(results).items():
        both = {mix(n): lines[mix(n)] for n in range(1, WORKERS)}  # batch sizes
        groups[f"{k}, over 4 small"] = cells.lines_over(both, lines[mix(WORKERS)])
    paper = by_mix(results, K[1])
    kept = {
        mix(n): Line(again, paper[mix(n)].paper)
        for n in ALL
        if (again := results.ok("train", setting=runs.KEPT, n_small=n))
    }
    if mix(0) in kept:
        groups["momentum kept, over large batches"] = cells.lines_over(kept, kept[mix(0)])
    return groups


_FIRST = "trained with, workers"
GAINS = cells.artefact("gains", rows=partial(table, of=gain_groups, columns=_FIRST))
UPDATES = cells.artefact(
    "updates",
    rows=partial(table, of=update_groups, columns=_FIRST),
    draw=partial(draw, of=update_groups),
)

# Does the gain stay at rates tuned for each mix?


def rates_table(results: Results) -> Iterator[dict[str, Any]]:
    """Accuracy by mix and rate, on images held out and on test images."""
    for n in runs.SEARCHED:
        tried = {
            rate: results.ok("train", setting=runs.SEARCH, n_small=n, rate=rate)
            for rate in runs.rates_of(results.profile, n)
        }
        held_out = {
            rate: [r.metrics["held_out"][-1] for r in records if r.seed in runs.SEARCH_SEEDS]
            for rate, records in tried.items()
        }
        # None where not all were run.
        best = max(tried, key=lambda r: np.mean(held_out[r])) if all(held_out.values()) else None
        for rate, records in tried.items():
            edge = "; untuned (edge of the grid)" * (rate in (min(tried), max(tried)))
            row = {"workers": mix(n), "rate over the paper's": f"{rate:g}"}
            row["rate over the paper's"] += f" (best{edge})" * (rate == best)
            for metric, images in (("held_out", "images held out"), ("accuracy", "test images")):
                row[f"accuracy on {images} (%)"] = summary(cells.final(results, records, metric))
            yield row | {"n": len(records)}


RATE_SEARCH = cells.artefact("rates", rows=rates_table)
