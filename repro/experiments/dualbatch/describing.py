"""How records are described: whose numbers they are, of which network and data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from repro.experiments.captions import panel
from repro.experiments.design import Results
from repro.experiments.dualbatch.settings import MIB, PAPER, ROLE, SECTION_5_2_3, SOLVED, TRAINED
from repro.experiments.judge import Cases, Estimate
from repro.records import Record


def network(config: Mapping[str, Any]) -> str:
    """Return what a title calls the network that ran, such as ``ResNet-8``."""
    name: str = config["model"]["name"]
    if name == "resnet_cifar":
        return f"ResNet-{config['model']['depth']}"
    return ROLE if name.endswith("resnet18") else name


def whose(records: Sequence[Record], more: str = "") -> str:
    """Return the title of a panel of our numbers: what ran, and whose place it takes.

    Args:
        records: That are drawn; without any the title says that nothing ran.
        more: What else the panel is of, such as ``12 px``.
    """
    if not records:
        return "ours: not run"
    first = records[0]
    config = first.config.get("parts", [first.config])[0]
    data = first.dataset["name"] if first.dataset else ""
    return panel(ROLE, network(config), ", ".join(text for text in (data, more) if text))


def trained(records: Sequence[Record]) -> str:
    """Return what was trained, for evidence and findings: network, data, epochs and momentum."""
    if not records:
        return ""
    config, dataset = records[0].config, records[0].dataset
    parts = [stands_for(network(config), ROLE)]
    if dataset:
        name, wanted = dataset["name"], _wanted(records[0])
        same = name.startswith(wanted.lower().replace("-", ""))
        parts.append(wanted if same else stands_for(name, wanted))
    parts.append(f"{sum(epochs for epochs, _ in config['stages']):g} epochs")
    kept = config.get("optimizer_state") == "kept"
    parts.append(f"momentum {'kept' if kept else 'begun anew in each share'}")
    return ", ".join(parts)


def said_of(found: Cases, *notes: str) -> Cases:
    """Return the cases with a colon behind their labels; the last estimate has the notes."""
    told = {
        name: replace(case, label=f"{case.label or name}:") if isinstance(case, Estimate) else case
        for name, case in found.items()
    }
    for name, case in reversed(told.items()):
        if isinstance(case, Estimate):
            told[name] = replace(case, note="; ".join(filter(None, (case.note, *notes))))
            break
    return told


def stands_for(ours: str, papers: str) -> str:
    """Return what ran, and what of the paper's it stands for, such as ``ResNet-8 (for ...)``."""
    return ours if ours == papers else f"{ours} (for {papers})"


def facts(results: Results) -> Iterable[str]:
    """Yield what is solved, simulated, synthetic or a stand-in; `described` says more, once."""
    records = [record for record in results.records if record.status == "ok"] or results.records
    kinds = {record.experiment for record in records}
    if kinds & SOLVED:
        yield "Solved, not measured."
    trained = [record for record in records if record.experiment in TRAINED]
    if any(record.config.get("engine", "local") == "local" for record in trained):
        yield "SIMULATED workers, on one device."
    if "memory" in kinds:
        yield "SIMULATED limit."
    if kinds & {"times", "memory"}:
        yield "SYNTHETIC images."
    if "wall" in kinds:
        yield "Real workers on SYNTHETIC images."
    stand_ins = dict.fromkeys(stand_in for record in records for stand_in in _stand_ins(record))
    if stand_ins:
        yield f"STAND-IN: {', '.join(stand_ins)}."


def _stand_ins(record: Record) -> Iterable[str]:
    """Yield what takes the place of the paper's network and data in a record."""
    for config in record.config.get("parts", [record.config]):
        if "model" in config and (ours := network(config)) != ROLE:
            yield f"{ours} for {ROLE}"
    if record.experiment in TRAINED and record.dataset:
        wanted, name = _wanted(record), record.dataset["name"]
        generated = "SYNTHETIC " * (record.dataset["kind"] == "synthetic")
        if not name.startswith(wanted.lower().replace("-", "")):
            yield f"{generated}{name} for {wanted}"


def _wanted(record: Record) -> str:
    return "ImageNet" if record.config["setting"] == SECTION_5_2_3 else "CIFAR-100"


def described(records: Sequence[Record]) -> Iterable[str]:
    """Yield what captions leave out: models, extent of trainings, what is solved or simulated."""
    if {record.experiment for record in records} & SOLVED:
        yield (
            "What is solved, not measured, is arithmetic of equations 4 to 8 with the paper's "
            "rounding. The paper prints neither a nor b: those of Table 2 and each b / a of Table "
            "6 are the ones that give its values (the range is narrow)."
        )
    configs = [part for record in records for part in record.config.get("parts", [record.config])]
    models = dict.fromkeys(_model(config) for config in configs if "model" in config)
    if models:
        yield f"Models: {'; '.join(models)}."
    trained = [record for record in records if record.experiment in TRAINED]
    if trained:
        yield from _trained(trained)
    ok = [record for record in records if record.status == "ok"]
    for record in ok:
        if record.experiment == "memory":
            yield _memory(record)
    timed, walls = ([r for r in ok if r.experiment == name] for name in ("times", "wall"))
    if timed:
        yield _timed(timed)
    if walls:
        yield from _on_the_wall(walls)


