"""Cells of trainings with their estimates, and the names of what ran in the paper's place."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from repro.experiments import design
from repro.experiments.judge import BySeed, Cases, Estimate, NotRun, cases, difference
from repro.experiments.mbs.runs import CLASSIFIERS, INITIAL, PUBLISHED, ROLES, task_of
from repro.experiments.query import Results
from repro.experiments.view import panel
from repro.records import Record
from repro.report import DASH

T = TypeVar("T")
MIB = 2**20
UNITS = {"accuracy": "test accuracy (%)", "iou": "test IoU (%)"}
WITHOUT, WITH, SUMMED, BY_SAMPLES = "without MBS", "with MBS", "not normalised", "by samples (ours)"
_NAMES = {
    "resnet_cifar": "ResNet-{depth}",
    "amoebanet_d": "AmoebaNet-D of {num_layers} layers",
    "unet": "U-Net of width {width}",
}


def styles() -> dict[str, dict[str, str]]:
    """Return a colour and a marker for each kind of training."""
    from repro import plots

    return plots.styles((WITHOUT, WITH, SUMMED, BY_SAMPLES))


def trainings(results: Results, role: str, mini_batch: int, streamed: bool) -> list[Record]:
    """Return the trainings of a model at the higher resolution, one per seed."""
    found = results.select("train", role=role, mini_batch=mini_batch, resolution="high")
    return [record for record in found if (record.config["micro_batch"] is not None) == streamed]


def pair(results: Results, role: str) -> dict[str, list[Record]]:
    """Return the trainings without and with MBS at the initial mini-batch."""
    both = {"without": False, "with": True}
    return {way: trainings(results, role, INITIAL[role], with_) for way, with_ in both.items()}


def best(results: Results, records: Sequence[Record]) -> BySeed:
    """Return the best metric of every training that ran, in percent."""
    ran = [record for record in records if record.status == "ok"]
    return results.cell(ran, lambda record: float(record.metrics["best"]))


def gap(results: Results, first: Sequence[Record], second: Sequence[Record]) -> Estimate:
    """Return the best metric of some trainings less that of others, in points, seed by seed."""
    both = [*first, *second]
    values = best(results, first), best(results, second)
    found = difference(*values, unit="points", resolution=image_points(both))
    return replace(found, label=ran_as(both[0].config["role"], both))


def image_points(records: Sequence[Record]) -> float:
    """Return one test image's share of an accuracy, in points; 0 of IoU, which counts pixels."""
    tested = [r for r in records if r.config["role"] in CLASSIFIERS]
    return 100 / min((r.config["test_samples"] or math.inf for r in tested), default=math.inf)


def same_result(results: Results, roles: Sequence[str]) -> Cases:
    """Best metric with MBS less that without, at the initial mini-batch."""

    def compare(role: str) -> Estimate:
        both = pair(results, role)
        return gap(results, both["with"], both["without"])

    return cases(roles, compare)


def told(compare: Callable[..., Estimate], *given: Any) -> str:
    """Return a comparison without its unit; a dash where it cannot be made."""
    try:
        return str(replace(compare(*given), unit=""))
    except NotRun:
        return DASH


def joined(parts: Sequence[tuple[bool, str]]) -> tuple[bool, str]:
    """Join whether each part of a check holds, and the numbers; no part is "not run"."""
    if not parts:
        raise NotRun("no records")
    return all(holds for holds, _ in parts), "; ".join(text for _, text in parts)


def status_or(records: Sequence[Record], text: str) -> str:
    """Return `text`, or how the runs ended where none succeeded."""
    if not records:
        return "not run"
    if any(record.status == "ok" for record in records):
        return text
    return "out of memory" if records[0].status == "out_of_memory" else "error"


def networks(role: str, records: Iterable[Record]) -> list[str]:
    """Return the networks that ran in a role, by the paper's name only where they are the same."""
    ran = [r for r in records if r.config["role"] == role and r.experiment != "foretell"]
    models = [record.config["model"] for record in ran]
    names = [role if m == PUBLISHED[role] else _NAMES[m["name"]].format(**m) for m in models]
    return list(dict.fromkeys(names))


def ran_as(role: str, records: Iterable[Record]) -> str:
    """Return which network ran in a role: ``ResNet-8 (for ResNet-50)``, or the paper's own name."""
    names = [name for name in networks(role, records) if name != role]
    return f"{' and '.join(names)} (for {role})" if names else role


def whose(role: str, records: Sequence[Record]) -> str:
    """Return a panel's title: network and data of our numbers."""
    shown = [record for record in records if record.config["role"] == role]
    if not shown:
        return f"{role}: not run"
    data = dict.fromkeys(record.dataset["name"] for record in shown if record.dataset)
    return panel(role, " and ".join(networks(role, shown)), " and ".join(data))


def marks(results: Results) -> Iterable[str]:
    """Yield the stand-ins for the paper's data, networks and memory, for a caption."""
    records = [record for record in results.records if record.experiment != "foretell"]
    papers = {"segmentation": "Carvana", "classification": "Flowers-102"}
    stand_ins = []
    for record in records:
        paper, name = papers[task_of(record.config["role"])], (record.dataset or {}).get("name")
        if name and not name.startswith(paper.lower().replace("-", "")):
            stand_ins.append(f"{name} for {paper}")
    if any(ran_as(role, records) != role for role in ROLES):
        stand_ins.append("smaller networks")
    if stand_ins:
        yield f"STAND-IN: {', '.join(dict.fromkeys(stand_ins))}."
    if any(r.dataset and r.dataset["kind"] == "synthetic" for r in records):
        yield "SYNTHETIC data."
    if any(r.config.get("limit_bytes") or r.config.get("limit_fits") for r in records):
        yield "SIMULATED memory limit."


artefact = partial(design.artefact, "mbs", facts=marks)
