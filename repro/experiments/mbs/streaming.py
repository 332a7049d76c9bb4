"""What does one mini-batch do when? (Figure 2)"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import Exhibit, Results, check
from repro.experiments.judge import Cases, NotRun, mean_of
from repro.experiments.mbs.describing import marks, ran_as
from repro.experiments.mbs.settings import timeline
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


def table(results: Results) -> list[dict[str, Any]]:
    """Return the times of the stages."""
    record = results.first("timeline")
    metrics = record.metrics if record else {}
    rows = []
    for kind in ("copy", "compute"):
        lengths = [
            1e3 * (end - start) for k, _, start, end in metrics.get("spans", []) if k == kind
        ]
        stage = metrics.get("copied", kind) if kind == "copy" else "forward + backward"
        rows.append((stage, str(len(lengths)), Summary.of(lengths).text(), f"{sum(lengths):.2f}"))
    if record:
        start, end = metrics["update"]
        update = f"{1e3 * (end - start):.2f}"
        rows.append(("optimizer step", "1", update, update))
        if record.device["type"] != "cpu":
            hidden = Summary.of([100 * share for share in hidden_shares(metrics["spans"])])
            hidden_text = f"{hidden.text(0)} %"
            rows.append(
                ("a copy behind a computation, but the first", str(hidden.n), hidden_text, DASH)
            )
    return [dict(zip(("stage", "n", "each (ms)", "in all (ms)"), row, strict=True)) for row in rows]


def figure(results: Results) -> "Figure":
    """Draw a measured timeline."""
    from repro import plots
    from repro.experiments.mbs.drawing import whose

    record = results.first("timeline")
    title = whose("ResNet-50", [record] if record else [])
    if record is None:
        return plots.timeline([("compute", 0, 0.0, 0.0)], (0.0, 1e-3), "copy (not run)", title)
    spans = [(str(k), int(i), float(a), float(b)) for k, i, a, b in record.metrics["spans"]]
    start, end = record.metrics["update"]
    lane = "prepare on the CPU" if "CPU" in record.metrics["copied"] else "copy, host to device"
    return plots.timeline(spans, (start, end), lane, title)


@check("One update follows all micro-batches of a mini-batch (section 3.3)")
def one_update(results: Results) -> tuple[bool, str]:
    """Ask whether parameters change once, after the last micro-batch."""
    metrics = results.need("timeline").metrics
    between, after = metrics["updates_between_micro_batches"], metrics["updates_after"]
    evidence = (
        f"over {metrics['micro_batches']} micro-batches the parameters changed {between} times "
        f"between micro-batches and {after} times after the last"
    )
    return (between, after) == (0, 1), evidence


def overlap(results: Results) -> Cases:
    """Return how much of a copy's time lies behind a computation; needs a copy engine."""
    record = results.need("timeline")
    if record.device["type"] == "cpu":
        raise NotRun("a CPU has no copy engine; needs a GPU")
    shares = hidden_shares(record.metrics["spans"])
    hidden = mean_of([100 * s for s in shares], unit="% of a copy's time", trials="micro-batches")
    return {"ResNet-50": replace(hidden, label=f"{ran_as('ResNet-50', [record])}: hidden")}


FIGURE2 = Exhibit(
    runs=lambda profile, chosen: [timeline(profile, chosen)],
    table=table,
    figure=figure,
    caption=caption(
        "One mini-batch of 64 in micro-batches μ1 to μ4, measured; the paper draws it.", marks
    ),
    claims={"overlap": overlap},
    checks=(one_update,),
)
