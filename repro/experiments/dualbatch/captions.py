"""Captions: what the numbers are, and all that differs from the paper's setting."""

from collections.abc import Callable, Iterable
from typing import Any

from repro.experiments.design import Results
from repro.experiments.dualbatch.grids import CIFAR
from repro.experiments.phrases import device_name, shortcomings
from repro.records import Record

_SOLVED = "Solved, not measured: arithmetic of equations 4 to 8 with the paper's rounding."
_INFERRED = (
    "The paper prints neither a nor b: those of Table 2 and each b / a of Table 6 are the ones "
    "that give its values (the range is narrow)."
)
_ENGINE = (
    "The parameter server and its workers are SIMULATED on one device: the workers take turns, in "
    "the order of a virtual clock. Virtual time is what as many devices like the paper's would "
    "take by its time model (its absolute times follow from the paper's own, so that they "
    "show the balance and nothing new); wall time is measured, of all workers in turn."
)
_RAY = (
    "On Ray the workers are real processes, which share the cores of one machine unless a cluster "
    "was given; wall time is theirs, and there is no virtual time."
)
_SCALED = (
    "b is scaled like the batch sizes, so that B_S / B_L and the shares of the data are the "
    "paper's."
)


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
    kinds = {record.experiment for record in records}
    if "solve" in kinds:
        yield _SOLVED
        yield _INFERRED
    if kinds - {"solve", "published"}:
        devices = ", ".join(
            sorted({device_name(r) for r in records if r.experiment not in ("solve", "published")})
        )
        yield f"Measured on {devices}."
    trained = [r for r in records if r.experiment == "train"]
    if trained:
        yield from _trained(trained)
    for record in records:
        if record.experiment in ("times", "memory") and record.status == "ok":
            yield _measured(record)
    for record in records:
        if record.experiment == "published" and record.dataset:
            yield f"{record.dataset['provenance']}"
    yield from shortcomings(results)


def _trained(records: list[Record]) -> Iterable[str]:
    if any(record.config["engine"] == "local" for record in records):
        yield _ENGINE
    if any(record.config["engine"] == "ray" for record in records):
        yield _RAY
    for facts in {r.dataset["fingerprint"]: r for r in records if r.dataset}.values():
        yield _data(facts)
    yield from dict.fromkeys(f"Model: {_model(record.config)}." for record in records)
    extents = dict.fromkeys(map(_extent, records))
    yield (
        f"{' '.join(extents)} SGD with momentum 0.9 and weight decay 5e-4, starting anew with each "
        "share; commits merge by w ← (w + f w_i) / (1 + f)."
    )
    if any(_small(record.config) for record in records):
        yield _SCALED


def _small(config: dict[str, Any]) -> bool:
    first = config["sub_stages"][0]["plan"]
    return bool(first["samples"] < 50_000)


def _extent(record: Record) -> str:
    config = record.config
    plan = config["sub_stages"][0]["plan"]
    stages = "/".join(f"{epochs:g}" for epochs, _ in config["stages"])
    return (
        f"An epoch is {plan['samples']:,} samples; stages of {stages} epochs, tested on "
        f"{config['test_samples']:,}. Augmented by shifts of up to "
        f"{config['augment']['padding']} pixels{' and mirroring' * config['augment']['flip']}."
    )


def _data(record: Record) -> str:
    facts = record.dataset or {}
    name = facts["name"]
    wanted = "ImageNet" if record.config["setting"] == "section 5.2.3" else "CIFAR-100"
    own = name.startswith(wanted.lower().replace("-", ""))
    kind = "SYNTHETIC data, " if facts["kind"] == "synthetic" else ""
    stand_in = "" if own else f", a STAND-IN for the paper's {wanted}"
    return f"Data: {kind}{name}{stand_in}: {facts['provenance'].rstrip('.')}."


def _model(config: dict[str, Any]) -> str:
    options = ", ".join(f"{k} {v}" for k, v in config["model"].items() if k != "name")
    end = f", {config['autocast']}, channels last" if config["autocast"] else ""
    name = config["model"]["name"]
    small = "" if name.endswith("resnet18") else " in the place of ResNet-18"
    return f"{name}{f' ({options})' if options else ''}{end}{small}"


def _measured(record: Record) -> str:
    config = record.config
    role = "CIFAR" if config["role"] == CIFAR else "ImageNet"
    if record.experiment == "times":
        sides = " and ".join(map(str, config["resolutions"]))
        return (
            f"Times in {role}'s place: {_model(config)} at {sides} pixels, SYNTHETIC images "
            f"(random numbers) on the device, {config['samples']:,} in an epoch; medians, timed "
            "in turns."
        )
    limit = config["limit_bytes"] or record.metrics.get("limit_bytes", 0)
    how = "over live tensors" if record.device["type"] == "cpu" else "a share of the card"
    return (
        f"Memory in {role}'s place: {_model(config)} at {config['resolution']} pixels, SYNTHETIC "
        f"images (random numbers), within {limit / 2**20:,.0f} MiB (SIMULATED: {how})."
    )
