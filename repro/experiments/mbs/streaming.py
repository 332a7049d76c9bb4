"""Do copies and reading hide behind computation? (Figure 2, section 4.3.3)"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from repro import plots
from repro.experiments.judge import Cases, Estimate, NotRun, mean_of, paired_ratio
from repro.experiments.mbs.cells import artefact, marks, ran_as, told, whose
from repro.experiments.mbs.runs import FILES_ROLE, READINGS, file_epochs, paper_rows, timeline
from repro.experiments.query import Results
from repro.report import summary

Spans = Sequence[Sequence[Any]]  # kind, micro-batch, start, end in seconds


def hidden_shares(spans: Spans) -> list[float]:
    """Return, of each copy but the first, the share of its time behind a computation."""
    computing = [(start, end) for kind, _, start, end in spans if kind == "compute"]
    copies = sorted((start, end) for kind, _, start, end in spans if kind == "copy")
    shares = []
    for start, end in copies[1:]:
        hidden = sum(max(0.0, min(end, b) - max(start, a)) for a, b in computing)
        shares.append(hidden / (end - start) if end > start else 1.0)
    return shares


def _timeline(results: Results) -> dict[str, Any]:
    record = results.first("timeline")
    return record.metrics if record else {"spans": [], "update": [0.0, 1e-3], "copied": "copy"}


def stages(results: Results) -> Iterator[dict[str, Any]]:
    """The times of the stages of one mini-batch."""
    metrics = _timeline(results)
    spans = [*metrics["spans"], ("update", 0, *metrics["update"])] if metrics["spans"] else []
    names = {"copy": metrics["copied"], "compute": "forward + backward", "update": "optimizer step"}
    for kind, stage in names.items():
        ms = [1e3 * (end - start) for own, _, start, end in spans if own == kind]
        yield {"stage": stage, "n": len(ms), "each (ms)": summary(ms)}


def figure2(results: Results) -> Any:
    """Draw one mini-batch over time: copies, computations, and the update at its end."""
    metrics = _timeline(results)
    figure, axes = plots.new_axes(1, 1, 10, 2.7)
    axis, bars = axes[0, 0], [*metrics["spans"], ("update", -1, *metrics["update"])]
    total_ms = 1e3 * max(end for *_, end in bars)
    lanes = {"update": (0, "#3a9d6e"), "compute": (1, "#1f6fb4"), "copy": (2, "#f2a541")}
    for kind, number, start, end in bars:
        left, width, (lane, color) = 1e3 * start, 1e3 * (end - start), lanes[kind]
        wide = width > 0.02 * total_ms  # a white edge would hide a narrower one
        edge = "white" if wide else color
        axis.barh(lane, width, 0.62, left, color=color, edgecolor=edge, lw=0.8)
        if number >= 0 and wide:
            ink = "white" if kind == "compute" else "black"
            place = {"ha": "center", "va": "center", "fontsize": 9}
            axis.text(left + width / 2, lane, f"μ{number + 1}", color=ink, **place)
    axis.set_yticks(
        range(3), ["optimizer step", "forward + backward,\naccumulate", metrics["copied"]]
    )
    axis.grid(axis="y", visible=False)
    axis.set_title(whose("ResNet-50", results.ok("timeline")), fontsize=10)
    axis.set(xlabel="time from the start of the mini-batch (ms)", xlim=(0, 1.01 * total_ms))
    return figure


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
    return {"ResNet-50": hidden.named(f"{ran_as('ResNet-50', [record])}: hidden")}


FIGURE2 = artefact(
    "figure2",
    plan=timeline,
    rows=stages,
    draw=figure2,
    claims={"overlap": overlap},
    checks={"one_update": one_update},
)


def _epochs_s(results: Results, reading: str) -> dict[int, list[float]]:
    """Return seconds of an epoch by mini-batch, ascending, of images read in one of `READINGS`."""
    record = results.measured("file_epochs")
    ways = {mini: way for way, (mini, _, read) in record.config["ways"].items() if read == reading}
    return {mini: record.timings[ways[mini]]["samples_s"] for mini in sorted(ways)}


def growth(results: Results, reading: str) -> Estimate:
    """Return the time of an epoch of the largest mini-batch over that of the smallest."""
    small, large = _epochs_s(results, reading).values()
    trials = "processes" if len(results.ok("file_epochs")) > 1 else "rounds"
    return paired_ratio(large, small, 3, trials=trials)


def table(results: Results) -> Iterator[dict[str, Any]]:
    """The times of both mini-batches by how images are read, and their growth."""
    paper = {row["mini_batch"]: row["time_with"][0] for row in paper_rows(FILES_ROLE)}
    for (run, _), (reading, said) in product(results.expected[:1], READINGS.items()):
        small, large = sorted({mini for mini, _, _ in run.config["ways"].values()})
        seconds = _epochs_s(results, reading) if results.ok("file_epochs") else {}
        yield {
            "images": said,
            "n": len(seconds.get(small, ())),
            **{f"B = {n} (s/epoch)": summary(seconds.get(n, ())) for n in (small, large)},
            "larger / smaller": told(growth, results, reading),
            "paper, larger / smaller": f"×{paper[large] / paper[small]:.3f}",
        }


def _files(results: Results) -> Iterable[str]:
    """Yield the number, size and place of the files, for the caption."""
    if record := results.first("file_epochs"):
        count, uncached = record.metrics["files"], record.metrics["uncached"]
        where = "perhaps from the page cache"
        if uncached is not None:
            where = f"{100 * uncached:.0f} % not in the page cache"
        pixels = record.config["dataset"]["image_size"]
        each = f"{pixels} px, {record.metrics['file_bytes'] / count / 1000:.0f} kB"
        yield f"{count:,} JPEG files of our own, {each} each, {where}."
    yield from marks(results)


FILES = artefact(
    "files",
    plan=file_epochs,
    rows=table,
    facts=_files,
    claims={"time_grows": lambda r: {READINGS[w]: growth(r, w) for w in ("ahead", "asked")}},
)
