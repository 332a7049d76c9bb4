"""The tables of what a step costs: time and memory, predicted and measured."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from repro.experiments.design import Results
from repro.experiments.dualbatch import reading
from repro.experiments.dualbatch.grids import CIFAR, IMAGENET, PAPER
from repro.experiments.dualbatch.reading import workers
from repro.report import DASH

MIB = 2**20


def table4(results: Results) -> pd.DataFrame:
    """Return Table 4: the time of a worker's share, measured and predicted."""
    found = [
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
        found.append(
            {
                "where": f"here, {row['kind']}",
                "k": f"{row['k']:.2f}",
                "batch size": row["batch"],
                "samples": row["samples"],
                "measured (s)": f"{row['measured_s']:.4f}",
                "predicted (s)": f"{row['predicted_s']:.4f}",
                "error": _error(row, "predicted_s"),
                "equation 2": _error(row, "equation2_s"),
                "equation 3": _error(row, "equation3_s"),
            }
        )
    rows = reading.measured(results, "times", CIFAR).get("shares", [])
    for k, n_small in dict.fromkeys((r["k"], r["n_small"]) for r in rows if "error" in r):
        found.append({"where": f"here, {workers(n_small)}: no plan", "k": f"{k:.2f}"})
    return pd.DataFrame(found, dtype=object)


def _error(row: dict[str, Any], name: str) -> str:
    return f"{100 * (row['measured_s'] / row[name] - 1):+.1f} %"


def shares(results: Results) -> list[dict[str, Any]]:
    """Return the measured shares, each batch size with its samples once for each k."""
    rows = reading.measured(results, "times", CIFAR).get("shares", [])
    once = {(row["k"], row["batch"], row["samples"]): row for row in rows if "batch" in row}
    return sorted(once.values(), key=lambda row: (row["k"], row["kind"], row["batch"]))


def times_table(results: Results) -> pd.DataFrame:
    """Return the fitted time models, here and of the authors' raw measurements."""
    found = []
    metrics = reading.measured(results, "times", CIFAR)
    for number, fit in enumerate(metrics.get("fits", [])):
        errors = [abs(p["measured_s"] / p["equation2_s"] - 1) for p in metrics["passes"][number]]
        found.append(_fit_row(f"here, {fit['resolution']} px", fit["a"], fit["b"], errors))
    for name, fit in reading.frameworks(results).items():
        errors = [abs(value) for value in fit["plan_errors"].values()]
        row = _fit_row(f"authors' raw data, {name}, GTX 1080, 32 px", fit["a"], fit["b"], errors)
        row["median error"] = f"{100 * fit['median_error']:.1f} % (of all 500)"
        found.append(row)
    inferred = PAPER["inferred"]
    found.append(
        {"where": "gives the paper's Table 2", **_coefficients(inferred["a"], inferred["b"]),
         "largest error": DASH, "median error": DASH}
    )  # fmt: skip
    return pd.DataFrame(found)


def _coefficients(a: float, b: float) -> dict[str, str]:
    return {"a (ms per sample)": f"{1e3 * a:.4f}", "b (ms per step)": f"{1e3 * b:.2f}",
            "b / a (samples)": f"{b / a:.1f}"}  # fmt: skip


def _fit_row(where: str, a: float, b: float, errors: Sequence[float]) -> dict[str, Any]:
    return {
        "where": where,
        **_coefficients(a, b),
        "largest error": f"{100 * max(errors):.1f} %",
        "median error": f"{100 * float(np.median(errors)):.1f} %",
    }


def figure13_table(results: Results) -> pd.DataFrame:
    """Return the memory models and the largest batch sizes that they predict."""
    found = []
    for role, key in ((CIFAR, "cifar"), (IMAGENET, "imagenet")):
        paper = PAPER["figure13"][key]
        metrics = reading.measured(results, "memory", role)
        config = reading.config_of(results, "memory", role)
        row: dict[str, Any] = {
            "data": f"{role}-100" if role == CIFAR else role,
            "pixels, paper": paper["resolution"],
            "pixels": config.get("resolution"),
            "largest, paper's prediction": f"{paper['predicted_max']:,}",
            "error, paper": f"{paper['error']:.1f} %",
        }
        if metrics:
            most = metrics["measured_max"]
            error = f"{100 * (metrics['predicted_max'] / most - 1):+.1f} %" if most else DASH
            row |= {
                "parameters etc. (MiB)": f"{metrics['fixed_bytes'] / MIB:,.1f}",
                "a sample (MiB)": f"{metrics['bytes_per_sample'] / MIB:,.3f}",
                "limit (MiB)": f"{metrics['limit_bytes'] / MIB:,.0f}",
                "largest, predicted": f"{metrics['predicted_max']:,}",
                "largest, measured": f"{metrics['measured_max']:,}",
                "error": error,
            }
        found.append(row)
    return pd.DataFrame(found, dtype=object)


def table10(results: Results) -> pd.DataFrame:
    """Return Table 10: ImageNet's settings, and the time model at its resolutions, at scale."""
    metrics = reading.measured(results, "times", IMAGENET)
    config = reading.config_of(results, "times", IMAGENET)
    part = PAPER["table6"]["imagenet"]
    found = []
    for number, side in enumerate(part["resolutions"]):
        row: dict[str, Any] = {
            "resolution, paper": side,
            "B_L, paper": part["large_batches"][number],
            "B_S, paper (n_S = 1 to 4)": reading.listed(
                [batches[number] for batches in part["small_batches"]]
            ),
            "b / a, inferred": f"{PAPER['inferred'][f'ratio_{side}']:.1f}",
        }
        if metrics:
            fit = metrics["fits"][number]
            row |= {
                "resolution": fit["resolution"],
                "B_L": config["large_batches"][number],
                **_coefficients(fit["a"], fit["b"]),
                "an epoch over the highest": _over_highest(metrics, number),
            }
        found.append(row)
    return pd.DataFrame(found, dtype=object)


def _over_highest(metrics: dict[str, Any], number: int) -> str:
    times = [metrics["epoch_s"][side] for side in sorted(metrics["epoch_s"], key=int)]
    return f"{times[number] / times[-1]:.2f}"
