"""The tables of θ-adaptive batch sizes: the paper's values beside ours."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from repro.experiments.adaptive import projection, reading
from repro.experiments.adaptive.grids import CIFAR, PAPER, STRATEGIES, TASKS
from repro.experiments.adaptive.reading import NAMES, final, trained
from repro.experiments.design import Results
from repro.records import Record
from repro.report import DASH, Summary, difference


def _counts(values: Sequence[float]) -> str:
    if not values:
        return DASH
    low, high = min(values), max(values)
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def _range(own: dict[str, Any]) -> str:
    return f"{own['batch']} ~ {own['max_batch']}" if "max_batch" in own else f"{own['batch']}"


def strategies(results: Results, task: str) -> pd.DataFrame:
    """Return Table I, II or III with what came out: all strategies of a task."""
    name, unit = reading.metric(task), reading.unit(task)
    best = trained(results, task, "best")
    before = final(best, name)
    paper_best = PAPER[task]["best"]["value"]
    fewest = reading.updates(best)
    found = []
    for strategy in (*STRATEGIES, "large", "noise"):
        records = trained(results, task, strategy)
        diverged = reading.diverged(results, task, strategy)
        if strategy not in STRATEGIES and not records and not diverged:
            continue
        own = PAPER[task].get(strategy, {})
        value = own.get("value")
        mean = np.mean(reading.updates(records)) if records else np.nan
        row = {
            "strategy": NAMES[strategy],
            "b, paper": _range(own) if own else DASH,
            "b, ours (epochs; seed 0)": reading.sizes(records[0]) if records else DASH,
            "μ, paper": _paper_rate(strategy, own),
            "μ, ours": _rate(records),
            f"{unit}, paper": _value(own),
            f"{unit}": Summary.of(final(records, name)).text(),
            "n": len(records),
            "over best, paper": DASH
            if value is None or strategy == "best"
            else f"{value - paper_best:+.2f}",
            "over best": str(difference(final(records, name), before))
            if records and before and strategy != "best"
            else DASH,
            "updates": _counts(reading.updates(records)),
            "best's over these": f"{np.mean(fewest) / mean:.2f}" if records and best else DASH,
        }
        if task != CIFAR:
            row |= {
                "epochs, paper": own.get("epochs", DASH),
                "epochs": _epochs(records),
            }
        if diverged:
            row["n"] = f"{len(records)}, {diverged} diverged"
        found.append(row)
    return pd.DataFrame(found, dtype=object)


def _paper_rate(strategy: str, own: dict[str, Any]) -> str:
    """Return the rate as the paper's tables print it."""
    if not own:
        return DASH
    if strategy == "linear":
        return f"{own['lr']:g}, {PAPER['warmup_epochs']} warm-up epochs"
    grown = own["lr"] * own.get("max_batch", own["batch"]) / own["batch"]
    return f"{own['lr']:g} ~ {grown:g}" if "max_batch" in own else f"{own['lr']:g}"


def _rate(records: Sequence[Record]) -> str:
    if not records:
        return DASH
    rates = records[0].metrics["lr"]
    if warmup := records[0].config["controller"].get("warmup"):
        return f"{max(rates):g}, {warmup} warm-up epoch{'s' * (warmup > 1)}"
    return f"{rates[0]:g}" if max(rates) == rates[0] else f"{rates[0]:g} ~ {max(rates):g}"


def _value(own: dict[str, Any]) -> str:
    if "value" not in own:
        return DASH
    spread = f" ± {own['std']:.1f}" if "std" in own else ""
    return f"{own['value']:.2f}{spread}"


def _epochs(records: Sequence[Record]) -> str:
    if not records:
        return DASH
    best = _counts([record.metrics["completed"] for record in records])
    return best if all(r.metrics["stopped"] for r in records) else f"{best} (rule not met)"


