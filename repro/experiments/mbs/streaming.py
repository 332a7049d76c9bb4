"""Do copies and reading hide behind computation? (Figure 2, section 4.3.3)"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.design import check
from repro.experiments.judge import Cases, Estimate, NotRun, in_turns, mean_of
from repro.experiments.mbs.cells import artefact, marks, ran_as, whose
from repro.experiments.mbs.runs import FILES_ROLE, READINGS, file_epochs, paper_rows, timeline
from repro.experiments.query import Results
from repro.report import DASH, Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Spans = Sequence[Sequence[Any]]  # kind, micro-batch, start, end in seconds


def hidden_shares(spans: Spans) -> list[float]:
    """Return, of each copy but the first, the share of its time behind a computation.

    Nothing is computed yet while the first micro-batch is copied.
    """
    computing = [(start, end) for kind, _, start, end in spans if kind == "compute"]
    copies = sorted((start, end) for kind, _, start, end in spans if kind == "copy")
    shares = []
    for start, end in copies[1:]:
        hidden = sum(max(0.0, min(end, b) - max(start, a)) for a, b in computing)
        shares.append(hidden / (end - start) if end > start else 1.0)
    return shares


def stages(results: Results) -> list[dict[str, Any]]:
    """The times of the stages of one mini-batch."""
    record = results.first("timeline")
    metrics = record.metrics if record else {"spans": []}
    rows: list[tuple[Any, ...]] = []
    for kind in ("copy", "compute"):
        lengths = [1e3 * (end - start) for k, _, start, end in metrics["spans"] if k == kind]
        stage = metrics.get("copied", kind) if kind == "copy" else "forward + backward"
        rows.append((stage, len(lengths), Summary.of(lengths).text(), f"{sum(lengths):.2f}"))
    if record:
        start, end = metrics["update"]
        rows.append(("optimizer step", 1, *[f"{1e3 * (end - start):.2f}"] * 2))
    if record and record.device["type"] != "cpu":
        hidden = Summary.of([100 * share for share in hidden_shares(metrics["spans"])])
        stage = "a copy behind a computation, but the first"
        rows.append((stage, hidden.n, f"{hidden.text(0)} %", DASH))
    return [dict(zip(("stage", "n", "each (ms)", "in all (ms)"), row, strict=True)) for row in rows]


def figure2(results: Results) -> "Figure":
    """A measured timeline."""
    from repro import plots

    record = results.first("timeline")
    if record is None:
        return plots.timeline([("compute", 0, 0.0, 0.0)], (0.0, 1e-3), "copy", "ours: not run")
    spans = [(str(k), int(i), float(a), float(b)) for k, i, a, b in record.metrics["spans"]]
    start, end = record.metrics["update"]
    lane = "prepare on the CPU" if "CPU" in record.metrics["copied"] else "copy, host to device"
    return plots.timeline(spans, (start, end), lane, whose("ResNet-50", [record]))


@check("One update follows all micro-batches of a mini-batch (section 3.3)")
def one_update(results: Results) -> tuple[bool, str]:
    """Whether parameters change once, after the last micro-batch."""
    metrics = results.need("timeline").metrics
    between, after = metrics["updates_between_micro_batches"], metrics["updates_after"]
    evidence = (
        f"over {metrics['micro_batches']} micro-batches the parameters changed {between} times "
        f"between micro-batches and {after} times after the last"
    )
    return (between, after) == (0, 1), evidence


def overlap(results: Results) -> Cases:
    """The share of a copy's time behind a computation; needs a copy engine."""
    record = results.need("timeline")
    if record.device["type"] == "cpu":
        raise NotRun("a CPU has no copy engine; needs a GPU")
    shares = [100 * share for share in hidden_shares(record.metrics["spans"])]
    hidden = mean_of(shares, unit="% of a copy's time", trials="micro-batches")
    return {"ResNet-50": replace(hidden, label=f"{ran_as('ResNet-50', [record])}: hidden")}


FIGURE2 = artefact(
    "figure2",
    plan=lambda profile, chosen: [timeline(profile, chosen)],
    rows=stages,
    draw=figure2,
    claims={"overlap": overlap},
    checks=(one_update,),
)


def _epochs_s(results: Results) -> tuple[tuple[int, int], dict[tuple[str, int], list[float]]]:
    """Return both mini-batches, and seconds of an epoch by way of reading and mini-batch."""
    record = results.measured("file_epochs")
    ways = record.config["ways"].items()
    seconds = {(read, mini): record.timings[way]["samples_s"] for way, (mini, _, read) in ways}
    sizes = sorted({mini for _, mini in seconds})
    return (sizes[0], sizes[-1]), seconds


def growth(results: Results) -> dict[str, Estimate]:
    """Return, by way of reading, the time of an epoch of the largest mini-batch over the smallest.

    Raises:
        NotRun: They were not timed.
    """
    (small, large), seconds = _epochs_s(results)
    trials = "processes" if len(results.ok("file_epochs")) > 1 else "rounds"
    return {
        reading: in_turns(seconds[reading, large], seconds[reading, small], 3, trials=trials)
        for reading in READINGS
    }


def time_grows(results: Results) -> Cases:
    """The growth of epochs whose images are read from files."""
    found = growth(results)
    return {READINGS[reading]: found[reading] for reading in ("ahead", "asked")}


def table(results: Results) -> list[dict[str, Any]]:
    """The times of both mini-batches by way of reading, and their growth."""
    if not results.ok("file_epochs"):
        return [{"images": said, "n": 0, "ours": "not run"} for said in READINGS.values()]
    sizes, seconds = _epochs_s(results)
    found = growth(results)
    paper = {row["mini_batch"]: row["time_with"][0] for row in paper_rows(FILES_ROLE)}
    rows = []
    for reading, said in READINGS.items():
        smaller, larger = (seconds[reading, size] for size in sizes)
        rows.append(
            {
                "images": said,
                "mini-batches": f"{sizes[0]}, {sizes[1]}",
                "n": len(smaller),
                "ours, smaller (s/epoch)": Summary.of(smaller).text(),
                "ours, larger (s/epoch)": Summary.of(larger).text(),
                "ours, larger / smaller": str(found[reading]),
                "paper, larger / smaller": f"×{paper[sizes[1]] / paper[sizes[0]]:.3f}",
            }
        )
    return rows


def _files(results: Results) -> Iterable[str]:
    """Yield the number, size and place of the files, for the caption."""
    record = results.first("file_epochs")
    if record is not None:
        count, uncached = record.metrics["files"], record.metrics["uncached"]
        kilobytes = record.metrics["file_bytes"] / count / 1000
        where = ", perhaps from the page cache"
        if uncached is not None:
            where = f", {100 * uncached:.0f} % not in the page cache"
        pixels = record.config["dataset"]["image_size"]
        yield f"{count:,} files of our own: JPEG, {pixels} px, {kilobytes:.0f} kB{where}."
    yield from marks(results)


FILES = artefact(
    "files",
    plan=lambda profile, chosen: [file_epochs(profile, chosen)],
    rows=table,
    facts=_files,
    claims={"time_grows": time_grows},
)
