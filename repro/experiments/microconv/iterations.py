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
from repro.experiments.intervals import Gap, NotRun, over_processes
from repro.experiments.judging import Part, Verdict, certain, combine, direction, each, equivalence
from repro.experiments.microconv.describing import marks, stands_in
from repro.experiments.microconv.settings import (
    ALONE,
    CAFFE,
    ITERATED,
    MIB,
    PAPER,
    iterated,
    iterations,
    mib,
    ms,
    paper_batch,
    rivals,
    times,
)
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLAIN, AGAIN, FREE = "plain", "plain again", "tuned, no limit"
MORE = ", more rounds"  # of these three alone
TRIED = (*ITERATED, *ALONE)
UNDIVIDED, DIVIDED = "WR undivided", "WR powerOfTwo"


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the iterations of every network, and torch's own under other settings."""
    return [iterations(profile, role) for role in iterated(profile)] + rivals(profile)


def _record(results: Results, role: str) -> Record:
    return results.need("iterations", role=role, rivals=None)


def _ran(results: Results, role: str) -> Record | None:
    return results.first("iterations", role=role, rivals=None)


def form(record: Record, name: str) -> Mapping[str, Any]:
    """Return what became of a network in one form.

    Raises:
        NotRun: It was not run.
    """
    outcomes: Mapping[str, Mapping[str, Any]] = record.metrics["forms"]
    if name not in outcomes:
        raise NotRun(f"{record.config['role']} was not run as {name}")
    return outcomes[name]


def refused(outcome: Mapping[str, Any]) -> bool:
    """Return whether a form could not be held to the limit."""
    return "least_bytes" in outcome


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
    return over_processes(logs, log=True)


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


def over_undivided(results: Results, role: str) -> Gap:
    """Return how much faster a network's iterations are divided than undivided.

    Raises:
        NotRun: They were not run both ways within a limit that binds; see `divided_faster`.
    """
    record = _record(results, role)
    undivided, divided = form(record, UNDIVIDED), form(record, DIVIDED)
    if refused(undivided) or refused(divided) or not undivided["needed"]:
        raise NotRun(f"{role} was not held to a limit that binds, both ways")
    return gain(record, UNDIVIDED, DIVIDED)


def table(results: Results) -> list[dict[str, Any]]:
    """Return the time of an iteration in each form beside torch's own and undivided."""
    rows = []
    for role in TRIED:
        record = _ran(results, role)
        if record is None:
            rows += _rival_rows(results, role)
            continue
        for name in _form_names(record):
            outcome = record.metrics["forms"].get(name, {})
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
            if refused(outcome):
                row["iteration (ms)"] = (
                    f"cannot be held: {mib(outcome['least_bytes'])} MiB would do"
                )
            elif outcome:
                row |= {
                    "kernels alone": times(outcome["native_s"] / outcome["predicted_s"]),
                    "divided kernels": f"{outcome['divided']} of {outcome['kernels']}",
                    "for the limit": str(outcome["needed"]),
                    "largest seen (MiB)": mib(outcome["seen_bytes"]),
                }
            if untouched(record, name):
                row["iteration (ms)"] = "left as it was"
            rows.append(row)
        rows += _rival_rows(results, role)
    return rows


def _rival_rows(results: Results, role: str) -> list[dict[str, Any]]:
    """Return what torch does by itself under other settings, over its own choice of plans."""
    tried = [r for r in results.ok("iterations", role=role) if r.config.get("rivals")]
    rows = []
    for record in tried:
        for name in record.config["rivals"]:
            found = record.metrics["rivals"][name]
            capped = f"{record.config['limit_mib']:g} each" if "capped" in name else DASH
            rows.append(
                {
                    "network": role,
                    "form": f"torch's own, {name}",
                    "limit (MiB)": capped,
                    "at the paper's mini-batch": _stands_for(record) if capped != DASH else DASH,
                    "paper": DASH,
                    "iteration (ms)": "failed" if "error" in found else ms(seconds(record, name)),
                    "over undivided": DASH,
                    "over torch's own": _told_gain(record, PLAIN, name),
                    "kernels alone": DASH,
                    "divided kernels": DASH,
                    "for the limit": DASH,
                    "largest seen (MiB)": mib(found["seen_bytes"]),
                }
            )
    return rows


