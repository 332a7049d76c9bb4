"""Do mini-batches beyond memory train, do they pay, and what do they cost? (Tables 4 and 5)"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

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
    one_machine,
)
from repro.experiments.judging import (
    Gap,
    NotRun,
    Part,
    Spread,
    Verdict,
    certain,
    combine,
    difference,
    direction,
    each,
    equivalence,
    exactly,
    ratio,
)
from repro.experiments.mbs.sameness import same_result
from repro.experiments.mbs.settings import (
    CLASSIFIERS,
    PAPER,
    UNITS,
    best,
    epoch_times,
    facts,
    micro_batch_of,
    overhead,
    pairs,
    paper_rows,
    status_or,
    trainings,
)
from repro.report import DASH, Summary, mean_std

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.plots import Point

LEAST_PERCENT = 1.0  # what repeated timings tell apart, where the paper's own overhead is less


def runs(profile: str, chosen: Chosen, roles: Sequence[str]) -> list[Run]:
    """Return trainings by mini-batch size and way, and the steps timed in turns."""
    found = [run for role in roles for run in pairs(profile, role, chosen)]
    return found + [overhead(profile, role, chosen) for role in roles]


def table(results: Results, name: str) -> list[dict[str, Any]]:
    """Return a row per model, mini-batch size and way of training."""
    rows = []
    whole = [
        {"model": role, "mini_batch": size, "micro_batch": micro_batch_of(role, size)}
        for role, size in _beyond_the_papers(results, name)
    ]
    for row, streamed in itertools.product([*PAPER[name], *whole], (False, True)):
        if streamed is False and row in whole:
            continue  # which the paper has no row for, and nobody tries undivided
        found = trainings(results, row["model"], row["mini_batch"], streamed)
        values = best(found)
        way = "with" if streamed else "without"
        paper = row.get(way)
        rows.append(
            {
                "model": row["model"],
                "mini-batch": row["mini_batch"],
                "μ-batch": row["micro_batch"] if streamed else DASH,
                "MBS": way,
                "paper (%)": DASH if row in whole else mean_std(paper),
                "ours (%)": status_or(found, Summary.of(values).text()),
                "n": len(values) or len(found),
                "difference": f"{np.mean(values) - paper[0]:+.2f}" if values and paper else DASH,
                "paper (s/epoch)": DASH if row in whole else mean_std(row.get(f"time_{way}")),
                "ours (s/epoch)": status_or(found, Summary.of(epoch_times(found)).text()),
            }
        )
    return rows


def figure(results: Results, name: str) -> "Figure":
    """Draw the metric with MBS against the mini-batch size, the paper's beside ours."""
    from repro import plots

    roles = list(dict.fromkeys(row["model"] for row in PAPER[name]))
    paper: dict[str, list[Point]] = {role: [] for role in roles}
    ours: dict[str, list[Point]] = {role: [] for role in roles}
    times: dict[str, list[Point]] = {role: [] for role in roles}
    for row in PAPER[name]:
        paper[row["model"]].append((row["mini_batch"], *row["with"]))
    in_the_paper = [(row["model"], row["mini_batch"]) for row in PAPER[name]]
    for role, size in [*in_the_paper, *_beyond_the_papers(results, name)]:
        found = trainings(results, role, size, True)
        for series, values in ((ours, best(found)), (times, epoch_times(found))):
            if values:
                summary = Summary.of(values)
                series[role].append((size, summary.mean, summary.std))
    unit = UNITS["iou" if name == "table5" else "accuracy"]
    initial = max(PAPER["table2"][role]["mini_batch"] for role in roles)
    panels = {"paper, with MBS": paper, "ours, with MBS": ours, "ours, with MBS, time": times}
    return plots.against_mini_batch(panels, [unit, unit, "training time (s/epoch)"], 2 * initial)


def _beyond_the_papers(results: Results, name: str) -> list[tuple[str, int]]:
    """Return models and mini-batches above the paper's rows: all of a training set."""
    largest = {row["model"]: row["mini_batch"] for row in PAPER[name]}
    found = {
        (r.config["role"], r.config["mini_batch"])
        for r in results.select("train", resolution="high")
        if r.config["mini_batch"] > largest.get(r.config["role"], math.inf)
    }
    return sorted(found)


