"""The cells that tables and claims compare: trainings by seed, measurements by process."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from repro.experiments.design import Results
from repro.experiments.dualbatch.runs import (
    KEPT,
    PAPER,
    SCHEMES,
    SECTION_5_1,
    SECTION_5_2,
    WORKERS,
    mix,
)
from repro.experiments.judge import BySeed, Cell, Estimate, NotRun, difference
from repro.records import Record
from repro.report import DASH, Summary

Records = Sequence[Record]


def section51(results: Results, k: float, n_small: int, factor: str = "linear") -> list[Record]:
    """The trainings of section 5.1 that ended; the baseline has n_small = 0 at any k."""
    k = k if n_small else 1.0
    return results.ok("train", setting=SECTION_5_1, n_small=n_small, k=k, factor=factor)


def section52(
    results: Results, scheme: str, n_small: int, setting: str = SECTION_5_2
) -> list[Record]:
    """The trainings of section 5.2 that ended: ``dual-batch`` or ``hybrid``."""
    return results.ok("train", setting=setting, n_small=n_small, scheme=scheme)


def kept(results: Results, n_small: int) -> list[Record]:
    """The trainings of a mix at the larger k with momentum kept from share to share."""
    return results.ok("train", setting=KEPT, n_small=n_small)


def final(results: Results, records: Records, metric: str) -> BySeed:
    """A metric after the last epoch, one value for each seed."""

    def read(record: Record) -> float:
        return float(record.metrics[metric][-1])

    # All seeds with momentum kept were planned before any was looked at.
    if records and records[0].config.get("setting") == KEPT:
        return BySeed.of(records, read)
    return results.cell(records, read)


def by_process(results: Results, experiment: str, values: Sequence[float]) -> Cell:
    """One value of each process with its number; of one process its rounds as they are."""
    records = results.processes(experiment)
    if len(records) < 2:
        return values
    of = dict(zip((record.seed for record in records), values, strict=True))
    return results.cell(records, lambda record: of[record.seed])


def change(results: Results, records: Records, base: Records, metric: str = "accuracy") -> Estimate:
    """How far a metric lies above that of other trainings, seed by seed.

    Raises:
        NotRun: There are no records of one of them, or they share no seed.
    """
    unit, digits = ("points", 2) if metric == "accuracy" else ("", 3)
    ours, others = (final(results, of, metric) for of in (records, base))
    return difference(ours, others, unit, digits)


def gain(results: Results, records: Records, base: Records) -> str:
    """The gain in points of accuracy with its interval, as a cell."""
    try:
        return str(change(results, records, base))
    except NotRun:
        return DASH


def outcome(
    results: Results,
    records: Records,
    paper: Mapping[str, float],
    base: Records,
    paper_base: Mapping[str, float],
    compared: bool = True,
) -> dict[str, Any]:
    """Columns of final loss and accuracy, and of the gain over others, the paper's with ours."""
    accuracy = final(results, records, "accuracy")
    points = paper["accuracy"] - paper_base["accuracy"]
    return {
        "loss, paper": f"{paper['loss']:.3f}",
        "loss": Summary.of(final(results, records, "test_loss")).text(3),
        "accuracy, paper (%)": f"{paper['accuracy']:.1f}",
        "accuracy (%)": Summary.of(accuracy).text(),
        "gain, paper": f"{points:+.1f}" if compared else DASH,
        "gain": gain(results, records, base) if compared else DASH,
        "n": len(accuracy),
    }


def plan_cell(records: Records, name: str) -> str:
    """A batch size of the plans that a training went by, one for each resolution."""
    if not records:
        return DASH
    # B_L is the size that a plan was solved for, also where no worker has it.
    shares = name.replace("batch", "samples")
    values = [plan[name] if plan[shares] else None for plan in records[0].metrics["plans"]]
    return ", ".join(DASH if value is None else f"{value:,}" for value in values)


def virtual_time(records: Records) -> float | None:
    """Mean seconds of trainings by the virtual clock; a cluster has none."""
    series = [record.metrics["virtual_time_s"] for record in records]
    times = [values[-1] for values in series if values]
    return float(np.mean(times)) if times else None


def scheme_rows(results: Results, table: str, setting: str, base: str) -> list[dict[str, Any]]:
    """Table 8 or 10: dual-batch learning and the hybrid scheme; gains are over `base`, 4 large."""
    paper, rows = PAPER[table], []
    compared, paper_base = section52(results, base, 0, setting), paper[SCHEMES[base]][0]
    for scheme, key in SCHEMES.items():
        for n, published in enumerate(paper[key]):
            records = section52(results, scheme, n, setting)
            over = bool(n) or scheme != base
            rows.append(
                {
                    "scheme": scheme,
                    "workers": mix(n),
                    "B_S": plan_cell(records, "small_batch"),
                    "B_L": plan_cell(records, "large_batch"),
                    **outcome(results, records, published, compared, paper_base, over),
                    "virtual (s)": _seconds(virtual_time(records)),
                }
            )
    for scheme, key in SCHEMES.items():
        mixed = [section52(results, scheme, n, setting) for n in range(1, WORKERS + 1)]
        every = [record for records in mixed for record in records]
        row = {"scheme": f"{scheme}, whole training", "workers": "with small batches"}
        row["virtual (s)"] = _seconds(virtual_time(every))
        rows.append(row | {"time, paper (s)": f"{paper[f'{key}_s']:,}"})
    return rows


def _seconds(value: float | None) -> str:
    return DASH if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
