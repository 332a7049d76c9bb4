"""From records to numbers: throughput and memory by network, place, way to train and batch size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro.experiments.design import Results
from repro.experiments.outofcore.grids import PAPER, RESNET
from repro.records import Record

GIB, MIB = 2**30, 2**20
SIMULATED, MEASURED = "simulated", "measured"
LABELS = {
    "in_core": "in core",
    "schedule": "schedule",
    "schedule_va": "schedule + VA",
    "lms": "LMS",
    "checkpointing": "checkpointing",
    "save_on_cpu": "save_on_cpu",
    "expandable_segments": "in core, expandable segments",
}


@dataclass(frozen=True)
class Point:
    """One way to train at one batch size, where it fits.

    Attributes:
        images_per_s: Throughput.
        relative: It over the best throughput in core, where that is known: on a CPU that of the
            largest mini-batch, which was timed in turns.
        budget_bytes: What the schedule was given, where there is one.
        reserved_bytes: What the allocator took for it, where that is known.
        held_bytes: What tensors took.
        row: All numbers.
    """

    images_per_s: float
    relative: float | None
    budget_bytes: int | None
    reserved_bytes: int | None
    held_bytes: int | None
    row: Mapping[str, Any]


Points = dict[int, Point | None]  # by batch size; None where it ran out of memory


def limit_bytes(results: Results, where: str, role: str) -> int | None:
    """Return the memory limit of a network's runs."""
    for record in results.select(where, role=role):
        if "limit_bytes" in record.metrics:
            return int(record.metrics["limit_bytes"])
    return None


def points(results: Results, where: str, role: str, mode: str) -> Points:
    """Return what one way to train reached by batch size, ascending; what failed is left out."""
    return _simulated(results, role, mode) if where == SIMULATED else _measured(results, role, mode)


def _simulated(results: Results, role: str, mode: str) -> Points:
    records = [r for r in results.select(SIMULATED, role=role) if r.status == "ok"]
    found: Points = {}
    base = max(
        (r.config["batch"] / r.metrics["rows"]["in_core"]["time_s"]
         for r in records if "in_core" in r.metrics["rows"]),
        default=None,
    )  # fmt: skip
    for record in sorted(records, key=lambda record: record.config["batch"]):
        batch = record.config["batch"]
        if mode == "lms" and not record.config["lms"]:
            continue
        row = record.metrics["rows"].get(mode)
        if mode == "lms" and row is None and "in_core" in record.metrics["rows"]:
            row = record.metrics["rows"]["in_core"]  # what fits is not swapped
        if row is None:
            found[batch] = None
            continue
        rate = batch / row["time_s"]
        found[batch] = Point(
            rate, rate / base if base else None, row.get("budget_bytes"), row["reserved_bytes"],
            row.get("held_bytes", record.metrics["peak_bytes"]), row,
        )  # fmt: skip
    return found


def _measured(results: Results, role: str, mode: str) -> Points:
    records = results.select(MEASURED, role=role, mode=mode)
    found: Points = {}
    for record in sorted(records, key=lambda record: record.config["batch"]):
        batch = record.config["batch"]
        if record.status == "out_of_memory":
            found[batch] = None
        elif record.status == "ok":
            metrics = record.metrics
            rate = batch / float(np.median(record.timings["iteration"]["samples_s"]))
            found[batch] = Point(
                rate, _relative(results, role, record), metrics.get("budget_bytes"),
                metrics.get("reserved_bytes"), metrics["held_bytes"], metrics,
            )  # fmt: skip
    return found


def _relative(results: Results, role: str, record: Record) -> float | None:
    """Return a run's throughput over that in core.

    On a CPU over that of the largest mini-batch, timed in turns: the median over rounds. Else over
    the best of those that were run.
    """
    ours = record.timings["iteration"]["samples_s"]
    if "reference" in record.timings:
        theirs = record.timings["reference"]["samples_s"]
        size = record.config["batch"] / record.config["base_batch"]
        return float(np.median([size * b / a for a, b in zip(ours, theirs, strict=True)]))
    rates = [
        r.config["batch"] / float(np.median(r.timings["iteration"]["samples_s"]))
        for r in results.select(MEASURED, role=role, mode="in_core")
        if r.status == "ok"
    ]
    return record.config["batch"] / float(np.median(ours)) / max(rates) if rates else None


def largest(found: Points) -> int | None:
    """Return the largest batch size that fitted."""
    return max((batch for batch, point in found.items() if point is not None), default=None)


def in_core_batch(results: Results, where: str, role: str) -> int | None:
    """Return the largest batch size that fits in core."""
    return largest(points(results, where, role, "in_core"))


def nearest(found: Points, batch: float) -> int | None:
    """Return the batch size that is nearest in proportion, None where there is none."""
    return min(found, key=lambda size: abs(np.log(size / batch)), default=None)


def corresponding(
    results: Results, where: str, batch: int, mode: str
) -> tuple[int, Point | None] | None:
    """Return ResNet-50's point at a batch size of the paper, or, on a CPU, in that proportion.

    None where none was run within 10 %.
    """
    found = points(results, where, RESNET, mode)
    wanted = float(batch)
    if any("base_batch" in record.config for record in results.select(where, role=RESNET)):
        base = in_core_batch(results, where, RESNET)
        if base is None:
            return None
        wanted = base * batch / PAPER["claims"]["in_core_batch"]
    size = nearest(found, wanted)
    return None if size is None or abs(size / wanted - 1) > 0.1 else (size, found[size])


def gib(count: float | None) -> str:
    """Return bytes as GiB, or as MiB where they are few."""
    if count is None:
        return "–"
    return f"{count / GIB:.2f} GiB" if count >= GIB / 4 else f"{count / MIB:.1f} MiB"
