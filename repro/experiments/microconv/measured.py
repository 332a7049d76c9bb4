"""Kernels as they were measured: the best division within a limit, and how two networks compare.

Two runs compare through torch's own convolution, which each of them timed in turns with its kernels
(a ratio of ratios), so that slow spells of the machine drop out.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from repro import plots
from repro.experiments.judge import Estimate, NotRun, deterministic
from repro.experiments.microconv.runs import KINDS, LAYERS, MIB, Cell
from repro.experiments.query import Results, one_machine
from repro.plots import Effect
from repro.records import Record
from repro.report import DASH

if TYPE_CHECKING:
    from repro.microconv import Division
Entry = dict[str, Any]  # a kernel in a record's metrics

NATIVE = "torch:native"  # torch's own convolution
IMPLICIT = "torch:implicit"  # where nothing else fits: this package's, as cuDNN's implicit GEMM
FALLBACK = "undivided is our own fallback, not a library's algorithm"
UNDIVIDED, TORCH = "over undivided", "over torch's own"  # speed-ups, as columns of tables


def _written(text: str, factor: float = 1.0) -> Callable[[float | None], str]:
    return lambda value: DASH if value is None else text.format(factor * value)


# Seconds as milliseconds, bytes as MiB, and a ratio as ``×1.23``; a dash for None.
ms, mib, times = _written("{:,.1f}", 1e3), _written("{:,.1f}", 1 / MIB), _written("×{:.2f}")


def label(entry: Mapping[str, Any]) -> str:
    """A short name of a kernel, such as ``conv2 F``."""
    return f"{entry['layer']} {KINDS[entry['kind']]}"


def tunings(results: Results, *policies: str) -> list[Record]:
    """The first tunings of AlexNet, one a process, by the first of several policies that has any.

    Those of its layers, where they were measured one by one, count as one if none is missing.
    """
    for policy in policies:
        records = results.ok("candidates", role="AlexNet", policy=policy)
        if whole := [record for record in records if not record.config.get("layer")]:
            return whole
        layers = {record.config["layer"]: record for record in records}
        if set(LAYERS) <= layers.keys():
            first, *others = (layers[name] for name in LAYERS)
            names = ("benchmark_s", "optimise_s", "measured", "kernels")
            sums = {n: sum((o.metrics[n] for o in others), first.metrics[n]) for n in names}
            config = {k: v for k, v in first.config.items() if k not in ("layer", "kinds")}
            return [replace(first, config=config, metrics={**first.metrics, **sums})]
    return []


def alexnet(results: Results) -> Record | None:
    """The measurement of all of AlexNet's kernels at the most micro-batch sizes."""
    return next(iter(tunings(results, "all", "powerOfTwo")), None)


def entries(record: Record | None) -> list[Entry]:
    """A record's kernels, none where there is no record."""
    return [] if record is None else record.metrics["kernels"]


def front(entry: Entry, limit_mib: float | None = None, policy: str = "all") -> "list[Division]":
    """A kernel's desirable divisions within a limit, the fastest last; none where nothing fits."""
    from repro.microconv import Candidate, micro_batch_sizes, pareto_front

    found: dict[int, list[Candidate]] = {
        size: [Candidate(*one) for one in entry["candidates"].get(str(size), [])]
        for size in micro_batch_sizes(entry["batch"], policy)
    }
    limit = None if limit_mib is None else int(limit_mib * MIB)
    try:
        return pareto_front(entry["batch"], found, limit)
    except ValueError:
        return []


def divide(entry: Entry, limit_mib: float, policy: str = "all") -> "Division | None":
    """The fastest division of a kernel within a limit, None where none fits."""
    return next(reversed(front(entry, limit_mib, policy)), None)


