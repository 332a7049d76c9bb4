"""What captions say of trainings: device, data, models, extents, what was chosen."""

from collections.abc import Iterable
from typing import Any

from repro.experiments.adaptive.settings import CHOICES, CIFAR, DIV2K, PAPER, PHANTOM
from repro.experiments.captions import dataset_phrase, devices
from repro.experiments.design import Results
from repro.records import Record


def facts(results: Results) -> Iterable[str]:
    """Yield what the trainings are: device, data, models, extents, those that diverged."""
    records = results.records
    yield f"Trained on {devices(records)}."
    for record in {r.dataset["fingerprint"]: r for r in records if r.dataset}.values():
        yield _data(record)
    yield from dict.fromkeys(f"Model: {_model(record.config)}." for record in records)
    yield from dict.fromkeys(map(_extent, records))
    yield from dict.fromkeys(_update(record.config) for record in records)
    yield from dict.fromkeys(said for record in records for said in _choices(record.config))
    yield (
        "F is the mean of the mini-batches' losses in an epoch; F(w_0) is computed before training."
    )
    if astray := sum(r.status == "ok" and r.metrics.get("diverged", False) for r in records):
        yield f"{astray} trainings DIVERGED; curves end there."


_DATA = {CIFAR: "CIFAR-10", DIV2K: "DIV2K", PHANTOM: "Phantom"}


def _data(record: Record) -> str:
    facts = record.dataset or {}
    task, name = record.config["task"], facts["name"]
    if task == PHANTOM and name == "phantom":
        return (
            f"Data: {facts['provenance'].rstrip('.')}. To restore: noise of "
            f"{record.config['sigma']:g} of the full range was added (our choice, SYNTHETIC)."
        )
    more = (
        "; pictures are turned to lie and cut to the centre that all have, inputs are shrunk by "
        "bicubic interpolation"
        if task == DIV2K
        else ""
    )
    return dataset_phrase(facts, _DATA[task], more=more)


def _model(config: dict[str, Any]) -> str:
    options = ", ".join(f"{k} {v}" for k, v in config["model"].items() if k != "name")
    low = config["autocast"] and config["strategy"] != "norms"
    end = f", {config['autocast']}" if low else ""
    name = config["model"]["name"]
    paper = "ResNet-20" if config["task"] == CIFAR else "EDSR"
    whole = name == "resnet20" or config["model"].get("width", 256) == 256
    small = "" if whole else f" in the place of the paper's {paper}"
    return f"{name}{f' ({options})' if options else ''}{end}{small}"


def _extent(record: Record) -> str:
    config = record.config
    task = config["task"]
    paper = PAPER[task]
    ratio = config["controller"]["batch"] / _paper_start(config)
    scaled = "" if round(ratio, 3) == 1 else f", batch sizes {ratio:.3g} of the paper's"
    said = (
        f"{config['train_samples']:,} training and {config['test_samples']:,} images to validate, "
        f"{config['epochs']} epochs (paper "
        f"{paper['samples']:,}, {paper['epochs']:,}){scaled}."
    )
    if _largest(config) > config["train_samples"]:
        said += " A batch above the number of images is one update an epoch."
    if task == CIFAR:
        return said
    best = config["controller"].get("base_lr", config["controller"].get("lr"))
    stop = config["stop"]
    return (
        f"{said} Patches of {config['patch']} pixels, one crop of each to validate; rates "
        f"{best / _paper_rate(config):.3g} times the paper's; ended where PSNR has not risen by "
        f"{stop['least']:g} dB for {stop['patience']} epochs, or by the number of epochs."
    )


def _update(config: dict[str, Any]) -> str:
    """Say what the paper leaves open: augmentation, momentum, weight decay."""
    task, optimizer = config["task"], config["optimizer"]
    if task == CIFAR:
        ways = [f"shifts of {config['padding']} pixels"] + ["mirroring"] * config["flip"]
    else:
        ways = ["random crops", "mirroring both ways", "transposition"]
    options = ", ".join(
        f"{name.replace('_', ' ')} {value:g}"
        for name, value in optimizer.items()
        if isinstance(value, int | float) and value
    )
    return (
        f"{task}, of our choice where the paper is silent: {optimizer['name'].upper()}"
        f"{f' with {options}' if options else ''}; augmented by {', '.join(ways)}."
    )


def _choices(config: dict[str, Any]) -> Iterable[str]:
    """Yield what was chosen where the paper is silent; records of before have the first of each."""
    keys = ["last_batch"] if config["task"] == CIFAR else list(CHOICES)
    if config["strategy"] == "norms":
        return
    for key in keys:
        told = CHOICES[key][config.get(key, next(iter(CHOICES[key])))]
        yield f"{told[0].upper()}{told[1:]}."
    if rule := config["controller"].get("saturation"):
        yield (
            f"A cost that has not fallen by {100 * rule['threshold']:g} % in {rule['patience']} "
            "epochs is taken for saturated (our choice): its rate decays, first to μ_0 β."
        )
    if interval := config["controller"].get("interval"):
        paper = PAPER[config["task"]]["interval"]
        short = f", at the scale of the epochs {interval}" if interval != paper else ""
        yield f"{config['task']}: the paper's K is {paper}{short}."


def _largest(config: dict[str, Any]) -> int:
    return int(config["controller"].get("max_batch", config["controller"]["batch"]))


def _paper_start(config: dict[str, Any]) -> float:
    if "stands_for" in config:
        return float(config["stands_for"])
    strategy = {"norms": "best"}.get(config["strategy"], config["strategy"])
    own = PAPER[config["task"]]
    return float(own.get(strategy, own["theta"])["batch"])


def _paper_rate(config: dict[str, Any]) -> float:
    own = PAPER[config["task"]]
    strategy = config["strategy"]
    if strategy in ("linear", "best", "norms"):
        return float(own["best"]["lr"])
    if strategy == "fixed":
        return float(own["best"]["lr"] * config["stands_for"] / own["best"]["batch"])
    return float(own.get(strategy, own["theta"])["lr"])
