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
_TITLE = f"images\n{panel(runs.RESNET, data='simulated, V100')}"
# By method, the name of its seconds in a record, and its own in a table.
_METHODS = {"bound": ("bound_s", runs.LABELS["bound"]), runs.FITTED: ("time_s", "our fastest")}


def _link_rows(results: Results) -> list[dict[str, Any]]:
    """Batch size, share of the bytes, rate of the link, and speed of each method over in core."""
    return [
        {"batch": record.config["batch"], "share": row["share"], "rate": row["rate"] / 1e9}
        | {m: record.config["batch"] / row[key] / IN_CORE_RATE for m, (key, _) in _METHODS.items()}
        for record in by_batch(results.ok("link", role=runs.RESNET))
        for row in record.metrics["rows"]
    ]


def link_table(results: Results) -> list[dict[str, Any]]:
    """Images/s by batch size, share of the bytes and rate of the link, and over those in core."""

    def shown(speed: float, digits: str = ".0f") -> str:
        return f"{speed * IN_CORE_RATE:{digits}} ({speed:.0%})"

    return [
        {"batch": row["batch"], "bytes": f"{row['share']:.0%}", "GB/s each way": f"{row['rate']:g}"}
        | {name: shown(row[method]) for method, (_, name) in _METHODS.items()}
        | {"paper": shown(runs.faster(row["batch"]) / IN_CORE_RATE, "g")}
        for row in _link_rows(results)
    ]


def link_figure(results: Results) -> "Figure":
    """Draw the speed kept by the rate of the link, a panel for each batch size."""
    panels, shares = [], dict(zip(runs.SIMULATION["link_shares"], ("ours", "budget"), strict=True))
    for batch in runs.SIMULATION["link_batches"]:
        rows = [row for row in _link_rows(results) if row["batch"] == batch]
        lines = [
            Line(
                method,
                {row["rate"]: row[method] for row in rows if row["share"] == share},
                f"{name}, {share:.0%} of the bytes",
                whose,
            )
            for method, (_, name) in _METHODS.items()
            for share, whose in shares.items()
        ]
        paper = {runs.RATE / 1e9: runs.faster(batch) / IN_CORE_RATE}
        lines.append(Line(runs.CHUNKS, paper, "paper", "paper"))
        panels.append(Panel(f"{batch:,} {_TITLE}", lines, "images/s over the\nlargest in core"))
    return draw(panels, len(panels), "link, each way (GB/s)")


LINK = artefact("link", plan=runs.link, rows=link_table, draw=link_figure)


def chunk_table(results: Results) -> list[dict[str, Any]]:
    """Budget, loss, mapping and images/s by the size of a chunk, ascending."""
    record = results.first("chunk_sizes", role=runs.RESNET)
    rows = record.metrics["rows"] if record is not None else {}
    batch = runs.SIMULATION["chunk_batch"]
    return [
        {
            "chunk": f"{mib} MiB" + " (the paper's)" * (int(mib) == runs.CHUNK_MIB),
            "budget": runs.gib(rows[mib]["budget_bytes"]),
            "lost inside, at most": runs.gib(rows[mib]["internal_bytes"]),
            "chunks mapped and unmapped": f"{rows[mib]['map_operations']:,}",
            "images/s": f"{batch / rows[mib]['time_s']:.0f}",
            "were mapping free": f"{batch / rows[mib]['unmapped_s']:.0f}",
        }
        for mib in sorted(rows, key=int)
    ]


CHUNK_SIZES = artefact("chunks", plan=runs.chunk_sizes, rows=chunk_table)
