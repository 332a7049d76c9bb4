"""Does the gain of kernels reach a whole iteration, under a limit that binds? (section IV-B)

Whole iterations, forward and backward, of networks that `tune` holds to a limit: by torch's own
convolutions and without a limit, undivided within it, and divided.
"""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from repro import plots
from repro.experiments.design import Chosen, Run, claims_of
from repro.experiments.judge import Cases, Estimate, Exact, NotRun, cases, mean_of, or_none
from repro.experiments.microconv import measured, runs
from repro.experiments.microconv.measured import mib, ms
from repro.experiments.microconv.runs import AGAIN, FREE, MORE, PAPER, PLAIN, network_name
from repro.experiments.query import Results
from repro.experiments.view import panel
from repro.records import Record
from repro.report import DASH

UNDIVIDED, DIVIDED = "WR undivided", "WR powerOfTwo"
# With the paper's speed-ups of an iteration over undivided.
CLAIM = claims_of("microconv")["iterations"]["divided_faster"]


def planned(profile: str, chosen: Chosen) -> list[Run]:
    """The networks, and torch's own convolutions under other settings."""
    roles = [role for role in runs.TRIED if role in runs.profile_of(profile)["iterated"]]
    return [*(runs.iterations(profile, role) for role in roles), *runs.rivals(profile)]


def _ran(results: Results) -> dict[str, Record]:
    found = {role: results.first("iterations", role=role, rivals=None) for role in runs.TRIED}
    return {role: record for role, record in found.items() if record}


def _form(record: Record, name: str) -> Mapping[str, Any]:
    """The outcome of a form; with `least_bytes`, where it could not be held to the limit."""
    forms: Mapping[str, Mapping[str, Any]] = record.metrics["forms"]
    if name not in forms:
        raise NotRun(f"{record.config['role']} was not run as {name}")
    return forms[name]


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
    """How much faster a network's iterations are divided than undivided, with notes.

    Kernels for which torch's own takes more than the limit run by others; by which is not recorded.
    """
    record = results.need("iterations", role=role, rivals=None)
    forms = [_form(record, name) for name in (UNDIVIDED, DIVIDED)]
    limit = f"{record.config['limit_mib']:g} MiB"
    if any("least_bytes" in form for form in forms):
        raise NotRun(f"{role} cannot be held to {limit}")
    needed, kernels = forms[0]["needed"], forms[0]["kernels"]
    if not needed:
        raise NotRun(f"no limit binds: all of {role} fits into {limit} by torch's own")
    faster = gain(record, UNDIVIDED, DIVIDED)
    note = f"divided is {gain(record, PLAIN, DIVIDED)} of torch's own speed without a limit"
    if names := ", ".join(measured.ours(record.config["algorithms"])):
        fallen = f"undivided, {needed} of {kernels} kernels fall back to NNPACK or our own "
        note = f"{fallen}{names}; {note}"
        if 2 * needed > kernels:
            raise NotRun(f"{measured.FALLBACK}: {faster}; {note}")
    return faster.named(f"{network_name(record)}, {limit}:", note)


def table(results: Results) -> list[dict[str, Any]]:
    """The time of an iteration in each form over torch's own and undivided."""
    records = sorted(results.ok("iterations"), key=lambda record: "rivals" in record.config)
    return [
        _row(record, name)
        for role in runs.TRIED
        for record in records
        if record.config["role"] == role
        for name in record.config.get("rivals", (AGAIN, *record.metrics["forms"]))
    ]


