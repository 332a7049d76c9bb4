"""Does the gain of kernels reach a whole iteration, under a limit that binds? (section IV-B)

Whole iterations, forward and backward, of networks that `tune` holds to a limit: by torch's own
convolutions and without a limit, undivided within it, and divided.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, mean_of
from repro.experiments.microconv import measured, runs
from repro.experiments.microconv.measured import mib, ms, or_none, times
from repro.experiments.microconv.runs import ALONE, CAFFE, ITERATED, PAPER, network_name
from repro.experiments.query import Results
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


def _need(results: Results, role: str, *names: str) -> tuple[Record, list[Mapping[str, Any]]]:
    """A network's record, and the outcomes of several forms."""
    record = results.need("iterations", role=role, rivals=None)
    for name in names:
        if name not in record.metrics["forms"]:
            raise NotRun(f"{role} was not run as {name}")
    return record, [record.metrics["forms"][name] for name in names]


def refused(outcome: Mapping[str, Any]) -> bool:
    """Whether a form could not be held to the limit."""
    return "least_bytes" in outcome


def untouched(record: Record, name: str = FREE) -> bool:
    """Whether `tune` left a network as it was without a limit: there is nothing to time."""
    return name == FREE and record.metrics["forms"].get(name, {}).get("divided") == 0


def gain(record: Record, slower: str, faster: str) -> Estimate:
    """How much faster one form's iterations are, by processes.

    Of each process the median over its rounds of the ratio of two times of one round counts; the
    error is the scatter of processes.
    """
    ratios = []
    for sample in record.metrics["samples_s"]:
        for name in (slower, faster):
            if name not in sample:
                raise NotRun(f"{record.config['role']} was not timed as {name}")
        rounds = zip(sample[slower], sample[faster], strict=True)
        ratios.append(math.exp(statistics.median(math.log(a / b) for a, b in rounds)))
    return mean_of(ratios, log=True)


def _most_rounds(record: Record, *names: str) -> tuple[str, ...]:
    """The names under which forms were timed most often."""
    more = tuple(name + MORE for name in names)
    every = all(name in sample for sample in record.metrics["samples_s"] for name in more)
    return more if every else names


def over_undivided(results: Results, role: str) -> Estimate:
    """How much faster a network's iterations are divided than undivided.

    With a note on the fallbacks of undivided, and torch's own speed. Which algorithms the
    kernels took is not recorded: those for which torch's own takes more than the limit run by
    others, of which some are this package's.
    """
    record, forms = _need(results, role, UNDIVIDED, DIVIDED)
    limit = f"{record.config['limit_mib']:g} MiB"
    if any(map(refused, forms)):
        raise NotRun(f"{role} cannot be held to {limit}")
    needed, kernels = forms[0]["needed"], forms[0]["kernels"]
    if not needed:
        raise NotRun(f"no limit binds: all of {role} fits into {limit} by torch's own")
    names = [
        name for name in record.config["algorithms"] if measured.ours_alone({"parts": [[0, name]]})
    ]
    faster = gain(record, UNDIVIDED, DIVIDED)
    note = f"divided is {gain(record, PLAIN, DIVIDED)} of torch's own speed without a limit"
    if names:
        fallen = f"undivided, {needed} of {kernels} kernels fall back to NNPACK or our own "
        note = f"{fallen}{', '.join(names)}; {note}"
    if names and 2 * needed > kernels:
        raise NotRun(f"{measured.FALLBACK}: {faster}; {note}")
    return replace(faster, label=f"{network_name(record)}, {limit}:", note=note)


def published(role: str) -> float:
    """The paper's speed-up of an iteration with powerOfTwo over undivided."""
    if role == "ResNet-18":
        return float(PAPER["abstract"]["resnet18"])
    if role == CAFFE:
        return float(PAPER["figure9"]["speedup_64"]["P100"][0])  # with all
    row = PAPER["table5"][role]
    return float(row["undivided"] / row["powerOfTwo"])


def table(results: Results) -> list[dict[str, Any]]:
    """The time of an iteration in each form over torch's own and undivided."""
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
    taken = ms(statistics.median(map(statistics.median, samples)) if samples else None)
    limit = f"{name.split()[1]} in all" if name.startswith("WD") else DASH
    if "capped" in name or name.startswith("WR"):
        limit = f"{record.config['limit_mib']:g} each"
    if refused(outcome):
        taken = f"cannot be held: {mib(outcome['least_bytes'])} MiB would do"
    elif untouched(record, name):
        taken = "left as it was"
    elif "error" in outcome:
        taken = "failed"
    over_torch = or_none(gain, record, *_most_rounds(record, PLAIN, name))
    return {
        "network": network_name(record),
        "form": f"torch's own, {name}" if rival else name,
        "limit (MiB)": limit,
        "paper": times(published(record.config["role"])) if name == DIVIDED else DASH,
        "over undivided": str(or_none(gain, record, UNDIVIDED, name) or DASH),
        "over torch's own": str(over_torch or DASH),
        "iteration (ms)": taken,
        "processes": len(samples),
        "largest seen (MiB)": mib(outcome.get("seen_bytes")),
    }


