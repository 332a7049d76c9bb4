"""What tables and claims compare, and whose numbers it is.

Trainings are compared by seed, measurements by process. Captions and titles name the networks and
data that stand in for the paper's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from repro.experiments import design
from repro.experiments.design import Artefact, Rows
from repro.experiments.dualbatch import runs
from repro.experiments.judge import BySeed, Cases, Cell, Estimate, NotRun, cases, difference
from repro.experiments.query import Results
from repro.experiments.view import panel
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Records = Sequence[Record]
Row = Mapping[str, float]  # the paper's loss and accuracy
Gains = dict[str, tuple[Estimate | None, float]]  # by line: ours, None if not run; the paper's


class Line(NamedTuple):
    """Trainings with the paper's row, and those that they are compared with, if any."""

    records: Records
    paper: Row
    base: Records = ()
    paper_base: Row | None = None


Lines = Mapping[str, Line]


def section51(results: Results, k: float, n_small: int, factor: str = "linear") -> list[Record]:
    """The trainings of section 5.1 that ended; the baseline has n_small = 0 at any k."""
    k = k if n_small else 1.0
    return results.ok("train", setting=runs.SECTION_5_1, n_small=n_small, k=k, factor=factor)


def lines_over(cells: Mapping[str, tuple[Records, Row]], base: tuple[Records, Row]) -> Lines:
    """The lines of trainings, all compared with one of them or with another."""
    return {
        name: Line(*cell) if cell[1] is base[1] else Line(*cell, *base)
        for name, cell in cells.items()
    }


def final(results: Results, records: Records, metric: str) -> BySeed:
    """A metric after the last epoch, one value for each seed."""

    def read(record: Record) -> float:
        return float(record.metrics[metric][-1])

    # All seeds with momentum kept were planned before any was looked at.
    if records and records[0].config.get("setting") == runs.KEPT:
        return BySeed.of(records, read)
    return results.cell(records, read)


def by_process(results: Results, records: Records, values: Sequence[float]) -> Cell:
    """One value of each process with its number; of one process its rounds as they are."""
    return values if len(records) < 2 else by_seed(results, records, values)


def by_seed(results: Results, records: Records, values: Iterable[float]) -> BySeed:
    """Values in the order of the records, each with its record's seed."""
    of = dict(zip((record.seed for record in records), values, strict=True))
    return results.cell(records, lambda record: of[record.seed])


def change(results: Results, records: Records, base: Records, metric: str = "accuracy") -> Estimate:
    """A metric over that of other trainings, seed by seed; `NotRun` if there is none of them."""
    ours, others = (final(results, of, metric) for of in (records, base))
    return difference(ours, others, *(("points", 2) if metric == "accuracy" else ("", 3)))


def gains(results: Results, lines: Lines) -> Gains:
    """The gain of every line that is compared with another, in points of accuracy."""
    pairs = {name: line for name, line in lines.items() if line.paper_base is not None}
    found = cases(pairs, lambda name: change(results, pairs[name].records, pairs[name].base))
    return {
        name: (
            ours if isinstance(ours, Estimate) else None,
            pairs[name].paper["accuracy"] - pairs[name].paper_base["accuracy"],  # type: ignore[index]
        )
        for name, ours in found.items()
    }


def compared(results: Results, pairs: Mapping[str, tuple[Records, Records]]) -> Cases:
    """By case, the accuracy of trainings over that of others."""
    return with_colons(cases(pairs, lambda name: change(results, *pairs[name])))


def with_colons(found: Cases) -> Cases:
    """The cases with a colon behind their labels, which end in numbers."""
    return {
        name: replace(case, label=f"{case.label or name}:") if isinstance(case, Estimate) else case
        for name, case in found.items()
    }


def outcome(results: Results, line: Line) -> dict[str, Any]:
    """Columns of final loss and accuracy, and of the gain, the paper's with ours."""
    accuracy = final(results, line.records, "accuracy")
    plans = line.records[0].metrics["plans"] if line.records else []
    small = [str(plan["small_batch"]) for plan in plans if plan["small_samples"]]
    cells = {
        "B_S": ", ".join(small) or DASH,  # one for each resolution
        "loss, paper": f"{line.paper['loss']:.3f}",
        "loss": Summary.of(final(results, line.records, "test_loss")).text(3),
        "accuracy, paper (%)": f"{line.paper['accuracy']:.1f}",
        "accuracy (%)": Summary.of(accuracy).text(),
        "n": len(accuracy),
    }
    for ours, paper in gains(results, {"": line}).values():
        cells |= {"gain, paper": f"{paper:+.1f}", "gain": gain_text(ours)}
    return cells


def gain_text(ours: Estimate | NotRun | None) -> str:
    """A gain with its interval as a cell, a dash where there is none."""
    return str(ours) if isinstance(ours, Estimate) else DASH


# Whose numbers they are.

ROLE = "ResNet-18"  # the paper's network


def network(config: Mapping[str, Any]) -> str:
    """The network of a configuration, such as ``ResNet-8``."""
    model = config["model"]
    return f"ResNet-{model['depth']}" if model["name"] == "resnet_cifar" else ROLE


def whose(records: Sequence[Record], more: str = "") -> str:
    """The title of a panel of our numbers: network and data, and `more`, such as ``12 px``."""
    if not records:
        return "ours: not run"
    first = records[0]
    config = first.config.get("parts", [first.config])[0]
    data = first.dataset["name"] if first.dataset else ""
    return panel(ROLE, network(config), ", ".join(text for text in (data, more) if text))


def _stand_ins(record: Record) -> Iterable[tuple[str, str]]:
    """Yield networks and data of a record, each with the paper's."""
    for config in record.config.get("parts", [record.config]):
        if "model" in config:
            yield network(config), ROLE
    if record.dataset and "setting" in record.config:
        name, wanted = record.dataset["name"], "CIFAR-100"
        if record.config["setting"] == runs.SECTION_5_2_3:
            wanted = "ImageNet"
        own = name.startswith(wanted.lower().replace("-", ""))
        synthetic = "SYNTHETIC " * (record.dataset["kind"] == "synthetic")
        yield synthetic + (wanted if own else name), wanted


def facts(results: Results) -> Iterable[str]:
    """Yield a caption's sentences on solved, simulated, synthetic and stand-in parts."""
    records = [record for record in results.records if record.status == "ok"] or results.records
    kinds = {record.experiment for record in records}
    if kinds & {"solve", "schemes"}:
        yield "Solved, not measured."
    if any("setting" in r.config and r.config.get("engine", "local") == "local" for r in records):
        yield "SIMULATED workers, on one device."
    if "memory" in kinds:
        yield "SIMULATED limit."
    if kinds & {"times", "memory"}:
        yield "SYNTHETIC images."
    if "wall" in kinds:
        yield "Real workers on SYNTHETIC images."
    pairs = [pair for record in records for pair in _stand_ins(record)]
    stand_ins = dict.fromkeys(f"{ours} for {paper}" for ours, paper in pairs if ours != paper)
    if stand_ins:
        yield f"STAND-IN: {', '.join(stand_ins)}."


def artefact(
    name: str,
    rows: Callable[[Results], Rows],
    draw: "Callable[[Results], Figure] | None" = None,
    **functions: Any,
) -> Artefact:
    """An artefact with its runs, its texts in ``paper.toml`` and `facts`."""
    made = partial(design.artefact, "dualbatch", name, facts=facts, plan=runs.RUNS[name])
    return made(rows=rows, draw=draw, **functions)