def fixed_batches(results: Results, task: str) -> pd.DataFrame:
    """Return Figures 1, 2 and 6 in numbers: trainings with one batch size."""
    unit = reading.unit(task)
    found = []
    for size, records in reading.by_batch(results, task).items():
        paper = records[0].config["stands_for"]
        found.append(
            {
                "B, paper": paper,
                "B": size,
                "μ": f"{max(records[0].metrics['lr']):g}",
                "warm-up": "yes" if records[0].config["strategy"] == "linear" else "no",
                f"{unit}, paper": _value(_of_batch(task, paper)),
                unit: Summary.of(final(records, reading.metric(task))).text(),
                "training cost": Summary.of(final(records, "train_cost")).text(4),
                "θ peaks in epoch, paper": PAPER[task]["peak"][0]
                if task == CIFAR and paper in (128, 256)
                else DASH,
                "θ peaks in epoch": _counts([reading.first_peak(r) for r in records]),
                "θ at the end": Summary.of(final(records, "theta")).text(4),
                "updates": _counts(reading.updates(records)),
                "n": len(records),
            }
        )
    return pd.DataFrame(found, dtype=object)


def _of_batch(task: str, size: Any) -> dict[str, Any]:
    for strategy in ("best", "linear"):
        own: dict[str, Any] = PAPER[task][strategy]
        if own["batch"] == size:
            return own
    return {}


def theta_curves(results: Results, tasks: Sequence[str]) -> pd.DataFrame:
    """Return where θ peaks and K is found, for the paper's choice of B_s (Figures 2 and 6)."""
    found = []
    for task in tasks:
        paper = PAPER[task]["peak"]
        for size, records in reading.by_batch(results, task).items():
            found.append(
                {
                    "task": task,
                    "B": size,
                    "θ peaks in epoch, paper": f"{paper[0]} to {paper[1]}"
                    if records[0].config["stands_for"] == PAPER[task]["theta"]["batch"]
                    else DASH,
                    "θ peaks in epoch": _counts([reading.first_peak(r) for r in records]),
                    "K": DASH,
                    "n": len(records),
                }
            )
        records = trained(results, task, "theta")
        known = [r.metrics["interval"][-1] for r in records if r.metrics["interval"][-1]]
        found.append(
            {
                "task": task,
                "B": "θ-adaptive",
                "θ peaks in epoch, paper": f"{paper[0]} to {paper[1]}",
                "θ peaks in epoch": _counts([reading.first_peak(r) for r in records]),
                "K": f"{_counts(known)} (paper {PAPER[task]['interval']})",
                "n": len(records),
            }
        )
    return pd.DataFrame(found, dtype=object)


def after_decay(results: Results) -> pd.DataFrame:
    """Return Figure 3 in numbers: θ at the first decay of the rate and at the end."""
    found = []
    for strategy in (*STRATEGIES, "large", "noise"):
        records = trained(results, CIFAR, strategy)
        if not records:
            continue
        places = [place for r in records if (place := _at_decay(r)) is not None]
        ratios = [after / before for before, after in places]
        found.append(
            {
                "strategy": NAMES[strategy],
                "θ before the decay": Summary.of([before for before, _ in places]).text(4),
                "θ at the end": Summary.of([after for _, after in places]).text(4),
                "rises by the factor": Summary.of(ratios).text(3),
                "accuracy (%)": Summary.of(final(records, "accuracy")).text(),
                "n": len(records),
            }
        )
    return pd.DataFrame(found, dtype=object)


def _at_decay(record: Record) -> tuple[float, float] | None:
    """Return θ at the first decay and at the end; None where the training ended before."""
    theta = record.metrics["theta"]
    decays = record.config["controller"].get("decay_at")
    share = PAPER[CIFAR]["decay_at"][0] / PAPER[CIFAR]["epochs"]
    first = decays[0] if decays else round(share * record.config["epochs"])
    return (theta[first - 1], theta[-1]) if len(theta) > first and theta[first - 1] else None


def rise(record: Record) -> float | None:
    """Return θ at the end over θ at the first decay; None where the training ended before."""
    found = _at_decay(record)
    return found[1] / found[0] if found else None


