"""The measurement of several processes, as one record."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from repro.records import Record


def of_processes(records: Sequence[Record], several: bool = False) -> Record:
    """Return the measurement of several processes as one record.

    Rounds of one process share what it drew, such as where its memory lies: each process counts
    once, and a timing's samples are the processes' medians. Metrics are medians over the processes
    where they are numbers; what cannot have a median is the first one's.

    Args:
        records: Of one configuration, one each; a single one is returned as it is.
        several: Whether a single one, too, has one sample of each timing.
    """
    first, *others = records
    if not others and not several:
        return first
    timings = {
        name: timing
        | {"samples_s": [statistics.median(r.timings[name]["samples_s"]) for r in records]}
        for name, timing in first.timings.items()
        if all(name in record.timings for record in others)
    }
    metrics = _median([record.metrics for record in records])
    return replace(first, timings=timings, metrics=metrics)


def _median(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {
            key: _median([value[key] for value in values])
            for key in first
            if all(isinstance(value, dict) and key in value for value in values)
        }
    if isinstance(first, list):
        if any(not isinstance(value, list) or len(value) != len(first) for value in values):
            return first
        return [_median(list(items)) for items in zip(*values, strict=True)]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return first
    return first if all(value == first for value in values) else statistics.median(values)
