"""How two networks' kernels compare: their times within a limit, and what the limit excludes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from repro.experiments.judge import Estimate, NotRun
from repro.experiments.microconv.settings import (
    MIB,
    compared,
    kernels_of,
    label,
    limit_of,
    ours_alone,
    own_scatter,
    ran,
)
from repro.experiments.query import Results, one_machine
from repro.records import Record


def held_s(record: Record | None) -> float | None:
    """Return the measured seconds of a network's kernels within the limit, None if not all fit."""
    rows = kernels_of(record)
    if not rows or any("time_s" not in row for row in rows):
        return None
    return math.fsum(row["time_s"] for row in rows)


def held_native_s(record: Record) -> float:
    """Return the seconds of the same kernels by torch, measured in turns with them."""
    return math.fsum(row["native_s"] for row in kernels_of(record))


def workspace_bytes(record: Record) -> int:
    """Return the workspace that a network's kernels take together, as the paper counts it."""
    return sum(row["workspace_bytes"] for row in kernels_of(record))


def unfit(record: Record | None) -> list[str]:
    """Return the kernels that have no division within the limit."""
    return [label(row) for row in kernels_of(record) if "time_s" not in row]


def need(
    results: Results, role: str, mode: str, limit_mib: int, *wanted: str, caffe: bool = False
) -> Record:
    """Return the network's record in float32 with the first of several policies that has one.

    Args:
        results: Of an artefact.
        role: The network.
        mode: WR or WD.
        limit_mib: The paper's, for each kernel; see `limit_of`.
        wanted: Policies.
        caffe: As of `limit_of`.

    Raises:
        NotRun: None has.
    """
    limit = limit_of(results.profile, role, mode, limit_mib, caffe)
    for policy in wanted:
        config = {"role": role, "mode": mode, "limit_mib": limit, "policy": policy}
        record = results.first("network", setting="fp32", **config)
        if record is not None:
            return record
    raise NotRun(f"{role} has no record with {mode}, {limit:,} MiB and {' or '.join(wanted)}")


# Where nothing else fits: this package's, in place of cuDNN's implicit GEMM.
IMPLICIT = "torch:implicit"


def gained(before: Record, after: Record) -> Estimate:
    """Return how much faster one record's kernels are than another's, relative to torch's own.

    The two were run at different moments; each was measured in turns with torch's own
    convolutions, and so the ratio of ratios leaves slow spells of the machine out. The error is
    that of the comparisons with torch's own: each is a median, and weighs as much as its kernel
    takes of the time. Kernels whose times are the very same ones do not count.

    Raises:
        NotRun: Not all kernels fit in both, or the records are of two machines.
    """
    one_machine([before, after])
    for record in (before, after):
        if missing := unfit(record):
            raise NotRun(f"{named(missing)} do not fit with {_where(record)}")
    pairs = list(zip(kernels_of(before), kernels_of(after), strict=True))
    mean, weight = 0.0, 0.0
    for sign, side in zip((1, -1), zip(*pairs, strict=True), strict=True):
        total = math.fsum(row["time_s"] for row in side)
        mean += sign * math.log(total / math.fsum(row["native_s"] for row in side))
        counted = [row for row, pair in zip(side, pairs, strict=True) if not _same(*pair)]
        weight += math.fsum((row["time_s"] / total) ** 2 for row in counted)
    return compared(mean, math.sqrt(weight), own_scatter([*ran(before), *ran(after)]))


def over_torch(record: Record) -> Estimate:
    """Return how fast a network's kernels are over torch's own, which no limit holds.

    Raises:
        NotRun: Not all fit.
    """
    rows, total = kernels_of(record), held_s(record)
    if total is None:
        raise NotRun(f"{named(unfit(record))} do not fit with {_where(record)}")
    weight = math.sqrt(math.fsum((row["time_s"] / total) ** 2 for row in rows))
    return compared(math.log(held_native_s(record) / total), weight, own_scatter(ran(record)))


FALLBACK = "undivided is our own fallback, not a library's algorithm"


def left_to_ours(record: Record) -> tuple[int, list[str]]:
    """Return how many kernels run by this package's algorithms alone, and by which."""
    taken = [names for row in kernels_of(record) if (names := ours_alone(row))]
    return len(taken), sorted({name for names in taken for name in names})


def beside_torch(gain: Estimate, undivided: Record, divided: Record) -> Estimate:
    """Return a gain over undivided, noting what undivided falls back to, and torch's own speed.

    Raises:
        NotRun: Most undivided kernels are left to this package's algorithms: no library's are
            there to compare with.
    """
    note = f"divided is {over_torch(divided)} of torch's own speed without a limit"
    count, names = left_to_ours(undivided)
    if count:
        kernels = len(kernels_of(undivided))
        said = f"undivided falls back to our own {', '.join(names)} on {count} of {kernels} kernels"
        note = f"{said}; {note}"
        if 2 * count > kernels:
            raise NotRun(f"{FALLBACK}: {gain}; {note}")
    return replace(gain, note=note)


def gain_or_none(before: Record | None, after: Record | None) -> Estimate | None:
    """Return `gained`, None where it has no number or nothing ran."""
    if before is None or after is None:
        return None
    try:
        return gained(before, after)
    except NotRun:
        return None


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (one["time_s"], one["native_s"]) == (other["time_s"], other["native_s"])


def _where(record: Record) -> str:
    config = record.config
    return f"{config['mode']} {config['policy']} with {config['limit_mib']:,} MiB"


def named(kernels: Sequence[str]) -> str:
    """Return a few kernels by name, of many their number."""
    if len(kernels) > 4:
        return f"{len(kernels)} kernels"
    return ", ".join(kernels)


def excluded(undivided: Record, others: Sequence[Record | None] = ()) -> list[str]:
    """Return the kernels of which the limit excludes an undivided algorithm worth having.

    Nothing undivided fits; or with a larger limit undivided takes more than this one; or a
    division takes another algorithm, which would need more for the whole mini-batch, a workspace
    being taken as proportional to the batch (but that of `IMPLICIT`, which is always the same).

    Args:
        undivided: The network undivided within a limit for each kernel.
        others: The same network undivided with a larger limit, or divided.
    """
    bound = dict.fromkeys(unfit(undivided))
    algorithms = {label(row): _algorithms(row) for row in kernels_of(undivided)}
    for record in others:
        for row in kernels_of(record):
            if "parts" not in row or _algorithms(row) <= algorithms[label(row)] | {IMPLICIT}:
                continue
            share = max(size for size, _ in row["parts"]) / row["batch"]
            if row["workspace_bytes"] / share > undivided.config["limit_mib"] * MIB:
                bound[label(row)] = None
    return list(bound)


def _algorithms(row: Mapping[str, Any]) -> set[str]:
    return {str(name) for _, name in row.get("parts", [])}


def need_binding(undivided: Record, others: Sequence[Record | None] = ()) -> list[str]:
    """Return `excluded`.

    Raises:
        NotRun: The limit excludes nothing, and so there is nothing that dividing could gain.
    """
    kernels = excluded(undivided, others)
    if kernels:
        return kernels
    rows = kernels_of(undivided)
    largest = max(row["workspace_bytes"] for row in rows) / MIB
    config = undivided.config
    raise NotRun(
        f"no limit binds: {config['limit_mib']:,} MiB exclude nothing of {config['role']}'s "
        f"{len(rows)} kernels, which take at most {largest:.1f} MiB undivided at a mini-batch of "
        f"{config['batch']}"
    )
