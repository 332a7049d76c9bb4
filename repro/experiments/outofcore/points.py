"""From records to numbers: throughput and memory of each way to train, by batch size.

What all questions share: points read from records, and compared with each other.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any

import numpy as np

from repro.experiments.judge import Estimate, Exact, NotRun, exactly, in_turns, ratio, unsure
from repro.experiments.outofcore.settings import (
    IN_CORE,
    LABELS,
    MEASURED,
    MODES,
    PACKED,
    PACKED_MODES,
    PAPER,
    PLACES,
    RESNET,
    SIMULATED,
    network_name,
)
from repro.experiments.query import Results, one_machine
from repro.records import Record
from repro.report import DASH


@dataclass(frozen=True)
class Point:
    """One way to train at one batch size, where it fits.

    Attributes:
        images_per_s: Throughput.
        relative: The throughput over that in core, None where that is not known: simulated, over
            the best one; on a CPU, over the largest mini-batch, timed in turns with this one.
        budget_bytes: What the schedule was given, where there is one.
        reserved_bytes: What the allocator took for the schedule, where that is known.
        held_bytes: What tensors took.
        internal_bytes: Of what the allocator took, what chunks lose inside; simulated only.
        image_s: Seconds an image, of each iteration that was timed; none where simulated.
        reference_s: Seconds an image of the largest mini-batch in core, timed in turns with these.
        host_bytes: The most of the host's memory that was taken by what is swapped out.
        host_foretold_bytes: What was foretold of it; measured only.
    """

    images_per_s: float
    relative: float | None
    budget_bytes: int | None
    reserved_bytes: int | None
    held_bytes: int | None
    internal_bytes: int | None = None
    image_s: tuple[float, ...] = ()
    reference_s: tuple[float, ...] = ()
    host_bytes: int | None = None
    host_foretold_bytes: int | None = None

    @property
    def paces(self) -> list[float]:
        """Seconds an image, over those of the same round's reference where there is one."""
        if not self.reference_s:
            return list(self.image_s)
        return [
            image / reference
            for image, reference in zip(self.image_s, self.reference_s, strict=True)
        ]


Points = dict[int, Point | None]  # by batch size; None where it ran out of memory


def points(results: Results, where: str, role: str, mode: str) -> Points:
    """Return what one way to train reached by batch size, ascending; what failed is left out."""
    read = _simulated_points if where == SIMULATED else _measured_points
    return read(results, role, mode)


def place(results: Results, where: str, role: str) -> str:
    """Return where a network's records come from: the V100 that is simulated, here, or which GPU.

    Short, as for a column: ``measured, NVIDIA H100``.
    """
    records = results.select(where, role=role)
    names = {r.device["name"] for r in records if r.device["type"] != "cpu"}
    if where == SIMULATED or not names:
        return PLACES[where]
    return f"measured, {' and '.join(sorted(' '.join(name.split()[:2]) for name in names))}"


def ran(results: Results, where: str, role: str) -> str:
    """Return which network ran: ``DenseNet-121 (for DenseNet)``, or what the paper calls it."""
    names = {network_name(record.config) for record in results.select(where, role=role)}
    other = " and ".join(sorted(names - {role}))
    return f"{other} (for {role})" if other else role


def _by_batch(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.config["batch"])


def _simulated_points(results: Results, role: str, mode: str) -> Points:
    records = results.ok(SIMULATED, role=role)
    in_core = [(r.config["batch"], r.metrics["rows"].get(IN_CORE)) for r in records]
    base = max((batch / row["time_s"] for batch, row in in_core if row), default=None)
    by_batch: Points = {}
    of_mode = results.ok(PACKED, role=role) if mode in PACKED_MODES else records
    for record in _by_batch(of_mode):
        batch, rows = record.config["batch"], record.metrics["rows"]
        if mode == "lms" and not record.config["lms"]:
            continue
        row = rows.get(mode)
        if mode == "bound" and "bound_s" in record.metrics:
            row = {"time_s": record.metrics["bound_s"], "reserved_bytes": None, "held_bytes": None}
        if mode == "lms" and row is None:
            row = rows.get(IN_CORE)  # what fits is not swapped
        if row is None:
            by_batch[batch] = None
            continue
        rate = batch / row["time_s"]
        by_batch[batch] = Point(
            rate,
            rate / base if base else None,
            row.get("budget_bytes"),
            row["reserved_bytes"],
            row.get("held_bytes", record.metrics["peak_bytes"]),
            row.get("internal_bytes"),
            host_bytes=row.get("host_bytes"),
        )
    return by_batch