def _streamed(
    results: Results, role: str, values: Callable[..., list[float]] = best
) -> dict[int, list[float]]:
    """Return what the trainings with MBS came to, by mini-batch size of the paper's rows."""
    sizes = [row["mini_batch"] for row in paper_rows(role)]
    found = {n: values(trainings(results, role, n, True)) for n in sizes}
    return {n: own for n, own in found.items() if own}


def _undivided(
    results: Results, role: str, values: Callable[..., list[float]] = best
) -> list[float]:
    return values(trainings(results, role, PAPER["table2"][role]["mini_batch"], False))


def _paper_overhead(role: str, row: int) -> float:
    """Return the share of time that a row with MBS takes more than the undivided first one."""
    first = paper_rows(role)[0]["time_without"][0]
    own = float(paper_rows(role)[row]["time_with"][0]) / first - 1
    return max(own, LEAST_PERCENT / 100)


def _beyond(results: Results, role: str, streamed: bool) -> list[Any]:
    initial = PAPER["table2"][role]["mini_batch"]
    above = [r for r in results.select("train", role=role) if r.config["mini_batch"] > initial]
    return [r for r in above if (r.config["micro_batch"] is not None) == streamed]


def _epoch_times(results: Results, role: str) -> list[Part]:
    """Judge each size's time of an epoch over that of the undivided initial mini-batch."""
    first, *_ = rows = paper_rows(role)
    one_machine(results.ok("train", role=role, resolution="high"))
    times = _streamed(results, role, epoch_times)
    undivided = _undivided(results, role, epoch_times)
    spread = Spread.pooled_logs([*times.values(), undivided])
    paper = {str(r["mini_batch"]): r["time_with"][0] / first["time_without"][0] for r in rows}

    def judge(size: str) -> Part:
        gap = ratio(times[int(size)], undivided, spread)
        # The paper's own ratio, and on top what section 4.3.3 accepts of this very model: the
        # paper's numbers are no slower.
        accepted = max([LEAST_PERCENT, *PAPER["overhead_percent"].get(role, {}).values()])
        allowed = max(paper[size] * (1 + accepted / 100) - 1, LEAST_PERCENT / 100)
        return equivalence(f"{role}, {size} (paper ×{paper[size]:.2f}):", gap, allowed, side=1)

    above = [str(n) for n in times if n > first["mini_batch"]]
    return each(above, judge) or [("not run", f"{role}: no records")]


