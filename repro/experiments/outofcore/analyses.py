"""Where do the paper's figures come from, and how large should a chunk be? (our analyses)

At the rate of the link as we read it, and with the bytes of torch's operations, no schedule reaches
the paper's rows of Table 1 beyond 512 images. The first analysis asks how much faster the link
would have to be, or how many bytes fewer the variables would have to have; the second is of section
4's trade-off.
"""

from typing import TYPE_CHECKING, Any

from repro.experiments.outofcore import runs
from repro.experiments.outofcore.panels import Line, Panel, draw
from repro.experiments.outofcore.points import artefact, by_batch
from repro.experiments.query import Results
from repro.experiments.view import panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IN_CORE_RATE = max(runs.published(runs.IN_CORE).values())  # the paper's images/s
BATCHES, CHUNK_BATCH = runs.SIMULATION["link_batches"], runs.SIMULATION["chunk_batch"]
_WHOSE = panel(runs.RESNET, data="simulated, V100")
# By method, the name of its seconds in a record, and its own in a table.
_METHODS = {"bound": ("bound_s", runs.LABELS["bound"]), runs.FITTED: ("time_s", "our fastest")}


def link_rows(results: Results) -> list[dict[str, Any]]:
    """Batch size, share of the bytes, rate of the link, and images/s of each method."""
    return [
        {"batch": r.config["batch"], "share": row["share"], "rate": row["rate"] / 1e9}
        | {method: r.config["batch"] / row[key] for method, (key, _) in _METHODS.items()}
        for r in by_batch(results.ok("link", role=runs.RESNET))
        for row in r.metrics["rows"]
    ]


def link_table(results: Results) -> list[dict[str, Any]]:
    """Images/s by batch size, share of the bytes and rate of the link, and over those in core."""

    def shown(rate: float, digits: str = ".0f") -> str:
        return f"{rate:{digits}} ({rate / IN_CORE_RATE:.0%})"

    return [
        {"batch": row["batch"], "bytes": f"{row['share']:.0%}", "GB/s each way": f"{row['rate']:g}"}
        | {name: shown(row[method]) for method, (_, name) in _METHODS.items()}
        | {"paper": shown(runs.faster(row["batch"]), "g")}
        for row in link_rows(results)
    ]


def link_figure(results: Results) -> "Figure":
    """Draw the speed kept by the rate of the link, a panel for each batch size."""
    panels, rows = [], link_rows(results)
    for batch in BATCHES:
        lines = []
        for method, (_, name) in _METHODS.items():
            for share, whose in zip(
                runs.SIMULATION["link_shares"], ("ours", "budget"), strict=True
            ):
                wanted = (batch, share)
                found = {
                    row["rate"]: row[method] / IN_CORE_RATE
                    for row in rows
                    if (row["batch"], row["share"]) == wanted
                }
                lines.append(Line(method, found, f"{name}, {share:.0%} of the bytes", whose))
        paper = {runs.RATE / 1e9: runs.faster(batch) / IN_CORE_RATE}
        lines.append(Line(runs.CHUNKS, paper, "paper", "paper"))
        ylabel = "images/s over the\nlargest in core"
        panels.append(Panel(f"{batch:,} images\n{_WHOSE}", lines, ylabel))
    return draw(panels, len(panels), "link, each way (GB/s)")


LINK = artefact("link", plan=runs.link, rows=link_table, draw=link_figure)


def _chunk_rows(results: Results) -> dict[int, dict[str, Any]]:
    """A simulated iteration by the size of a chunk in MiB, ascending."""
    record = results.first("chunk_sizes", role=runs.RESNET)
    rows = record.metrics["rows"] if record is not None else {}
    return {int(mib): rows[mib] for mib in sorted(rows, key=int)}


def chunk_table(results: Results) -> list[dict[str, Any]]:
    """Budget, loss, mapping and images/s by the size of a chunk."""
    return [
        {
            "chunk": f"{mib} MiB" + " (the paper's)" * (mib == runs.CHUNK_MIB),
            "budget": runs.gib(row["budget_bytes"]),
            "lost inside, at most": runs.gib(row["internal_bytes"]),
            "chunks mapped and unmapped": f"{row['map_operations']:,}",
            "images/s": f"{CHUNK_BATCH / row['time_s']:.0f}",
        }
        for mib, row in _chunk_rows(results).items()
    ]


def chunk_figure(results: Results) -> "Figure":
    """Draw the memory lost inside chunks, and the speed with mapping and without."""
    rows = _chunk_rows(results)
    lost = {mib: row["internal_bytes"] / runs.GIB for mib, row in rows.items()}
    free, speed = (
        {mib: CHUNK_BATCH / row[key] for mib, row in rows.items()}
        for key in ("unmapped_s", "time_s")
    )
    rates = [
        Line(runs.CHUNKS, free, "with chunks, were mapping free", "budget"),
        Line(runs.CHUNKS, speed, "with chunks"),
    ]
    title = f"{CHUNK_BATCH} images\n{_WHOSE}"
    lines = [Line(runs.CHUNKS, lost, "with chunks")]
    panels = [
        Panel(f"lost inside chunks, {title}", lines, "memory (GiB)"),
        Panel(f"speed, {title}", rates, "images/s"),
    ]
    return draw(panels, 2, "size of a chunk (MiB)")


CHUNK_SIZES = artefact("chunks", plan=runs.chunk_sizes, rows=chunk_table, draw=chunk_figure)