def _trained(records: Sequence[Record]) -> Iterable[str]:
    if any(record.config.get("engine", "local") == "local" for record in records):
        yield (
            "The parameter server and its workers are SIMULATED on one device: the workers take "
            "turns, in the order of a virtual clock. Virtual time is what as many devices would "
            "take by the paper's time model. It follows from the paper's own times: it shows the "
            "balance between workers, and nothing new."
        )
    if any(record.config.get("engine") == "ray" for record in records):
        yield (
            "On Ray the workers are real processes. They share the cores of one machine unless a "
            "cluster was given; they have wall time, and no virtual time."
        )
    yield from dict.fromkeys(sentence for record in records for sentence in _data(record))
    yield from _extents(records)
    kept = {record.config.get("optimizer_state") == "kept" for record in records}
    momentum = {True: "kept by each worker from share to share", False: "begun anew in each share"}
    said = " or ".join(momentum[each] for each in sorted(kept))
    yield (
        f"SGD with weight decay 5e-4 and momentum 0.9, {said}; commits merge by "
        "w ← (w + f w_i) / (1 + f), unless merge rules are compared."
    )
    first_plans = [record.config["sub_stages"][0]["plan"] for record in records]
    if any(plan["samples"] < PAPER["cifar_samples"] for plan in first_plans):
        yield (
            "b is scaled like the batch sizes, so that B_S / B_L and the shares of the data are "
            "the paper's."
        )


def _extents(records: Sequence[Record]) -> Iterable[str]:
    """Yield how long the trainings are: a sentence for each size of an epoch."""
    sizes: dict[str, dict[str, dict[str, None]]] = {}
    for record in records:
        config = record.config
        samples = config["sub_stages"][0]["plan"]["samples"]
        size = (
            f"An epoch is {samples:,} samples, augmented by shifts of up to "
            f"{config['augment']['padding']} pixels{' and mirroring' * config['augment']['flip']}; "
            f"tests are on {config['test_samples']:,}"
        )
        if watched := config.get("watched_samples"):
            size += f", on {watched:,} of them before the last epoch"
        if config.get("held_out"):
            size += "; so many more were held out"
        stages = "/".join(f"{epochs:g}" for epochs, _ in config["stages"])
        sizes.setdefault(size, {}).setdefault(stages, {})[record.experiment] = None
    for size, by_stages in sizes.items():
        listed = ", ".join(
            f"{stages} ({', '.join(experiments)})" for stages, experiments in by_stages.items()
        )
        yield f"{size}. Epochs of the stages: {listed}."


def _data(record: Record) -> Iterable[str]:
    """Yield what is not the paper's about a training's data."""
    if not record.dataset:
        return
    name, wanted = record.dataset["name"], _wanted(record)
    asked = record.config.get("dataset", {})
    if asked.get("name") == "digits" and "image_size" in asked:  # other sets say so
        yield f"digits is ENLARGED to {asked['image_size']} pixels."
    if not name.startswith(wanted.lower().replace("-", "")):
        yield f"{name} is a STAND-IN for the paper's {wanted}."


def _model(config: Mapping[str, Any]) -> str:
    options = ", ".join(f"{k} {v}" for k, v in config["model"].items() if k != "name")
    end = f", {config['autocast']}, channels last" if config["autocast"] else ""
    name = config["model"]["name"]
    small = "" if name.endswith("resnet18") else f", a STAND-IN for {ROLE}"
    if not name.startswith("torchvision/"):
        small += ", with a stem of 3×3 and stride 1 (our choice)"
    return f"{name}{f' ({options})' if options else ''}{end}{small}"


def _timed(records: Sequence[Record]) -> str:
    config = records[0].config
    sides = " and ".join(map(str, config["resolutions"]))
    return (
        f"Times in {config['role']}'s place: {network(config)} at {sides} pixels, SYNTHETIC "
        f"images (random numbers) on the device, {config['samples']:,} in an epoch; medians, "
        f"timed in turns{_by_processes(records)}."
    )


def _by_processes(records: Sequence[Record]) -> str:
    if len(records) < 2:
        return ""
    return f", in each of {len(records)} processes; plans in tables are those of the first"


def _memory(record: Record) -> str:
    config = record.config
    limit = config["limit_bytes"] or record.metrics.get("limit_bytes", 0)
    how = "over live tensors" if record.device["type"] == "cpu" else "a share of the card"
    return (
        f"Memory in {config['role']}'s place: {network(config)} at {config['resolution']} pixels, "
        f"SYNTHETIC images (random numbers), within {limit / MIB:,.0f} MiB (SIMULATED: {how})."
    )


def _on_the_wall(records: Sequence[Record]) -> Iterable[str]:
    record = records[0]
    devices = record.metrics["devices"]
    if not record.metrics["parts"]:
        yield f"Two real workers were not timed: they would share {devices} core or accelerator."
        return
    parts = " and ".join(
        f"{network(part)} at {', '.join(map(str, _sides(part)))} pixels, {part['samples']:,} "
        "samples in an epoch"
        for part in record.config["parts"]
    )
    yield (
        f"Two real workers on Ray, with a core or an accelerator each (there were {devices}): "
        f"{parts}; SYNTHETIC images (random numbers), {record.config['rounds']} rounds in turns "
        f"after one that warms up{_by_processes(records)}."
    )


def _sides(part: Mapping[str, Any]) -> list[int]:
    return sorted({kind["resolution"] for kind in part["epochs"]})
