"""Names of networks and data, and of the paper's that they stand in for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from repro.experiments import design
from repro.experiments.design import Artefact, Rows
from repro.experiments.dualbatch import runs
from repro.experiments.judge import Cases, Estimate
from repro.experiments.query import Results
from repro.experiments.view import panel
from repro.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLE = "ResNet-18"  # the paper's network
TRAINED = {"train", "synchronise", "flatness", "own_plan"}
SOLVED = {"solve", "schemes"}  # experiments that measure nothing


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


def _data(record: Record) -> tuple[str, str]:
    """The data set of a training, and the paper's; both are the paper's if it is that."""
    name: str = record.dataset["name"] if record.dataset else ""
    wanted = "ImageNet" if record.config["setting"] == runs.SECTION_5_2_3 else "CIFAR-100"
    return (wanted if name.startswith(wanted.lower().replace("-", "")) else name), wanted


def trained(records: Sequence[Record]) -> str:
    """The network, data, epochs and momentum of trainings, for evidence; empty without any."""
    if not records:
        return ""
    config = records[0].config
    pairs = [(network(config), ROLE), _data(records[0])]
    parts = [ours if ours == paper else f"{ours} (for {paper})" for ours, paper in pairs]
    kept = config.get("optimizer_state") == "kept"
    parts.append(f"{sum(epochs for epochs, _ in config['stages']):g} epochs")
    parts.append(f"momentum {'kept' if kept else 'begun anew in each share'}")
    return ", ".join(parts)


def said_of(found: Cases, *notes: str) -> Cases:
    """The cases with a colon behind their labels; the last estimate has the notes."""
    told = {
        name: replace(case, label=f"{case.label or name}:") if isinstance(case, Estimate) else case
        for name, case in found.items()
    }
    for name, case in reversed(told.items()):
        if isinstance(case, Estimate):
            told[name] = replace(case, note="; ".join(filter(None, (case.note, *notes))))
            break
    return told


def facts(results: Results) -> Iterable[str]:
    """Yield a caption's sentences on solved, simulated, synthetic and stand-in parts."""
    records = [record for record in results.records if record.status == "ok"] or results.records
    kinds = {record.experiment for record in records}
    trainings = [record for record in records if record.experiment in TRAINED]
    if kinds & SOLVED:
        yield "Solved, not measured."
    if any(record.config.get("engine", "local") == "local" for record in trainings):
        yield "SIMULATED workers, on one device."
    if "memory" in kinds:
        yield "SIMULATED limit."
    if kinds & {"times", "memory"}:
        yield "SYNTHETIC images."
    if "wall" in kinds:
        yield "Real workers on SYNTHETIC images."
    configs = [part for record in records for part in record.config.get("parts", [record.config])]
    pairs = [(network(config), ROLE) for config in configs if "model" in config]
    for record in trainings:
        if record.dataset:
            name, wanted = _data(record)
            pairs.append(("SYNTHETIC " * (record.dataset["kind"] == "synthetic") + name, wanted))
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
