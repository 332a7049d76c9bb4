"""Does the line of a batch's time predict the workers' shares? Table 4."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from repro.experiments.captions import caption
from repro.experiments.design import Exhibit, Results
from repro.experiments.dualbatch.describing import facts, said_of
from repro.experiments.dualbatch.settings import CIFAR, PAPER, K, step_times, workers
from repro.experiments.dualbatch.times import above_0, trials_of
from repro.experiments.dualbatch.trends import epoch_samples, farthest
from repro.experiments.judge import Cases, Estimate, mean_of
from repro.records import Record
from repro.report import DASH


def _first_shares(results: Results) -> list[dict[str, Any]]:
    # Processes solve plans of their own, whose medians would be nobody's.
    record = results.first("times", role=CIFAR)
    return list(record.metrics["shares"]) if record else []


def shares(results: Results) -> list[dict[str, Any]]:
    """Return the shares that the first process measured, each batch size with its samples once."""
    rows = _first_shares(results)
    once = {(row["k"], row["batch"], row["samples"]): row for row in rows if "batch" in row}
    return sorted(once.values(), key=lambda row: (row["k"], row["kind"], row["batch"]))


def table4(results: Results) -> list[dict[str, Any]]:
    """Return the time of a worker's share, measured and predicted."""
    table_rows: list[dict[str, Any]] = [
        {
            "where": "paper, GTX 1080",
            "k": f"{row['k']:.2f}",
            "batch size": row["batch"],
            "samples": row["samples"],
            "measured (s)": f"{row['measured']:.3f}",
            "predicted (s)": f"{row['predicted']:.3f}",
            "error": f"{row['error']:+.1f} %",
            "equation 2": DASH,
            "equation 3": DASH,
        }
        for row in PAPER["table4"]["rows"]
    ]
    for row in shares(results):
        columns = {
            "error": "predicted_s",
            "equation 2": "equation2_s",
            "equation 3": "equation3_s",
        }
        errors = {
            heading: f"{100 * (row['measured_s'] / row[key] - 1):+.1f} %"
            for heading, key in columns.items()
        }
        table_rows.append(
            {
                "where": f"here, {row['kind']}",
                "k": f"{row['k']:.2f}",
                "batch size": row["batch"],
                "samples": row["samples"],
                "measured (s)": f"{row['measured_s']:.4f}",
                "predicted (s)": f"{row['predicted_s']:.4f}",
                **errors,
            }
        )
    rows = _first_shares(results)
    for k, n_small in dict.fromkeys((r["k"], r["n_small"]) for r in rows if "error" in r):
        table_rows.append({"where": f"here, {workers(n_small)}: no plan", "k": f"{k:.2f}"})
    return table_rows


def shares_predicted(results: Results) -> Cases:
    """Compare each share's time with its prediction, by processes where there are several."""
    several = trials_of(results) == "processes"
    errors = _of_processes(results) if several else _of_medians(results)
    names = {f"k = {k:g}": k for k in K}

    def of_k(name: str) -> dict[str, Estimate]:
        return {f"{name}, {row}": e for (k, row), e in errors.items() if k == names[name]}

    return said_of(farthest(names, of_k))


Errors = dict[tuple[float, str], Estimate]  # by k and share


def _of_medians(results: Results) -> Errors:
    """Return times over predictions.

    Only medians are kept of the shares' turns. The spread of one turn is taken to be that of whole
    epochs, which are of the same steps and were timed in turns by the same process.
    """
    record = results.need("times", role=CIFAR)
    epochs = epoch_samples(record, record.config["resolutions"][-1]).values()
    dof = sum(len(seconds) - 1 for seconds in epochs)
    squares = sum(float(np.var(np.log(s), ddof=1)) * (len(s) - 1) for s in epochs)
    of_median = math.sqrt(math.pi / 2 * squares / dof)
    error = of_median / math.sqrt(record.config["repeats"])
    found: Errors = {}
    for row in shares(results):
        above_0(row["predicted_s"])
        log = math.log(row["measured_s"] / row["predicted_s"])
        found[row["k"], f"batch size {row['batch']}, {row['samples']} samples"] = Estimate(
            log, error, dof, record.config["repeats"], log=True, digits=3, trials="rounds"
        )
    return found


def _of_processes(results: Results) -> Errors:
    """Return times over predictions; each process has solved plans for the times it measured."""
    ratios: dict[tuple[float, str], dict[int, float]] = {}  # by process
    records: dict[tuple[float, str], list[Record]] = {}
    for record in results.processes("times", role=CIFAR):
        # Large batches take the same share whatever the number of small ones: it is timed once.
        once: dict[tuple[float, int, int], dict[str, Any]] = {}
        for row in record.metrics["shares"]:
            if "batch" in row:
                once.setdefault((row["k"], row["batch"], row["samples"]), row)
        for row in once.values():
            above_0(row["predicted_s"])
            share = row["k"], f"{row['kind']} batches, n_S = {row['n_small']}"
            ratios.setdefault(share, {})[record.seed] = row["measured_s"] / row["predicted_s"]
            records.setdefault(share, []).append(record)
    errors: Errors = {}
    for share, of in ratios.items():
        cell = results.cell(records[share], partial(_ratio, of))
        errors[share] = mean_of(cell, log=True, digits=3)
    return errors


def _ratio(of: Mapping[int, float], record: Record) -> float:
    return of[record.seed]


TABLE4 = Exhibit(
    long=True,
    runs=lambda profile, chosen: [step_times(profile)],
    table=table4,
    caption=caption(
        "Shares of plans for the times fitted here, predicted as a d + b ⌈d / x⌉; errors of "
        "equations 2 and 3 beside. The paper's own predictions follow from neither.",
        facts,
    ),
    claims={"shares_predicted": shares_predicted},
)
