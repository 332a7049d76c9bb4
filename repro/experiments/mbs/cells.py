"""Cells of trainings with their estimates, and the names of what ran in the paper's place."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from repro.experiments import design
from repro.experiments.judge import BySeed, Estimate, difference
from repro.experiments.mbs.runs import AS_IN_PAPER, CLASSIFIERS, PUBLISHED, ROLES, task_of
from repro.experiments.query import Results
from repro.experiments.view import panel
from repro.records import Record

MIB = 2**20
UNITS = {"accuracy": "test accuracy (%)", "iou": "test IoU (%)"}
WITHOUT, WITH, SUMMED, BY_SAMPLES = "without MBS", "with MBS", "not normalised", "by samples (ours)"


def styles() -> dict[str, dict[str, str]]:
    """Return a colour and a marker for each way of training."""
    from repro import plots

    return plots.styles((WITHOUT, WITH, SUMMED, BY_SAMPLES))


def trainings(results: Results, role: str, mini_batch: int, streamed: bool) -> list[Record]:
    """Return the trainings of a model at the higher resolution, one per seed."""
    found = results.select("train", role=role, mini_batch=mini_batch, resolution="high")
    return [record for record in found if (record.config["micro_batch"] is not None) == streamed]


def best(results: Results, records: Sequence[Record]) -> BySeed:
    """Return the best metric of every training that ran, in percent."""
    ran = [record for record in records if record.status == "ok"]
    return results.cell(ran, lambda record: float(record.metrics["best"]))


def gap(results: Results, first: Sequence[Record], second: Sequence[Record]) -> Estimate:
    """Return the best metric of some trainings less that of others, in points, seed by seed.

    Raises:
        NotRun: They share no seed.
    """
    both = [*first, *second]
    values = best(results, first), best(results, second)
    found = difference(*values, unit="points", resolution=image_points(both))
    return replace(found, label=ran_as(both[0].config["role"], both)) if both else found


def image_points(records: Sequence[Record]) -> float:
    """Return one test image's share of an accuracy, in points; 0 of IoU, which counts pixels."""
    tested = [r for r in records if r.config["role"] in CLASSIFIERS]
    return 100 / min((r.config["test_samples"] or math.inf for r in tested), default=math.inf)


def status_or(records: Sequence[Record], text: str) -> str:
    """Return `text`, or how the runs ended where none succeeded."""
    if not records:
        return "not run"
    if any(record.status == "ok" for record in records):
        return text
    return "out of memory" if records[0].status == "out_of_memory" else "error"


def network(role: str, model: Mapping[str, Any]) -> str:
    """Return a short name of the network that ran; the paper's name only where it is the same."""
    if dict(model) == PUBLISHED[role]:
        return role
    names = {
        "resnet_cifar": "ResNet-{depth}",
        "amoebanet_d": "AmoebaNet-D of {num_layers} layers",
        "unet": "U-Net of width {width}",
    }
    return names[model["name"]].format(**model)


def _networks(role: str, records: Iterable[Record]) -> list[str]:
    """Return the names of the networks that ran in a role; a prediction is no run."""
    own = [r for r in records if r.config["role"] == role and r.experiment != "foretell"]
    return list(dict.fromkeys(network(role, record.config["model"]) for record in own))


def ran_as(role: str, records: Iterable[Record]) -> str:
    """Return which network ran in a role: ``ResNet-8 (for ResNet-50)``, or the paper's own name."""
    names = [name for name in _networks(role, records) if name != role]
    return f"{' and '.join(names)} (for {role})" if names else role


def whose(role: str, records: Sequence[Record]) -> str:
    """Return a panel's title: network and data of our numbers."""
    shown = [record for record in records if record.config["role"] == role]
    if not shown:
        return f"{role}: not run"
    data = dict.fromkeys(record.dataset["name"] for record in shown if record.dataset)
    return panel(role, " and ".join(_networks(role, shown)), " and ".join(data))


def side(config: Mapping[str, Any]) -> int:
    """Return the side in pixels of the images that a configuration trains on."""
    pixels: int = config["augment"].get("crop_size") or config["dataset"]["image_size"]
    return pixels


def marks(results: Results) -> Iterable[str]:
    """Yield the stand-ins for the paper's data, networks and memory, for a caption."""
    records = [record for record in results.records if record.experiment != "foretell"]
    stand_ins = []
    for record in records:
        papers = "Carvana" if task_of(record.config["role"]) == "segmentation" else "Flowers-102"
        name = record.dataset["name"] if record.dataset else papers
        if not name.lower().startswith(papers.lower().replace("-", "")) and name != papers:
            stand_ins.append(f"{name} for {papers}")
    if any(ran_as(role, records) != role for role in ROLES):
        stand_ins.append("smaller networks")
    if stand_ins:
        yield f"STAND-IN: {', '.join(dict.fromkeys(stand_ins))}."
    if any(r.dataset and r.dataset["kind"] == "synthetic" for r in records):
        yield "SYNTHETIC data."
    timed = {
        f"{r.config['train_samples']:,}"
        for r in records
        if r.experiment == "epochs" and r.config["resolution"] == AS_IN_PAPER
    }
    if timed:
        yield f"Timed epochs: {' and '.join(sorted(timed))} images."
    if any(r.config.get("limit_bytes") or r.config.get("limit_fits") for r in records):
        yield "SIMULATED memory limit."


artefact = partial(design.artefact, "mbs", facts=marks)
