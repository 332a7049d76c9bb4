"""The tables of dual-batch learning: the paper's values beside ours."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from repro.experiments.design import Results
from repro.experiments.dualbatch import reading
from repro.experiments.dualbatch.grids import CIFAR, IMAGENET, PAPER, WORKERS, K
from repro.experiments.dualbatch.reading import final, section51, section52, workers
from repro.records import Record
from repro.report import DASH, Summary, difference

FACTORS = {"linear": "d_S/d_L", "sqrt": "√(d_S/d_L)", "none": "none"}
MIB = 2**20


def table2(results: Results) -> pd.DataFrame:
    """Return Table 2, solved."""
    ours = {(row["k"], row["n_small"]): row for row in reading.rows(results, "table2")}
    found = []
    for paper in PAPER["table2"]["rows"]:
        own = ours.get((paper["k"], paper["n_small"]), {})
        both = paper["n_small"] < WORKERS
        found.append(
            {
                "k": f"{paper['k']:.2f}",
                "(n_S, n_L)": workers(paper["n_small"]),
                "B_S, paper": paper["small_batch"],
                "B_S": own.get("small_batch"),
                "d_S, paper": paper["small_samples"],
                "d_S": own.get("small_samples"),
                "d_L, paper": paper.get("large_samples"),
                "d_L": own.get("large_samples") if both else None,
                "d_S/d_L, paper": f"{paper['factor']:.3f}" if both else None,
                "d_S/d_L": f"{own['factor']:.3f}" if both and own else None,
            }
        )
    return pd.DataFrame(found, dtype=object)


def table6(results: Results) -> pd.DataFrame:
    """Return Table 6, solved: batch sizes at every resolution."""
    found = []
    for name, label in (("cifar", "CIFAR-100"), ("imagenet", "ImageNet")):
        part = PAPER["table6"][name]
        sides = part["resolutions"]
        for n_small in range(WORKERS + 1):
            own = [
                row
                for row in reading.rows(results, "table6")
                if row["n_small"] == n_small and row["resolution"] in sides
            ]
            paper = part["small_batches"][n_small - 1] if n_small else None
            shares = part["small_samples"][n_small - 1] if n_small else part["baseline_samples"]
            found.append(
                {
                    "data": f"{label}, {', '.join(map(str, sides))} px",
                    "n_S": n_small,
                    "B_L": _listed(part["large_batches"]),
                    "B_S, paper": _listed(paper) if paper else DASH,
                    "B_S": _listed([row["small_batch"] for row in own]) if n_small else DASH,
                    "d_S, d_L, paper": _shares(n_small, shares, part["large_samples"]),
                    "d_S, d_L": _shares(
                        n_small,
                        own[0]["small_samples"] or own[0]["large_samples"],
                        own[0]["large_samples"],
                    )
                    if own
                    else DASH,
                }
            )
    return pd.DataFrame(found)


def _listed(values: Sequence[int | None]) -> str:
    return ", ".join(f"{value:,}" for value in values if value is not None)


def _shares(n_small: int, own: int, large: int) -> str:
    if n_small == 0:
        return f"–, {own:,}"
    return f"{own:,}, {large:,}" if n_small < WORKERS else f"{own:,}, –"


def schedule_table(results: Results, table: str) -> pd.DataFrame:
    """Return Table 7 or 9: the setting of every epoch, for one small-batch worker."""
    part = PAPER["table6"]["cifar" if table == "table7" else "imagenet"]
    count = len(part["resolutions"])
    stages, spans = PAPER[table]["stages"], PAPER[table]["epochs"]
    found = []
    for row in reading.rows(results, table):
        hybrid = row["scheme"] == "hybrid"
        place = row["sub_stage"] - 1 if hybrid else count - 1
        first = (row["stage"] - 1) * count
        last = first + count - 1
        span = spans[first + place] if hybrid else [spans[first][0], spans[last][1]]
        found.append(
            {
                "scheme": row["scheme"],
                "stage": row["stage"],
                "sub-stage": row["sub_stage"] if hybrid else DASH,
                "epochs, paper": f"{span[0]}-{span[1]}",
                "epochs": f"{row['first']}-{row['last']}",
                "rate, paper": f"{stages[row['stage'] - 1][1]:g}",
                "rate": f"{row['lr']:g}",
                "B_S, B_L, paper": f"{part['small_batches'][0][place]}, "
                f"{part['large_batches'][place]}",
                "B_S, B_L": f"{row['small_batch']}, {row['large_batch']}",
                "resolution, paper": part["resolutions"][place],
                "resolution": row["resolution"],
                "dropout, paper": f"{PAPER[table]['dropouts'][place]:g}",
                "dropout": f"{row['dropout']:g}",
            }
        )
    return pd.DataFrame(found)


def _gap(ours: Sequence[float], others: Sequence[float]) -> str:
    return str(difference(ours, others)) if ours and others else DASH


def _plan(records: Sequence[Record], name: str) -> str:
    if not records:
        return DASH
    values = [plan[name] for plan in records[0].metrics["plans"]]
    return ", ".join(DASH if value is None else f"{value:,}" for value in values)


def _outcome(records: Sequence[Record], paper: dict[str, float]) -> dict[str, Any]:
    accuracy = final(records, "accuracy")
    return {
        "loss, paper": f"{paper['loss']:.3f}",
        "loss": Summary.of(final(records, "test_loss")).text(3),
        "accuracy, paper (%)": f"{paper['accuracy']:.1f}",
        "accuracy (%)": Summary.of(accuracy).text(),
        "n": len(accuracy),
    }


def table3(results: Results) -> pd.DataFrame:
    """Return Table 3: final test loss and accuracy by model-update factor."""
    found = []
    for paper in PAPER["table3"]:
        n_small = paper["n_small"]
        plain = final(section51(results, K[1], n_small, "none"), "accuracy")
        for scheme, label in FACTORS.items():
            records = section51(results, K[1], n_small, scheme)
            gain = paper[scheme]["accuracy"] - paper["none"]["accuracy"]
            other = scheme != "none"
            ratio = records[0].metrics["plans"][-1]["factor"] if records else None
            value = {"linear": ratio, "sqrt": ratio and ratio**0.5, "none": 1.0}[scheme]
            found.append(
                {
                    "(n_S, n_L)": workers(n_small),
                    "factor": label,
                    "value, paper": f"{paper[scheme]['value']:.3f}",
                    "value": f"{value:.3f}" if value and records else DASH,
                    **_outcome(records, paper[scheme]),
                    "over none, paper": f"{gain:+.1f}" if other else DASH,
                    "over none": _gap(final(records, "accuracy"), plain) if other else DASH,
                }
            )
    return pd.DataFrame(found)


def table5(results: Results) -> pd.DataFrame:
    """Return Table 5: final test loss and accuracy by the number of small-batch workers."""
    base = section51(results, 1.0, 0)
    before = final(base, "accuracy")
    virtual = _virtual(base)
    paper = PAPER["table5"]["baseline"]
    rows = [(1.0, 0, base, paper)]
    for row in PAPER["table5"]["rows"]:
        rows.append((row["k"], row["n_small"], section51(results, row["k"], row["n_small"]), row))
    return pd.DataFrame(
        [
            {
                "k": f"{k:.2f}",
                "(n_S, n_L)": workers(n_small),
                "B_S": _plan(records, "small_batch"),
                "B_L": _plan(records, "large_batch"),
                **_outcome(records, own),
                "gain, paper": f"{own['accuracy'] - paper['accuracy']:+.1f}" if n_small else DASH,
                "gain": _gap(final(records, "accuracy"), before) if n_small else DASH,
                "virtual time over baseline": _ratio(_virtual(records), virtual),
                "wall (s)": _wall(records),
            }
            for k, n_small, records, own in rows
        ]
    )


def _virtual(records: Sequence[Record]) -> float | None:
    times = [record.metrics["virtual_time_s"][-1] for record in records]
    return float(np.mean(times)) if times else None


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.3f}" if value and base else DASH


def _wall(records: Sequence[Record]) -> str:
    return Summary.of([record.metrics["wall_time_s"][-1] for record in records]).text()


def table8(results: Results) -> pd.DataFrame:
    """Return Table 8: dual-batch learning against the hybrid scheme."""
    paper = PAPER["table8"]
    base = final(section52(results, 0, "dual-batch"), "accuracy")
    found = []
    for scheme, key in (("dual-batch", "dual_batch"), ("hybrid", "hybrid")):
        for n_small, own in enumerate(paper[key]):
            records = section52(results, n_small, scheme)
            gain = own["accuracy"] - paper["dual_batch"][0]["accuracy"]
            first = scheme == "dual-batch" and n_small == 0
            found.append(
                {
                    "scheme": scheme,
                    "n_S": n_small,
                    "B_S": _plan(records, "small_batch"),
                    "B_L": _plan(records, "large_batch"),
                    **_outcome(records, own),
                    "gain, paper": DASH if first else f"{gain:+.1f}",
                    "gain": DASH if first else _gap(final(records, "accuracy"), base),
                    "virtual (s)": _seconds(_virtual(records)),
                    "wall (s)": _wall(records),
                }
            )
    return pd.DataFrame(found)


def _seconds(value: float | None) -> str:
    return DASH if value is None else f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


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
                "error": f"{100 * (row['measured_s'] / row['predicted_s'] - 1):+.1f} %",
            }
        )
    return pd.DataFrame(found)


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
            error = metrics["predicted_max"] / metrics["measured_max"] - 1
            row |= {
                "parameters etc. (MiB)": f"{metrics['fixed_bytes'] / MIB:,.1f}",
                "a sample (MiB)": f"{metrics['bytes_per_sample'] / MIB:,.3f}",
                "limit (MiB)": f"{metrics['limit_bytes'] / MIB:,.0f}",
                "largest, predicted": f"{metrics['predicted_max']:,}",
                "largest, measured": f"{metrics['measured_max']:,}",
                "error": f"{100 * error:+.1f} %",
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
            "B_S, paper (n_S = 1 to 4)": _listed(
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


def table10_trainings(results: Results) -> pd.DataFrame:
    """Return Table 10's settings, and below them its trainings."""
    trained = results.select("train", setting="section 5.2.3")
    settings = table10(results)
    if not trained:
        return settings
    rows = []
    for scheme, key in (("dual-batch", "dual_batch"), ("hybrid", "hybrid")):
        for n_small, own in enumerate(PAPER["table10"][key]):
            same = [r for r in trained if r.config["scheme"] == scheme and r.status == "ok"]
            records = [r for r in same if r.config["n_small"] == n_small]
            rows.append({"scheme": scheme, "n_S": n_small, **_outcome(records, own)})
    return pd.concat([settings, pd.DataFrame(rows)]).astype(object)


def engines(results: Results) -> pd.DataFrame:
    """Return one training by both engines."""
    found = []
    for engine in ("local", "ray"):
        for record in results.select("train", workers=2, engine=engine):
            if record.status != "ok":
                found.append({"engine": engine, "accuracy (%)": record.status})
                continue
            metrics = record.metrics
            stale = metrics["staleness"]
            found.append(
                {
                    "engine": engine,
                    "accuracy (%)": f"{metrics['accuracy'][-1]:.2f}",
                    "commits": metrics["commits"],
                    "staleness, mean": f"{np.mean(stale):.2f}",
                    "staleness, most": max(stale),
                    "wall (s)": f"{metrics['wall_time_s'][-1]:.2f}",
                    "same weights in the same order": {True: "yes", False: "NO", None: DASH}[
                        metrics["same_weights"]
                    ],
                }
            )
    return pd.DataFrame(found)
