"""Does what kernels gain reach a whole iteration, under a limit that binds? (section IV-B)

Whole iterations, forward and backward, of networks that `tune` holds to a limit: by torch's own
convolutions and without a limit, undivided within it, and divided.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.design import LONG, Exhibit, Results, check
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, mean_of
from repro.experiments.microconv.comparing import NATIVE, judged, mib, ms, times
from repro.experiments.microconv.runs import (
    ALONE,
    CAFFE,
    ITERATED,
    MIB,
    PAPER,
    at_papers_batch,
    captioned,
    iterated,
    iterations,
    network_name,
    rivals,
)
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN, AGAIN, FREE = "plain", "plain again", "tuned, no limit"
MORE = ", more rounds"  # of these three alone
UNDIVIDED, DIVIDED = "WR undivided", "WR powerOfTwo"
TRIED = (*ITERATED, *ALONE)
ROUNDED = 1e-4  # relative error up to which algorithms are admitted; see `building`


def _ran(results: Results) -> dict[str, Record]:
    """The networks' records by role."""
    found = {role: results.first("iterations", role=role, rivals=None) for role in TRIED}
    return {role: record for role, record in found.items() if record}


def form(record: Record, name: str) -> Mapping[str, Any]:
    """What became of a network in one form.

    Raises:
        NotRun: It was not run.
    """
    outcomes: Mapping[str, Mapping[str, Any]] = record.metrics["forms"]
    if name not in outcomes:
        raise NotRun(f"{record.config['role']} was not run as {name}")
    return outcomes[name]


def refused(outcome: Mapping[str, Any]) -> bool:
    """Whether a form could not be held to the limit."""
    return "least_bytes" in outcome


def untouched(record: Record, name: str = FREE) -> bool:
    """Whether `tune` left a network as it was without a limit: there is nothing to time."""
    return name == FREE and record.metrics["forms"].get(name, {}).get("divided") == 0


def gain(record: Record, slower: str, faster: str) -> Estimate:
    """How much faster one form's iterations are, by processes.

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
        math.exp(statistics.median(math.log(a / b) for a, b in zip(*pair, strict=True)))
        for sample in samples
        for pair in [(sample[slower], sample[faster])]
    ]
    return mean_of(ratios, log=True)


def over_torch(record: Record, name: str) -> Estimate:
    """How fast a form's iterations are over torch's own, by the names timed most often."""
    slower, faster = _most_rounds(record, PLAIN, name)
    return gain(record, slower, faster)


def _most_rounds(record: Record, *names: str) -> tuple[str, ...]:
    more = tuple(name + MORE for name in names)
    every = all(name in sample for sample in record.metrics["samples_s"] for name in more)
    return more if every else names


def _or_none(estimate: Callable[[], Estimate]) -> Estimate | None:
    try:
        return estimate()
    except NotRun:
        return None


def over_undivided(results: Results, role: str) -> Estimate:
    """How much faster a network's iterations are divided than undivided.

    With a note on what undivided may fall back to, and torch's own beside it. Which algorithms the
    kernels took is not recorded: those for which torch's own takes more than the limit run by
    others, of which some are this package's.

    Raises:
        NotRun: They were not run both ways within a limit that binds, or most undivided kernels
            may be left to this package's algorithms.
    """
    record = results.need("iterations", role=role, rivals=None)
    undivided, divided = form(record, UNDIVIDED), form(record, DIVIDED)
    limit = f"{record.config['limit_mib']:g} MiB"
    if refused(undivided) or refused(divided):
        raise NotRun(f"{role} cannot be held to {limit}")
    needed, kernels = undivided["needed"], undivided["kernels"]
    if not needed:
        raise NotRun(f"no limit binds: all of {role} fits into {limit} by torch's own")
    own = [n for n in record.config["algorithms"] if n.startswith("torch:") and n != NATIVE]
    ours = f"undivided, {needed} of {kernels} kernels fall back to NNPACK or our own "
    note = f"divided is {gain(record, PLAIN, DIVIDED)} of torch's own speed without a limit"
    faster = gain(record, UNDIVIDED, DIVIDED)
    said = ours + ", ".join(own) if own else ""
    told = judged(faster, note, said, bool(own) and 2 * needed > kernels)
    return replace(told, label=f"{network_name(record)}, {limit}:")


def published(role: str) -> float:
    """The paper's speed-up of an iteration with powerOfTwo over undivided."""
    if role == "ResNet-18":
        return float(PAPER["abstract"]["resnet18"])
    if role == CAFFE:
        return float(PAPER["figure9"]["speedup_64"]["P100"][0])  # with all
    row = PAPER["table5"][role]
    return float(row["undivided"] / row["powerOfTwo"])


