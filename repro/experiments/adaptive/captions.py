"""Captions: what the numbers are, and all that differs from the paper's setting."""

from collections.abc import Callable, Iterable
from typing import Any

from repro.experiments.adaptive.grids import CIFAR, DIV2K, PAPER, PHANTOM
from repro.experiments.design import Results
from repro.experiments.phrases import device_name, shortcomings
from repro.records import Record

_SIMULATED = (
    "SIMULATED: no cluster was at hand. The paper's cluster is a model with latency and bandwidth "
    'fitted to the speed-ups that the paper prints; "modelled from the other two" has not seen '
    "the one that it stands beside, without and with section VI-B's cost of small batches (7/6 of "
    "a sample a step); elsewhere that cost is fitted too, up to 7/6. Speed-ups do not tell "
    "summation and overlap apart: the sum is taken for free, the overlap for whole. Where the "
    "paper gives no schedule for its third method outside CIFAR-10 (batch doubled every 30 of 140 "
    "epochs) the same share of the training is ASSUMED."
)
_PROCESSES = (
    "Measured: training steps of one process, and of two on the same machine, on SYNTHETIC images "
    "(random numbers), 4 in a row, medians, in turns."
)
_PROJECTED = (
    "Projected: the paper's schedule on SIMULATED nodes that compute and communicate like our "
    "processes, with our small model."
)
_DATA = {CIFAR: "CIFAR-10", DIV2K: "DIV2K", PHANTOM: "Phantom"}


def caption(lead: str, scaling: bool = False) -> Callable[[Results], str]:
    """Return a function that completes `lead` by what the records say of themselves."""

    def complete(results: Results) -> str:
        return " ".join([lead, *_facts(results, scaling)])

    return complete


def _facts(results: Results, scaling: bool) -> Iterable[str]:
    if scaling:
        yield _SIMULATED
    records = results.records
    if not records:
        yield "Not run yet."
        return
    if measured := [r for r in records if r.experiment == "parallel" and r.status == "ok"]:
        yield _PROCESSES
        if scaling:
            yield _PROJECTED
        yield f"Processes on {measured[0].metrics['device']}."
    trained = [r for r in records if r.experiment != "parallel"]
    if trained:
        devices = ", ".join(sorted({device_name(record) for record in trained}))
        yield f"Trained on {devices}."
        yield from _trained(trained)
    if astray := sum(r.status == "ok" and r.metrics.get("diverged", False) for r in records):
        yield f"{astray} trainings DIVERGED; curves end there."
    yield from shortcomings(results)


def _trained(records: list[Record]) -> Iterable[str]:
    for facts in {r.dataset["fingerprint"]: r for r in records if r.dataset}.values():
        yield _data(facts)
    yield from dict.fromkeys(f"Model: {_model(record.config)}." for record in records)
    yield from dict.fromkeys(map(_extent, records))
    yield (
        "F is the mean of the mini-batches' losses in an epoch; F(w_0) is computed before training."
    )


def _data(record: Record) -> str:
    facts = record.dataset or {}
    task, name = record.config["task"], facts["name"]
    if task == PHANTOM and name == "phantom":
        return (
            f"Data: {facts['provenance'].rstrip('.')}. To restore: noise of "
            f"{record.config['sigma']:g} of the full range was added (our choice, SYNTHETIC)."
        )
    wanted = _DATA[task]
    own = name.startswith(wanted.lower().replace("-", ""))
    kind = "SYNTHETIC data, " if facts["kind"] == "synthetic" else ""
    stand_in = "" if own else f", a STAND-IN for the paper's {wanted}"
    made = "; inputs are shrunk by bicubic interpolation" if task == DIV2K else ""
    return f"Data: {kind}{name}{stand_in}: {facts['provenance'].rstrip('.')}{made}."


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


def _largest(config: dict[str, Any]) -> int:
    return int(config["controller"].get("max_batch", config["controller"]["batch"]))


def _paper_start(config: dict[str, Any]) -> float:
    if "stands_for" in config:
        return float(config["stands_for"])
    strategy = {"norms": "best", "noise": "theta"}.get(config["strategy"], config["strategy"])
    return float(PAPER[config["task"]][strategy]["batch"])


def _paper_rate(config: dict[str, Any]) -> float:
    own = PAPER[config["task"]]
    strategy = config["strategy"]
    if strategy in ("linear", "best", "norms"):
        return float(own["best"]["lr"])
    if strategy == "fixed":
        return float(own["best"]["lr"] * config["stands_for"] / own["best"]["batch"])
    return float(own[strategy]["lr"])
