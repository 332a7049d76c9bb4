"""Does what kernels gain reach a whole iteration, under a limit that binds? (section IV-B)

Whole iterations, forward and backward, of networks that `tune` holds to a limit: by torch's own
convolutions and without a limit, undivided within it, and divided.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

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
from repro.experiments.judging import (
    Gap,
    NotRun,
    Part,
    Verdict,
    certain,
    combine,
    direction,
    each,
    equivalence,
)
from repro.experiments.microconv.settings import (
    ALONE,
    CAFFE,
    ITERATED,
    MIB,
    PAPER,
    facts,
    iterated,
    iterations,
    mib,
    ms,
    paper_batch,
    times,
)
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN, AGAIN, FREE = "plain", "plain again", "tuned, no limit"
MORE = ", more rounds"  # of these three alone
TRIED = (*ITERATED, *ALONE)
UNDIVIDED, DIVIDED = "WR undivided", "WR powerOfTwo"


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the iterations of every network."""
    return [iterations(profile, role) for role in iterated(profile)]


def _record(results: Results, role: str) -> Record:
    return results.need("iterations", role=role)


def form(record: Record, name: str) -> Mapping[str, Any]:
    """Return what became of a network in one form.

    Raises:
        NotRun: It was not run.
    """
    told: Mapping[str, Mapping[str, Any]] = record.metrics["forms"]
    if name not in told:
        raise NotRun(f"{record.config['role']} was not run as {name}")
    return told[name]


def refused(told: Mapping[str, Any]) -> bool:
    """Return whether a form could not be held to the limit."""
    return "least_bytes" in told


def gain(record: Record, slower: str, faster: str) -> Gap:
    """Return how much faster one form's iterations are, by processes.

    Of each process the median over its rounds of the ratio of two times of one round counts; the
    error is what processes differ by.

    Raises:
        NotRun: A form was not timed.
    """
    samples: Sequence[Mapping[str, Sequence[float]]] = record.metrics["samples_s"]
    for name in (slower, faster):
        if any(name not in sample for sample in samples):
            raise NotRun(f"{record.config['role']} was not timed as {name}")
    logs = [
        statistics.median(
            math.log(a / b) for a, b in zip(sample[slower], sample[faster], strict=True)
        )
        for sample in samples
    ]
    mean, n = math.fsum(logs) / len(logs), len(logs)
    if n < 2:
        return Gap(mean, math.nan, math.nan, math.nan, log=True, trials="rounds")
    sd = statistics.stdev(logs)
    return Gap(mean, sd / math.sqrt(n), n - 1, sd / math.sqrt(2), log=True, trials="rounds")


def seconds(record: Record, name: str) -> float | None:
    """Return the median over processes of the median seconds of a form, None if not timed."""
    samples = [sample[name] for sample in record.metrics["samples_s"] if name in sample]
    return statistics.median(map(statistics.median, samples)) if samples else None


def _form_names(record: Record) -> list[str]:
    return [AGAIN, *record.metrics["forms"]]


def _limit(record: Record, name: str) -> str:
    if name in (AGAIN, FREE):
        return DASH
    if name.startswith("WD"):
        return f"{name.split()[1]} in all"
    return f"{record.config['limit_mib']:g} each"


def _stands_for(record: Record) -> str:
    batch = paper_batch(record.config["role"])
    return f"{record.config['limit_mib'] * batch / record.config['batch']:,.4g}"


def table(results: Results) -> list[dict[str, Any]]:
    """Return the time of an iteration in each form beside torch's own and undivided."""
    rows = []
    for role in TRIED:
        record = results.first("iterations", role=role)
        if record is None:
            continue
        for name in _form_names(record):
            told = record.metrics["forms"].get(name, {})
            row = {
                "network": role,
                "form": name,
                "limit (MiB)": _limit(record, name),
                "at the paper's mini-batch": (
                    DASH if _limit(record, name) == DASH else _stands_for(record)
                ),
                "paper": times(published(role)) if name == DIVIDED else DASH,
                "iteration (ms)": ms(seconds(record, name)),
                "over undivided": _told_gain(record, UNDIVIDED, name),
                "over torch's own": _told_gain(record, *_in_most_rounds(record, PLAIN, name)),
                "kernels alone": DASH,
                "divided kernels": DASH,
                "for the limit": DASH,
                "largest seen (MiB)": DASH,
            }
            if refused(told):
                row["iteration (ms)"] = f"cannot be held: {mib(told['least_bytes'])} MiB would do"
            elif told:
                row |= {
                    "kernels alone": times(told["native_s"] / told["predicted_s"]),
                    "divided kernels": f"{told['divided']} of {told['kernels']}",
                    "for the limit": str(told["needed"]),
                    "largest seen (MiB)": mib(told["seen_bytes"]),
                }
            if untouched(record, name):
                row["iteration (ms)"] = "left as it was"
            rows.append(row)
    return rows