def table(results: Results) -> list[dict[str, Any]]:
    """The time of an iteration in each form beside torch's own and undivided."""
    ran, rows = _ran(results), []
    for role in TRIED:
        if record := ran.get(role):
            rows += [_row(record, name) for name in (AGAIN, *record.metrics["forms"])]
        for rival in results.ok("iterations", role=role):
            rows += [_row(rival, name) for name in rival.config.get("rivals") or ()]
    return rows


def _row(record: Record, name: str) -> dict[str, Any]:
    """A form of a network; or torch's own under another setting, over its own choice of plans."""
    rival = record.metrics.get("rivals", {}).get(name)
    outcome = rival or record.metrics["forms"].get(name, {})
    samples = [sample[name] for sample in record.metrics["samples_s"] if name in sample]
    taken = statistics.median(map(statistics.median, samples)) if samples else None
    limit = f"{record.config['limit_mib'] or 0:g} each"
    if name.startswith("WD"):
        limit = f"{name.split()[1]} in all"
    unlimited = name in (AGAIN, FREE) or (rival and "capped" not in name)
    row = {
        "network": network_name(record),
        "form": f"torch's own, {name}" if rival else name,
        "limit (MiB)": DASH if unlimited else limit,
        "at the paper's mini-batch": DASH if unlimited else f"{at_papers_batch(record):,.4g}",
        "paper": times(published(record.config["role"])) if name == DIVIDED else DASH,
        "iteration (ms)": ms(taken),
        "over undivided": str(_or_none(lambda: gain(record, UNDIVIDED, name)) or DASH),
        "over torch's own": str(_or_none(lambda: over_torch(record, name)) or DASH),
        "kernels alone": DASH,
        "divided kernels": DASH,
        "for the limit": DASH,
        "largest seen (MiB)": mib(outcome.get("seen_bytes")),
    }
    if refused(outcome):
        row["iteration (ms)"] = f"cannot be held: {mib(outcome['least_bytes'])} MiB would do"
    elif "kernels" in outcome:
        row |= {
            "kernels alone": times(outcome["native_s"] / outcome["predicted_s"]),
            "divided kernels": f"{outcome['divided']} of {outcome['kernels']}",
            "for the limit": str(outcome["needed"]),
        }
    if untouched(record, name):
        row["iteration (ms)"] = "left as it was"
    if "error" in outcome:
        row["iteration (ms)"] = "failed"
    return row


def figure(results: Results) -> "Figure":
    """Speed-ups of each network's forms, divided over undivided beside the paper's."""
    from repro.experiments.microconv.drawing import effect, effects

    shown = {
        AGAIN: "torch's own, a second time, over itself",
        UNDIVIDED: "undivided over torch's own",
        DIVIDED: "divided (powerOfTwo) over torch's own",
        FREE: "tuned without a limit over torch's own",
    }
    groups = {}
    for role, record in _ran(results).items():
        limit = record.config["limit_mib"]
        title = network_name(record) + (f", {limit:g} MiB" if limit else ", no limit")
        rows = groups[title] = []
        if limit:
            faster = _or_none(lambda role=role: over_undivided(results, role))  # type: ignore[misc]
            rows.append(effect("divided over undivided", published(role), faster))
        for name, label in shown.items():
            if name in (AGAIN, *record.metrics["forms"]):
                ratio = _or_none(lambda r=record, n=name: over_torch(r, n))  # type: ignore[misc]
                left = " (left as it was)" * untouched(record, name)
                rows.append(effect(label + left, None, ratio))
    title = "speed-up of an iteration: forward and backward, SYNTHETIC inputs"
    return effects(groups, "speed-up; right of 1 is faster", title)


