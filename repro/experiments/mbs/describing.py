"""What ran in the paper's place: its networks, data, sides and memory, in words."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from repro.experiments.design import Results
from repro.experiments.mbs.settings import AS_IN_PAPER, MIB, PAPER_SIDES, PUBLISHED, ROLES
from repro.records import Record


def marks(results: Results) -> Iterable[str]:
    """Yield what takes the place of the paper's data, networks and memory, for a caption."""
    records = _run(results.records)
    stand_ins = [f"{name} for {paper}" for name, paper in _others_data(records)]
    if any(network(r.config["role"], r.config["model"]) != r.config["role"] for r in records):
        stand_ins.append("smaller networks")
    if stand_ins:
        yield f"STAND-IN: {', '.join(stand_ins)}."
    if any(r.dataset and r.dataset["kind"] == "synthetic" for r in records):
        yield "SYNTHETIC data."
    if smaller := _smaller(records):
        yield f"SMALLER images to train on: {'; '.join(smaller)}."
    if counts := sorted({count for _, count in _timed(records)}):
        yield f"Timed epochs: {_and(f'{count:,}' for count in counts)} images."
    if any(r.config.get("limit_bytes") for r in records) or _limited(records):
        yield "SIMULATED memory limit."


def facts(records: Sequence[Record]) -> Iterable[str]:
    """Yield what all artefacts share: networks, sides, extents, limit, and predicted sizes."""
    measured = _run(records)
    models = {
        (role, network(role, r.config["model"]), _model(r.config["model"])): None
        for role in ROLES
        for r in measured
        if r.config["role"] == role
    }
    ran = [f"{name} for {role} ({options})" for role, name, options in models if name != role]
    published = [role for role, name, _ in models if name == role]
    if ran:
        yield f"Networks (STAND-IN): {', '.join(ran)}."
    if published:
        yield f"The paper's networks: {', '.join(published)}."
    if others := _others_data(measured):
        taken = [f"{name} takes the place of {paper}" for name, paper in others]
        yield f"Data (STAND-IN): {', '.join(taken)}."
    yield from _extents(measured)
    if card := {r.config["limit_bytes"] for r in measured if r.config.get("limit_bytes")}:
        yield (
            f"The memory limit is the paper's card's, {max(card) / 2**30:g} GiB (SIMULATED: a "
            "share of the device, MemoryBudget on a CPU)."
        )
    if limited := _limited(measured):
        sizes = [r.metrics["limit_bytes"] for r in limited if r.metrics.get("limit_bytes")]
        on_cpu = all(record.device["type"] == "cpu" for record in limited)
        how = "MemoryBudget over the live tensors" if on_cpu else "a share of the card"
        share = "; each training first takes two steps under it" if on_cpu else ""
        yield (
            f"The memory limit is SIMULATED ({how}{share}). For each network it lies half way "
            f"between the need of the paper's initial mini-batch and of twice that"
            f"{f', {_range_mib(sizes)}' if sizes else ''}. The sizes that fit are set, not found."
        )
    if len(measured) < len(records):
        yield (
            "The largest mini-batch of the paper's card is predicted (SIMULATED): two training "
            "steps of the published networks at the published sizes, by their live tensors without "
            "content."
        )
    trained = [r for r in measured if r.experiment == "train"]
    if any(r.config["role"] == "U-Net" for r in trained):
        yield "IoU is over all pixels of all test images (our choice)."
    if any(r.config["dataset"].get("split") for r in trained):
        yield (
            "Flowers-102 is divided by our choice: 80 % of its images at random to train on; its "
            "official split (--set dataset.split=official) trains on 1,020."
        )
    if any(r.config.get("micro_batch") for r in measured):
        yield "MBS normalises by Algorithm 1; BatchNorm sees micro-batches, as in the paper."


def _smaller(records: Iterable[Record]) -> list[str]:
    """Return where one of the paper's networks trains on smaller images than there."""
    found = {
        f"{role} {side(r.config)} px (paper {side_in_paper(role)}), {r.config['epochs']} epochs": 0
        for r in records
        if r.experiment == "train" and r.config["resolution"] == "high"
        for role in [r.config["role"]]
        if network(role, r.config["model"]) == role and side(r.config) < side_in_paper(role)
    }
    return list(found)


def _timed(records: Iterable[Record]) -> list[tuple[str, int]]:
    """Return the networks whose epochs are timed at the paper's sides, and their images."""
    return [
        (r.config["role"], r.config["train_samples"])
        for r in records
        if r.experiment == "epochs" and r.config["resolution"] == AS_IN_PAPER
    ]


