"""What does it take to find the divisions: measuring, dividing and solving? (Section IV-B2)"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from repro.experiments.design import LONG, Chosen, Exhibit, Run
from repro.experiments.judge import Cases, Estimate, NotRun, cases, mean_of, ratio
from repro.experiments.microconv.describing import marks
from repro.experiments.microconv.settings import (
    PAPER,
    alexnet_kernels,
    median,
    mib,
    ms,
    policies,
    programme,
    repeated,
    solver,
    tunings,
)
from repro.experiments.query import Results, one_machine
from repro.experiments.view import caption
from repro.records import Record
from repro.report import DASH

COST = PAPER["optimisation"]
RESNET50 = f"WD, {COST['resnet50'][0]} variables"
RESNET152 = "WD, 2500 variables"


def optimisation_runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the measurements of AlexNet from an empty cache, and the solver's programmes.

    Under `long` those of quick, by several processes.
    """
    of = "quick" if profile == LONG else profile
    wanted = dict.fromkeys(("powerOfTwo", policies(of, "AlexNet")[-1]))
    measured = [run for policy in wanted for run in alexnet_kernels(of, policy)]
    if profile == LONG:
        measured = [repeated(run) for run in measured]
    return [*measured, solver(profile), programme(profile)]


def tuning_s(record: Record) -> float:
    """Return the seconds of measuring a network's kernels and dividing them."""
    return float(record.metrics["benchmark_s"] + record.metrics["optimise_s"])


def optimisation_table(results: Results) -> list[dict[str, Any]]:
    """Return the seconds that a first tuning of AlexNet takes, and the solver's."""
    rows = []
    for policy, seconds in (("powerOfTwo", COST["power_of_two_s"]), ("all", COST["all_s"])):
        record = next(iter(tunings(results, policy)), None)
        rows.append(
            {
                "what": f"AlexNet, policy {policy}: measure and divide",
                "paper": f"{seconds} s",
                "ours": f"{tuning_s(record):,.2f} s" if record else DASH,
                "of which dividing (ms)": ms(record.metrics["optimise_s"] if record else None),
                "times measured": record.metrics["measured"] if record else DASH,
            }
        )
    solved = results.first("solver")
    published = {RESNET50: f"{COST['resnet50'][1]} ms", RESNET152: f"{COST['resnet152_ms']} ms"}
    for name, timing in (solved.timings if solved else {}).items():
        assert solved is not None
        rows.append(
            {
                "what": f"{name} (made-up fronts)" if name in published else name,
                "paper": published.get(name, DASH),
                "ours": f"{ms(median(solved, name))} ms",
                "of which dividing (ms)": DASH,
                "times measured": len(timing["samples_s"]),
            }
        )
    measured = results.first("programme")
    for name, timing in (measured.timings if measured else {}).items():
        assert measured is not None
        metrics, total = measured.metrics, mib(measured.metrics["total_bytes"][name])
        rows.append(
            {
                "what": f"WD, ResNet-152's own {metrics['kernels']} kernels, "
                f"{metrics['variables']} variables, {total} MiB ({name})",
                "paper": f"{COST['resnet152_ms']} ms",
                "ours": f"{ms(median(measured, name))} ms",
                "of which dividing (ms)": DASH,
                "times measured": len(timing["samples_s"]),
            }
        )
    return rows


def power_of_two_saves(results: Results) -> Cases:
    """The seconds of a first tuning with powerOfTwo over all, taken once by each process."""
    ways = [tunings(results, policy) for policy in ("powerOfTwo", "all")]
    if not all(ways):
        raise NotRun("no records")
    two, every = (records[0] for records in ways)
    one_machine([record for records in ways for record in records])
    ours, theirs = ([tuning_s(record) for record in records] for records in ways)
    counts = f"{two.metrics['measured']} for {every.metrics['measured']} times measured"
    how = f"at a mini-batch of {every.config['batch']}, each tuned once"
    how += f" in each of {len(ours)} processes" if len(ours) > 1 else ""
    taken = ratio(ours, theirs, trials="processes")
    return {"AlexNet": replace(taken, label="powerOfTwo over all", note=f"{counts} {how}")}


def _over_paper(samples_s: Sequence[float], paper_ms: float, label: str) -> Estimate:
    """Return the solver's seconds over the paper's time."""
    over = mean_of([1e3 * s / paper_ms for s in samples_s], log=True, trials="rounds")
    return replace(over, label=f"{label}, over {paper_ms} ms:")


def _made_up(results: Results, name: str, paper_ms: float) -> Estimate:
    solved = results.need("solver")
    label = f"made-up fronts, {name.removeprefix('WD, ')}, {ms(median(solved, name))} ms"
    return _over_paper(solved.timings[name]["samples_s"], paper_ms, label)


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
        return _over_paper(record.timings[name]["samples_s"], COST["resnet152_ms"], label)

    return cases(("2,500 variables", "as in the paper", "binding"), solved)


OPTIMISATION = Exhibit(
    long=True,
    runs=optimisation_runs,
    table=optimisation_table,
    caption=caption(
        "Seconds to measure and divide AlexNet from an empty cache, and to solve WD's programmes: "
        "SYNTHETIC ones of the paper's sizes, and ResNet-152's measured one within two totals.",
        marks,
    ),
    claims={
        "power_of_two_saves": power_of_two_saves,
        "solver_resnet50": solver_resnet50,
        "solver_resnet152": solver_resnet152,
    },
)
