"""The figures of dual-batch learning, from records."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from repro import plots
from repro.experiments.design import Results
from repro.experiments.dualbatch import drawings, reading
from repro.experiments.dualbatch.costs import MIB
from repro.experiments.dualbatch.grids import CIFAR, IMAGENET, PAPER, WORKERS, K
from repro.experiments.dualbatch.reading import section51, section52, workers
from repro.experiments.dualbatch.tables import FACTORS
from repro.measure import MemoryModel, TimeModel
from repro.records import Record

LOSS, ACCURACY = "test loss", "test accuracy (%)"
Curves = dict[str, list[list[float]]]


def _lines(groups: dict[str, Sequence[Record]], metric: str) -> Curves:
    return {label: [r.metrics[metric] for r in records] for label, records in groups.items()}


def _loss_and_accuracy(groups: dict[str, dict[str, Sequence[Record]]]) -> Figure:
    panels: dict[str, Curves] = {}
    ylabels = []
    for title, records in groups.items():
        for metric, ylabel in (("test_loss", LOSS), ("accuracy", ACCURACY)):
            panels[f"{title}: {ylabel.split(' (')[0]}"] = _lines(records, metric)
            ylabels.append(ylabel)
    return plots.epoch_curves(panels, ylabels)


def figures5_6(results: Results) -> Figure:
    """Return Figures 5 and 6: loss and accuracy by model-update factor."""
    groups: dict[str, dict[str, Sequence[Record]]] = {}
    for paper in PAPER["table3"]:
        n = paper["n_small"]
        groups[f"(n_S, n_L) = {workers(n)}"] = {
            f"factor {label}": section51(results, K[1], n, scheme)
            for scheme, label in FACTORS.items()
        }
    return _loss_and_accuracy(groups)


def figures7_10(results: Results) -> Figure:
    """Return Figures 7 to 10: loss and accuracy by the number of small-batch workers."""
    groups: dict[str, dict[str, Sequence[Record]]] = {}
    for k in K:
        groups[f"k = {k:g}"] = {
            f"(n_S, n_L) = {workers(n)}": section51(results, k, n) for n in range(WORKERS + 1)
        }
    return _loss_and_accuracy(groups)


def figures11_12(results: Results) -> Figure:
    """Return Figures 11 and 12: dual-batch learning and the hybrid scheme."""
    groups: dict[str, dict[str, Sequence[Record]]] = {}
    for scheme in ("dual-batch", "hybrid"):
        groups[scheme] = {f"n_S = {n}": section52(results, n, scheme) for n in range(WORKERS + 1)}
    return _loss_and_accuracy(groups)


def figure3(results: Results) -> Figure:
    """Return Figure 3: the time of a batch against its size, here and in the authors' data."""
    panels = {}
    metrics = reading.measured(results, "times", CIFAR)
    sizes = reading.config_of(results, "times", CIFAR).get("batch_sizes", [])
    for fit in metrics.get("fits", []):
        model = TimeModel(fit["a"], fit["b"])
        line = [model.predict(n) for n in sizes]
        panels[f"here, {fit['resolution']} px"] = [(sizes, fit["seconds"], line)]
    for name, fit in reading.frameworks(results).items():
        line = [fit["a"] * n + fit["b"] for n in fit["batches"]]
        panels[f"GTX 1080, {name}"] = [(fit["batches"], fit["per_batch_s"], line)]
    return drawings.fits(
        panels, "time of a batch (ms)", [""], ("measured", "fitted a x + b"), unit=1e3
    )


def figure4(results: Results) -> Figure:
    """Return Figure 4: the time of an epoch, measured and by equation 2."""
    panels = {}
    metrics = reading.measured(results, "times", CIFAR)
    for fit, passes in zip(metrics.get("fits", []), metrics.get("passes", []), strict=True):
        columns = [[p[key] for p in passes] for key in ("batch", "measured_s", "equation2_s")]
        panels[f"here, {fit['resolution']} px"] = [(columns[0], columns[1], columns[2])]
    for name, fit in reading.frameworks(results).items():
        panels[f"GTX 1080, {name}"] = [(fit["batches"], fit["epoch_s"], fit["predicted_s"])]
    return drawings.fits(
        panels, "time of an epoch (s)", [""], ("measured", "predicted by equation 2")
    )


def figure13(results: Results) -> Figure:
    """Return Figure 13: measured and predicted memory."""
    panels = {}
    for role in (CIFAR, IMAGENET):
        metrics = reading.measured(results, "memory", role)
        if not metrics:
            continue
        model = MemoryModel(metrics["fixed_bytes"], metrics["bytes_per_sample"])
        sizes = [*metrics["batch_sizes"], *(n for n, _ in metrics["beyond"])]
        peaks = [*metrics["peaks"], *(peak for _, peak in metrics["beyond"])]
        side = reading.config_of(results, "memory", role)["resolution"]
        panels[f"{role}, {side} px"] = [(sizes, peaks, [model.predict(n) for n in sizes])]
    return drawings.fits(
        panels, "peak memory (MiB)", [""],
        ("measured", "line fitted to the eight smallest"), unit=1 / MIB,
    )  # fmt: skip