def figure(results: Results) -> "Figure":
    """Speed-ups of each network's forms; the paper's of divided over undivided."""
    from repro.experiments.microconv.drawing import effect, effects

    shown = {
        AGAIN: "torch's own, a second time, over itself",
        UNDIVIDED: "undivided over torch's own",
        DIVIDED: "divided (powerOfTwo) over torch's own",
        FREE: "tuned without a limit over torch's own",
    }
    groups = {}
    for role, record in _ran(results).items():
        limit, rows = record.config["limit_mib"], []
        if limit:
            faster = or_none(over_undivided, results, role)
            rows.append(effect("divided over undivided", published(role), faster))
        for name, label in shown.items():
            if found := or_none(gain, record, *_most_rounds(record, PLAIN, name)):
                rows.append(effect(label, None, found))
        groups[network_name(record) + (f", {limit:g} MiB" if limit else ", no limit")] = rows
    title = "ours: iterations, forward and backward, SYNTHETIC inputs"
    return effects(groups, "speed-up of an iteration; right of 1 is faster", title)


def divided_faster(results: Results) -> Cases:
    """The iterations of each network divided over undivided; to fit only divided is a gain."""

    def faster(role: str) -> Estimate | Exact:
        record, (undivided, *_) = _need(results, role, UNDIVIDED)
        if refused(undivided) and not refused(_need(results, role, DIVIDED)[1][0]):
            least = f"({mib(undivided['least_bytes'])} MiB undivided)"
            return Exact(True, f"within {record.config['limit_mib']:g} MiB only divided {least}")
        return over_undivided(results, role)

    return cases([name for name in ITERATED if name in runs.iterated(results.profile)], faster)


def wd_over_wr(results: Results) -> Cases:
    """AlexNet's iterations with WD over WR by the same policy, its total WR's limit times 15."""
    ran = _ran(results)
    both = [ran[role] for role in (CAFFE, "AlexNet") if role in ran]
    both = [record for record in both if any(way[0] == "WD" for way in record.config["ways"])]
    record = both[0] if both else _need(results, "AlexNet")[0]
    total = record.config["limit_mib"] * PAPER["figure11"]["kernels"]["AlexNet"]
    shared = [way[2] for way in record.config["ways"] if way[:2] == ["WD", total]]
    if not shared:
        raise NotRun(f"no WD with {total:g} MiB in all")
    wd = f"WD {total:g} MiB {shared[0]}"
    label = f"{network_name(record)}, {total:g} MiB in all, both {shared[0]}:"
    note = f"WD is {gain(record, PLAIN, wd)} of torch's own speed without a limit"
    return {"AlexNet": replace(gain(record, f"WR {shared[0]}", wd), label=label, note=note)}


def no_slower(results: Results) -> Cases:
    """The time of each network's iterations tuned, over torch's own."""
    ran = _ran(results)

    def slower(role: str) -> Estimate | Exact:
        record = ran[role]
        if untouched(record):
            return Exact(True, "left as it was")
        _, (outcome, *_) = _need(results, role, FREE)
        plain, again, free = _most_rounds(record, PLAIN, AGAIN, FREE)
        label = f"{network_name(record)}, {outcome['divided']} kernels divided:"
        note = f"torch's own over itself {gain(record, again, plain)}"
        return replace(gain(record, free, plain), label=label, note=note)

    if all(map(untouched, ran.values())):
        raise NotRun(f"tune left as they were: {', '.join(ran)}" if ran else "no records")
    return cases(ran, slower)


def _worst(errors: Sequence[float]) -> float:
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def same_gradients(results: Results) -> tuple[bool, str]:
    """The largest difference of a gradient's element, relative to its largest element.

    Of networks in which a kernel left torch's own.
    """
    ran = _ran(results).values()
    gaps = [
        (form["gradient_error"], form["own_gradient_error"])
        for record in ran
        for form in record.metrics["forms"].values()
        if form.get("divided")
    ]
    if not gaps:
        left = f"{len(ran)} networks, and no kernel of them left torch's own"
        raise NotRun(left if ran else "no records")
    beyond = [pair for pair in gaps if not pair[0] <= ROUNDED]
    evidence = f"{len(gaps) - len(beyond)} of {len(gaps)} tuned forms within {ROUNDED:.0e}"
    if beyond:
        worst, own = map(_worst, zip(*beyond, strict=True))
        evidence += (
            f"; elsewhere by up to {worst:.0e}, where torch's own with and without their library "
            f"differ by {own:.0e} (a unit at the edge of its ReLU)"
        )
    return all(gap <= own + ROUNDED for gap, own in beyond), evidence


def held(results: Results) -> tuple[bool, str]:
    """Bytes seen by a profiler in each convolution, and those listed, over the limits."""
    shares = []
    for record in results.ok("iterations"):
        for name, outcome in record.metrics["forms"].items():
            if not refused(outcome) and name != FREE:
                wd = name.startswith("WD")
                limit = float(name.split()[1] if wd else record.config["limit_mib"])
                taken = max(outcome["workspace_bytes"], outcome["seen_bytes"] or 0)
                shares.append(taken / (limit * runs.MIB))
    if not shares:
        raise NotRun("no records")
    told = f"{len(shares)} tuned forms take at most {100 * max(shares):.0f} % of their limits"
    return max(shares) <= 1, told


ITERATIONS = runs.artefact(
    "iterations",
    plan=lambda profile, chosen: [
        *map(partial(runs.iterations, profile), runs.iterated(profile)),
        *runs.rivals(profile),
    ],
    rows=table,
    draw=figure,
    claims={"divided_faster": divided_faster, "wd_over_wr": wd_over_wr, "no_slower": no_slower},
    checks={"held": held, "gradients": same_gradients},
)
