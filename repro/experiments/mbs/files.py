"""Is it the disk that makes epochs of larger mini-batches longer? (section 4.3.3)"""

from collections.abc import Iterable
from typing import Any

from repro.experiments.captions import caption
from repro.experiments.design import Exhibit, Results
from repro.experiments.judge import Cases, Estimate, NotRun, in_turns
from repro.experiments.mbs.describing import marks
from repro.experiments.mbs.settings import FILES_ROLE, READINGS, file_epochs, paper_rows
from repro.records import Record
from repro.report import DASH, Summary


def _sizes(record: Record) -> tuple[int, int]:
    """Return the smaller and the larger mini-batch."""
    sizes = sorted({mini for mini, _, _ in record.config["ways"].values()})
    return sizes[0], sizes[-1]


def _seconds(record: Record) -> dict[tuple[str, int], list[float]]:
    """Return seconds of an epoch by way of reading and mini-batch."""
    ways = record.config["ways"].items()
    return {(reading, mini): record.timings[way]["samples_s"] for way, (mini, _, reading) in ways}


def growth_from_files(results: Results) -> dict[str, Estimate]:
    """Return, by way of reading, the time of an epoch of the largest mini-batch over the smallest.

    Raises:
        NotRun: They were not timed.
    """
    record = results.measured("file_epochs")
    trials = "processes" if len(results.processes("file_epochs")) > 1 else "rounds"
    small, large = _sizes(record)
    seconds = _seconds(record)
    return {
        reading: in_turns(seconds[reading, large], seconds[reading, small], 3, trials=trials)
        for reading in READINGS
    }


def time_grows(results: Results) -> Cases:
    """Return the growth of epochs whose images are read from files."""
    growth = growth_from_files(results)
    return {READINGS[reading]: growth[reading] for reading in ("ahead", "asked")}


def table(results: Results) -> list[dict[str, Any]]:
    """Return the times of both mini-batches by way of reading, and how they grow."""
    rows = []
    try:
        record, growth = results.measured("file_epochs"), growth_from_files(results)
    except NotRun:
        record, growth = None, {}
    for reading, said in READINGS.items():
        row = {"images": said, "mini-batches": DASH, "n": 0}
        cells = dict.fromkeys(
            ("ours, smaller (s/epoch)", "ours, larger (s/epoch)", "ours, larger / smaller",
             "paper, larger / smaller"),
            "not run",
        )  # fmt: skip
        if record is not None:
            small, large = _sizes(record)
            times = [_seconds(record)[reading, size] for size in (small, large)]
            paper = {r["mini_batch"]: r["time_with"][0] for r in paper_rows(FILES_ROLE)}
            row |= {"mini-batches": f"{small}, {large}", "n": len(times[0])}
            told = [Summary.of(values).text() for values in times]
            told += [str(growth[reading]), f"×{paper[large] / paper[small]:.3f}"]
            cells = dict(zip(cells, told, strict=True))
        rows.append(row | cells)
    return rows


def _facts(results: Results) -> Iterable[str]:
    """Yield what was read from where, for the caption."""
    record = results.first("file_epochs")
    if record is not None:
        count, uncached = record.metrics["files"], record.metrics["uncached"]
        kilobytes = record.metrics["file_bytes"] / count / 1000
        yield (
            f"{count:,} files of our own: JPEG, {record.config['dataset']['image_size']} px, "
            f"{kilobytes:.0f} kB{_from_where(uncached)}."
        )
    yield from marks(results)


def _from_where(uncached: float | None) -> str:
    """Say whether a read met the disk."""
    if uncached is None:
        return ", perhaps from the page cache"
    if uncached < 0.5:
        return ", from the page cache and no disk"
    return f", {100 * uncached:.0f} % not in the page cache"


FILES = Exhibit(
    runs=lambda profile, chosen: [file_epochs(profile, chosen)],
    table=table,
    caption=caption(
        "Epochs with MBS in turns, images decoded by one thread; the paper's are Table 4's.",
        _facts,
    ),
    long=True,
    claims={"time_grows": time_grows},
)
