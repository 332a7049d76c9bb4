"""The tables of dual-batch learning: the paper's values beside ours."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from repro.experiments.design import Results
from repro.experiments.dualbatch import costs, reading
from repro.experiments.dualbatch.grids import PAPER, WORKERS, K
from repro.experiments.dualbatch.reading import final, section51, section52, workers
from repro.records import Record
from repro.report import DASH, Summary, difference

FACTORS = {"linear": "d_S/d_L", "sqrt": "√(d_S/d_L)", "none": "none"}


def table2(results: Results) -> pd.DataFrame:
    """Return Table 2, solved."""
    ours = {(row["k"], row["n_small"]): row for row in reading.rows(results, "table2")}
    raw = reading.frameworks(results).get("TensorFlow", {}).get("table2", [])
    found = []
    for number, paper in enumerate(PAPER["table2"]["rows"]):
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
                "B_S, raw data": raw[number] if raw else None,
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
                    "B_L": reading.listed(part["large_batches"]),
                    "B_S, paper": reading.listed(paper) if paper else DASH,
                    "B_S": reading.listed([row["small_batch"] for row in own]) if n_small else DASH,
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
    # B_L is the size that a plan was solved for, also where no worker has it.
    shares = name.replace("batch", "samples")
    values = [plan[name] if plan[shares] else None for plan in records[0].metrics["plans"]]
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
    found = [record.metrics["virtual_time_s"] for record in records]
    times = [values[-1] for values in found if values]  # none on a cluster
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


def table10_trainings(results: Results) -> pd.DataFrame:
    """Return Table 10's settings, and below them its trainings."""
    trained = results.select("train", setting="section 5.2.3")
    settings = costs.table10(results)
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
