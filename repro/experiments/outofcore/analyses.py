"""Where do the paper's figures come from, and how large should a chunk be? (our analyses)

At the rate of the link as we read it no schedule reaches the paper's rows beyond 512 images.
"""

from collections.abc import Iterator
from typing import Any

from repro.experiments.outofcore import runs
from repro.experiments.outofcore.points import artefact, by_batch
from repro.experiments.query import Results


def link_table(results: Results) -> Iterator[dict[str, Any]]:
    """Images/s by batch size, share of the bytes and rate of the link."""
    for record in by_batch(results.ok("link")):
        batch = record.config["batch"]
        for row in record.metrics["rows"]:
            yield {
                "batch": batch,
                "bytes": f"{row['share']:.0%}",
                "GB/s each way": f"{row['rate'] / 1e9:g}",
                "no schedule beats (images/s)": f"{batch / row['bound_s']:.0f}",
                "our fastest (images/s)": f"{batch / row['time_s']:.0f}",
                "paper (images/s)": f"{runs.faster(batch):g}",
            }


LINK = artefact("link", plan=runs.link, rows=link_table)


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
