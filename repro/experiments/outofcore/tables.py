"""Tables and figures: throughput and memory against batch size."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from repro.experiments.design import Results
from repro.experiments.outofcore import drawings, reading
from repro.experiments.outofcore.grids import MODES, PAPER, RESNET, ROLES
from repro.experiments.outofcore.reading import (
    GIB,
    LABELS,
    MEASURED,
    MIB,
    SIMULATED,
    Points,
    gib,
)
from repro.report import DASH

PLACES = {SIMULATED: "simulated, V100", MEASURED: "measured here"}
_PEERS = ("checkpointing", "save_on_cpu", "expandable_segments")


def _shown(found: Points, batches: Sequence[int]) -> list[str]:
    """Return throughputs as text: x for out of memory, a dash where nothing was run."""
    return [
        DASH if batch not in found else "x" if (point := found[batch]) is None
        else f"{point.images_per_s:,.0f}" if point.images_per_s >= 20
        else f"{point.images_per_s:.1f}"
        for batch in batches
    ]  # fmt: skip


def _batches(results: Results, where: str, role: str) -> list[int]:
    return sorted({record.config["batch"] for record in results.select(where, role=role)})


def table1(results: Results) -> pd.DataFrame:
    """Return images/s by batch size: the paper's, simulated, measured here."""
    paper = PAPER["table1"]
    base = PAPER["claims"]["in_core_batch"]
    heads = [f"{batch} ({batch / base:.2g}×)" for batch in paper["batches"]]
    rows = []
    published = {"lms_in_core": "in core, P100 (Le et al.)", "lms": "LMS, P100 (Le et al.)",
                 "in_core": "in core", "schedule": "schedule",
                 "schedule_va": "schedule + VA"}  # fmt: skip
    for key, label in published.items():
        values = ["x" if value != value else f"{value:g}" for value in paper[key]]
        rows.append(["paper, V100" if "P100" not in label else "paper", label, *values])
    for where, place in PLACES.items():
        batches = _batches(results, where, RESNET)
        columns = _columns(batches, reading.in_core_batch(results, where, RESNET))
        if where == MEASURED and batches:
            sizes = ["" if batch is None else f"N = {batch}" for batch in columns]
            rows.append([place, "batch size", *sizes])
        modes = ("in_core", "lms", "schedule", "schedule_va") if where == SIMULATED else (
            *MODES, *_PEERS)  # fmt: skip
        for mode in modes:
            found = reading.points(results, where, RESNET, mode)
            if found:
                values = [DASH if batch is None else _shown(found, [batch])[0] for batch in columns]
                rows.append([place, LABELS[mode], *values])
    return pd.DataFrame(rows, columns=["where", "method", *heads])


def _columns(batches: Sequence[int], base: int | None) -> list[int | None]:
    """Return which of our batch sizes stands under each of the paper's: the same, or as large.

    That is, as large over the largest in core, to 5 % or the next whole number.
    """
    columns: list[int | None] = []
    for published in PAPER["table1"]["batches"]:
        found = published if published in batches else None
        if found is None and base is not None:
            wanted = base * published / PAPER["claims"]["in_core_batch"]
            near = [batch for batch in batches if abs(batch - wanted) <= max(0.5, 0.05 * wanted)]
            found = min(near, key=lambda batch: abs(batch - wanted), default=None)
        columns.append(found)
    return columns


def table1_figure(results: Results) -> Figure:
    """Draw Table 1: throughput over that of the largest batch size in core."""
    paper = PAPER["table1"]
    best = max(value for value in paper["in_core"] if value == value)
    base = PAPER["claims"]["in_core_batch"]
    lms_best = max(value for value in paper["lms_in_core"] if value == value)
    published = {
        LABELS[mode]: [
            (batch / base, value / (lms_best if mode == "lms" else best))
            for batch, value in zip(paper["batches"], paper[mode], strict=True)
            if value == value
        ]
        for mode in ("in_core", "lms", "schedule", "schedule_va")
    }
    panels: dict[str, dict[str, Any]] = {"paper: V100, and P100 for LMS": published}
    for where, place in PLACES.items():
        size = reading.in_core_batch(results, where, RESNET)
        if size is None:
            continue
        lines = {}
        for mode in ("in_core", "lms", "schedule", "schedule_va", *_PEERS):
            found = reading.points(results, where, RESNET, mode)
            lines[LABELS[mode]] = [
                (batch / size, point.relative)
                for batch, point in found.items()
                if point is not None and point.relative is not None
            ]
        panels[f"{place}, in core up to {size}"] = lines
    return drawings.curves(
        [panels], ["images/s over the\nlargest in core"],
        xlabel="batch size over the largest in core",
    )  # fmt: skip