def _row(record: Record, name: str) -> dict[str, Any]:
    """A form of a network; or torch's own under another setting, over its own choice of plans."""
    rival = record.metrics.get("rivals", {}).get(name)
    outcome = rival or record.metrics["forms"].get(name, {})
    samples = [sample[name] for sample in record.metrics["samples_s"] if name in sample]
    taken = ms(statistics.median(map(statistics.median, samples)) if samples else None)
    limit = f"{name.split()[1]} in all" if name.startswith("WD") else DASH
    if "capped" in name or name.startswith("WR"):
        limit = f"{record.config['limit_mib']:g} each"
    if "least_bytes" in outcome:
        taken = f"cannot be held: {mib(outcome['least_bytes'])} MiB would do"
    elif untouched(record, name):
        taken = "left as it was"
    elif "error" in outcome:
        taken = "failed"
    return {
        "network": network_name(record),
        "form": f"torch's own, {name}" if rival else name,
        "limit (MiB)": limit,
        "paper": CLAIM.effect_of(record.config["role"]) if name == DIVIDED else None,
        measured.UNDIVIDED: or_none(gain, record, UNDIVIDED, name),
        measured.TORCH: or_none(gain, record, *_most_rounds(record, PLAIN, name)),
        "iteration (ms)": taken,
        "largest seen (MiB)": mib(outcome.get("seen_bytes")),
    }


def figure(results: Results) -> "plots.Figure":
    """Speed-ups of each network's forms; the paper's of divided over undivided."""
    axis = "speed-up of an iteration; right of 1 is faster"
    title = panel("iterations, forward and backward")
    rows = sorted(table(results), key=lambda row: row["paper"] is None)  # these first
    shown = [row if row["paper"] else row | {measured.UNDIVIDED: None} for row in rows]
    return measured.draw(shown, ["network"], "form", axis, title)


def divided_faster(results: Results) -> Cases:
    """The iterations of each network divided over undivided; to fit only divided is a gain."""

    def faster(role: str) -> Estimate | Exact:
        record = results.need("iterations", role=role, rivals=None)
        undivided = _form(record, UNDIVIDED)
        if "least_bytes" in undivided and "least_bytes" not in _form(record, DIVIDED):
            least = f"({mib(undivided['least_bytes'])} MiB undivided)"
            return Exact(True, f"within {record.config['limit_mib']:g} MiB only divided {least}")
        return over_undivided(results, role)

    wanted = runs.profile_of(results.profile)["iterated"]
    return cases([name for name in runs.ITERATED if name in wanted], faster)


def wd_over_wr(results: Results) -> Cases:
    """AlexNet's iterations with WD over WR by the same policy, its total WR's limit times 15."""
    for record in filter(None, map(_ran(results).get, (runs.CAFFE, "AlexNet"))):
        total = record.config["limit_mib"] * PAPER["figure11"]["kernels"]["AlexNet"]
        for _, _, policy in (way for way in record.config["ways"] if way[:2] == ["WD", total]):
            wd = f"WD {total:g} MiB {policy}"
            label = f"{network_name(record)}, {total:g} MiB in all, both {policy}:"
            note = f"WD is {gain(record, PLAIN, wd)} of torch's own speed without a limit"
            return {"AlexNet": gain(record, f"WR {policy}", wd).named(label, note)}
    raise NotRun("no records of WD with as much in all")


def no_slower(results: Results) -> Cases:
    """The time of each network's iterations tuned, over torch's own."""
    ran = _ran(results)

    def slower(role: str) -> Estimate | Exact:
        record = ran[role]
        if untouched(record):
            return Exact(True, "left as it was")
        divided = _form(record, FREE)["divided"]
        plain, again, free = _most_rounds(record, PLAIN, AGAIN, FREE)
        label = f"{network_name(record)}, {divided} kernels divided:"
        note = f"torch's own over itself {gain(record, again, plain)}"
        return gain(record, free, plain).named(label, note)

    if all(map(untouched, ran.values())):
        raise NotRun(f"tune left as they were: {', '.join(ran)}" if ran else "no records")
    return cases(ran, slower)


ITERATIONS = runs.artefact(
    "iterations",
    plan=planned,
    rows=lambda results: measured.told(table(results)),
    draw=figure,
    claims={"divided_faster": divided_faster, "wd_over_wr": wd_over_wr, "no_slower": no_slower},
)