def claims_of(roles: Sequence[str]) -> tuple[Claim, ...]:  # noqa: C901 (claims, one by one)
    """Return the claims on Table 4 or 5."""

    @claim("trains_beyond", "Mini-batches far beyond memory train with MBS", "Section 4.3.2")
    def trains_beyond(results: Results, expected: Expectation) -> Verdict:
        def judge(role: str) -> Part:
            initial = PAPER["table2"][role]["mini_batch"]
            found = _beyond(results, role, True)
            if not found:
                raise NotRun("no records")
            done = [r.config["mini_batch"] for r in found if r.status == "ok"]
            name = f"{role}: {len(done)} of {len(found)} runs trained"
            if len(done) < len(found):
                return certain(name, False)
            # The sizes that were tried set how far it can reach.
            reach = exactly(max(done) / initial, log=True, digits=0)
            paper = paper_rows(role)[-1]["mini_batch"] / initial
            return direction(f"{name}, up to the initial mini-batch", reach, paper)

        return combine(each(roles, judge))

    @claim(
        "optimum_beyond",
        "A mini-batch above the largest that fits gives the best result",
        "Section 4.3.2",
    )
    def optimum_beyond(results: Results, expected: Expectation) -> Verdict:
        def judge(role: str) -> Part:
            initial, rows = PAPER["table2"][role]["mini_batch"], paper_rows(role)
            cells, without = _streamed(results, role), _undivided(results, role)
            above = {n: values for n, values in cells.items() if n > initial}
            if not above:
                raise NotRun("no records")
            optimum = max(above, key=lambda n: float(np.mean(above[n])))
            published = max(r["with"][0] for r in rows if r["mini_batch"] > initial)
            spread = Spread.pooled([*cells.values(), without])
            return direction(
                f"{role}: best of {len(above)} sizes, {optimum}, over undivided {initial}",
                difference(above[optimum], without, spread, "points"),
                published - rows[0]["without"][0],
                sign=expected.sign,
                candidates=len(above),
            )

        return combine(each(roles, judge))

    @claim("best_not_largest", "The best mini-batch is not the largest one", "Section 4.3.2")
    def best_not_largest(results: Results, expected: Expectation) -> Verdict:
        def judge(role: str) -> Part:
            cells, rows = _streamed(results, role), paper_rows(role)
            if len(cells) < 2:
                raise NotRun("no records")
            largest = max(cells)
            others = {n: float(np.mean(values)) for n, values in cells.items() if n != largest}
            optimum = max(others, key=lambda n: others[n])
            return direction(
                f"{role}: {optimum} over {largest}",
                difference(cells[optimum], cells[largest], Spread.pooled(cells.values()), "points"),
                max(r["with"][0] for r in rows) - rows[-1]["with"][0],
                sign=expected.sign,
                candidates=len(others),
            )

        return combine(each(roles, judge))

    def overhead_claim(key: str, way: str, row: int, text: str) -> Claim:
        @claim(key, f"{text} costs no more time than in the paper", "Tables 4 and 5")
        def judge_overhead(results: Results, expected: Expectation) -> Verdict:
            def judge(role: str) -> Part:
                record = results.need("overhead", role=role)
                initial = record.config["mini_batch"]
                sizes = {"undivided": initial, "halved": initial, "doubled": 2 * initial}
                per_sample = {
                    name: [s / n for s in record.timings[name]["samples_s"]]
                    for name, n in sizes.items()
                }
                gap = ratio(per_sample[way], per_sample["undivided"], digits=3, trials="rounds")
                count = len(per_sample[way])
                return equivalence(
                    f"{role}, {count} in turns,", gap, _paper_overhead(role, row), side=1
                )

            return combine(each(roles, judge))

        return judge_overhead

    @claim(
        "overhead_sizes",
        "At the sizes that the paper names, an epoch with MBS takes no more over the undivided "
        "initial mini-batch than there",
        "Section 4.3.3",
    )
    def overhead_sizes(results: Results, expected: Expectation) -> Verdict:
        def judge(case: str) -> Part:
            role, _, size = case.partition(", ")
            times = _streamed(results, role, epoch_times)
            undivided = _undivided(results, role, epoch_times)
            if int(size) not in times:
                raise NotRun("no records")
            spread = Spread.pooled_logs([*times.values(), undivided])
            gap = ratio(times[int(size)], undivided, spread, digits=3)
            percent = PAPER["overhead_percent"][role][size]
            return equivalence(f"{case}:", gap, max(percent, LEAST_PERCENT) / 100, side=1)

        for role in roles:
            one_machine(results.ok("train", role=role, resolution="high"))
        cases = [
            f"{role}, {size}" for role in roles for size in PAPER["overhead_percent"].get(role, {})
        ]
        return combine(each(cases, judge))

    def growth(results: Results, role: str) -> tuple[str, Gap, float]:
        one_machine(results.ok("train", role=role, resolution="high"))
        times = _streamed(results, role, epoch_times)
        initial = PAPER["table2"][role]["mini_batch"]
        above = sorted(n for n in times if n > initial)
        if len(above) < 2:
            raise NotRun("no records")
        small, large = above[0], above[-1]
        paper = {r["mini_batch"]: r["time_with"][0] for r in paper_rows(role)}
        gap = ratio(times[large], times[small], Spread.pooled_logs(times.values()), digits=3)
        return f"{role}: {large} over {small}", gap, paper[large] / paper[small]

    @claim(
        "time_grows",
        "An epoch takes longer with the largest mini-batch than with the smallest that MBS alone "
        "can train",
        "Section 4.3.3",
    )
    def time_grows(results: Results, expected: Expectation) -> Verdict:
        def judge(role: str) -> Part:
            name, gap, paper = growth(results, role)
            return direction(name, gap, paper, sign=expected.sign)

        return combine(each(roles, judge))

    @claim(
        "time_little",
        "An epoch takes but little longer with the largest mini-batch than with the smallest that "
        "MBS alone can train",
        "Section 4.3.3",
    )
    def time_little(results: Results, expected: Expectation) -> Verdict:
        def judge(role: str) -> Part:
            name, gap, paper = growth(results, role)
            return equivalence(f"{name} (paper ×{paper:.3f})", gap, paper**2 - 1, side=1)

        return combine(each(roles, judge))

    @claim(
        "whole_set",
        "All training samples together can be one mini-batch",
        "Sections 1 and 4.3.2",
    )
    def whole_set(results: Results, expected: Expectation) -> Verdict:
        def judge(role: str) -> Part:
            found = [
                r
                for r in _beyond(results, role, True)
                if (r.metrics or {}).get("steps_per_epoch") == 1 or r.status != "ok"
            ]
            if not found:
                raise NotRun("no records")
            size = max(r.config["mini_batch"] for r in found)
            largest = [r for r in found if r.config["mini_batch"] == size]
            done = sum(r.status == "ok" for r in largest)
            told = f"{role}: mini-batches of all {size:,} trained in {done} of {len(largest)} runs"
            return certain(told, done == len(largest))

        return combine(each(roles, judge))

    @claim(
        "epoch_time",
        "An epoch with larger mini-batches takes no longer, relative to the undivided initial "
        "one, than in the paper",
        "Section 4.3.3",
    )
    def epoch_time(results: Results, expected: Expectation) -> Verdict:
        return combine([part for role in roles for part in _epoch_times(results, role)])

    return (
        trains_beyond,
        same_result(roles, "The result at the initial mini-batch is the same with and without MBS"),
        optimum_beyond,
        best_not_largest,
        overhead_claim("overhead_halved", "halved", 0, "Dividing the initial mini-batch in two"),
        overhead_claim(
            "overhead_doubled",
            "doubled",
            1,
            "Twice the initial mini-batch, in micro-batches of it,",
        ),
        overhead_sizes,
        epoch_time,
        time_grows,
        time_little,
        whole_set,
    )


