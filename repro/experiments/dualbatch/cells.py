"""What tables and claims compare, and whose numbers it is.

Trainings are compared by seed, measurements by process. Captions and titles name the networks and
data that stand in for the paper's.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from repro import plots
from repro.experiments import design, view
from repro.experiments.design import Artefact
from repro.experiments.dualbatch import runs
from repro.experiments.judge import BySeed, Cases, Cell, Estimate, difference, or_none
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH, summary

Records = Sequence[Record]


class Line(NamedTuple):
    """Trainings with the paper's loss and accuracy, and those that they are compared with."""

    records: Records
    paper: Mapping[str, float]
    base: "Line | None" = None


Lines = Mapping[str, Line]


def section51(results: Results, k: float, n_small: int, factor: str = "linear") -> list[Record]:
    """The trainings of section 5.1 that ended; the baseline has n_small = 0 at any k."""
    k = k if n_small else 1.0
    return results.ok("train", setting=runs.SECTION_5_1, n_small=n_small, k=k, factor=factor)


def lines_over(lines: Lines, base: Line) -> dict[str, Line]:
    """The lines, all compared with one of them or with another."""
    return {n: line if line is base else line._replace(base=base) for n, line in lines.items()}


def final(results: Results, records: Records, metric: str) -> BySeed:
    """A metric after the last epoch, one value for each seed."""
    values = [float(record.metrics[metric][-1]) for record in records]
    return by_seed(results, records, values)


def by_seed(results: Results, records: Records, values: Iterable[float]) -> BySeed:
    """Values in the order of the records, each with its record's seed."""
    following = iter(values)
    return results.cell(records, lambda record: next(following))


def by_process(results: Results, records: Records, values: Sequence[float]) -> Cell:
    """One value of each process with its number; of one process its rounds as they are."""
    return values if len(records) < 2 else by_seed(results, records, values)


def change(results: Results, records: Records, base: Records, metric: str = "accuracy") -> Estimate:
    """A metric over that of other trainings, seed by seed; `NotRun` if there is none of them."""
    ours, others = (final(results, of, metric) for of in (records, base))
    if metric != "accuracy":
        return difference(ours, others, digits=3)
    image = 100 / min((r.config["test_samples"] for r in [*records, *base]), default=math.inf)
    return difference(ours, others, "points", step=image)


def gain(results: Results, line: Line) -> tuple[Estimate | None, float]:
    """The gain of a line over its base in points: ours, None if not run, and the paper's."""
    base = line.base or line
    ours = or_none(change, results, line.records, base.records)
    return ours, line.paper["accuracy"] - base.paper["accuracy"]


def outcome(results: Results, line: Line) -> dict[str, Any]:
    """Columns of final loss and accuracy, and of the gain, the paper's with ours."""
    accuracy = final(results, line.records, "accuracy")
    plans = line.records[0].metrics["plans"] if line.records else []
    small = [str(plan["small_batch"]) for plan in plans if plan["small_samples"]]
    cells = {
        "B_S": ", ".join(small) or DASH,  # one for each resolution
        "loss, paper": f"{line.paper['loss']:.3f}",
        "loss": summary(final(results, line.records, "test_loss"), 3),
        "accuracy, paper (%)": f"{line.paper['accuracy']:.1f}",
        "accuracy (%)": summary(accuracy),
        "n": len(accuracy),
    }
    if line.base:
        ours, paper = gain(results, line)
        cells |= {"gain, paper": f"{paper:+.1f}", "gain": str(ours or DASH)}
    return cells


# Whose numbers they are.

ROLE = "ResNet-18"  # the paper's network


def _network(config: Mapping[str, Any]) -> str:
    model = config["model"]
    return f"ResNet-{model['depth']}" if model["name"] == "resnet_cifar" else ROLE


def whose(records: Sequence[Record], more: str = "") -> str:
    """The title of a panel of our numbers: network and data, and `more`, such as ``12 px``."""
    if not records:
        return "ours: not run"
    config = records[0].config.get("parts", [records[0].config])[0]
    data = records[0].dataset["name"] if records[0].dataset else ""
    return view.panel(ROLE, _network(config), ", ".join(text for text in (data, more) if text))


def _facts(results: Results) -> Iterable[str]:
    """Yield a caption's sentences on simulated workers and stand-ins."""
    records = [record for record in results.records if record.status == "ok"] or results.records
    if any("setting" in r.config and r.config.get("engine", "local") == "local" for r in records):
        yield "SIMULATED workers, on one device."
    pairs = []
    for record in records:
        parts = [part for part in record.config.get("parts", [record.config]) if "model" in part]
        pairs += [(_network(part), ROLE) for part in parts]
        if record.dataset and (setting := record.config.get("setting")):
            data = "ImageNet" if setting == runs.SECTION_5_2_3 else "CIFAR-100"
            pairs.append((record.dataset["name"], data))
    yield from view.stand_ins(pairs)


def artefact(
    name: str, claims: Mapping[str, Callable[[Results], Cases]] | None = None, **functions: Any
) -> Artefact:
    """An artefact with its runs, its texts in ``paper.toml`` and the facts of its caption."""
    colons = {key: _with_colons(numbers) for key, numbers in (claims or {}).items()}
    plan = runs.RUNS[name]
    return design.artefact("dualbatch", name, facts=_facts, plan=plan, claims=colons, **functions)


def _with_colons(numbers: Callable[[Results], Cases]) -> Callable[[Results], Cases]:
    """Put a colon behind the labels of a claim's cases, which end in numbers."""
    return lambda results: {
        name: case.named(f"{case.label or name}:") if isinstance(case, Estimate) else case
        for name, case in numbers(results).items()
    }


# Figures: the same workers look the same in all.

STYLES: dict[str, dict[str, Any]] = plots.styles(map(runs.mix, range(runs.WORKERS + 1)))
STYLES |= plots.styles(runs.FACTORS.values())  # in no figure with those
STYLES |= {
    "small batches": STYLES[runs.mix(runs.WORKERS)],
    "large batches": STYLES[runs.mix(0)],
    "dual batches": STYLES[runs.mix(runs.HALF)],
    "training loss": {"color": plots.INK, "marker": "o"},
    "test loss": {"color": plots.WITHOUT, "marker": "s"},
}


def on_one_scale(axes: Sequence["plots.Axes"], label: str) -> None:
    """Give panels of one quantity the same y axis, so that they compare."""
    axes[0].set_ylabel(label)
    for axis in axes[1:]:
        axis.sharey(axes[0])
        axis.tick_params(labelleft=False)
        axis.autoscale_view()