def untouched(record: Record, name: str) -> bool:
    """Return whether `tune` left a network as it was: there is nothing to time."""
    outcome = record.metrics["forms"].get(name, {})
    return name == FREE and outcome.get("divided") == 0


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
    """Draw speed-ups beside the paper's, and what each form takes over torch's own."""
    from repro import plots
    from repro.experiments.microconv.drawing import Dot, draw_dots, right_end

    records = [r for role in TRIED if (r := _ran(results, role))]
    rows = []
    for record in records:
        role = record.config["role"]
        try:
            gap = over_undivided(results, role)
        except NotRun:
            gap = None
        rows.append(Dot.of(gap, {} if role in ALONE else {"": published(role)}))
    figure, axes = plots.new_axes(1, 2, 10.5, 1.9 + 0.5 * max(1, len(records)))
    speedups, over_own = axes[0]
    draw_dots(speedups, rows, right_end(rows))
    for row, dot in enumerate(rows):
        if dot.ours is None:
            reason = " no limit was set" if not records[row].config["limit_mib"] else " not held"
            speedups.text(0, row + 0.2, reason, fontsize=8, va="center", color="#48536a")
        else:
            speedup = f"  ×{dot.ours:.2f}"
            text: dict[str, Any] = {"va": "center", "fontsize": 9, "color": plots.INK}
            end = dot.ends[1] if dot.ends else dot.ours
            speedups.text(end, row + 0.2 * bool(dot.papers), speedup, **text)
    speedups.set_xlim(0, 1.15 * right_end(rows))
    speedups.set_title("ours and the paper's: speed-up of an iteration,\ndivided over undivided")
    speedups.set_xlabel("speed-up (×); right of 1, dividing wins")
    speedups.set_yticks(range(len(records)), list(map(_named, records)))
    _draw_over_own(over_own, records)
    for axis in axes[0]:
        axis.title.set_fontsize(10)
        axis.set_ylim(max(1, len(records)) - 0.45, -0.55)
    plots.legend_below(figure, 3)
    return figure


def _named(record: Record) -> str:
    """Return whose numbers a row shows: the paper's network, and what runs in its place."""
    limit = record.config["limit_mib"]
    model = record.config["model"]
    width = f" (width {model['width']})" if "width" in model else ""
    width = f" (k = {model['growth']})" if "growth" in model else width
    mark = f"\nSTAND-IN{width}" if stands_in(record) else ""
    return f"{record.config['role']}{f', {limit:g} MiB' if limit else ''}{mark}"


def _draw_over_own(axis: "Axes", records: Sequence[Record]) -> None:
    """Draw the time of each form's iterations over torch's own, with what tune left alone."""
    from repro.experiments.microconv.drawing import POLICIES, TORCHS

    shown: dict[str, tuple[str, str]] = {  # by form: look, label
        AGAIN: (TORCHS, "torch's own, a second time"),
        UNDIVIDED: ("undivided", "undivided within the limit"),
        DIVIDED: ("powerOfTwo", "divided (powerOfTwo) within the limit"),
        FREE: ("all", "tuned without a limit"),
    }
    note: dict[str, Any] = {"fontsize": 8, "color": "#48536a"}
    largest = 1.2
    for row, record in enumerate(records):
        names = [name for name in shown if name in _form_names(record)]
        for number, name in enumerate(names):
            height = row + 0.18 * (number - (len(names) - 1) / 2)
            try:
                slower, faster = _in_most_rounds(record, name, PLAIN)
                gap = gain(record, slower, faster)
            except NotRun:
                if untouched(record, name):
                    beside = axis.get_yaxis_transform()
                    axis.text(1.03, row, "left to torch", transform=beside, va="center", **note)
                continue
            look, label = shown[name]
            colour, marker = POLICIES[look]["color"], POLICIES[look]["marker"]
            value, (low, high) = math.exp(gap.mean), map(math.exp, gap.interval())
            largest = max(largest, 1.06 * value)
            if math.isfinite(low) and math.isfinite(high):
                axis.plot([low, high], [height] * 2, "-", color=colour, lw=1.8)
                largest = max(largest, 1.06 * min(high, 3 * value))
            axis.plot([value], [height], marker, color=colour, ms=6, label=label)
    axis.axvline(1, color="#48536a", linewidth=1)
    axis.set_xlim(0, largest)
    axis.set_yticks(range(len(records)), [])
    axis.grid(axis="y", visible=False)
    if any(untouched(record, FREE) for record in records):
        axis.text(
            1.03, 1.01, "tuned without\na limit:", transform=axis.transAxes, va="bottom", **note
        )
    axis.set_title("ours: time of an iteration over torch's own")
    axis.set_xlabel("time (×); right of 1 is slower than torch's own")


