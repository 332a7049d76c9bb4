"""Does what kernels gain reach a whole iteration, under a limit that binds? (section IV-B)

Whole iterations, forward and backward, of networks that `tune` holds to a limit: by torch's own
convolutions and without a limit, undivided within it, and divided.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.design import LONG, Chosen, Exhibit, Run, check
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, mean_of
from repro.experiments.microconv.comparing import FALLBACK
from repro.experiments.microconv.describing import marks, network_name
from repro.experiments.microconv.settings import (
    ALONE,
    CAFFE,
    ITERATED,
    MIB,
    NATIVE,
    PAPER,
    iterated,
    iterations,
    mib,
    ms,
    paper_batch,
    rivals,
    times,
)
from repro.experiments.query import Results
from repro.experiments.view import caption
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


def gain(record: Record, slower: str, faster: str) -> Estimate:
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
    ratios = [
        math.exp(
            statistics.median(
                math.log(a / b) for a, b in zip(sample[slower], sample[faster], strict=True)
            )
        )
        for sample in samples
    ]
    return mean_of(ratios, log=True)


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


def over_undivided(results: Results, role: str) -> Estimate:
    """Return how much faster a network's iterations are divided than undivided.

    With a note on what undivided may fall back to, and torch's own beside it. Which algorithms the
    kernels took is not recorded: those for which torch's own takes more than the limit run by
    others, of which some are this package's.

    Raises:
        NotRun: They were not run both ways within a limit that binds, or most undivided kernels
            may be left to this package's algorithms.
    """
    record = _record(results, role)
    undivided, divided = form(record, UNDIVIDED), form(record, DIVIDED)
    limit = f"{record.config['limit_mib']:g} MiB"
    if refused(undivided) or refused(divided):
        raise NotRun(f"{role} cannot be held to {limit}")
    needed, kernels = undivided["needed"], undivided["kernels"]
    if not needed:
        raise NotRun(f"no limit binds: all of {role} fits into {limit} by torch's own")
    ours = [n for n in record.config["algorithms"] if n.startswith("torch:") and n != NATIVE]
    faster = gain(record, UNDIVIDED, DIVIDED)
    note = f"divided is {gain(record, PLAIN, DIVIDED)} of torch's own speed without a limit"
    if ours:
        may = f"undivided, {needed} of {kernels} kernels fall back to NNPACK or our own "
        note = f"{may}{', '.join(ours)}; {note}"
        if 2 * needed > kernels:
            raise NotRun(f"{FALLBACK}: {faster}; {note}")
    return replace(faster, label=f"{network_name(record)}, {limit}:", note=note)


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
                "network": network_name(record),
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
                    "network": network_name(record),
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
    """Return what ran, for which of the paper's networks, and the limit."""
    limit = record.config["limit_mib"]
    return network_name(record).replace(" (", "\n(") + (f", {limit:g} MiB" if limit else "")


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


def divided_faster(results: Results) -> Cases:
    """The iterations of each network divided over undivided; what fits divided only is a gain."""

    def faster(role: str) -> Estimate | Exact:
        record = _record(results, role)
        undivided, limit = form(record, UNDIVIDED), f"{record.config['limit_mib']:g} MiB"
        if refused(undivided) and not refused(form(record, DIVIDED)):
            least = mib(undivided["least_bytes"])
            return Exact(True, f"within {limit} only divided ({least} MiB undivided)")
        return over_undivided(results, role)

    return cases([name for name in ITERATED if name in iterated(results.profile)], faster)


