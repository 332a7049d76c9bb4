"""The figures of θ-adaptive batch sizes, from records."""

from matplotlib.figure import Figure

from repro import plots
from repro.experiments.adaptive import drawings, projection, reading
from repro.experiments.adaptive.grids import CIFAR, DIV2K, PAPER, PHANTOM, STRATEGIES
from repro.experiments.adaptive.reading import NAMES, curves, trained
from repro.experiments.design import Results

COST, THETA = "training cost", "θ"


def _strategies(results: Results, task: str, name: str) -> dict[str, list[list[float]]]:
    found = {s: trained(results, task, s) for s in (*STRATEGIES, "large", "noise")}
    return {NAMES[s]: curves(records, name) for s, records in found.items() if records}


def _batches(results: Results, task: str, name: str) -> dict[str, list[list[float]]]:
    return {
        f"B = {size}": curves(records, name)
        for size, records in reading.by_batch(results, task).items()
    }


def figure1(results: Results) -> Figure:
    """Return Figure 1: learning curves by batch size."""
    panels = {"EDSR by batch size": _batches(results, DIV2K, "psnr")}
    return plots.epoch_curves(panels, ["PSNR (dB)"], 5.2)


def figure2(results: Results) -> Figure:
    """Return Figure 2: cost and θ by batch size."""
    panels = {name: _batches(results, CIFAR, key) for name, key in
              ((COST, "train_cost"), ("θ by batch size", "theta"))}  # fmt: skip
    return plots.epoch_curves(panels, [COST, THETA])


def figure3(results: Results) -> Figure:
    """Return Figure 3: θ by strategy."""
    panels = {"θ by strategy": _strategies(results, CIFAR, "theta")}
    return plots.epoch_curves(panels, [THETA], 5.2)


def learning(results: Results, task: str) -> Figure:
    """Return Figure 4 or 5: validation PSNR by strategy."""
    panels = {f"{PAPER[task]['title']}, by strategy": _strategies(results, task, "psnr")}
    return plots.epoch_curves(panels, ["PSNR (dB)"], 5.2)


def figure6(results: Results) -> Figure:
    """Return Figure 6: θ by batch size on both restoration tasks."""
    panels = {f"θ, {task}": _batches(results, task, "theta") for task in (DIV2K, PHANTOM)}
    return plots.epoch_curves(panels, [THETA, THETA])


def figure10(results: Results) -> Figure:
    """Return Figure 10: training loss and accuracy by strategy."""
    panels = {
        "training loss": _strategies(results, CIFAR, "train_cost"),
        "validation accuracy": _strategies(results, CIFAR, "accuracy"),
    }
    return plots.epoch_curves(panels, ["training loss", "accuracy (%)"])


def scaling(results: Results, task: str) -> Figure:
    """Return Figure 7, 8 or 11: time and speed-up against the number of nodes."""
    samples = PAPER[task]["samples"]
    here = reading.measured(results).get(task)
    models = {"paper's cluster": projection.fitted_to_paper(task)}
    own = projection.fitted_here(here) if here else None
    if own is not None:
        models["nodes like our processes"] = own
    times: dict[str, list[tuple[float, float]]] = {}
    speedups: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in models}
    for strategy in projection.SCALED:
        label, schedule = NAMES[strategy], projection.paper_schedule(task, strategy)
        nodes = projection.nodes_of(task, strategy)
        base = models["paper's cluster"]
        alone = base.training_time(projection.paper_schedule(task, "best"), samples, 1)
        times[label] = [(n, base.training_time(schedule, samples, n) / alone) for n in nodes]
        for name, model in models.items():
            speedups[name][label] = [(n, model.speedup(schedule, samples, n)) for n in nodes]
    reported = {NAMES[s]: tuple(value) for s, value in PAPER[task]["speedups"].items() if value[0]}
    measured = {}
    if here and own is not None:
        measured = {
            NAMES[s]: (2.0, projection.two_processes(here, task, s)[1]) for s in projection.SCALED
        }
    return drawings.scaling(times, speedups, reported, measured)


def figure9(results: Results) -> Figure:
    """Return Figure 9: where the time of measured steps goes."""
    here = reading.measured(results)
    bars: dict[str, dict[str, tuple[float, float, float]]] = {}
    for task, own in here.items():
        largest = max(step["batch"] for step in own["steps"])
        bars[f"{task}, B = {largest}"] = {
            ("1 process" if step["averaging"] == "none" else
             f"2, {step['averaging'].replace('_', '-')}"):
            (1e3 * step["computation_s"], 1e3 * step["communication_s"], 1e3 * step["blocked_s"])
            for step in own["steps"] if step["batch"] == largest
        }  # fmt: skip
    return drawings.breakdown(bars)


def projected(results: Results) -> Figure:
    """Return Figure 9 on the modelled cluster: shares of time against the number of nodes."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for label, (_, rows) in projection.breakdowns().items():
        lines: dict[str, list[tuple[float, float]]] = {}
        for nodes, row in rows.items():
            for name, value in row.items():
                lines.setdefault(name, []).append((nodes, value))
        panels[f"cost of small batches: {label}"] = lines
    return drawings.shares(panels)


def stable(results: Results) -> Figure:
    """Return gradient norms against the batch size (section III-D)."""
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for record in results.select("norms"):
        if record.status != "ok" or record.seed != 0:
            continue
        panels[record.config["task"]] = {
            f"after {point['epochs']} epochs": list(
                zip(
                    record.metrics["sizes"],
                    point["norms"],
                    [error or 0.0 for error in point["errors"]],
                    strict=True,
                )
            )
            for point in record.metrics["points"]
        }
    return drawings.norms(panels)