def _measured_points(results: Results, role: str, mode: str) -> Points:
    by_batch: Points = {}
    for record in _by_batch(results.select(MEASURED, role=role, mode=mode)):
        batch = record.config["batch"]
        if record.status == "out_of_memory":
            by_batch[batch] = None
        if record.status != "ok":
            continue
        by_batch[batch] = point_of(record)
    return by_batch


def point_of(record: Record) -> Point:
    """Return what a measured record reached."""
    batch, metrics = record.config["batch"], record.metrics
    image_s = _image_s(record, "iteration", batch)
    reference_s: tuple[float, ...] = ()
    relative = None
    if "reference" in record.timings:
        reference_s = _image_s(record, "reference", record.config["base_batch"])
        relative = exp(-in_turns(image_s, reference_s).mean)
    return Point(
        _rate(record),
        relative,
        metrics.get("budget_bytes"),
        metrics.get("reserved_bytes"),
        metrics["held_bytes"],
        image_s=image_s,
        reference_s=reference_s,
        host_bytes=metrics.get("host_bytes"),
        host_foretold_bytes=metrics.get("host_foretold_bytes"),
    )


def _image_s(record: Record, name: str, batch: int) -> tuple[float, ...]:
    return tuple(sample / batch for sample in record.timings[name]["samples_s"])


def _rate(record: Record) -> float:
    """Return the images/s of the median iteration."""
    seconds = float(np.median(record.timings["iteration"]["samples_s"]))
    batch: int = record.config["batch"]
    return batch / seconds


def largest(by_batch: Points) -> int | None:
    """Return the largest batch size that fitted."""
    return max((batch for batch, point in by_batch.items() if point is not None), default=None)


def in_core_batch(results: Results, where: str, role: str) -> int | None:
    """Return the largest batch size that fits in core."""
    return largest(points(results, where, role, IN_CORE))


def batches(results: Results, where: str, role: str) -> list[int]:
    """Return the batch sizes of a network that have records, ascending."""
    return sorted({record.config["batch"] for record in results.select(where, role=role)})


def limit_bytes(results: Results, where: str, role: str) -> int | None:
    """Return the memory limit of a network's runs."""
    limits = [r.metrics["limit_bytes"] for r in results.ok(where, role=role)]
    return int(limits[0]) if limits else None


def point_at(results: Results, where: str, batch: int, mode: str) -> tuple[int, Point | None]:
    """Return ResNet-50's point at a batch size of the paper, and that size here.

    On a CPU it is the batch size that is as large over the largest in core.

    Raises:
        NotRun: None was run within 10 %.
    """
    by_batch = points(results, where, RESNET, mode)
    wanted = float(batch)
    if any("base_batch" in record.config for record in results.select(where, role=RESNET)):
        base = in_core_batch(results, where, RESNET)
        if base is None:
            raise NotRun("no records of what fits in core")
        wanted = base * batch / PAPER["claims"]["in_core_batch"]
    near = min(by_batch, key=lambda size: abs(np.log(size / wanted)), default=0)
    if abs(near / wanted - 1) > 0.1:
        raise NotRun(f"no records of {batch} images")
    return near, by_batch[near]


NO_LINK = "needs a GPU: a CPU swaps to its own memory, over no link"


def on_cpu(results: Results, role: str) -> bool:
    """Return whether a network was measured on a CPU, where the allocators are simulated."""
    return any(r.device["type"] == "cpu" for r in results.select(MEASURED, role=role))


def has_link(results: Results, role: str, mode: str) -> bool:
    """Return whether what swapped had a link between its memories, if only a simulated one."""
    records = results.select(MEASURED, role=role, mode=mode)
    return bool(records) and all("link_share" in record.config for record in records)


def need_real_allocators(results: Results, where: str, roles: Sequence[str]) -> None:
    """Refuse to count what was measured with simulated allocators.

    Raises:
        NotRun: It was.
    """
    if where != MEASURED:
        return
    if any(on_cpu(results, role) for role in roles):
        raise NotRun("needs a GPU: on a CPU, too, the allocators are simulated")
    records = [record for role in roles for record in results.select(MEASURED, role=role)]
    if any(record.device["type"] != "cuda" for record in records):
        raise NotRun("needs CUDA, whose driver maps chunks: on other devices they are simulated")