def wd_over_wr(results: Results) -> Cases:
    """AlexNet's iterations with WD over WR by the same policy, its total WR's limit times 15."""
    ran = [r for role in (CAFFE, "AlexNet") if (r := _ran(results, role)) is not None]
    both = [r for r in ran if any(way[0] == "WD" for way in r.config["ways"])]
    record = both[0] if both else _record(results, "AlexNet")
    total = record.config["limit_mib"] * PAPER["figure11"]["kernels"]["AlexNet"]
    shared = [way for way in record.config["ways"] if way[0] == "WD" and way[1] == total]
    if not shared:
        raise NotRun(f"no WD with {total:g} MiB in all")
    policy = shared[0][2]
    wd = f"WD {total:g} MiB {policy}"
    label = f"{network_name(record)}, {total:g} MiB in all, both {policy}:"
    note = f"WD is {gain(record, PLAIN, wd)} of torch's own speed without a limit"
    return {"AlexNet": replace(gain(record, f"WR {policy}", wd), label=label, note=note)}


def no_slower(results: Results) -> Cases:
    """The time of each network's iterations tuned, over torch's own."""

    def slower(role: str) -> Estimate | Exact:
        record = ran[role]
        if untouched(record, FREE):
            return Exact(True, "left as it was")
        plain, again, free = _in_most_rounds(record, PLAIN, AGAIN, FREE)
        rounds = [len(sample[free]) for sample in record.metrics["samples_s"] if free in sample]
        label = f"{network_name(record)}, {form(record, FREE)['divided']} kernels divided:"
        itself = f"torch's own over itself {gain(record, again, plain)}"
        note = f"{itself}; {sum(rounds)} rounds in {len(rounds)} processes"
        return replace(gain(record, free, plain), label=label, note=note)

    ran = {role: record for role in TRIED if (record := _ran(results, role)) is not None}
    if all(untouched(record, FREE) for record in ran.values()):
        raise NotRun(f"tune left as they were: {', '.join(ran)}" if ran else "no records")
    return cases(ran, slower)


ROUNDED = 1e-4  # relative error up to which algorithms are admitted; see `building`


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


@check(f"The loss of a tuned network is that of the untuned one, to a share of {ROUNDED:.0e}")
def same_loss(results: Results) -> tuple[bool, str]:
    """Compare the relative difference of the losses with the margin."""
    tuned = _tuned(results)
    worst = _finite([outcome["loss_error"] for outcome in tuned])
    said = f"{len(tuned)} tuned forms of networks whose kernels left torch's own differ"
    return worst <= ROUNDED, f"{said} by at most {worst:.0e}"


@check(
    f"Gradients of a tuned network are those of the untuned one, to a share of {ROUNDED:.0e} of "
    "the largest, or no farther apart than those of torch's own two convolutions"
)
def same_gradients(results: Results) -> tuple[bool, str]:
    """Compare the largest difference of a gradient's element, relative to its largest element."""
    tuned = _tuned(results)
    gaps = [(one["gradient_error"], one["own_gradient_error"]) for one in tuned]
    beyond = [(gap, itself) for gap, itself in gaps if not gap <= ROUNDED]
    evidence = f"{len(gaps) - len(beyond)} of {len(gaps)} tuned forms within {ROUNDED:.0e}"
    if beyond:
        worst = _finite([gap for gap, _ in beyond])
        evidence += (
            f"; elsewhere by up to {worst:.0e}, where torch's own with and without their library "
            f"differ by {max(itself for _, itself in beyond):.0e} (a unit at the edge of its ReLU)"
        )
    return all(gap <= itself + ROUNDED for gap, itself in beyond), evidence


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


def _facts(results: Results) -> Iterable[str]:
    """Yield what is not the paper's, and which processes count."""
    yield from marks(results)
    if results.profile == LONG:
        yield ("Looks at fewer processes (5, 15) do not count.")


ITERATIONS = Exhibit(
    long=True,
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Iterations within limits that bind, in turns; lines: 95 % intervals. Undivided, what "
        "does not fit runs by NNPACK or by us.",
        _facts,
    ),
    claims={"divided_faster": divided_faster, "wd_over_wr": wd_over_wr, "no_slower": no_slower},
    checks=(held, same_loss, same_gradients),
)
