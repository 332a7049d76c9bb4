"""Is a large mini-batch worth having, and is a large image? (Table 1)

Neither uses MBS: this is the paper's motivation.
"""

from typing import TYPE_CHECKING, Any

from repro.experiments.judge import Cases, cases
from repro.experiments.mbs.cells import (
    UNITS,
    WITHOUT,
    artefact,
    best,
    gap,
    ran_as,
    side,
    styles,
    whose,
)
from repro.experiments.mbs.runs import LARGE_BATCH, PAPER, resolutions
from repro.experiments.query import Results
from repro.records import Record
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROLES = ("ResNet-50", "U-Net")
CELLS = (("low", "small"), ("low", "large"), ("high", "small"), ("high", "large"))
# The paper's text leaves the smaller size out; see the note in paper.toml.
_PAPERS_SIZES = {size: PAPER["table1"][f"{size}_batch"] for size in ("small", "large")}


def cell(results: Results, role: str, resolution: str, size: str) -> list[Record]:
    """Return the trainings of one cell of the table; `size` is ``small`` or ``large``."""
    undivided = results.select("train", role=role, resolution=resolution, micro_batch=None)
    return [r for r in undivided if (r.config["mini_batch"] == LARGE_BATCH) == (size == "large")]


def table(results: Results) -> list[dict[str, Any]]:
    """The metric by mini-batch and image size."""
    rows = []
    for role in ROLES:
        paper = PAPER["table1"][role]
        for resolution, size in CELLS:
            records = cell(results, role, resolution, size)
            values = best(results, records)
            assumed = " (assumed)" * (size == "small")
            rows.append(
                {
                    "model": ran_as(role, results.records),
                    "image, paper": f"{paper[f'{resolution}_size']} px",
                    "image, ours": f"{side(records[0].config)} px" if records else DASH,
                    "mini-batch, paper": f"{_PAPERS_SIZES[size]}{assumed}",
                    "mini-batch, ours": records[0].config["mini_batch"] if records else DASH,
                    "paper (%)": f"{paper[f'{resolution}_{size}']:.2f}",
                    "ours (%)": Summary.of(values).text(),
                    "n": len(values),
                }
            )
    return rows


def figure(results: Results) -> "Figure":
    """The table as bars."""
    from repro import plots

    panels: dict[str, dict[str, list[plots.Point]]] = {}
    groups = {}
    for role in ROLES:
        series: dict[str, list[plots.Point]] = {"paper": [], "ours": []}
        below = []
        paper = PAPER["table1"][role]
        for position, (resolution, size) in enumerate(CELLS):
            records = cell(results, role, resolution, size)
            below.append(f"paper {paper[f'{resolution}_size']} px, {_PAPERS_SIZES[size]}")
            series["paper"].append((position, paper[f"{resolution}_{size}"], float("nan")))
            if values := best(results, records):
                summary, config = Summary.of(values), records[0].config
                series["ours"].append((position, summary.mean, summary.std))
                below[-1] += f"\nours {side(config)} px, {config['mini_batch']}"
        title = whose(role, results.select("train", role=role))
        panels[title], groups[title] = series, below
    units = [UNITS["accuracy"], UNITS["iou"]]
    below_all = "image side, mini-batch size"
    return plots.grouped_bars(panels, groups, below_all, units, styles()[WITHOUT]["color"])


def _gain(results: Results, larger: tuple[str, str], smaller: tuple[str, str]) -> Cases:
    return cases(
        ROLES,
        lambda role: gap(results, cell(results, role, *larger), cell(results, role, *smaller)),
    )


def large_mini_batch(results: Results) -> Cases:
    """Large less small mini-batch, at the higher resolution."""
    return _gain(results, ("high", "large"), ("high", "small"))


def high_resolution(results: Results) -> Cases:
    """Higher less lower resolution, with the large mini-batch."""
    return _gain(results, ("high", "large"), ("low", "large"))


TABLE1 = artefact(
    "table1",
    plan=resolutions,
    rows=table,
    draw=figure,
    claims={"large_mini_batch": large_mini_batch, "high_resolution": high_resolution},
)
