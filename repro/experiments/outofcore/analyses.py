"""Where do the paper's figures come from, and how large should a chunk be? (our analyses)

At the rate of the link as we read it, and with the bytes of torch's operations, no schedule reaches
the paper's rows of Table 1 beyond 512 images. The first analysis asks how much faster the link
would have to be, or how many bytes fewer the variables would have to have; the second is of section
4's trade-off.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from repro.experiments.outofcore import runs
from repro.experiments.outofcore.panels import Line, Panel, draw
from repro.experiments.outofcore.points import artefact, by_batch
from repro.experiments.query import Results
from repro.experiments.view import panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METHODS = {"bound": ("bound_s", runs.LABELS["bound"]), runs.FITTED: ("time_s", "our fastest")}


def link_table(results: Results) -> Iterator[dict[str, Any]]:
    """Images/s by batch size, share of the bytes and rate of the link."""
    for record in by_batch(results.ok("link")):
        batch = record.config["batch"]
        for row in record.metrics["rows"]:
            yield {
                "batch": batch,
                "bytes": f"{row['share']:.0%}",
                "GB/s each way": f"{row['rate'] / 1e9:g}",
                **{name: f"{batch / row[key]:.0f}" for key, name in _METHODS.values()},
                "paper": f"{runs.faster(batch):g}",
            }


def link_figure(results: Results) -> "Figure":
    """Draw images/s by the rate of the link, a panel for each batch size."""
    panels = []
    for batch in runs.SIMULATION["link_batches"]:
        records = results.ok("link", batch=batch)
        lines = [
            Line(
                method,
                {row["rate"] / 1e9: batch / row[key] for row in rows if row["share"] == share},
                f"{name}, {share:.0%} of the bytes",
                whose,
            )
            for rows in [record.metrics["rows"] for record in records]
            for method, (key, name) in _METHODS.items()
            for share, whose in zip(runs.SIMULATION["link_shares"], ("ours", "budget"), strict=True)
        ]
        lines.append(Line(runs.CHUNKS, {runs.RATE / 1e9: runs.faster(batch)}, "paper", "paper"))
        title = f"{batch:,} images\n{panel(runs.RESNET, data='simulated, V100')}"
        panels.append(Panel(title, lines, "images/s"))
    return draw(panels, len(panels), "link, each way (GB/s)")


LINK = artefact("link", plan=runs.link, rows=link_table, draw=link_figure)


def chunk_table(results: Results) -> Iterator[dict[str, Any]]:
    """Budget, loss, mapping and images/s by the size of a chunk, ascending."""
    batch = runs.SIMULATION["chunk_batch"]
    for record in results.ok("chunk_sizes"):
        for mib, row in sorted(record.metrics["rows"].items(), key=lambda pair: int(pair[0])):
            yield {
                "chunk": f"{mib} MiB" + " (the paper's)" * (int(mib) == runs.CHUNK_MIB),
                "budget": runs.gib(row["budget_bytes"]),
                "lost inside, at most": runs.gib(row["internal_bytes"]),
                "chunks mapped and unmapped": f"{row['map_operations']:,}",
                "images/s": f"{batch / row['time_s']:.0f}",
                "were mapping free": f"{batch / row['unmapped_s']:.0f}",
            }


CHUNK_SIZES = artefact("chunks", plan=runs.chunk_sizes, rows=chunk_table)