def slowdown(results: Results, where: str, role: str, point: Point) -> Estimate:
    """Return the time of an image over that of the largest mini-batch in core.

    Raises:
        NotRun: Nothing fits in core, or the times are of several machines.
    """
    if where == SIMULATED:
        if point.relative is None:
            raise NotRun("nothing fits in core")
        return exactly(1 / point.relative, log=True)
    one_machine(results.ok(MEASURED, role=role))
    if point.reference_s:
        return in_turns(point.image_s, point.reference_s)
    in_core = points(results, where, role, IN_CORE)
    base = in_core.get(largest(in_core) or 0)
    if base is None:
        raise NotRun("nothing fits in core")
    return ratio(point.image_s, base.image_s, trials="rounds")


def speed(results: Results, where: str, role: str, ours: Point, other: Point) -> Estimate:
    """Return the images/s of one way to train over those of another.

    Raises:
        NotRun: The times are of several machines.
    """
    if where == SIMULATED:
        return exactly(ours.images_per_s / other.images_per_s, log=True)
    one_machine(results.ok(MEASURED, role=role))
    return ratio(other.paces, ours.paces, trials="rounds")


def largest_trained(results: Results, where: str, role: str, mode: str) -> int:
    """Return the largest batch size that a way trains, 0 for none.

    Simulated: as looked for, to 3 %. Measured: of the batch sizes that were tried.

    Raises:
        NotRun: No records.
    """
    if where == SIMULATED:
        return int(results.need("reach", role=role).metrics[mode])
    by_batch = points(results, where, role, mode)
    if not by_batch:
        raise NotRun("no records")
    return largest(by_batch) or 0


def end_is_open(results: Results, where: str, role: str, mode: str) -> bool:
    """Return whether a way may train more than it was tried with: nothing larger ran out."""
    if where == SIMULATED:
        return False
    by_batch = points(results, where, role, mode)
    return not by_batch or by_batch[max(by_batch)] is not None


def reach_over(
    results: Results, where: str, role: str, modes: tuple[str, str]
) -> tuple[int, int, Estimate]:
    """Return the largest batch sizes that two ways train, and the first over the second.

    Raises:
        NotRun: No records, or one of the two trains nothing.
    """
    first, second = (largest_trained(results, where, role, mode) for mode in modes)
    for mode, size in zip(modes, (first, second), strict=True):
        if not size:
            raise NotRun(f"{LABELS[mode]} trains nothing to compare with")
    return first, second, exactly(first / second, log=True)


def larger(
    results: Results, role: str, modes: tuple[str, str], paper: float = float("inf")
) -> Estimate | Exact:
    """Return how much larger the first way trains a network than the second, as measured.

    Where larger sizes were not tried that may change the answer, the ratio is `unsure`: the first
    might train more, unless it has the paper's ratio already; the second might train more, unless
    the first ended below it.

    Args:
        results: Records.
        role: The network.
        modes: Two ways to train.
        paper: The paper's ratio.

    Raises:
        NotRun: No records, or the second trains nothing.
    """
    first, second = (largest_trained(results, MEASURED, role, mode) for mode in modes)
    label = f"{ran(results, MEASURED, role)}: {first} {LABELS[modes[0]]} over {second} "
    label += LABELS[modes[1]]
    if second and not first:
        return Exact(False, f"({first} {LABELS[modes[0]]}, {second} {LABELS[modes[1]]})")
    gap = reach_over(results, MEASURED, role, modes)[-1]
    for mode, size, matters in (
        (modes[0], first, exp(gap.mean) < 0.999 * paper),
        (modes[1], second, first >= second),
    ):
        if matters and end_is_open(results, MEASURED, role, mode):
            note = f"{size} is the largest that was tried {LABELS[mode]}"
            return replace(unsure(first / second, log=True), label=label, note=note)
    return replace(gap, label=label)


def throughput(by_batch: Points, batch: int) -> str:
    """Return images/s as text: x for out of memory, a dash where nothing was run."""
    if batch not in by_batch:
        return DASH
    point = by_batch[batch]
    if point is None:
        return "x"
    return f"{point.images_per_s:,.0f}" if point.images_per_s >= 20 else f"{point.images_per_s:.1f}"


def rows_of_others(
    results: Results, role: str, cell: Callable[[Points, int], str]
) -> list[dict[str, Any]]:
    """Return a row for each place and batch size of a network, a cell for each way to train."""
    rows = []
    for where, label in PLACES.items():
        base = in_core_batch(results, where, role)
        for batch in batches(results, where, role):
            over = f"{batch / base:.2g}×" if base else DASH
            row = {
                "network": ran(results, where, role),
                "where": label,
                "batch": batch,
                "over in core": over,
            }
            for mode in MODES:
                row[LABELS[mode]] = cell(points(results, where, role, mode), batch)
            rows.append(row)
    return rows