def divided_faster(results: Results) -> Cases:
    """The iterations of each network divided over undivided; what fits divided only is a gain."""

    def faster(role: str) -> Estimate | Exact:
        record = results.need("iterations", role=role, rivals=None)
        undivided, limit = form(record, UNDIVIDED), f"{record.config['limit_mib']:g} MiB"
        if refused(undivided) and not refused(form(record, DIVIDED)):
            least = mib(undivided["least_bytes"])
            return Exact(True, f"within {limit} only divided ({least} MiB undivided)")
        return over_undivided(results, role)

    return cases([name for name in ITERATED if name in iterated(results.profile)], faster)


def wd_over_wr(results: Results) -> Cases:
    """AlexNet's iterations with WD over WR by the same policy, its total WR's limit times 15."""
    ran = _ran(results)
    both = [ran[role] for role in (CAFFE, "AlexNet") if role in ran]
    both = [r for r in both if any(mode == "WD" for mode, *_ in r.config["ways"])]
    record = both[0] if both else results.need("iterations", role="AlexNet", rivals=None)
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
    ran = _ran(results)

    def slower(role: str) -> Estimate | Exact:
        record = ran[role]
        if untouched(record):
            return Exact(True, "left as it was")
        plain, again, free = _most_rounds(record, PLAIN, AGAIN, FREE)
        rounds = [len(sample[free]) for sample in record.metrics["samples_s"] if free in sample]
        label = f"{network_name(record)}, {form(record, FREE)['divided']} kernels divided:"
        itself = f"torch's own over itself {gain(record, again, plain)}"
        note = f"{itself}; {sum(rounds)} rounds in {len(rounds)} processes"
        return replace(gain(record, free, plain), label=label, note=note)

    if all(map(untouched, ran.values())):
        raise NotRun(f"tune left as they were: {', '.join(ran)}" if ran else "no records")
    return cases(ran, slower)


def _tuned(results: Results) -> list[Mapping[str, Any]]:
    """The forms of networks in which a kernel left torch's own.

    Raises:
        NotRun: There is none.
    """
    ran = _ran(results).values()
    tuned = [f for record in ran for f in record.metrics["forms"].values() if f.get("divided")]
    if not tuned:
        left = f"{len(ran)} networks, and no kernel of them left torch's own"
        raise NotRun(left if ran else "no records")
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
    gaps = [(one["gradient_error"], one["own_gradient_error"]) for one in _tuned(results)]
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
    shares = []
    for record in results.ok("iterations"):
        for name, outcome in record.metrics["forms"].items():
            if not refused(outcome) and name != FREE:
                wd = name.startswith("WD")
                limit = float(name.split()[1] if wd else record.config["limit_mib"])
                taken = max(outcome["workspace_bytes"], outcome["seen_bytes"] or 0)
                shares.append(taken / (limit * MIB))
    if not shares:
        raise NotRun("no records")
    fullest = max(shares)
    told = f"{len(shares)} tuned forms take at most {100 * fullest:.0f} % of their limits"
    return fullest <= 1, told


def _facts(results: Results) -> Iterable[str]:
    if results.profile == LONG:
        yield "Looks at fewer processes (5, 15) do not count."


ITERATIONS = Exhibit(
    long=True,
    runs=lambda profile, chosen: [
        *(iterations(profile, role) for role in iterated(profile)),
        *rivals(profile),
    ],
    table=table,
    figure=figure,
    caption=captioned(
        "Iterations within limits that bind, in turns; lines: 95 % intervals. Undivided, what "
        "does not fit runs by NNPACK or by us.",
        _facts,
    ),
    claims={"divided_faster": divided_faster, "wd_over_wr": wd_over_wr, "no_slower": no_slower},
    checks=(held, same_loss, same_gradients),
)
