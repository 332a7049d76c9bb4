"""Names of networks and data, and of the paper's that they stand in for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from repro.experiments import design
from repro.experiments.design import Artefact, Rows
from repro.experiments.dualbatch import runs
from repro.experiments.query import Results
from repro.experiments.view import panel
from repro.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
