"""What captions of several papers say in the same words."""

from collections.abc import Iterable

from repro.experiments.design import Results
from repro.records import Record


def device_name(record: Record) -> str:
    """Return the device that a record was made on, a CPU with its threads."""
    name: str = record.device["name"]
    threads = record.device.get("threads")
    if record.device["type"] != "cpu" or not threads:
        return name
    return f"{name} ({threads} thread{'s' * (threads > 1)})"


def shortcomings(results: Results) -> Iterable[str]:
    """Yield a sentence for each kind of record that is stale, lacking or failed."""
    if results.stale:
        yield f"STALE records, whose code has changed since: {len(results.stale)}."
    if lacking := sum(record.status == "out_of_memory" for record in results.records):
        yield f"{lacking} runs ran out of memory."
    if results.failed:
        yield f"{len(results.failed)} runs FAILED."
    if results.missing:
        yield f"{results.missing} of {len(results.expected)} runs are missing."
