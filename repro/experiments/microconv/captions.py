"""Captions: what the numbers are, and all that differs from the paper's setting."""

from collections.abc import Callable, Iterable
from typing import Any

from repro.experiments.design import Results, reported
from repro.records import Record

_HELD = (
    "Held to the limit is every temporary byte, those included that torch's own convolution "
    "(torch:native) allocates inside: they are measured."
)
_TUNED = (
    "tune() leaves a kernel to torch where that is fastest, and does not hold torch to the limit. "
    "Speed-ups over undivided compare each run's ratio to torch's own convolutions, timed in turns."
)


def caption(lead: str, held: bool = True, tuned: bool = False) -> Callable[[Results], str]:
    """Return a function that completes `lead` by what the records say of themselves."""

    def complete(results: Results) -> str:
        said = [lead, *([_HELD] if held else []), *([_TUNED] if tuned else [])]
        return " ".join([*said, *_facts(results)])

    return complete


def _facts(results: Results) -> Iterable[str]:
    records = [record for record in results.records if record.status == "ok"]
    if not results.records:
        yield "Not run yet."
        return
    devices = sorted({_device(record) for record in records})
    if devices:
        paper = reported("microconv")["device"]
        yield f"Measured on {', '.join(devices)}, the paper's on {paper}."
    yield from dict.fromkeys(filter(None, map(_network, records)))
    if any("algorithms" in record.config for record in records):
        named = {", ".join(r.config["algorithms"]) for r in records if "algorithms" in r.config}
        yield f"Divisions are made of {' or '.join(sorted(named))}."
    layers = [r for r in records if r.experiment == "deepbench"]
    if layers:
        first = [r for r in layers if r.config["setting"] == layers[0].config["setting"]]
        run = sum(len(r.metrics["layers"]) for r in first)
        left_out = sum(r.metrics["left_out"] for r in first)
        yield (
            f"{run} layers at {layers[0].config['factor']} times their batch size; {left_out} "
            f"others are left out."
        )
    if any(r.experiment in ("candidates", "network", "deepbench") for r in records):
        yield "Inputs and weights are SYNTHETIC (random numbers), as in any timing of kernels."
    if any(r.device["type"] == "cpu" for r in records):
        yield "Freed memory is kept by the process, so that page faults are not what is compared."
    if results.stale:
        yield f"{len(results.stale)} records are STALE: their code has changed since."
    if results.failed:
        yield f"{len(results.failed)} runs FAILED."
    if results.missing:
        yield f"{results.missing} of {len(results.expected)} runs are missing."


def _device(record: Record) -> str:
    threads = record.config.get("threads")
    if record.device["type"] != "cpu" or not threads:
        name: str = record.device["name"]
        return name
    return f"{record.device['name']} with {threads} thread{'s' * (threads > 1)}"


_PUBLISHED = {
    "AlexNet": "Caffe's AlexNet, whose conv2 has two groups (Table V: the version here), at 256",
    "ResNet-50": "at 64 (Table V) or 32 (Figure 11)",
    "DenseNet-40": "k = 40 at 256",
    "ResNet-18": "at 32",
}


def _network(record: Record) -> str | None:
    config: dict[str, Any] = record.config
    if "model" not in config:
        return None
    options = ", ".join(f"{k} {v}" for k, v in config["model"].items() if k != "name")
    name = f"{config['model']['name']}{f' ({options})' if options else ''}"
    paper = _PUBLISHED.get(config["role"], "")
    return (
        f"{config['role']} is {name} with {config['image']}×{config['image']} pixels at a "
        f"mini-batch of {config['batch']}; the paper's: {paper}."
    )
