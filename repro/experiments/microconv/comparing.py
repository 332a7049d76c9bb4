"""Kernels as they were measured: the best division within a limit, and how two networks compare.

Two runs compare through torch's own convolution, which each of them timed in turns with its kernels
(a ratio of ratios), so that slow spells of the machine drop out.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.design import Results, one_machine
from repro.experiments.judge import Estimate, NotRun, exactly
from repro.experiments.microconv.runs import KINDS, LAYERS, MIB, limit_of
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from repro.microconv import Candidate, Division

Entry = dict[str, Any]  # a kernel in a record's metrics
Row = Mapping[str, Any]

NATIVE = "torch:native"  # torch's own convolution
IMPLICIT = "torch:implicit"  # where nothing else fits: this package's, as cuDNN's implicit GEMM
FALLBACK = "undivided is our own fallback, not a library's algorithm"


def ms(seconds: float | None, digits: int = 1) -> str:
    """Seconds as milliseconds."""
    return DASH if seconds is None else f"{1e3 * seconds:,.{digits}f}"


def mib(count: float | None) -> str:
    """Bytes as MiB."""
    return DASH if count is None else f"{count / MIB:,.1f}"


def times(ratio: float | None) -> str:
    """A ratio as ``1.23×``."""
    return DASH if ratio is None else f"{ratio:.2f}×"


def label(entry: Row) -> str:
    """A short name of a kernel, such as ``conv2 F``."""
    return f"{entry['layer']} {KINDS[entry['kind']]}"


def named(kernels: Sequence[str]) -> str:
    """A few kernels by name, of many their number."""
    return f"{len(kernels)} kernels" if len(kernels) > 4 else ", ".join(kernels)


def kernels_of(record: Record | None) -> list[Entry]:
    """A record's kernels, none where there is no record."""
    return [] if record is None else record.metrics["kernels"]


def tunings(results: Results, *policies: str) -> list[Record]:
    """The first tunings of AlexNet, one a process, by the first of several policies that has any.

    Those of its layers, where they were measured one by one, count as one if none is missing.
    """
    for policy in policies:
        records = results.ok("candidates", role="AlexNet", policy=policy)
        layers = {name: r for r in records if (name := r.config.get("layer"))}
        if whole := [record for record in records if not record.config.get("layer")]:
            return whole
        if set(LAYERS) <= layers.keys():
            return [_joined([layers[name] for name in LAYERS])]
    return []


def _joined(layers: Sequence[Record]) -> Record:
    metrics: dict[str, Any] = {
        name: sum(record.metrics[name] for record in layers)
        for name in ("benchmark_s", "optimise_s", "measured")
    }
    metrics["kernels"] = [entry for record in layers for entry in record.metrics["kernels"]]
    config = {k: v for k, v in layers[0].config.items() if k not in ("layer", "kinds")}
    return replace(layers[0], config=config, metrics=metrics)


def alexnet(results: Results) -> Record | None:
    """The measurement of all of AlexNet's kernels at the most micro-batch sizes."""
    return next(iter(tunings(results, "all", "powerOfTwo")), None)


def candidates_of(entry: Entry, policy: str = "all") -> "dict[int, list[Candidate]]":
    """A kernel's candidates for the micro-batch sizes of a policy."""
    from repro.microconv import Candidate, micro_batch_sizes

    wanted = set(micro_batch_sizes(entry["batch"], policy))
    return {
        int(size): [Candidate(*way) for way in ways]
        for size, ways in entry["candidates"].items()
        if int(size) in wanted
    }


def divide(entry: Entry, limit_mib: float, policy: str = "all") -> "Division | None":
    """The fastest division of a kernel within a limit, None where none fits."""
    from repro.microconv import best_division

    try:
        return best_division(entry["batch"], candidates_of(entry, policy), int(limit_mib * MIB))
    except ValueError:
        return None


def front(entry: Entry, limit_mib: float | None = None) -> "list[Division]":
    """A kernel's desirable divisions within a limit; none where nothing fits."""
    from repro.microconv import pareto_front

    limit = None if limit_mib is None else int(limit_mib * MIB)
    try:
        return pareto_front(entry["batch"], candidates_of(entry), limit)
    except ValueError:
        return []


