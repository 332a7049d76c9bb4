"""How two networks' kernels compare: their times within a limit, and what the limit excludes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro.experiments.design import Results, one_machine
from repro.experiments.intervals import Gap, NotRun, Spread
from repro.experiments.judging import Part
from repro.experiments.microconv.settings import (
    MIB,
    compared,
    kernels_of,
    label,
    limit_of,
    own_spread,
    ran,
    scatter,
)
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


def speedup(slower: Record | None, faster: Record | None) -> float | None:
    """Return how much faster one record's kernels are, both relative to torch's own.

    The two were run at different moments; each was measured in turns with torch's own
    convolutions, and so the ratio of ratios leaves slow spells of the machine out.
    """
    before, after = held_s(slower), held_s(faster)
    if before is None or after is None or slower is None or faster is None:
        return None
    return before / held_native_s(slower) / (after / held_native_s(faster))


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


@dataclass(frozen=True)
class Comparison:
    """How much faster one record's kernels are than another's, of those that fit in both.

    Attributes:
        gap: The speed-up.
        kernels: How many fit both ways.
        unfit: Of each record where some do not fit, which; the speed-up of the whole network then
            has no number.
        spread: Of one comparison with torch's own.
        note: How many kernels of undivided are left to `IMPLICIT`, which is ours.
    """

    gap: Gap
    kernels: int
    unfit: tuple[str, ...]
    spread: Spread
    note: str = ""

    def judged(self, name: str, judge: Callable[[str, Gap], Part]) -> Part:
        """Return the part that `judge` makes of the gap, undecided where kernels are left out."""
        if self.unfit:
            evidence = f"{name} {self.gap} of the {self.kernels} kernels that fit both ways, "
            return "undecided", f"{evidence}which say nothing of the whole: {'; '.join(self.unfit)}"
        word, evidence = judge(name, self.gap)
        return word, f"{evidence}{self.note}; {scatter(self.spread)}"


def gained(before: Record, after: Record) -> Comparison:
    """Compare one record's kernels with another's, both relative to torch's own, as `speedup`.

    The error is that of the comparisons with torch's own: each is a median, and weighs as much as
    its kernel takes of the time. Kernels whose times are the very same ones do not count.

    Raises:
        NotRun: No kernel fits in both, or the records are of two machines.
    """
    one_machine([before, after])
    pairs = [
        pair
        for pair in zip(kernels_of(before), kernels_of(after), strict=True)
        if all("time_s" in row for row in pair)
    ]
    if not pairs:
        raise NotRun(f"no kernel fits both ways; {_where(before)}")
    mean, weight = 0.0, 0.0
    for sign, side in zip((1, -1), zip(*pairs, strict=True), strict=True):
        total = math.fsum(row["time_s"] for row in side)
        mean += sign * math.log(total / math.fsum(row["native_s"] for row in side))
        counted = [row for row, pair in zip(side, pairs, strict=True) if not _same(*pair)]
        weight += math.fsum((row["time_s"] / total) ** 2 for row in counted)
    spread = own_spread([*ran(before), *ran(after)])
    left_out = [
        f"{named(missing)} do not fit with {_where(record)}"
        for record in (before, after)
        if (missing := unfit(record))
    ]
    gap = compared(mean, math.sqrt(weight), spread)
    return Comparison(gap, len(pairs), tuple(left_out), spread, _left_to_implicit(before))


def _left_to_implicit(record: Record) -> str:
    rows = kernels_of(record)
    left = sum(_algorithms(row) == {IMPLICIT} for row in rows)
    if not left or record.config["policy"] != "undivided":
        return ""
    return f"; undivided, {left} of {len(rows)} kernels run as {IMPLICIT}"


def whole_gain(before: Record | None, after: Record | None) -> Gap | None:
    """Return the speed-up of `gained`, None where it is not that of all kernels or nothing ran."""
    if before is None or after is None:
        return None
    try:
        comparison = gained(before, after)
    except NotRun:
        return None
    return None if comparison.unfit else comparison.gap


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