def untouched(record: Record, name: str) -> bool:
    """Return whether `tune` left a network as it was: there is nothing to time."""
    told = record.metrics["forms"].get(name, {})
    return name == FREE and told.get("divided") == 0


def _in_most_rounds(record: Record, *names: str) -> tuple[str, ...]:
    """Return the names under which forms were timed most often."""
    more = tuple(name + MORE for name in names)
    every = all(name in sample for sample in record.metrics["samples_s"] for name in more)
    return more if every else names


def _told_gain(record: Record, slower: str, faster: str) -> str:
    try:
        return str(gain(record, slower, faster))
    except NotRun:
        return DASH


def published(role: str) -> float:
    """Return the paper's speed-up of an iteration with powerOfTwo over undivided."""
    if role == "ResNet-18":
        return float(PAPER["abstract"]["resnet18"])
    if role == CAFFE:
        return float(PAPER["figure9"]["speedup_64"]["P100"][0])  # with all
    row = PAPER["table5"][role]
    return float(row["undivided"] / row["powerOfTwo"])


def figure(results: Results) -> "Figure":
    """Draw the time of an iteration over torch's own, form by form."""
    from repro import plots

    records = [r for role in TRIED if (r := results.first("iterations", role=role))]
    drawn, axes = plots.new_axes(1, max(1, len(records)), 3.4 * max(2, len(records)), 3.6)
    for axis, record in zip(axes[0], records, strict=False):
        names = _form_names(record)
        for position, name in enumerate(names):
            try:
                gap = gain(record, name, PLAIN)
            except NotRun:
                place = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "#b3261e"}
                left = "left as\nit was" if untouched(record, name) else "cannot\nbe held"
                axis.text(position, 0.02, left, **place)
                continue
            height = math.exp(gap.mean)
            axis.bar(position, height, 0.7, color=plots.OURS if "WR p" in name else plots.PAPER)
            low, high = (math.exp(end) for end in gap.interval())
            if math.isfinite(low) and high < 5:
                ends = [[height - low], [high - height]]
                axis.errorbar(position, height, ends, fmt="none", color="black", capsize=3)
            axis.text(position, 0.02, f"{height:.2f}", ha="center", va="bottom", fontsize=8)
        axis.axhline(1, color="#b3261e", linestyle="--", linewidth=1.2)
        axis.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axis.grid(axis="x", visible=False)
        limit = record.config["limit_mib"]
        axis.set(title=record.config["role"] + (f", {limit:g} MiB" if limit else ""))
    axes[0, 0].set_ylabel("iteration over torch's own")
    return drawn


@claim(
    "divided_faster",
    "Whole iterations within a limit for each kernel are faster divided than undivided (as we put "
    "it: each network at one limit that binds, with powerOfTwo)",
    "Section IV-B3",
)
def divided_faster(results: Results, expected: Expectation) -> Verdict:
    """Judge the iterations of each network, divided over undivided."""

    def judge(role: str) -> Part:
        record = _record(results, role)
        undivided, divided = form(record, UNDIVIDED), form(record, DIVIDED)
        limit = f"{record.config['limit_mib']:g} MiB"
        if refused(divided):
            raise NotRun(f"{role} cannot be held to {limit}")
        if refused(undivided):
            least = mib(undivided["least_bytes"])
            return certain(f"{role}: within {limit} only divided ({least} MiB undivided)", True)
        if not undivided["needed"]:
            raise NotRun(f"no limit binds: all of {role} fits into {limit} by torch's own")
        judge_gap = partial(direction, paper=published(role), sign=expected.sign)
        return judge_gap(f"{role}, {limit}:", gain(record, UNDIVIDED, DIVIDED))

    return combine(each(ITERATED, judge))


@claim(
    "wd_over_wr",
    "With the same workspace in all, WD makes AlexNet's iteration faster than WR does, both "
    "divided",
    "Section IV-B2",
)
def wd_over_wr(results: Results, expected: Expectation) -> Verdict:
    """Judge WD over WR by the same policy, its total the limit of WR times 15."""
    record = _record(results, "AlexNet")
    total = record.config["limit_mib"] * PAPER["figure11"]["kernels"]["AlexNet"]
    shared = [way for way in record.config["ways"] if way[0] == "WD" and way[1] == total]
    if not shared:
        raise NotRun(f"no WD with {total:g} MiB in all")
    policy = shared[0][2]
    gap = gain(record, f"WR {policy}", f"WD {total:g} MiB {policy}")
    return combine([direction(f"{total:g} MiB in all, {policy}:", gap, sign=expected.sign)])


