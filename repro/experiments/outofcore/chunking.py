"""How large should a chunk be? (the trade-off of section 4)"""

from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption, panel
from repro.experiments.design import Chosen, Exhibit, Expectation, Results, Run, claim
from repro.experiments.intervals import NotRun, exactly
from repro.experiments.judging import Verdict, certain, combine, direction, equivalence
from repro.experiments.outofcore.panels import no_records, set_sizes, styles
from repro.experiments.outofcore.settings import (
    CHUNK_BATCH,
    CHUNKS,
    GIB,
    LABELS,
    PAPER,
    RESNET,
    chunk_sizes,
    facts,
    gib,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWN = PAPER["claims"]["chunk_mib"]


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the one analysis, of all sizes."""
    return [chunk_sizes(profile)]


def _rows(results: Results) -> dict[int, dict[str, Any]]:
    """Return what a plan takes by the size of a chunk in MiB, ascending."""
    record = results.first("chunk_sizes", role=RESNET)
    rows = record.metrics["rows"] if record is not None else {}
    return {int(mib): rows[mib] for mib in sorted(rows, key=int)}


def _need(results: Results) -> dict[int, dict[str, Any]]:
    rows = _rows(results)
    if not rows:
        raise NotRun("no records")
    return rows


def table(results: Results) -> list[dict[str, Any]]:
    """Return budget, loss, mapping and images/s by the size of a chunk."""
    return [
        {
            "chunk": f"{mib} MiB" + " (the paper's)" * (mib == OWN),
            "budget": gib(row["budget_bytes"]),
            "lost inside, at most": gib(row["internal_bytes"]),
            "chunks mapped and unmapped": f"{row['map_operations']:,}",
            "images/s, mapping free": f"{CHUNK_BATCH / row['unmapped_s']:.0f}",
            "images/s": f"{CHUNK_BATCH / row['time_s']:.0f}",
        }
        for mib, row in _rows(results).items()
    ]


def figure(results: Results) -> "Figure":
    """Draw what is lost inside, and the speed with mapping and without."""
    from repro.plots import PAPER as GREY
    from repro.plots import legend_below, new_axes

    rows = _rows(results)
    figure, axes = new_axes(1, 2, 9.4, 3.5)
    lost, speed = axes[0]
    whose = panel(RESNET, data="SIMULATED V100")
    look = styles()[LABELS[CHUNKS]]
    free = {"color": "#5f6b7a", "marker": "h"}
    inside = [row["internal_bytes"] / GIB for row in rows.values()]
    lost.plot(list(rows), inside, ms=6, label="with chunks", **look)
    lost.set_title(f"lost inside chunks, {CHUNK_BATCH} images\n{whose}", fontsize=9)
    lost.set_ylabel("memory (GiB)")
    for key, label, drawn in (
        ("unmapped_s", "with chunks, were mapping free", free),
        ("time_s", "with chunks", look),
    ):
        rates = [CHUNK_BATCH / row[key] for row in rows.values()]
        speed.plot(list(rows), rates, ms=6, label=label, **drawn)
    speed.set_title(f"speed, {CHUNK_BATCH} images\n{whose}", fontsize=9)
    speed.set_ylabel("images/s")
    for axis in (lost, speed):
        axis.axvline(OWN, color=GREY, ls="--", lw=1.2, label="the paper's chunk")
        axis.set_xlabel("size of a chunk (MiB)")
        if rows:
            set_sizes(axis, rows)
        else:
            no_records(axis)
        axis.set_ylim(bottom=0)
        axis.margins(y=0.1)
    legend_below(figure, 3)
    return figure


@claim(
    "smaller_fragments_less",
    "Smaller chunks lose less inside: the smallest against the paper's",
    "Section 4",
    "simulated",
)
def smaller_fragments_less(results: Results, expected: Expectation) -> Verdict:
    """Judge the bytes lost inside."""
    rows = _need(results)
    small = min(rows)
    gap = exactly(rows[small]["internal_bytes"] / rows[OWN]["internal_bytes"], log=True)
    name = f"lost inside chunks of {small} MiB over those of {OWN}"
    return combine([direction(name, gap, sign=expected.sign)])


@claim(
    "smaller_costs_more",
    "Smaller chunks take longer, for more of them are mapped: the smallest against the paper's",
    "Section 4",
    "simulated",
)
def smaller_costs_more(results: Results, expected: Expectation) -> Verdict:
    """Judge the time of an iteration."""
    rows = _need(results)
    small = min(rows)
    gap = exactly(rows[small]["time_s"] / rows[OWN]["time_s"], log=True)
    name = f"time with chunks of {small} MiB over {OWN}"
    return combine([direction(name, gap, sign=expected.sign)])


@claim(
    "balanced",
    f"Chunks of {OWN} MiB balance both: no other size is clearly faster",
    "Section 4",
    "simulated",
)
def balanced(results: Results, expected: Expectation) -> Verdict:
    """Judge the time of an iteration against that of the fastest size."""
    rows = _need(results)
    if OWN not in rows:
        return combine([certain(f"chunks of {OWN} MiB serve no budget", False)])
    fastest = min(rows, key=lambda mib: float(rows[mib]["time_s"]))
    gap = exactly(rows[OWN]["time_s"] / rows[fastest]["time_s"], log=True)
    name = f"time with chunks of {OWN} MiB over the fastest, of {fastest}"
    return combine([equivalence(name, gap, expected.allowed(), side=1)])


CHUNK_SIZES = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        f"ResNet-50 at {CHUNK_BATCH} images by the size of a chunk: what chunks lose inside at "
        "most, and images/s with what it takes to map them and without.",
        facts,
    ),
    claims=(smaller_fragments_less, smaller_costs_more, balanced),
)