def _extents(measured: Sequence[Record]) -> Iterable[str]:
    """Yield the sides of images, and epochs with their samples."""
    sides, as_in_paper = [], []
    for role in ROLES:
        of_role = [r for r in measured if r.config["role"] == role]
        every = sorted({(side(r.config), r.config["resolution"]) for r in of_role})
        as_in_paper += [f"{role} {pixels} px" for pixels, at in every if at == AS_IN_PAPER]
        if shown := [(pixels, at) for pixels, at in every if at != AS_IN_PAPER]:
            ours = _and(pixels for pixels, _ in shown)
            paper = _and(PAPER_SIDES[role, resolution] for _, resolution in shown)
            sides.append(f"{role} {ours} px (paper {paper})")
    if sides:
        yield f"Image sides: {', '.join(sides)}."
    if as_in_paper:
        yield (
            f"Memory and time at the paper's image sides ({', '.join(as_in_paper)}), in float32 "
            "(convolutions: TF32 where the device has it), channels last."
        )
    if timed := [f"{count:,} images of {role}" for role, count in _timed(measured)]:
        yield f"Epochs that are timed have {', '.join(timed)}."
    if low := sorted({r.config["autocast"] for r in measured if r.config.get("autocast")}):
        yield f"Trainings for accuracy: {_and(low)} under autocast, channels last."
    wheres = {"train": "", "normalised": " in section 3.4", "twins": " as twins"}
    trained = [r for r in measured if r.experiment in wheres]
    extents: dict[tuple[int | None, int], dict[str, None]] = {}
    for role, experiment in itertools.product(ROLES, wheres):
        for record in trained:
            if (record.config["role"], record.experiment) == (role, experiment):
                extent = record.config["train_samples"], record.config["epochs"]
                extents.setdefault(extent, {})[f"{role}{wheres[experiment]}"] = None
    for (samples, epochs), roles in extents.items():
        count = "all" if samples is None else f"{samples:,}"
        yield f"{', '.join(roles)}: {epochs} epochs of {count} training samples."


def _and(values: Iterable[object]) -> str:
    return " and ".join(str(value) for value in values)


def _run(records: Iterable[Record]) -> list[Record]:
    """Return the records of what ran on this device; predictions did not."""
    return [record for record in records if record.experiment != "foretell"]


def _limited(records: Iterable[Record]) -> list[Record]:
    """Return the records that were made under a limit set by the initial mini-batch."""
    return [r for r in records if r.experiment in ("train", "size") and r.config.get("limit_fits")]


def _others_data(records: Iterable[Record]) -> list[tuple[str, str]]:
    """Return each dataset that is not the paper's, and the one whose place it takes."""
    pairs = {
        (record.dataset["name"], data_in_paper(record.config["role"])): None
        for record in records
        if record.dataset
    }
    return [
        (name, paper)
        for name, paper in pairs
        if not name.startswith(paper.lower().replace("-", ""))
    ]


def data_in_paper(role: str) -> str:
    """Return the name of the data that the paper trains a model on."""
    return "Carvana" if role == "U-Net" else "Flowers-102"


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


def ran_as(role: str, records: Iterable[Record]) -> str:
    """Return which network ran in a role: ``ResNet-8 (for ResNet-50)``, or the paper's own name."""
    own = [record for record in _run(records) if record.config["role"] == role]
    names = dict.fromkeys(network(role, record.config["model"]) for record in own)
    names.pop(role, None)
    return f"{' and '.join(names)} (for {role})" if names else role


def side_in_paper(role: str) -> int:
    """Return the side of the paper's images in pixels."""
    return PAPER_SIDES[role, "high"]


def side(config: Mapping[str, Any]) -> int:
    """Return the side of what a configuration trains on, in pixels."""
    pixels: int = config["augment"].get("crop_size") or config["dataset"]["image_size"]
    return pixels


def _range_mib(sizes: Sequence[int]) -> str:
    ends = [f"{size / MIB:,.1f}" for size in (min(sizes), max(sizes))]
    return f"{' to '.join(dict.fromkeys(ends))} MiB"


def _model(model: Mapping[str, Any]) -> str:
    options = ", ".join(f"{name} {value}" for name, value in model.items() if name != "name")
    return f"{model['name']}{f', {options}' if options else ''}"
