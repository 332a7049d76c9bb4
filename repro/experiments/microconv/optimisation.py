"""How long does it take to find the divisions: measuring, dividing and solving? (Section IV-B2)"""

import statistics
from collections.abc import Iterator
from typing import Any

from repro.experiments.judge import Cases, Estimate, NotRun, cases, mean_of, ratio
from repro.experiments.microconv import runs
from repro.experiments.microconv.measured import mib, ms, tunings
from repro.experiments.query import Results, one_machine
from repro.records import Record
from repro.report import DASH

COST = runs.PAPER["optimisation"]
RESNET50, RESNET152 = f"WD, {COST['resnet50'][0]} variables", "WD, 2500 variables"
OWN = ("as in the paper", "binding")  # totals of ResNet-152's own programme
PAPER_MS = {RESNET50: COST["resnet50"][1]}
PAPER_MS |= dict.fromkeys((RESNET152, *OWN), COST["resnet152_ms"])


def tuning_s(record: Record) -> float:
    """Seconds of measuring a network's kernels and dividing them."""
    return float(record.metrics["benchmark_s"] + record.metrics["optimise_s"])


def _median_ms(record: Record, name: str) -> str:
    return f"{ms(statistics.median(record.timings[name]['samples_s']))} ms"


def table(results: Results) -> Iterator[dict[str, Any]]:
    """The seconds that a first tuning of AlexNet takes, and the solver's."""
    for policy, seconds in (("powerOfTwo", COST["power_of_two_s"]), ("all", COST["all_s"])):
        for record in tunings(results, policy)[:1]:
            row = {"what": f"AlexNet, policy {policy}: measure and divide", "paper": f"{seconds} s"}
            row["ours"] = f"{tuning_s(record):,.2f} s"
            yield row | {"times measured": record.metrics["measured"]}
    for record in [*results.ok("solver"), *results.ok("programme")]:
        for name, timing in record.timings.items():
            what, paper = name, PAPER_MS.get(name)
            if name in OWN:
                variables, total = record.metrics["variables"], record.metrics["total_bytes"][name]
                what = f"WD, ResNet-152's own {variables} variables, {mib(total)} MiB ({name})"
            row = {"what": what, "paper": f"{paper} ms" if paper else DASH}
            row["ours"] = _median_ms(record, name)
            yield row | {"times measured": len(timing["samples_s"])}


def power_of_two_saves(results: Results) -> Cases:
    """The seconds of a first tuning with powerOfTwo over all, taken once by each process."""
    found = [tunings(results, policy) for policy in ("powerOfTwo", "all")]
    if not all(found):
        raise NotRun("no records")
    two, every = (records[0] for records in found)
    one_machine([record for records in found for record in records])
    ours, theirs = ([tuning_s(record) for record in records] for records in found)
    counts = f"{two.metrics['measured']} for {every.metrics['measured']} times measured"
    how = f"at a mini-batch of {every.config['batch']}, each tuned once"
    how += f" in each of {len(ours)} processes" if len(ours) > 1 else ""
    taken = ratio(ours, theirs, trials="processes")
    return {"AlexNet": taken.named("powerOfTwo over all", f"{counts} {how}")}


def _over_paper(results: Results, name: str) -> Estimate:
    """The solver's time over the paper's."""
    record = results.need("programme" if name in OWN else "solver")
    label = f"made-up fronts, {name.removeprefix('WD, ')}, {_median_ms(record, name)}"
    if name in OWN:
        taken, total = (mib(record.metrics[f"{key}_bytes"][name]) for key in ("taken", "total"))
        variables = record.metrics["variables"]
        label = f"its own {variables} variables, {taken} of {total} MiB taken ({name})"
    samples = [1e3 * s / PAPER_MS[name] for s in record.timings[name]["samples_s"]]
    over = mean_of(samples, log=True, trials="rounds")
    return over.named(f"{label}, over {PAPER_MS[name]} ms:")


def solver_resnet152(results: Results) -> Cases:
    """The time of a programme of 2,500 variables, and of ResNet-152's own with two totals.

    The paper does not say how many variables it had.
    """
    names = {"2,500 variables": RESNET152} | {name: name for name in OWN}
    return cases(names, lambda case: _over_paper(results, names[case]))


OPTIMISATION = runs.artefact(
    "optimisation",
    plan=runs.optimisation,
    rows=table,
    claims={
        "power_of_two_saves": power_of_two_saves,
        "solver_resnet50": lambda results: {"ResNet-50": _over_paper(results, RESNET50)},
        "solver_resnet152": solver_resnet152,
    },
)
