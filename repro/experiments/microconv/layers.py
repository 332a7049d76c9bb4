"""Kernel by kernel: the tables and figures on AlexNet's layers and on DeepBench."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from repro.experiments.design import Results, reported
from repro.experiments.microconv import drawings, reading
from repro.experiments.microconv.grids import LIMITS_MIB, MIB, POLICIES
from repro.experiments.microconv.reading import Entry, mib, ms, times
from repro.microconv import Division
from repro.report import DASH

NAN = float("nan")
PAPER = reported("microconv")


def _layers(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    grouped: dict[str, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry["layer"], []).append(entry)
    return grouped


def _sums(divisions: Sequence[Division | None]) -> tuple[float | None, float | None]:
    """Return the workspace in bytes and the time in seconds together; None if one is missing."""
    if not divisions or any(division is None for division in divisions):
        return None, None
    found = [division for division in divisions if division is not None]
    return sum(d.workspace_bytes for d in found), sum(d.time_s for d in found)


def _undivided(entries: Sequence[Entry], limit_mib: float) -> tuple[float | None, float | None]:
    return _sums([reading.divide(entry, limit_mib, "undivided") for entry in entries])


def figure1_table(results: Results) -> pd.DataFrame:
    """Return, by layer, workspace and time of the best undivided algorithms at each limit."""
    record = reading.best_candidates(results, "AlexNet")
    rows = []
    for layer, entries in _layers(record.metrics["kernels"] if record else []).items():
        row: dict[str, Any] = {"layer": layer, "kernels": len(entries)}
        for limit in LIMITS_MIB:
            workspace, time = _undivided(entries, limit)
            row[f"{limit} MiB: workspace"] = "does not fit" if time is None else mib(workspace)
            row[f"{limit} MiB: ms"] = ms(time)
        row["torch's own: MiB"] = mib(sum(entry["native_bytes"] for entry in entries))
        row["torch's own: ms"] = ms(sum(entry["native_s"] for entry in entries))
        rows.append(row)
    return pd.DataFrame(rows)


def figure1(results: Results) -> Figure:
    """Draw Figure 1."""
    record = reading.best_candidates(results, "AlexNet")
    layers = _layers(record.metrics["kernels"] if record else [])
    panels = {}
    for limit in LIMITS_MIB:
        pairs = [_undivided(entries, limit) for entries in layers.values()]
        panels[f"limit {limit} MiB"] = (
            [NAN if w is None else w / MIB for w, _ in pairs],
            [NAN if t is None else 1e3 * t for _, t in pairs],
        )
    return drawings.workspace_and_time(list(layers), panels)


def figure6_table(results: Results) -> pd.DataFrame:
    """Return the desirable divisions of conv2, forward."""
    entry = reading.conv2_entry(results)
    rows = [
        {
            "point": number + 1,
            "workspace (MiB)": f"{division.workspace_bytes / MIB:,.2f}",
            "time (ms)": ms(division.time_s),
            "division": str(division),
        }
        for number, division in enumerate(
            [] if entry is None else reading.front(entry, PAPER["figure6"]["max_workspace_mib"])
        )
    ]
    return pd.DataFrame(rows, columns=["point", "workspace (MiB)", "time (ms)", "division"])


def figure6(results: Results) -> Figure:
    """Draw Figure 6."""
    entry = reading.conv2_entry(results)
    if entry is None:
        return drawings.front([])
    return drawings.front(
        front_points(entry, PAPER["figure6"]["max_workspace_mib"]), native_point(entry)
    )


def front_points(entry: Entry, limit_mib: float | None = None) -> list[Any]:
    """Return the points of a kernel's front as `drawings.front` takes them."""
    return [(d.workspace_bytes / MIB, 1e3 * d.time_s, d.parts) for d in
            reading.front(entry, limit_mib)]  # fmt: skip


def native_point(entry: Entry) -> tuple[float, float]:
    """Return the memory in MiB and time in ms of torch's own convolution."""
    return entry["native_bytes"] / MIB, 1e3 * entry["native_s"]