@claim(
    "no_slower",
    "Without a limit that binds, no network is slower tuned than untuned, beyond what torch's own "
    "scatters by against itself",
    "Section III-B",
)
def no_slower(results: Results, expected: Expectation) -> Verdict:
    """Judge each network's iterations tuned, over torch's own, but those that were left alone."""

    def judge(role: str) -> Part:
        record = _record(results, role)
        told = form(record, FREE)
        name = f"{role}, {told['divided']} kernels divided:"
        plain, again, free = _in_most_rounds(record, PLAIN, AGAIN, FREE)
        rounds = [len(sample[free]) for sample in record.metrics["samples_s"] if free in sample]
        word, said = equivalence(name, gain(record, free, plain), expected.allowed(), side=1)
        own = f"torch's own over itself {gain(record, again, plain)}"
        return word, f"{said}; {own}; {sum(rounds)} rounds in {len(rounds)} processes"

    records = {role: results.first("iterations", role=role) for role in (*ITERATED, *ALONE)}
    ran = {role: record for role, record in records.items() if record is not None}
    left = [role for role, record in ran.items() if untouched(record, FREE)]
    if len(left) == len(ran):
        raise NotRun(f"tune left as they were: {', '.join(left)}" if ran else "no records")
    verdict = combine(each([role for role in ran if role not in left], judge))
    also = f"; left as they were: {', '.join(left)}" if left else ""
    return Verdict(verdict.word, verdict.evidence + also)


def _tuned(results: Results) -> list[Mapping[str, Any]]:
    """Return the forms of networks in which a kernel left torch's own.

    Raises:
        NotRun: There is none.
    """
    records = results.ok("iterations", setting="fp32")
    tuned = [
        told
        for record in records
        for told in record.metrics["forms"].values()
        if told.get("divided")
    ]
    if not tuned:
        untouched = f"{len(records)} networks, and no kernel of them left torch's own"
        raise NotRun(untouched if records else "no records")
    return tuned


def _finite(values: Sequence[float]) -> float:
    return max(values) if all(map(math.isfinite, values)) else math.inf


@claim("same_loss", "Results do not change: the loss is the same", "Section II")
def same_loss(results: Results, expected: Expectation) -> Verdict:
    """Judge the relative difference of the losses of tuned and untuned networks."""
    tuned = _tuned(results)
    worst, margin = _finite([told["loss_error"] for told in tuned]), expected.allowed()
    told = f"over {len(tuned)} networks with kernels that left torch's own, by at most {worst:.0e}"
    return combine([certain(f"{told}, margin {margin:.0e}", worst <= margin)])


@claim(
    "same_gradients",
    "Results do not change: gradients are the same (as we put it: or no farther apart than "
    "those of torch's own two convolutions)",
    "Section II",
)
def same_gradients(results: Results, expected: Expectation) -> Verdict:
    """Judge the largest difference of a gradient's element, relative to its largest element."""
    tuned, margin = _tuned(results), expected.allowed()
    gaps = [(one["gradient_error"], one["own_gradient_error"]) for one in tuned]
    beyond = [(gap, own) for gap, own in gaps if not gap <= margin]
    told = f"{len(gaps) - len(beyond)} of {len(gaps)} networks within {margin:.0e}"
    if beyond:
        worst = _finite([gap for gap, _ in beyond])
        told += (
            f"; elsewhere by up to {worst:.0e}, where torch's own with and without their library "
            f"differ by {max(own for _, own in beyond):.0e} (a unit at the edge of its ReLU)"
        )
    holds = all(gap <= own + margin for gap, own in beyond)
    return combine([certain(told, holds)])


@check(
    "No convolution allocates more than the limit, seen from outside; and under WD all together "
    "list no more than theirs"
)
def held(results: Results) -> tuple[bool, str]:
    """Compare what a profiler saw inside each convolution, and what is listed, with the limits."""
    fullest, forms = 0.0, 0
    for record in results.ok("iterations"):
        for name, told in record.metrics["forms"].items():
            if refused(told) or name == FREE:
                continue
            limit = float(name.split()[1] if name.startswith("WD") else record.config["limit_mib"])
            taken = max(told["workspace_bytes"], told["seen_bytes"] or 0)
            fullest, forms = max(fullest, taken / (limit * MIB)), forms + 1
    if not forms:
        raise NotRun("no records")
    return fullest <= 1, f"{forms} networks take at most {100 * fullest:.0f} % of their limits"


ITERATIONS = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Whole iterations, forward and backward, all forms in turns; intervals over processes. "
        "Held to the limit is every temporary byte of each convolution, torch's own included: "
        "where that takes more it is replaced or divided (for the limit), whatever time that "
        "takes. Kernels alone: torch's own over the sum of kernels, each measured by itself. On a "
        "CPU undivided algorithms of low memory are ours (torch:direct, torch:im2col). "
        f"{' and '.join(ALONE)} are not the paper's: they are tuned without a limit alone. Where "
        "tune leaves a network as it was, nothing is timed.",
        facts,
    ),
    claims=(divided_faster, wd_over_wr, no_slower, same_loss, same_gradients),
    checks=(held,),
)