def figure3_table(results: Results) -> pd.DataFrame:
    """Return the budgets that schedules could be given, and what the allocators took."""
    rows = []
    for where, place in PLACES.items():
        limit = reading.limit_bytes(results, where, RESNET)
        for batch in _batches(results, where, RESNET):
            row: dict[str, Any] = {"where": place, "batch": batch, "limit": gib(limit)}
            for mode, note in (("schedule", ""), ("schedule_va", ", VA")):
                found = reading.points(results, where, RESNET, mode)
                names = {f"budget{note}": "budget_bytes", f"held{note}": "held_bytes",
                         f"actual{note}": "reserved_bytes"}  # fmt: skip
                for name, field in names.items():
                    point = found.get(batch)
                    value = gib(getattr(point, field)) if point else "x"
                    row[name] = value if batch in found else DASH
            at = PAPER["claims"]["lms_batch"]
            row["paper: budget"] = (
                f"{PAPER['claims']['budget_gib_928']} GiB" if batch == at else DASH
            )
            rows.append(row)
    return pd.DataFrame(rows)


def figure3(results: Results) -> Figure:
    """Draw Figure 3: for each place, without and with chunks."""
    rows: list[dict[str, Any]] = []
    labels = []
    limits = {}
    for where, place in PLACES.items():
        limit = reading.limit_bytes(results, where, RESNET)
        if limit is None:
            continue
        unit, name = _unit(limit)
        panels: dict[str, Any] = {}
        for mode in ("schedule", "schedule_va"):
            found = reading.points(results, where, RESNET, mode)
            title = f"{place}: {LABELS[mode]}"
            limits[title] = limit / unit
            panels[title] = {
                what: [
                    (batch, value / unit)
                    for batch, point in found.items()
                    if point is not None and (value := getattr(point, field)) is not None
                ]
                for what, field in (("budget", "budget_bytes"), ("actual", "reserved_bytes"))
            }
        rows.append(panels)
        labels.append(f"memory ({name})")
    return drawings.curves(rows or [{"no records": {}}], labels or [""], limits)


def _unit(limit: int | None) -> tuple[int, str]:
    return (GIB, "GiB") if limit is None or limit >= GIB else (MIB, "MiB")


def growth_table(results: Results, memory: bool) -> pd.DataFrame:
    """Return throughput (Figure 4) or memory (Figure 5) of the other networks by batch size."""
    rows = []
    for role in ROLES[1:]:
        for where, place in PLACES.items():
            base = reading.in_core_batch(results, where, role)
            for batch in _batches(results, where, role):
                row: dict[str, Any] = {
                    "network": role, "where": place, "batch": batch,
                    "over in core": DASH if not base else f"{batch / base:.2g}×",
                }  # fmt: skip
                for mode in MODES:
                    found = reading.points(results, where, role, mode)
                    if not memory:
                        row[LABELS[mode]] = _shown(found, [batch])[0]
                        continue
                    point = found.get(batch)
                    taken = point and (point.reserved_bytes or point.held_bytes)
                    row[LABELS[mode]] = gib(taken) if taken else "x" if batch in found else DASH
                if memory:
                    row["limit"] = gib(reading.limit_bytes(results, where, role))
                rows.append(row)
        if not memory:
            paper = PAPER["section52"]
            least, most = paper["va_over_schedule"]
            rows.append({"network": role, "where": "paper, V100", "batch": "largest",
                         "over in core": DASH, LABELS["in_core"]: f"N = {paper['in_core'][role]}",
                         LABELS["schedule"]: f"{paper['schedule'][role]:g}× that",
                         LABELS["schedule_va"]: f"{least:g} to {most:g}× that"})  # fmt: skip
        for record in results.select("reach", role=role):
            if not memory and record.status == "ok":
                sizes = {LABELS[mode]: f"N = {record.metrics[mode]}" for mode in MODES}
                rows.append({"network": role, "where": PLACES[SIMULATED], "batch": "largest",
                             "over in core": DASH, **sizes})  # fmt: skip
    return pd.DataFrame(rows)


def growth_figure(results: Results, memory: bool) -> Figure:
    """Draw Figure 4 or Figure 5, simulated above measured."""
    rows: list[dict[str, Any]] = []
    labels = []
    limits = {}
    for where, place in PLACES.items():
        row = {}
        unit, name = _unit(reading.limit_bytes(results, where, ROLES[-1]))
        labels.append(f"memory ({name})" if memory else "images/s")
        for role in ROLES[1:]:
            title = f"{role}, {place}"
            limit = reading.limit_bytes(results, where, role)
            if memory and limit is not None:
                limits[title] = limit / unit
            row[title] = {
                LABELS[mode]: [
                    (batch, value)
                    for batch, point in reading.points(results, where, role, mode).items()
                    if point is not None
                    and (value := (point.reserved_bytes or point.held_bytes or 0) / unit
                         if memory else point.images_per_s)
                ]
                for mode in MODES
            }  # fmt: skip
        rows.append(row)
    return drawings.curves(rows, labels, limits)
