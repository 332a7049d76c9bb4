"""What captions, panels and the setup say of trainings: networks, data, extents, choices."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from repro.experiments.adaptive.settings import (
    CHOICES,
    CIFAR,
    DIV2K,
    FIRST_EPOCHS,
    PAPER,
    PHANTOM,
    PHOTOGRAPHS,
)
from repro.experiments.captions import panel
from repro.experiments.design import Results
from repro.records import Record

# What the paper trains for each task, and on what.
ROLES = {CIFAR: "ResNet-20", DIV2K: "EDSR", PHANTOM: "EDSR"}
DATA = {CIFAR: "CIFAR-10", DIV2K: "DIV2K", PHANTOM: "Phantom"}

# Of what is drawn by epoch.
CURVES = "Curves: means over seeds; end bars: one standard deviation."


def facts(results: Results) -> Iterable[str]:
    """Yield what a caption warns of: stand-ins, data that are made, trainings that diverged."""
    trainings = {r.dataset["fingerprint"]: r for r in results.records if r.dataset}.values()
    yield from warnings(trainings)
    if astray := sum(
        record.status == "ok" and record.metrics.get("diverged", False)
        for record in results.records
        if record.experiment != FIRST_EPOCHS  # which are drawn nowhere
    ):
        yield f"{astray} trainings DIVERGED; curves end there."


def warnings(trainings: Iterable[Record]) -> Iterable[str]:
    """Yield what takes the place of the paper's networks and data, and what is made up."""
    stand_ins: list[str] = []
    synthetic: list[str] = []
    for record in trainings:
        task, data = record.config["task"], (record.dataset or {})
        stand_ins += stand_in(record.config)
        if not _is_the_papers(record):
            stand_ins.append(f"{data['name']} for {DATA[task]}")
        if data["kind"] == "synthetic":
            synthetic.append(data["name"])
    if stand_ins:
        yield f"STAND-IN: {', '.join(dict.fromkeys(stand_ins))}."
    if synthetic:
        yield f"SYNTHETIC: {', '.join(dict.fromkeys(synthetic))}."


def stand_in(config: Mapping[str, Any]) -> list[str]:
    """Return what network takes the place of the paper's, empty where it is the paper's."""
    ours, role = network(config), ROLES[config["task"]]
    return [f"{ours} for {role}"] if ours != role else []


def _is_the_papers(record: Record) -> bool:
    """Whether a record's dataset is the paper's, or made as the paper's was."""
    name: str = (record.dataset or {})["name"]
    return name.startswith(DATA[record.config["task"]].lower().replace("-", ""))


def network(config: Mapping[str, Any]) -> str:
    """Return a model in a word: ``ResNet-8``, ``EDSR 2×16`` (2 blocks of 16 channels)."""
    model = config["model"]
    if model["name"] == "resnet_cifar":
        return f"ResNet-{model['depth']}"
    if model["name"] == "resnet20":
        return "ResNet-20"
    whole = model.get("width", 256) == 256
    return "EDSR" if whole else f"EDSR {model['blocks']}×{model['width']}"


def ran(records: Sequence[Record]) -> str:
    """Return which network was trained; see `called`."""
    return called(records[0].config)


def called(config: Mapping[str, Any]) -> str:
    """Name a network, and what it stands for: ``ResNet-8 (for ResNet-20)``."""
    ours, role = network(config), ROLES[config["task"]]
    return ours if ours == role else f"{ours} (for {role})"


def title(records: Sequence[Record], task: str) -> str:
    """Return the title of a panel of our trainings of a task."""
    if not records:
        return f"ours: {DATA[task]} was not run"
    return panel(ROLES[task], network(records[0].config), (records[0].dataset or {})["name"])


def papers_title(task: str) -> str:
    """Return the title of a panel of the paper's numbers of a task."""
    return f"paper: {ROLES[task]}, {DATA[task]}"


def in_full(results: Results) -> Iterable[str]:
    """Yield what the trainings of one task are: networks, extents, optimizer, what was chosen."""
    # All strategies have these alike, but for the largest batch.
    for record in results.records[:1]:
        config, data = record.config, record.dataset or {}
        papers = "" if _is_the_papers(record) else f", a STAND-IN for {DATA[config['task']]}"
        if data["kind"] == "synthetic":
            papers += " (SYNTHETIC)"
        noise = ""
        if "sigma" in config:
            noise = (
                f", to be restored from noise of {config['sigma']:g} of the full range (our "
                "choice, SYNTHETIC)"
            )
        yield (
            f"{DATA[config['task']]}: {_model(config)} trains on {data['name']}{papers}{noise}. "
            f"{_extent(record)} {_update(config)}"
        )
        if max(_largest(other.config) for other in results.records) > config["train_samples"]:
            yield "A batch above the number of images is one update an epoch."


