"""What the records of dual-batch learning say, as plain numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from repro.experiments.design import Results
from repro.experiments.dualbatch.grids import WORKERS
from repro.records import Record

SECTION_5_1, SECTION_5_2 = "section 5.1", "section 5.2"


def section51(results: Results, k: float, n_small: int, factor: str = "linear") -> list[Record]:
    """Return the trainings of section 5.1 that ended; the baseline has n_small = 0, whatever k."""
    found = results.select(
        "train", setting=SECTION_5_1, n_small=n_small, k=k if n_small else 1.0, factor=factor
    )
    return [record for record in found if record.status == "ok"]


def section52(results: Results, n_small: int, scheme: str) -> list[Record]:
    """Return the trainings of section 5.2.2 that ended: ``dual-batch`` or ``hybrid``."""
    found = results.select("train", setting=SECTION_5_2, n_small=n_small, scheme=scheme)
    return [record for record in found if record.status == "ok"]


def final(records: Sequence[Record], name: str) -> list[float]:
    """Return a metric after the last epoch, one value for each seed."""
    return [record.metrics[name][-1] for record in records]


def rows(results: Results, table: str) -> list[dict[str, Any]]:
    """Return what was solved for a table."""
    found = results.select("solve", table=table)
    return found[0].metrics["rows"] if found and found[0].status == "ok" else []


def measured(results: Results, experiment: str, role: str) -> dict[str, Any]:
    """Return the metrics of a measurement, empty where there is none."""
    found = [r for r in results.select(experiment, role=role) if r.status == "ok"]
    return found[0].metrics if found else {}


def config_of(results: Results, experiment: str, role: str) -> dict[str, Any]:
    """Return the configuration of a measurement, empty where there is none."""
    found = results.select(experiment, role=role)
    return found[0].config if found else {}


def frameworks(results: Results) -> dict[str, dict[str, Any]]:
    """Return what was fitted to the authors' raw measurements, by framework."""
    found = [r for r in results.select("published") if r.status == "ok"]
    return found[0].metrics["frameworks"] if found else {}


def workers(n_small: int) -> str:
    """Return the numbers of workers as the paper has them."""
    return f"({n_small}, {WORKERS - n_small})"


def saved_share(metrics: dict[str, Any]) -> float | None:
    """Return the share of time that cycling the resolutions saves, from epochs timed in turns.

    Each resolution has as many epochs; without cycling all are at the highest.
    """
    times = metrics.get("epoch_s")
    if not times:
        return None
    seconds = [times[side] for side in sorted(times, key=int)]
    return 1 - float(np.mean(seconds)) / seconds[-1]


def wall_saving(results: Results, n_small: int) -> list[float]:
    """Return the share of wall time that the hybrid scheme saves, one value for each seed."""
    ours = {r.seed: r for r in section52(results, n_small, "hybrid")}
    plain = {r.seed: r for r in section52(results, n_small, "dual-batch")}
    return [
        1 - ours[s].metrics["wall_time_s"][-1] / plain[s].metrics["wall_time_s"][-1]
        for s in sorted(ours.keys() & plain.keys())
    ]


def listed(values: Sequence[int | None]) -> str:
    """Return numbers as a list in words."""
    return ", ".join(f"{value:,}" for value in values if value is not None)
