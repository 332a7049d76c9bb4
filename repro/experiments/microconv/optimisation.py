"""What does it take to find the divisions: measuring, dividing and solving? (Section IV-B2)"""

import statistics
from dataclasses import replace
from typing import Any

from repro.experiments.design import LONG, Chosen, Exhibit, Results, Run, one_machine
from repro.experiments.judge import Cases, Estimate, NotRun, cases, mean_of, ratio
from repro.experiments.microconv.comparing import mib, ms, tunings
from repro.experiments.microconv.runs import (
    PAPER,
    alexnet_kernels,
    captioned,
    policies,
    programmes,
    repeated,
)
from repro.records import Record
from repro.report import DASH

COST = PAPER["optimisation"]
RESNET50 = f"WD, {COST['resnet50'][0]} variables"
RESNET152 = "WD, 2500 variables"


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """The measurements of AlexNet from an empty cache, and the solver's programmes.

    Under `long` those of quick, by several processes.
    """
    of = "quick" if profile == LONG else profile
    wanted = dict.fromkeys(("powerOfTwo", policies(of)[-1]))
    measured = [run for policy in wanted for run in alexnet_kernels(of, policy)]
    if profile == LONG:
        measured = [repeated(run) for run in measured]
    return [*measured, *programmes(profile)]


def tuning_s(record: Record) -> float:
    """Seconds of measuring a network's kernels and dividing them."""
    return float(record.metrics["benchmark_s"] + record.metrics["optimise_s"])


def _median_ms(record: Record, name: str) -> str:
    return ms(statistics.median(record.timings[name]["samples_s"]))


def table(results: Results) -> list[dict[str, Any]]:
    """The seconds that a first tuning of AlexNet takes, and the solver's."""
    rows = []

    def add(what: str, paper: str, ours: str, dividing: str, count: Any) -> None:
        row = {"what": what, "paper": paper, "ours": ours, "of which dividing (ms)": dividing}
        rows.append(row | {"times measured": count})

    for policy, seconds in (("powerOfTwo", COST["power_of_two_s"]), ("all", COST["all_s"])):
        what, paper = f"AlexNet, policy {policy}: measure and divide", f"{seconds} s"
        record = next(iter(tunings(results, policy)), None)
        if record is None:
            add(what, paper, DASH, DASH, DASH)
        else:
            dividing, count = ms(record.metrics["optimise_s"]), record.metrics["measured"]
            add(what, paper, f"{tuning_s(record):,.2f} s", dividing, count)
    published = {RESNET50: f"{COST['resnet50'][1]} ms", RESNET152: f"{COST['resnet152_ms']} ms"}
    for record in results.ok("solver"):
        for name, timing in record.timings.items():
            what = f"{name} (made-up fronts)" if name in published else name
            taken, paper = f"{_median_ms(record, name)} ms", published.get(name, DASH)
            add(what, paper, taken, DASH, len(timing["samples_s"]))
    for record in results.ok("programme"):
        own = f"WD, ResNet-152's own {record.metrics['kernels']} kernels, "
        own += f"{record.metrics['variables']} variables, "
        for name, timing in record.timings.items():
            what = f"{own}{mib(record.metrics['total_bytes'][name])} MiB ({name})"
            taken = f"{_median_ms(record, name)} ms"
            add(what, published[RESNET152], taken, DASH, len(timing["samples_s"]))
    return rows


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
    return {"AlexNet": replace(taken, label="powerOfTwo over all", note=f"{counts} {how}")}


def _over_paper(record: Record, name: str, paper_ms: float, label: str) -> Estimate:
    """The solver's seconds over the paper's time."""
    samples = [1e3 * s / paper_ms for s in record.timings[name]["samples_s"]]
    over = mean_of(samples, log=True, trials="rounds")
    return replace(over, label=f"{label}, over {paper_ms} ms:")


def _made_up(results: Results, name: str, paper_ms: float) -> Estimate:
    solved = results.need("solver")
    label = f"made-up fronts, {name.removeprefix('WD, ')}, {_median_ms(solved, name)} ms"
    return _over_paper(solved, name, paper_ms, label)


def solver_resnet50(results: Results) -> Cases:
    """The time of a programme with as many variables over GLPK's."""
    return {"ResNet-50": _made_up(results, RESNET50, COST["resnet50"][1])}


def solver_resnet152(results: Results) -> Cases:
    """The time of a programme of 2,500 variables, and of ResNet-152's own with two totals.

    The paper does not say how many variables it had.
    """

    def solved(name: str) -> Estimate:
        if name == "2,500 variables":
            return _made_up(results, RESNET152, COST["resnet152_ms"])
        record = results.need("programme")
        taken, total = (mib(record.metrics[f"{key}_bytes"][name]) for key in ("taken", "total"))
        variables = record.metrics["variables"]
        label = f"its own {variables} variables, {taken} of {total} MiB taken ({name})"
        return _over_paper(record, name, COST["resnet152_ms"], label)

    return cases(("2,500 variables", "as in the paper", "binding"), solved)


OPTIMISATION = Exhibit(
    long=True,
    runs=runs,
    table=table,
    caption=captioned(
        "Seconds to measure and divide AlexNet from an empty cache, and to solve WD's programmes: "
        "SYNTHETIC ones of the paper's sizes, and ResNet-152's measured one within two totals."
    ),
    claims={
        "power_of_two_saves": power_of_two_saves,
        "solver_resnet50": solver_resnet50,
        "solver_resnet152": solver_resnet152,
    },
)
