"""Is a large mini-batch worth having, and is a large image? (Table 1)

Neither uses MBS: this is the paper's motivation.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Results, Run
from repro.experiments.judge import Cases, Estimate, cases
from repro.experiments.mbs.describing import marks, ran_as, side
from repro.experiments.mbs.settings import (
    LARGE_BATCH,
    PAPER,
    SMALL_BATCH,
    TABLE1_EXTENT,
    UNITS,
    best,
    gap,
    training,
)
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.plots import Point

ROLES = ("ResNet-50", "U-Net")
CELLS = (("low", "small"), ("low", "large"), ("high", "small"), ("high", "large"))


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return trainings without MBS: two batch sizes at two resolutions.

    The time of one of them stands in Table 4 or 5.
    """
    extent = TABLE1_EXTENT.get(profile)
    return [
        training(profile, role, chosen, size, None, low, not low and size == LARGE_BATCH, extent)
        for role in ROLES
        for low in (True, False)
        for size in (SMALL_BATCH[profile], LARGE_BATCH)
    ]


def cell(results: Results, role: str, resolution: str, label: str) -> list[Record]:
    """Return the trainings of one cell of the table; `label` is ``small`` or ``large``."""
    undivided = results.select("train", role=role, resolution=resolution, micro_batch=None)
    large = label == "large"
    return [run for run in undivided if (run.config["mini_batch"] == LARGE_BATCH) == large]


def table(results: Results) -> list[dict[str, Any]]:
    """Return the metric by mini-batch and image size."""
    rows = []
    for role in ROLES:
        paper = PAPER["table1"][role]
        for resolution, label in CELLS:
            records = cell(results, role, resolution, label)
            values = best(results, records)
            rows.append(
                {
                    "model": ran_as(role, results.records),
                    "image, paper": f"{paper[f'{resolution}_size']} px",
                    "image, ours": f"{side(records[0].config)} px" if records else DASH,
                    "mini-batch, paper": _PAPERS_SIZES[label],
                    "mini-batch, ours": records[0].config["mini_batch"] if records else DASH,
                    "paper (%)": f"{paper[f'{resolution}_{label}']:.2f}",
                    "ours (%)": Summary.of(values).text(),
                    "n": len(values),
                }
            )
    return rows


# The paper's text leaves the smaller size out; see the note in paper.toml.
_PAPERS_SIZES = {
    "small": f"{PAPER['table1']['small_batch']} (assumed)",
    "large": str(PAPER["table1"]["large_batch"]),
}


def figure(results: Results) -> "Figure":
    """Draw the table as bars."""
    from repro import plots
    from repro.experiments.mbs.drawing import STYLES, WITHOUT, whose

    panels: dict[str, dict[str, list[Point]]] = {}
    groups = {}
    for role in ROLES:
        series: dict[str, list[Point]] = {"paper": [], "ours": []}
        below = []
        paper = PAPER["table1"][role]
        for position, (resolution, label) in enumerate(CELLS):
            records = cell(results, role, resolution, label)
            size = _PAPERS_SIZES[label].partition(" ")[0]
            below.append(f"paper {paper[f'{resolution}_size']} px, {size}")
            series["paper"].append((position, paper[f"{resolution}_{label}"], float("nan")))
            if values := best(results, records):
                summary, config = Summary.of(values), records[0].config
                series["ours"].append((position, summary.mean, summary.std))
                below[-1] += f"\nours {side(config)} px, {config['mini_batch']}"
        title = whose(role, results.select("train", role=role))
        panels[title], groups[title] = series, below
    units = [UNITS["accuracy"], UNITS["iou"]]
    below_all = "image side, mini-batch size"
    return plots.grouped_bars(panels, groups, below_all, units, STYLES[WITHOUT]["color"])


def _gain(results: Results, larger: tuple[str, str], smaller: tuple[str, str]) -> Cases:
    """Compare one cell of the table with another, for both networks."""

    def compare(role: str) -> Estimate:
        first, second = (cell(results, role, *which) for which in (larger, smaller))
        label = ran_as(role, [*first, *second])
        return replace(gap(results, first, second), label=label)

    return cases(ROLES, compare)


def large_mini_batch(results: Results) -> Cases:
    """Compare the two mini-batches at the higher resolution."""
    return _gain(results, ("high", "large"), ("high", "small"))


def high_resolution(results: Results) -> Cases:
    """Compare the two resolutions with the large mini-batch."""
    return _gain(results, ("high", "large"), ("low", "large"))


TABLE1 = Exhibit(
    long=True,
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Best test accuracy or IoU without MBS, by mini-batch and image size; the paper's small "
        "mini-batch is assumed.",
        marks,
    ),
    claims={"large_mini_batch": large_mini_batch, "high_resolution": high_resolution},
)