def stable(results: Results) -> pd.DataFrame:
    """Return gradient norms by batch size, and the maximum stable one (section III-D)."""
    found: list[dict[str, Any]] = []
    for task in TASKS:
        records = [r for r in results.select("norms", task=task) if r.status == "ok"]
        if not records:
            continue
        places = range(len(records[0].metrics["points"]))
        for place in places:
            points = [record.metrics["points"][place] for record in records]
            sizes = records[0].metrics["sizes"]
            means = np.mean([point["norms"] for point in points], 0)
            listed = ", ".join(f"{n}: {mean:.3g}" for n, mean in zip(sizes, means, strict=True))
            found.append(
                {
                    "task": task,
                    "after epochs": points[0]["epochs"],
                    "‖∇w‖ by batch size": listed,
                    "B_s, paper": PAPER[task]["theta"]["batch"],
                    "B_s, paper, at scale": _scaled_start(records[0]),
                    "B_s": _counts([point["stable"] for point in points]),
                    "n": len(points),
                }
            )
    return pd.DataFrame(found, dtype=object)


def _scaled_start(record: Record) -> int:
    task = record.config["task"]
    ratio = record.config["controller"]["batch"] / PAPER[task]["best"]["batch"]
    return round(PAPER[task]["theta"]["batch"] * ratio)


def scaling(results: Results, task: str) -> pd.DataFrame:
    """Return Figure 7, 8 or 11 in numbers: speed-ups, the paper's, modelled and measured."""
    here = reading.measured(results).get(task)
    model = projection.fitted_here(here) if here else None
    found = []
    for strategy in projection.SCALED:
        nodes, value = PAPER[task]["speedups"][strategy]
        low, high = sorted(projection.predicted(task, strategy))
        alone = projection.best_speedup(projection.fitted_to_paper(task), task, strategy)
        row: dict[str, Any] = {
            "strategy": NAMES[strategy],
            "nodes": nodes or f"best of {_listed(projection.nodes_of(task, strategy))}",
            "paper": f"{value:.2f}",
            "modelled from the other two": f"{low:.1f} to {high:.1f}",
            "fitted to all three": f"{alone:.1f}",
            "projected, our machine": DASH,
            "two processes, projected": DASH,
            "two processes, measured": DASH,
        }
        if model is not None:
            most, at = projection.largest_speedup(model, task, strategy)
            row["projected, our machine"] = f"{most:.1f} on {at} node{'s' * (at > 1)}"
        if here:
            said, measured = projection.two_processes(here, task, strategy)
            row["two processes, projected"] = DASH if np.isnan(said) else f"{said:.2f}"
            row["two processes, measured"] = f"{measured:.2f}"
        found.append(row)
    return pd.DataFrame(found, dtype=object)


def _listed(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}"


def breakdown(results: Results) -> pd.DataFrame:
    """Return Figure 9 in numbers: where the time of a step goes."""
    found = []
    for task, own in reading.measured(results).items():
        for step in own["steps"]:
            found.append(
                {
                    "task": task,
                    "averaging": step["averaging"].replace("none", "one process"),
                    "batch size": step["batch"],
                    "processes": step["processes"],
                    "step (ms)": f"{1e3 * step['total_s']:.2f}",
                    "computation (ms)": f"{1e3 * step['computation_s']:.2f}",
                    "communication (ms)": f"{1e3 * step['communication_s']:.2f}",
                    "summation (ms)": f"{1e3 * step['summation_s']:.2f}",
                    "blocked (ms)": f"{1e3 * step['blocked_s']:.2f}",
                }
            )
    return pd.DataFrame(found, dtype=object)


def projected(results: Results) -> pd.DataFrame:
    """Return Figure 9 on the modelled cluster of the paper, by the number of nodes."""
    found = []
    for label, (model, rows) in projection.breakdowns().items():
        for nodes, row in rows.items():
            found.append(
                {
                    "cost of small batches": f"{label}: {model.overhead_s:.2f} samples",
                    "nodes": nodes,
                    **{f"{name} (%)": f"{100 * value:.2f}" for name, value in row.items()},
                }
            )
    return pd.DataFrame(found, dtype=object)


def communications(results: Results, task: str) -> list[tuple[Record, Record]]:
    """Return, for each seed that has both, the best fixed batch's training and θ-adaptive's."""
    best = {r.seed: r for r in trained(results, task, "best")}
    ours = {r.seed: r for r in trained(results, task, "theta")}
    return [(best[seed], ours[seed]) for seed in sorted(best.keys() & ours.keys())]