def layer_ratios(results: Results, setting: str, over: str) -> dict[str, list[float]]:
    """Return DeepBench's speed-ups by kernel size, over ``undivided`` or ``torch``'s own.

    Where no undivided algorithm fits into the limit there is no ratio over ``undivided``. Both
    times were measured in turns with torch's own convolution, and are compared through it.
    """
    ratios: dict[str, list[float]] = {}
    for record in results.select("deepbench", setting=setting):
        for row in record.metrics.get("layers", []):
            divided, undivided = row.get("divided"), row.get("undivided")
            if divided is None or (over == "undivided" and undivided is None):
                continue
            relative = divided["native_s"] / divided["time_s"]
            if over == "undivided":
                relative *= undivided["time_s"] / undivided["native_s"]
            ratios.setdefault(row["kernel_size"], []).append(relative)
    return dict(sorted(ratios.items(), key=lambda item: _area(item[0])))


def _area(kernel_size: str) -> int:
    rows, columns = kernel_size.split("×")
    return int(rows) * int(columns)


def flat(groups: dict[str, list[float]]) -> list[float]:
    """Return the values of all groups."""
    return list(chain.from_iterable(groups.values()))


def left_to_win(results: Results) -> str:
    """Say, by setting, on how many layers dividing still beats torch's own convolution."""
    said = []
    for setting in reading.settings(results):
        ratios = flat(layer_ratios(results, setting, "torch"))
        won = sum(ratio > 1.05 for ratio in ratios)
        said.append(
            f"{setting}: on {won} of {len(ratios)} layers, {np.mean(ratios):.2f}× on average"
            if ratios
            else f"{setting}: no layers"
        )
    return "; ".join(said)


def figure8_table(results: Results) -> pd.DataFrame:
    """Return the speed-ups of DeepBench's layers by kernel size and setting."""
    rows = []
    for setting in reading.settings(results):
        fitting = layer_ratios(results, setting, "undivided")
        own = layer_ratios(results, setting, "torch")
        groups = {"all": (flat(fitting), flat(own))}
        groups |= {size: (fitting.get(size, []), own[size]) for size in own}
        for size, (over_undivided, over_torch) in groups.items():
            rows.append(
                {
                    "setting": setting,
                    "kernel": size,
                    "n": len(over_undivided),
                    "over undivided: mean": _mean(over_undivided),
                    "least": _extreme(over_undivided, min),
                    "largest": _extreme(over_undivided, max),
                    "paper, V100 half": _paper_ratio(size),
                    "n, torch": len(over_torch),
                    "over torch's own: mean": _mean(over_torch),
                    "largest, torch": _extreme(over_torch, max),
                }
            )
    return pd.DataFrame(rows)


def _paper_ratio(size: str) -> str:
    paper = PAPER["figure8"]
    if size == "all":
        return f"{paper['mean']:.2f}×, up to {paper['largest']:.2f}×"
    return f"{paper['three_by_three']['V100']:.2f}×" if size == "3×3" else DASH


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f}×" if values else DASH


def _extreme(values: Sequence[float], which: Any) -> str:
    return f"{which(values):.2f}×" if values else DASH


def figure8(results: Results) -> Figure:
    """Draw Figure 8 for the first setting."""
    setting = next(iter(reading.settings(results)), "fp32")
    panels = {
        "over the best undivided algorithm within 64 MiB": "undivided",
        "over torch's own convolution, without a limit": "torch",
    }
    return drawings.ranges(
        {title: layer_ratios(results, setting, over) for title, over in panels.items()},
        "speed-up (×)",
    )


FIGURE10_LIMITS = (8, PAPER["figure10"]["limit_mib"])


def conv2_runs(results: Results) -> dict[tuple[int, str], dict[str, Any]]:
    """Return what was measured of conv2's divisions, by limit and policy."""
    record = reading.one(results, "candidates", layer="conv2")
    rows = record.metrics["checked"] if record else []
    return {(row["limit_mib"], row["policy"]): row for row in rows}


def conv2_gain(results: Results, limit: int, policy: str) -> float | None:
    """Return how much faster conv2 runs than undivided, each in turns with torch's own."""
    runs = conv2_runs(results)
    divided, undivided = runs.get((limit, policy)), runs.get((limit, "undivided"))
    if divided is None or undivided is None:
        return None
    relative = [row["time_s"] / row["native_s"] for row in (undivided, divided)]
    return float(relative[0] / relative[1])


def best_policy(results: Results) -> str:
    """Return the policy with the most micro-batch sizes that conv2 was run with."""
    return "all" if any(policy == "all" for _, policy in conv2_runs(results)) else "powerOfTwo"


