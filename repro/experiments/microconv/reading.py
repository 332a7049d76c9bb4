"""From records to numbers: candidates, divisions under a limit, times."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from repro.experiments.design import Results
from repro.experiments.microconv.grids import MIB
from repro.microconv import (
    Candidate,
    Division,
    assign_workspaces,
    best_division,
    micro_batch_sizes,
    pareto_front,
)
from repro.records import Record
from repro.report import DASH

Entry = dict[str, Any]  # a kernel in a record's metrics
KINDS = {"forward": "F", "backward_data": "BD", "backward_filter": "BF"}


def one(results: Results, experiment: str, **config: Any) -> Record | None:
    """Return the record of a run that ended well, None where there is none."""
    found = (r for r in results.select(experiment, **config) if r.status == "ok")
    return next(found, None)


def best_candidates(results: Results, role: str, setting: str = "fp32") -> Record | None:
    """Return the measurement of a whole network with the most micro-batch sizes."""
    for policy in ("all", "powerOfTwo"):
        for record in results.select("candidates", role=role, setting=setting, policy=policy):
            if record.status == "ok" and not record.config.get("layer"):
                return record
    return None


def conv2_entry(results: Results) -> Entry | None:
    """Return AlexNet's second convolution, forward."""
    record = one(results, "candidates", layer="conv2")
    return None if record is None else record.metrics["kernels"][0]


def candidates(entry: Entry, policy: str = "all") -> dict[int, list[Candidate]]:
    """Return a kernel's candidates for the micro-batch sizes of a policy."""
    wanted = set(micro_batch_sizes(entry["batch"], policy))
    return {
        int(size): [Candidate(*way) for way in ways]
        for size, ways in entry["candidates"].items()
        if int(size) in wanted
    }


def divide(entry: Entry, limit_mib: float, policy: str = "all") -> Division | None:
    """Return the fastest division of a kernel within a limit, None where none fits."""
    try:
        return best_division(entry["batch"], candidates(entry, policy), int(limit_mib * MIB))
    except ValueError:
        return None


def front(entry: Entry, limit_mib: float | None = None) -> list[Division]:
    """Return a kernel's desirable divisions within a limit; none where nothing fits."""
    limit = None if limit_mib is None else int(limit_mib * MIB)
    try:
        return pareto_front(entry["batch"], candidates(entry), limit)
    except ValueError:
        return []


def share_out(entries: Sequence[Entry], total_mib: float) -> list[Division] | None:
    """Return the divisions that WD chooses, None where the total admits none."""
    fronts = {index: front(entry) for index, entry in enumerate(entries)}
    try:
        chosen = assign_workspaces(fronts, int(total_mib * MIB))
    except ValueError:
        return None
    return [chosen[index] for index in range(len(entries))]


def label(entry: Entry) -> str:
    """Return a short name of a kernel, such as ``conv2 F``."""
    return f"{entry['layer']} {KINDS[entry['kind']]}"


def parts_text(parts: Iterable[Sequence[Any]]) -> str:
    """Return a division in short: ``2×32 nnpack:ft16x16``."""
    return str(Division(0.0, 0, [(int(size), str(name)) for size, name in parts]))


def held_s(record: Record | None) -> float | None:
    """Return the measured seconds of a network's kernels within the limit, None if not all fit."""
    rows = [] if record is None else record.metrics["kernels"]
    if not rows or any("time_s" not in row for row in rows):
        return None
    return float(sum(row["time_s"] for row in rows))


def held_native_s(record: Record) -> float:
    """Return the seconds of the same kernels by torch, measured in turns with them."""
    return float(sum(row["native_s"] for row in record.metrics["kernels"]))


def workspace_bytes(record: Record) -> int:
    """Return the workspace that a network's kernels take together, as the paper counts it."""
    return sum(row["workspace_bytes"] for row in record.metrics["kernels"])


def unfit(record: Record) -> list[str]:
    """Return the kernels that have no division within the limit."""
    return [label(row) for row in record.metrics["kernels"] if "time_s" not in row]


def median(record: Record, name: str) -> float:
    """Return the median of a record's timing, in seconds."""
    return float(np.median(record.timings[name]["samples_s"]))


def paired_ratio(record: Record, slower: str, faster: str) -> float:
    """Return the median over rounds of one timing over another that was taken in turns."""
    pairs = zip(*(record.timings[name]["samples_s"] for name in (slower, faster)), strict=True)
    return float(np.median([a / b for a, b in pairs]))


def relative_time(record: Record | None) -> float | None:
    """Return a network's kernels within the limit over torch's own, measured in turns."""
    held = held_s(record)
    return None if held is None or record is None else held / held_native_s(record)


def speedup(slower: Record | None, faster: Record | None) -> float | None:
    """Return how much faster one record's kernels are, both relative to torch's own.

    The two were run at different moments; each was measured in turns with torch's own
    convolutions, and so the ratio of ratios leaves slow spells of the machine out.
    """
    before, after = relative_time(slower), relative_time(faster)
    return None if before is None or after is None else before / after


def settings(results: Results) -> list[str]:
    """Return the settings of precision that have records, in the order of the plan."""
    return list(dict.fromkeys(r.config["setting"] for r in results.records if r.status == "ok"))


def ms(seconds: float | None, digits: int = 1) -> str:
    """Return seconds as milliseconds."""
    return DASH if seconds is None else f"{1e3 * seconds:,.{digits}f}"


def mib(count: float | None) -> str:
    """Return bytes as MiB."""
    return DASH if count is None else f"{count / MIB:,.1f}"


def times(ratio: float | None) -> str:
    """Return a ratio as ``1.23×``."""
    return DASH if ratio is None else f"{ratio:.2f}×"
