"""What does it take to find the divisions: measuring, dividing and solving? (Section IV-B2)"""

from typing import Any

from repro.experiments.captions import caption
from repro.experiments.design import (
    LONG,
    Chosen,
    Exhibit,
    Expectation,
    Results,
    Run,
    claim,
    one_machine,
)
from repro.experiments.intervals import NotRun, ratio
from repro.experiments.judging import Verdict, combine, direction
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


@claim(
    "power_of_two_saves",
    "powerOfTwo takes far less time to tune than all",
    "Section IV-B1",
)
def power_of_two_saves(results: Results, expected: Expectation) -> Verdict:
    """Judge the seconds of a first tuning, taken once by each process."""
    ways = [tunings(results, policy) for policy in ("powerOfTwo", "all")]
    if not all(ways):
        raise NotRun("no records")
    two, every = (records[0] for records in ways)
    one_machine([record for records in ways for record in records])
    ours, theirs = ([tuning_s(record) for record in records] for records in ways)
    gap = ratio(ours, theirs, trials="processes")
    paper = COST["power_of_two_s"] / COST["all_s"]
    word, evidence = direction("powerOfTwo over all", gap, paper, sign=expected.sign)
    counts = f"{two.metrics['measured']} for {every.metrics['measured']} times measured"
    how = f"at a mini-batch of {every.config['batch']}, each tuned once"
    how += f" in each of {len(ours)} processes" if len(ours) > 1 else ""
    return combine([(word, f"{evidence}; {counts} {how}")])


def _solved(results: Results, expected: Expectation, name: str, paper_ms: float) -> Verdict:
    """Judge the solver's seconds, sample by sample, against the paper's."""
    samples = results.need("solver").timings[name]["samples_s"]
    gap = ratio([1e3 * s for s in samples], [paper_ms] * len(samples), trials="rounds")
    subject = f"made-up fronts, {ms(median(results.need('solver'), name))} ms over the paper's:"
    return combine([direction(subject, gap, sign=expected.sign)])


@claim(
    "solver_resnet50",
    f"The 0-1 programme of ResNet-50, {COST['resnet50'][0]} variables, is solved within "
    f"{COST['resnet50'][1]} ms",
    "Section IV-B2",
)
def solver_resnet50(results: Results, expected: Expectation) -> Verdict:
    """Judge a programme with as many variables against GLPK's time."""
    return _solved(results, expected, RESNET50, COST["resnet50"][1])


@claim(
    "solver_resnet152",
    f"Even the most complicated 0-1 programme, ResNet-152's, is solved within "
    f"{COST['resnet152_ms']} ms",
    "Section IV-B2",
)
def solver_resnet152(results: Results, expected: Expectation) -> Verdict:
    """Judge a programme of 2,500 variables; the paper does not say how many it had."""
    return _solved(results, expected, RESNET152, COST["resnet152_ms"])


@claim(
    "solver_resnet152_own",
    f"The 0-1 programme of ResNet-152's own kernels is solved within {COST['resnet152_ms']} ms",
    "Section IV-B2",
)
def solver_resnet152_own(results: Results, expected: Expectation) -> Verdict:
    """Judge WD with the total that the paper names for ResNet-50, and with one that binds."""
    record = results.need("programme")
    metrics, parts = record.metrics, []
    for name, timing in record.timings.items():
        samples, paper_ms = timing["samples_s"], COST["resnet152_ms"]
        gap = ratio([1e3 * s for s in samples], [paper_ms] * len(samples), trials="rounds")
        taken, total = mib(metrics["taken_bytes"][name]), mib(metrics["total_bytes"][name])
        text = f"{metrics['variables']} variables, {taken} of {total} MiB taken ({name}):"
        parts.append(direction(text, gap, sign=expected.sign))
    return combine(parts)


OPTIMISATION = Exhibit(
    long=True,
    runs=optimisation_runs,
    table=optimisation_table,
    caption=caption(
        "Seconds to measure and divide AlexNet from an empty cache, and to solve WD's programmes: "
        "SYNTHETIC ones of the paper's sizes, and ResNet-152's measured one within two totals.",
        marks,
    ),
    claims=(power_of_two_saves, solver_resnet50, solver_resnet152, solver_resnet152_own),
)