def figure10_table(results: Results) -> pd.DataFrame:
    """Return conv2's divisions by limit and policy."""
    runs = conv2_runs(results)
    record = reading.one(results, "candidates", layer="conv2")
    paper = {"undivided": f"{PAPER['figure10']['undivided_kib']} KiB",
             "powerOfTwo": f"{PAPER['figure10']['power_of_two_mib']} MiB, 32s",
             "all": times(PAPER["figure10"]["speedup_all"])}  # fmt: skip
    rows = []
    for limit in FIGURE10_LIMITS:
        for policy in POLICIES:
            row = runs.get((limit, policy))
            tried = record and (policy != "all" or record.config["policy"] == "all")
            absent = "does not fit" if tried else DASH
            rows.append(
                {
                    "limit (MiB)": limit,
                    "policy": policy,
                    "paper": paper[policy] if limit == FIGURE10_LIMITS[1] else DASH,
                    "division": reading.parts_text(row["parts"]) if row else absent,
                    "workspace (MiB)": mib(row["workspace_bytes"] if row else None),
                    "time (ms)": ms(row["time_s"] if row else None),
                    "sum of parts (ms)": ms(row["predicted_s"] if row else None),
                    "torch's own (ms)": ms(row["native_s"] if row else None),
                    "over undivided": times(conv2_gain(results, limit, policy)),
                }
            )
    return pd.DataFrame(rows)


def figure10(results: Results) -> Figure:
    """Draw Figure 10."""
    entry = reading.conv2_entry(results)
    rows = []
    for limit in FIGURE10_LIMITS if entry is not None else ():
        assert entry is not None
        for policy in POLICIES:
            division = reading.divide(entry, limit, policy)
            if division is not None:
                rows.append((f"{policy}, {limit} MiB", part_times(entry, division, policy)))
    return drawings.timeline(rows)


def part_times(entry: Entry, division: Division, policy: str = "all") -> list[Any]:
    """Return (size, algorithm, ms) of every part of a division."""
    times = {
        (size, way.algorithm): 1e3 * way.time_s
        for size, ways in reading.candidates(entry, policy).items()
        for way in ways
    }
    return [(size, name, times[size, name]) for size, name in division.parts]


def assignment(results: Results) -> list[tuple[Entry, Division]] | None:
    """Return AlexNet's kernels with the divisions that WD chooses, None where nothing fits."""
    record = reading.best_candidates(results, "AlexNet")
    entries = record.metrics["kernels"] if record else []
    chosen = reading.share_out(entries, PAPER["figure12"]["total_mib"]) if entries else None
    return None if chosen is None else list(zip(entries, chosen, strict=True))


def figure12_table(results: Results) -> pd.DataFrame:
    """Return what WD assigns to each kernel of AlexNet."""
    chosen = assignment(results) or []
    total = PAPER["figure12"]["total_mib"] * MIB
    rows = [
        {
            "kernel": reading.label(entry),
            "workspace (MiB)": mib(division.workspace_bytes),
            "share of the limit": f"{100 * division.workspace_bytes / total:.1f} %",
            "time (ms)": ms(division.time_s),
            "torch's own (ms)": ms(entry["native_s"]),
            "torch's own (MiB)": mib(entry["native_bytes"]),
            "division": str(division),
        }
        for entry, division in chosen
    ]
    return pd.DataFrame(rows)


def figure12(results: Results) -> Figure:
    """Draw Figure 12: the workspace of every kernel, WR at 8 MiB each beside WD."""
    record = reading.best_candidates(results, "AlexNet")
    entries = record.metrics["kernels"] if record else []
    bars: dict[str, dict[str, float]] = {}
    held = [reading.divide(entry, 8) for entry in entries]
    bars["WR, 8 MiB each"] = {
        reading.label(e): d.workspace_bytes / MIB for e, d in zip(entries, held, strict=True) if d
    }
    total = PAPER["figure12"]["total_mib"]
    bars[f"WD, {total} MiB in all"] = {
        reading.label(e): d.workspace_bytes / MIB for e, d in assignment(results) or []
    }
    if not entries:
        bars = {}  # nothing was measured, which is not that nothing fits
    title = "workspace of AlexNet's kernels"
    return drawings.stacked({title: bars}, "workspace (MiB)", {title: {"limit of WD": total}})