@claim(
    "resnet101_faster",
    "Of all models ResNet-101 alone takes less time with MBS than without (as we put it: with "
    "larger mini-batches than fit)",
    "Section 4.3.3",
)
def resnet101_faster(results: Results, expected: Expectation) -> Verdict:
    """Judge ResNet-101's epoch at its best mini-batch over the undivided initial one."""
    role, size = "ResNet-101", 128
    one_machine(results.ok("train", role=role, resolution="high"))
    times = _streamed(results, role, epoch_times)
    undivided = _undivided(results, role, epoch_times)
    if size not in times:
        raise NotRun("no records")
    first, *rows = paper_rows(role)
    paper = {r["mini_batch"]: r["time_with"][0] for r in rows}[size] / first["time_without"][0]
    gap = ratio(times[size], undivided, Spread.pooled_logs([*times.values(), undivided]), digits=3)
    return combine([direction(f"{role}, {size}", gap, paper, sign=expected.sign)])


def undivided_fails(roles: Sequence[str]) -> Check:
    """Return the check that larger mini-batches run out of memory without MBS."""

    @check(
        "Without MBS every mini-batch above the initial one runs out of memory: the simulated "
        "limit is set so"
    )
    def fails(results: Results) -> tuple[bool, str]:
        found = {role: _beyond(results, role, False) for role in roles}
        if not any(found.values()):
            raise NotRun("no records")
        refused = {
            role: sum(r.status == "out_of_memory" for r in own) for role, own in found.items()
        }
        said = [f"{role}: {refused[role]} of {len(own)} runs" for role, own in found.items()]
        return all(refused[role] == len(own) for role, own in found.items()), "; ".join(said)

    return fails


def _exhibit(name: str, roles: Sequence[str], lead: str, *more: Claim) -> Exhibit:
    return Exhibit(
        runs=partial(runs, roles=roles),
        table=partial(table, name=name),
        figure=partial(figure, name=name),
        caption=caption(lead, facts),
        claims=(*claims_of(roles), *more),
        checks=(undivided_fails(roles),),
    )


TABLE4 = _exhibit(
    "table4",
    CLASSIFIERS,
    "Best test accuracy and time of an epoch, without and with MBS.",
    resnet101_faster,
)
TABLE5 = _exhibit("table5", ["U-Net"], "Best test IoU and time of an epoch, without and with MBS.")
