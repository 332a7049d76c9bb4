"""Captions: what the numbers are, and all that differs from the paper's setting."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from repro.experiments.design import Results
from repro.experiments.mbs.grids import ROLES

MIB = 2**20


def caption(lead: str) -> Callable[[Results], str]:
    """Return a function that completes `lead` by what the records say of themselves."""

    def complete(results: Results) -> str:
        return " ".join([lead, *_facts(results)])

    return complete


def _facts(results: Results) -> Iterable[str]:
    records = results.records
    if not records:
        yield "Not run yet."
        return
    devices = sorted({record.device["name"] for record in records})
    yield f"Measured on {', '.join(devices)}."
    described = {_data(r.dataset, r.config["role"]): None for r in records if r.dataset}
    yield from described
    models = {
        (role, _model(r.config["model"])): None
        for role in ROLES
        for r in records
        if r.config["role"] == role
    }
    yield f"Models: {', '.join(f'{role} is {model}' for role, model in models)}."
    trained = [r for r in records if r.experiment == "train"]
    trainings = {(r.config["train_samples"], r.config["epochs"]) for r in trained}
    extents = [
        f"{'all' if samples is None else f'{samples:,}'} training samples, {epochs} epochs"
        for samples, epochs in sorted(trainings, key=str)
    ]
    if extents:
        yield f"An epoch is {' or '.join(extents)}."
    sides = {
        (role, _side(r.config), r.config["resolution"]): None
        for role in ROLES
        for r in records
        if r.config["role"] == role
    }
    papers = ", ".join(
        f"{role} {side} px, paper {_PAPER_SIDES[role, resolution]}"
        for role, side, resolution in sides
    )
    yield f"Image sides: {papers}."
    if any(r.config.get("limit_fits") for r in records if r.experiment in ("train", "size")):
        limits = [r.metrics["limit_bytes"] for r in records if r.metrics.get("limit_bytes")]
        on_cpu = all(record.device["type"] == "cpu" for record in records)
        how = "MemoryBudget over the live tensors" if on_cpu else "a share of the card"
        share = ", in two steps ahead of each training" if on_cpu and trained else ""
        yield (
            f"The memory limit is SIMULATED ({how}{share}), for each model half way between the "
            f"need of the paper's initial mini-batch and of twice that"
            f"{f' ({_range_mib(limits)})' if limits else ''}: which sizes fit is set by this."
        )
    if any(r.config.get("micro_batch") for r in records):
        yield "MBS normalises by Algorithm 1; BatchNorm sees micro-batches, as in the paper."
    if results.stale:
        yield f"{len(results.stale)} records are STALE: their code has changed since."
    if results.failed:
        yield f"{len(results.failed)} runs FAILED."
    if results.missing:
        yield f"{results.missing} of {len(results.expected)} runs are missing."


# Section 4.2.3; Table 1 has the lower ones.
_PAPER_SIDES = {
    ("ResNet-50", "high"): 224,
    ("ResNet-50", "low"): 32,
    ("ResNet-101", "high"): 224,
    ("AmoebaNet-D", "high"): 416,
    ("U-Net", "high"): 384,
    ("U-Net", "low"): 96,
}


def _side(config: Mapping[str, Any]) -> int:
    side: int = config["augment"].get("crop_size") or config["dataset"]["image_size"]
    return side


def _data(facts: Mapping[str, str], role: str) -> str:
    paper = "Carvana" if role == "U-Net" else "Flowers-102"
    own = facts["name"].startswith(("flowers102", "carvana")) or "stand-in" in facts["provenance"]
    kind = "SYNTHETIC data, " if facts["kind"] == "synthetic" else ""
    stand_in = "" if own else f", a stand-in for the paper's {paper}"
    return f"Data: {kind}{facts['name']}{stand_in}: {facts['provenance'].rstrip('.')}."


def _range_mib(sizes: Sequence[int]) -> str:
    ends = [f"{size / MIB:,.1f}" for size in (min(sizes), max(sizes))]
    return f"{' to '.join(dict.fromkeys(ends))} MiB"


def _model(model: dict[str, object]) -> str:
    options = ", ".join(f"{name} {value}" for name, value in model.items() if name != "name")
    return f"{model['name']}{f' ({options})' if options else ''}"
