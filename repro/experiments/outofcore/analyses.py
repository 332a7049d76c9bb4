"""Where do the paper's figures come from, and how large should a chunk be? (our analyses)

At the rate of the link as we read it no schedule reaches the paper's rows beyond 512 images.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from repro.experiments.outofcore import runs
from repro.experiments.outofcore.points import Line, Panel, artefact, by_batch, draw
from repro.experiments.query import Results
from repro.experiments.view import panel


def link_table(results: Results) -> Iterator[dict[str, Any]]:
    """Images/s by batch size, share of the bytes and rate of the link."""
    for record in by_batch(results.ok("link")):
        batch = record.config["batch"]
        for row in record.metrics["rows"]:
            yield {
                "batch": batch,
                "bytes": f"{row['share']:.0%}",
                "GB/s each way": f"{row['rate'] / 1e9:g}",
                "upper bound (images/s)": f"{batch / row['bound_s']:.0f}",
                "our fastest (images/s)": f"{batch / row['time_s']:.0f}",
                "paper (images/s)": f"{runs.faster(batch):g}",
            }


def link_figure(results: Results) -> Any:
    """Draw the speed kept by the rate of the link, a panel for each batch size."""
    in_core = max(runs.published(runs.IN_CORE).values())
    methods = ("bound", "bound_s", runs.LABELS["bound"]), (runs.FITTED, "time_s", "our fastest")
    looks = zip(runs.SIMULATION["link_shares"], ("ours", "budget"), strict=True)
    curves, panels = list(product(methods, looks)), []
    for batch in runs.SIMULATION["link_batches"]:
        rows = [row for r in results.ok("link", batch=batch) for row in r.metrics["rows"]]
        paper = {runs.RATE / 1e9: runs.faster(batch) / in_core}
        lines = [Line(runs.CHUNKS, paper, "paper", "paper")]
        for (method, key, name), (share, look) in curves:
            own = {r["rate"] / 1e9: batch / r[key] / in_core for r in rows if r["share"] == share}
            lines.append(Line(method, own, f"{name}, {share:.0%} of the bytes", look))
        title = f"{batch:,} images\n{panel(runs.RESNET, data='simulated, V100')}"
        panels.append(Panel(title, lines, "images/s over the\nlargest in core"))
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