def divided_again(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of `candidates` that follow from the times that it measured."""
    kernels, checked = metrics["kernels"], []
    for row in metrics["checked"]:
        if (division := divide(kernels[0], row["limit_mib"], row["policy"])) is not None:
            size, time_s = division.workspace_bytes, division.time_s
            derived = {"parts": division.parts, "workspace_bytes": size, "predicted_s": time_s}
            checked.append(row | derived)
    different = {(e["kind"], e["shape"], e["batch"]): e for e in kernels}.values()
    unfit = sum(divide(entry, 64, config["policy"]) is None for entry in different)
    return {"checked": checked, "infeasible_at_64_mib": unfit}


# Comparisons with torch's own convolution.


def compared(mean: float, weight: float, rows: Iterable[Mapping[str, Any]]) -> Estimate:
    """A ratio made of comparisons with torch's own, given its logarithm.

    `weight` is the root of the sum of the comparisons' squared shares, 0 where nothing that was
    compared differs. The scatter of a comparison is that of the `rows`, kernels as they ran, whose
    division is torch's own convolution: two medians of the same thing. Each counts once.
    """
    if not weight:
        return deterministic(math.exp(mean), log=True)
    own = [row for row in rows if row.get("parts") == [[row["batch"], NATIVE]]]
    pairs = {(row["time_s"], row["native_s"]) for row in own}
    squares = [math.log(time_s / native_s) ** 2 for time_s, native_s in pairs]
    dof = len(squares) or math.nan
    scatter = math.sqrt(math.fsum(squares) / dof)
    return Estimate(mean, scatter * weight, dof, log=True, trials="measurements")


def algorithms(row: Mapping[str, Any]) -> set[str]:
    """The algorithms of a division."""
    return {str(name) for _, name in row.get("parts", [])}


def ours(names: Iterable[str]) -> list[str]:
    """This package's algorithms among several; they take the place of a library's slow ones."""
    return sorted(n for n in names if n.startswith("torch:") and n != NATIVE)


def left_to_ours(rows: Iterable[Mapping[str, Any]]) -> list[set[str]]:
    """The algorithms of each division that is made of this package's alone."""
    return [names for row in rows if (names := algorithms(row)) and len(ours(names)) == len(names)]


def noted(
    gain: Estimate, torchs: Estimate, rows: Sequence[Mapping[str, Any]], noun: str = "kernels"
) -> Estimate:
    """A gain over undivided `rows`, with notes on their fallbacks and on the gain over torch's."""
    note = f"divided is {torchs} of torch's own speed without a limit"
    if left := left_to_ours(rows):
        names = ", ".join(sorted(set().union(*left)))
        fallen = f"undivided falls back to our own {names} on {len(left)} of {len(rows)} {noun}"
        note = f"{fallen}; {note}"
    if 2 * len(left) > len(rows):
        raise NotRun(f"{FALLBACK}: {gain}; {note}")
    return replace(gain, note=note)


def unfit(record: Record | None) -> str:
    """The kernels that have no division within the limit, of many their number; empty for none."""
    names = [label(row) for row in entries(record) if "time_s" not in row]
    return f"{len(names)} kernels" if len(names) > 4 else ", ".join(names)


def fitting(record: Record) -> pd.DataFrame:
    """A network's kernels within the limit, one a row: layer, times and workspace."""
    if missing := unfit(record):
        config = record.config
        where = f"{config['mode']} {config['policy']} with {config['limit_mib']:,} MiB"
        raise NotRun(f"{missing} do not fit with {where}")
    return pd.DataFrame(entries(record))


def need(results: Results, *cells: Cell) -> Record:
    """A network's record, of the first of several cells that has one."""
    for cell in cells:
        config = {"role": cell.role, "mode": cell.mode, "setting": cell.precision}
        limit = cell.limit_mib(results.profile)
        if record := results.first("network", policy=cell.policy, limit_mib=limit, **config):
            return record
    wanted = " or ".join(cell.policy for cell in cells)
    raise NotRun(f"{cell.role} has no record with {cell.mode}, {limit:,} MiB and {wanted}")


def gained(before: Record, after: Record) -> Estimate:
    """How much faster one record's kernels are than another's, relative to torch's own.

    In the error each kernel weighs by its time; kernels whose times are the very same do not count.
    """
    one_machine([before, after])
    sides = [fitting(before), fitting(after)]
    other = sides[0].time_s.ne(sides[1].time_s) | sides[0].native_s.ne(sides[1].native_s)
    slower, faster = (math.log(side.time_s.sum() / side.native_s.sum()) for side in sides)
    weight = sum(float(((side.time_s / side.time_s.sum())[other] ** 2).sum()) for side in sides)
    return compared(slower - faster, math.sqrt(weight), _as_run(before, after))


def over_torch(record: Record) -> Estimate:
    """How fast a network's kernels are over torch's own, which no limit holds."""
    rows = fitting(record)
    weight = math.sqrt(((rows.time_s / rows.time_s.sum()) ** 2).sum())
    return compared(math.log(rows.native_s.sum() / rows.time_s.sum()), weight, _as_run(record))


def _as_run(*records: Record) -> list[Entry]:
    """Networks' kernels, and torch's own against themselves, as they ran."""
    return [row for r in records for row in (*entries(r), *r.metrics.get("own", []))]


def need_binding(undivided: Record, others: Sequence[Record | None]) -> None:
    """Check that the limit excludes an undivided algorithm worth having of some kernel.

    Some kernel does not fit undivided; or `others` take another algorithm, which would need more
    than the limit for the whole mini-batch (in proportion, except `IMPLICIT`).
    """
    if unfit(undivided):
        return
    config, rows = undivided.config, entries(undivided)
    known = {label(row): algorithms(row) | {IMPLICIT} for row in rows}
    for row in (row for record in others for row in entries(record) if "parts" in row):
        share = max(size for size, _ in row["parts"]) / row["batch"]
        needs = row["workspace_bytes"] / share
        if not algorithms(row) <= known[label(row)] and needs > config["limit_mib"] * MIB:
            return
    within = f"{config['limit_mib']:,} MiB exclude nothing of {config['role']}'s"
    raise NotRun(f"no limit binds: {within} {len(rows)} kernels at {config['batch']} samples")


# Tables and figures.


def told(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A table's values in words: ratios as ``×1.23``, a dash for None."""

    def word(value: Any) -> Any:
        ratio = value is None or isinstance(value, float)
        return times(value) if ratio else str(value) if isinstance(value, Estimate) else value

    return [{name: word(value) for name, value in row.items()} for row in rows]


def draw(
    table: Iterable[Mapping[str, Any]],
    heading: Sequence[str],
    name: str,
    xlabel: str,
    title: str,
    columns: Sequence[str] = (UNDIVIDED, TORCH),
) -> "plots.Figure":
    """Draw a table's speed-ups under headings, in the first precision, beside the paper's.

    Without headings those are the `columns`, of the first of which the paper's are.
    """
    rows, groups = list(table), dict[str, list[Effect]]()
    for row in rows:
        if row.get("setting") != rows[0].get("setting"):
            continue
        for over in columns:
            paper, gain = row["paper"] if over == columns[0] else None, row.get(over)
            if gain is None and paper is None:
                continue
            ours = (None, None) if gain is None else gain.drawn()
            own = groups.setdefault(", ".join(row[part] for part in heading) or over, [])
            own.append((row[name] + f", {over}" * bool(heading), paper, *ours))
    lines = [line for head, own in groups.items() for line in ((head, None, None, None), *own)]
    figure = plots.effects(lines, xlabel, headings=groups)
    figure.suptitle(title, fontsize=11)
    return figure