def divided_again(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of `candidates` that follow from the times that it measured."""
    entries = metrics["kernels"]
    checked = []
    for row in metrics["checked"]:
        if (division := divide(entries[0], row["limit_mib"], row["policy"])) is not None:
            size, time_s = division.workspace_bytes, division.time_s
            derived = {"parts": division.parts, "workspace_bytes": size, "predicted_s": time_s}
            checked.append(row | derived)
    different = {(e["kind"], e["shape"], e["batch"]): e for e in entries}.values()
    unfit = sum(divide(e, 64, config["policy"]) is None for e in different)
    return {"checked": checked, "infeasible_at_64_mib": unfit}


# Comparisons with torch's own convolution.


def own_scatter(rows: Iterable[Row]) -> tuple[float, int]:
    """Standard deviation of one comparison with torch's own, on a log scale, and its freedom.

    Where a division is torch's own convolution undivided, its time and torch's are two medians of
    the same thing: they differ by no effect. NaN and 0 where there is no such division.
    """
    pairs = {
        (row["time_s"], row["native_s"])
        for row in rows
        if row.get("parts") == [[row["batch"], NATIVE]]
    }
    if not pairs:
        return math.nan, 0
    squares = [math.log(time_s / native_s) ** 2 for time_s, native_s in pairs]
    return math.sqrt(math.fsum(squares) / len(squares)), len(squares)


def compared(mean: float, weight: float, rows: Iterable[Row]) -> Estimate:
    """The logarithm of a ratio that is made of comparisons with torch's own.

    Args:
        mean: The logarithm.
        weight: Of the scatter in the error: the root of the sum of the comparisons' squared
            shares; 0 where nothing that was compared differs.
        rows: Kernels as they ran, which tell the scatter (`own_scatter`).
    """
    if not weight:
        return exactly(math.exp(mean), log=True)
    sd, dof = own_scatter(rows)
    return Estimate(mean, sd * weight, dof or math.nan, log=True, trials="measurements")


def ours_alone(row: Row) -> tuple[str, ...]:
    """This package's algorithms where a division is made of nothing else, else none.

    They take the place of an algorithm of a library that needs next to no workspace.
    """
    names = tuple(sorted(_algorithms(row)))
    ours = all(name.startswith("torch:") and name != NATIVE for name in names)
    return names if ours else ()


def judged(gain: Estimate, note: str, ours: str, most: bool) -> Estimate:
    """A gain over undivided with its notes.

    Args:
        gain: Over undivided.
        note: What else the evidence says.
        ours: What undivided leaves to this package's algorithms, empty for nothing.
        most: Whether that is most of it.

    Raises:
        NotRun: It is: no library's algorithms are there to compare with.
    """
    note = f"{ours}; {note}" if ours else note
    if most:
        raise NotRun(f"{FALLBACK}: {gain}; {note}")
    return replace(gain, note=note)


def held_s(record: Record | None) -> float | None:
    """The measured seconds of a network's kernels within the limit, None if not all fit."""
    rows = kernels_of(record)
    if not rows or any("time_s" not in row for row in rows):
        return None
    return math.fsum(row["time_s"] for row in rows)


def native_s(record: Record) -> float:
    """The seconds of the same kernels by torch, measured in turns with them."""
    return math.fsum(row["native_s"] for row in kernels_of(record))


def workspace_bytes(record: Record) -> int:
    """The workspace that a network's kernels take together, as the paper counts it."""
    return sum(row["workspace_bytes"] for row in kernels_of(record))


def unfit(record: Record | None) -> list[str]:
    """The kernels that have no division within the limit."""
    return [label(row) for row in kernels_of(record) if "time_s" not in row]


def need(
    results: Results, role: str, mode: str, limit_mib: int, *wanted: str, caffe: bool = False
) -> Record:
    """The network's record in float32 by the first of several policies that has one.

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
        if record := results.first("network", setting="fp32", **config):
            return record
    raise NotRun(f"{role} has no record with {mode}, {limit:,} MiB and {' or '.join(wanted)}")


def _need_all(record: Record) -> None:
    if missing := unfit(record):
        config = record.config
        where = f"{config['mode']} {config['policy']} with {config['limit_mib']:,} MiB"
        raise NotRun(f"{named(missing)} do not fit with {where}")


def gained(before: Record, after: Record) -> Estimate:
    """How much faster one record's kernels are than another's, relative to torch's own.

    The error is that of the comparisons with torch's own: each is a median, and weighs as much as
    its kernel takes of the time. Kernels whose times are the very same ones do not count.

    Raises:
        NotRun: Not all kernels fit in both, or the records are of two machines.
    """
    one_machine([before, after])
    for record in (before, after):
        _need_all(record)
    pairs = list(zip(kernels_of(before), kernels_of(after), strict=True))
    mean, weight = 0.0, 0.0
    for sign, side in zip((1, -1), zip(*pairs, strict=True), strict=True):
        total = math.fsum(row["time_s"] for row in side)
        mean += sign * math.log(total / math.fsum(row["native_s"] for row in side))
        counted = [row for row, pair in zip(side, pairs, strict=True) if not _same(*pair)]
        weight += math.fsum((row["time_s"] / total) ** 2 for row in counted)
    return compared(mean, math.sqrt(weight), [*_as_run(before), *_as_run(after)])


def _same(one: Row, other: Row) -> bool:
    return (one["time_s"], one["native_s"]) == (other["time_s"], other["native_s"])


def _as_run(record: Record) -> list[Entry]:
    """A network's kernels, and torch's own against themselves, as they ran."""
    return [*kernels_of(record), *record.metrics.get("own", [])]


def over_torch(record: Record) -> Estimate:
    """How fast a network's kernels are over torch's own, which no limit holds.

    Raises:
        NotRun: Not all fit.
    """
    _need_all(record)
    rows, total = kernels_of(record), math.fsum(row["time_s"] for row in kernels_of(record))
    weight = math.sqrt(math.fsum((row["time_s"] / total) ** 2 for row in rows))
    return compared(math.log(native_s(record) / total), weight, _as_run(record))


def gain_or_none(before: Record | None, after: Record | None) -> Estimate | None:
    """`gained`, None where it has no number or nothing ran."""
    if before is None or after is None:
        return None
    try:
        return gained(before, after)
    except NotRun:
        return None


def left_to_ours(record: Record) -> tuple[int, list[str]]:
    """How many kernels run by this package's algorithms alone, and by which."""
    taken = [names for row in kernels_of(record) if (names := ours_alone(row))]
    return len(taken), sorted({name for names in taken for name in names})


def beside_torch(gain: Estimate, undivided: Record, divided: Record) -> Estimate:
    """A gain over undivided, noting what undivided falls back to, and torch's own speed.

    Raises:
        NotRun: Most undivided kernels are left to this package's algorithms.
    """
    (count, names), kernels = left_to_ours(undivided), len(kernels_of(undivided))
    ours = f"undivided falls back to our own {', '.join(names)} on {count} of {kernels} kernels"
    note = f"divided is {over_torch(divided)} of torch's own speed without a limit"
    return judged(gain, note, ours if count else "", 2 * count > kernels)


def _algorithms(row: Row) -> set[str]:
    return {str(name) for _, name in row.get("parts", [])}


def need_binding(undivided: Record, others: Sequence[Record | None] = ()) -> None:
    """Check that the limit excludes an undivided algorithm worth having of some kernel.

    Nothing undivided fits; or with a larger limit undivided takes more than this one; or a
    division takes another algorithm, which would need more for the whole mini-batch, a workspace
    being taken as proportional to the batch (but that of `IMPLICIT`, which is always the same).

    Args:
        undivided: The network undivided within a limit for each kernel.
        others: The same network undivided with a larger limit, or divided.

    Raises:
        NotRun: The limit excludes nothing, and so there is nothing that dividing could gain.
    """
    if unfit(undivided):
        return
    config, rows = undivided.config, kernels_of(undivided)
    algorithms = {label(row): _algorithms(row) for row in rows}
    for row in (row for record in others for row in kernels_of(record) if "parts" in row):
        share = max(size for size, _ in row["parts"]) / row["batch"]
        other = not _algorithms(row) <= algorithms[label(row)] | {IMPLICIT}
        if other and row["workspace_bytes"] / share > config["limit_mib"] * MIB:
            return
    largest = max(row["workspace_bytes"] for row in rows) / MIB
    raise NotRun(
        f"no limit binds: {config['limit_mib']:,} MiB exclude nothing of {config['role']}'s "
        f"{len(rows)} kernels, which take at most {largest:.1f} MiB undivided at a mini-batch of "
        f"{config['batch']}"
    )
