"""How large should a chunk be? (the trade-off of section 4)"""

from typing import TYPE_CHECKING, Any

from repro.experiments.design import Chosen, Exhibit, Run, check
from repro.experiments.judge import NotRun
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
from repro.experiments.query import Results
from repro.experiments.view import caption, panel

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
    if OWN not in rows:
        raise NotRun(f"no records of chunks of {OWN} MiB")
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


@check("Smaller chunks lose less inside: the smallest against the paper's")
def smaller_fragments_less(results: Results) -> tuple[bool, str]:
    """Ask it of the bytes lost inside."""
    return _smallest(results, "internal_bytes", "lost inside", -1)


@check("Smaller chunks take longer, for more of them are mapped: the smallest against the paper's")
def smaller_costs_more(results: Results) -> tuple[bool, str]:
    """Ask it of the time of an iteration."""
    return _smallest(results, "time_s", "time", 1)


def _smallest(results: Results, key: str, what: str, sign: int) -> tuple[bool, str]:
    rows = _need(results)
    small = min(rows)
    over = float(rows[small][key] / rows[OWN][key])
    return sign * (over - 1) > 0, f"{what} with chunks of {small} MiB over {OWN} ×{over:.2f}"


BALANCED = 0.05


@check(f"Chunks of {OWN} MiB balance both: no other size is faster by {100 * BALANCED:g} %")
def balanced(results: Results) -> tuple[bool, str]:
    """Ask it of the time of an iteration beside that of the fastest size."""
    rows = _need(results)
    fastest = min(rows, key=lambda mib: float(rows[mib]["time_s"]))
    over = float(rows[OWN]["time_s"] / rows[fastest]["time_s"])
    said = f"time with chunks of {OWN} MiB over the fastest, of {fastest}, ×{over:.2f}"
    return over <= 1 + BALANCED, said


CHUNK_SIZES = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        f"ResNet-50 at {CHUNK_BATCH} images by the size of a chunk: what chunks lose inside at "
        "most, and images/s with what it takes to map them and without.",
        facts,
    ),
    checks=(smaller_fragments_less, smaller_costs_more, balanced),
)