def choices(results: Results) -> Iterable[str]:
    """Yield what was chosen where the paper is silent."""
    configs = [record.config for record in results.records]
    yield from dict.fromkeys(said for config in configs for said in _choices(config))


def _model(config: Mapping[str, Any]) -> str:
    options = ", ".join(f"{k} {v}" for k, v in config["model"].items() if k != "name")
    low = config["autocast"] and config["strategy"] != "norms"
    precision = f" in {config['autocast']}" if low else ""
    role = f", a STAND-IN for {ROLES[config['task']]}," if stand_in(config) else ""
    return f"{network(config)}{f' ({options})' if options else ''}{precision}{role}"


def _extent(record: Record) -> str:
    config = record.config
    task = config["task"]
    paper = PAPER[task]
    ratio = config["controller"]["batch"] / _paper_start(config)
    scaled = "" if round(ratio, 3) == 1 else f" Batch sizes are {ratio:.3g} of the paper's."
    side = config.get("patch") or config["dataset"].get("image_size")
    shape = f", {'patches of ' * ('patch' in config)}{side}×{side} pixels," if side else ""
    count = config["train_samples"]
    there = min(count, PHOTOGRAPHS.get(config["dataset"]["name"], count))
    images = f"{there:,} images" + f", {count // there} times an epoch" * (there < count)
    said = (
        f"{images}{shape} to train on and {config['test_samples']:,} to "
        f"validate, {config['epochs']} epochs (the paper: {paper['samples']:,} images, "
        f"{paper['epochs']:,} epochs).{scaled}"
    )
    if task == CIFAR:
        return said
    best = config["controller"].get("base_lr", config["controller"].get("lr"))
    stop = config["stop"]
    return (
        f"{said} Each image is validated by one crop; rates are "
        f"{best / _paper_rate(config):.3g} times the paper's; training ends where PSNR has not "
        f"risen by {stop['least']:g} dB for {stop['patience']} epochs, or with the epochs."
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
        f"Optimizer: {optimizer['name']}{f' with {options}' if options else ''}; "
        f"augmentation, our choice: {', '.join(ways)}."
    )


def _choices(config: dict[str, Any]) -> Iterable[str]:
    """Yield what was chosen where the paper is silent; records of before have the first of each."""
    keys = ["last_batch"] if config["task"] == CIFAR else list(CHOICES)
    if config["strategy"] == "norms":
        return
    for key in keys:
        meaning = CHOICES[key][config.get(key, next(iter(CHOICES[key])))]
        yield f"{meaning[0].upper()}{meaning[1:]}."
    if rule := config["controller"].get("saturation"):
        yield (
            f"A cost that has not fallen by {100 * rule['threshold']:g} % in {rule['patience']} "
            "epochs counts as saturated (our choice): its rate decays, first to μ_0 β."
        )
    if interval := config["controller"].get("interval"):
        paper = PAPER[config["task"]]["interval"]
        scaled = f", {interval} at the scale of our epochs" if interval != paper else ""
        yield f"The paper's K for {DATA[config['task']]} is {paper}{scaled}."


def _largest(config: dict[str, Any]) -> int:
    return int(config["controller"].get("max_batch", config["controller"]["batch"]))


def _paper_start(config: dict[str, Any]) -> float:
    if "stands_for" in config:
        return float(config["stands_for"])
    strategy = {"norms": "best"}.get(config["strategy"], config["strategy"])
    paper = PAPER[config["task"]]
    return float(paper.get(strategy, paper["theta"])["batch"])


def _paper_rate(config: dict[str, Any]) -> float:
    paper = PAPER[config["task"]]
    strategy = config["strategy"]
    if strategy in ("linear", "best", "norms"):
        return float(paper["best"]["lr"])
    if strategy == "fixed":
        return float(paper["best"]["lr"] * config["stands_for"] / paper["best"]["batch"])
    return float(paper.get(strategy, paper["theta"])["lr"])