@claim(
    "divided_faster",
    "Whole iterations within a limit for each kernel are faster divided than undivided (as we put "
    "it: each network at one limit that binds, with powerOfTwo)",
    "Section IV-B3",
)
def divided_faster(results: Results, expected: Expectation) -> Verdict:
    """Judge the iterations of each network whose limit binds, divided over undivided."""
    unbound: dict[str, str] = {}

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
            unbound[role] = f"no limit binds: all of {role} fits into {limit} by torch's own"
            raise NotRun(unbound[role])
        judge_gap = partial(direction, paper=published(role), sign=expected.sign)
        return judge_gap(f"{role}, {limit}:", gain(record, UNDIVIDED, DIVIDED))

    names = [name for name in ITERATED if name in iterated(results.profile)]
    judged = dict(zip(names, each(names, judge), strict=True))
    if len(unbound) == len(names):
        raise NotRun("; ".join(unbound.values()))
    verdict = combine([part for name, part in judged.items() if name not in unbound])
    also = "".join(f"; not counted: {why}" for why in unbound.values())
    return Verdict(verdict.word, verdict.evidence + also)


@claim(
    "wd_over_wr",
    "With the same workspace in all, WD makes AlexNet's iteration faster than WR does, both "
    "divided",
    "Section IV-B2",
)
def wd_over_wr(results: Results, expected: Expectation) -> Verdict:
    """Judge WD over WR by the same policy, its total the limit of WR times 15."""
    ran = [r for role in (CAFFE, "AlexNet") if (r := _ran(results, role)) is not None]
    both = [r for r in ran if any(way[0] == "WD" for way in r.config["ways"])]
    record = both[0] if both else _record(results, "AlexNet")
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
        outcome = form(record, FREE)
        name = f"{role}, {outcome['divided']} kernels divided:"
        plain, again, free = _in_most_rounds(record, PLAIN, AGAIN, FREE)
        rounds = [len(sample[free]) for sample in record.metrics["samples_s"] if free in sample]
        word, said = equivalence(name, gain(record, free, plain), expected.allowed(), side=1)
        itself = f"torch's own over itself {gain(record, again, plain)}"
        return word, f"{said}; {itself}; {sum(rounds)} rounds in {len(rounds)} processes"

    records = {role: _ran(results, role) for role in (*ITERATED, *ALONE)}
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
    records = results.ok("iterations", setting="fp32", rivals=None)
    tuned = [
        outcome
        for record in records
        for outcome in record.metrics["forms"].values()
        if outcome.get("divided")
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
    worst, margin = _finite([outcome["loss_error"] for outcome in tuned]), expected.allowed()
    said = f"over {len(tuned)} tuned forms of networks whose kernels left torch's own"
    said += f", by at most {worst:.0e}"
    return combine([certain(f"{said}, margin {margin:.0e}", worst <= margin)])


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
    beyond = [(gap, itself) for gap, itself in gaps if not gap <= margin]
    evidence = f"{len(gaps) - len(beyond)} of {len(gaps)} tuned forms within {margin:.0e}"
    if beyond:
        worst = _finite([gap for gap, _ in beyond])
        evidence += (
            f"; elsewhere by up to {worst:.0e}, where torch's own with and without their library "
            f"differ by {max(itself for _, itself in beyond):.0e} (a unit at the edge of its ReLU)"
        )
    holds = all(gap <= itself + margin for gap, itself in beyond)
    return combine([certain(evidence, holds)])


@check(
    "No convolution allocates more than the limit, seen from outside; and under WD all together "
    "list no more than theirs"
)
def held(results: Results) -> tuple[bool, str]:
    """Compare what a profiler saw inside each convolution, and what is listed, with the limits."""
    fullest, forms = 0.0, 0
    for record in results.ok("iterations"):
        for name, outcome in record.metrics["forms"].items():
            if refused(outcome) or name == FREE:
                continue
            limit = float(name.split()[1] if name.startswith("WD") else record.config["limit_mib"])
            taken = max(outcome["workspace_bytes"], outcome["seen_bytes"] or 0)
            fullest, forms = max(fullest, taken / (limit * MIB)), forms + 1
    if not forms:
        raise NotRun("no records")
    return fullest <= 1, f"{forms} tuned forms take at most {100 * fullest:.0f} % of their limits"


ITERATIONS = Exhibit(
    long=True,
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Whole iterations within limits that bind: torch's own convolutions do not all fit. All "
        "forms run in turns; lines are 95 % intervals over processes.",
        marks,
    ),
    claims=(divided_faster, wd_over_wr, no_slower, same_loss, same_gradients),
    checks=(held,),
)
