"""Captions: what the numbers are, and all that differs from the paper's setting."""

from collections.abc import Callable, Iterable
from typing import Any

from repro.experiments.design import Results
from repro.experiments.outofcore.grids import PAPER
from repro.experiments.outofcore.reading import MEASURED, gib
from repro.records import Record

_SIMULATED = (
    "SIMULATED, V100: nothing ran. Traces of the published networks (torch's operations on a CPU, "
    "at the published image sizes) are scheduled and timed by simulation, copies at 50 GB/s each "
    "way; simulators of torch's allocator and of the chunked one (40 MiB; mapping costs nothing) "
    "serve them within 16 GiB. A function takes a fixed time and, as in the paper's figure 1, one "
    "in proportion to its bytes, fitted to the paper's throughputs in core of ResNet-50 (and taken "
    "for DenseNet and DeepLabv3+, too, of which it states none) and Pix2PixHD (3 images/s), and "
    "no faster than the fastest of these. Budgets are found by trying: larger ones may be served."
)
_CPU = (
    "On a CPU the memory limit is SIMULATED: on tensors, for training in core and checkpointing; "
    "schedules get the largest budget whose requests the simulated allocators, scaled in "
    "proportion to the limit, serve within it. OutOfCore holds that budget and swaps to the same "
    "machine's memory. Each run was timed in turns with the largest mini-batch in core; claims and "
    "figures have ratios within these turns, tables medians. Seeing an operation costs some 30 μs, "
    "most of what is lost at small batch sizes."
)


def caption(lead: str) -> Callable[[Results], str]:
    """Return a function that completes `lead` by what the records say of themselves."""

    def complete(results: Results) -> str:
        return " ".join([lead, *_facts(results)])

    return complete


def _facts(results: Results) -> Iterable[str]:
    if not results.records:
        yield "Not run yet."
        return
    if any(record.experiment != MEASURED for record in results.records):
        yield _SIMULATED
    measured = [r for r in results.records if r.experiment == MEASURED]
    if measured:
        devices = ", ".join(sorted({_device(record) for record in measured}))
        yield f"Measured on {devices}; the paper's device is {PAPER['device']}."
        if any(record.device["type"] == "cpu" for record in measured):
            yield _CPU
        yield from dict.fromkeys(map(_network, measured))
        yield "Inputs are SYNTHETIC (random numbers): only speed and memory are looked at."
    yield "x: out of memory, or no budget was found that the allocator serves."
    if results.stale:
        yield f"{len(results.stale)} records are STALE: their code has changed since."
    if results.failed:
        yield f"{len(results.failed)} runs FAILED."
    if results.missing:
        yield f"{results.missing} of {len(results.expected)} runs are missing."


def _device(record: Record) -> str:
    threads = record.config.get("threads")
    name: str = record.device["name"]
    if record.device["type"] != "cpu" or not threads:
        return name
    return f"{name} with {threads} thread{'s' * (threads > 1)}"


def _network(record: Record) -> str:
    config: dict[str, Any] = record.config
    options = ", ".join(f"{k} {v}" for k, v in config["model"].items() if k != "name")
    height, width = config["image"]
    limit = config.get("limit_between")
    within = (
        f"a limit that {limit[0]} images need in core and {limit[1]} exceed"
        if limit
        else f"a limit of {gib(config['limit_gib'] * 2**30)}"
    )
    return (
        f"{config['role']} is {config['model']['name']}{f' ({options})' if options else ''} on "
        f"{height}×{width} pixels with {within}."
    )
