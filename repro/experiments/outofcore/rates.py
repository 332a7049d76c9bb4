"""Where do the paper's figures come from? (our analysis of Table 1)

At the rate of the link as we read it, and with the bytes of torch's operations, no schedule reaches
the paper's rows beyond 512 images. How much faster the link would have to be, or how many bytes
fewer, is looked at here.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import caption
from repro.experiments.design import Chosen, Exhibit, Expectation, Results, Run, claim
from repro.experiments.judging import NotRun, Verdict, combine, direction, equivalence, exactly
from repro.experiments.outofcore.settings import (
    CHUNKS,
    FEWER_BYTES,
    IN_CORE,
    LINK_BATCHES,
    PAPER,
    RESNET,
    SCHEDULE,
    facts,
    link,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE = PAPER["table1"]
RATE = PAPER["bandwidth_bytes_per_s"]
FASTER = 1.25  # times the rate of the link


def published(batch: int) -> float:
    """Return the paper's images/s at a batch size, of its faster way."""
    at = TABLE["batches"].index(batch)
    return float(max(rate for mode in (SCHEDULE, CHUNKS) if (rate := TABLE[mode][at]) == rate))


def in_core() -> float:
    """Return the paper's best images/s in core."""
    return float(max(rate for rate in TABLE[IN_CORE] if rate == rate))


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return an analysis for each batch size; under smoke of one."""
    return [link(batch) for batch in (LINK_BATCHES[:1] if profile == "smoke" else LINK_BATCHES)]


def _rows(results: Results) -> Iterator[tuple[int, dict[str, Any]]]:
    for record in sorted(results.ok("link", role=RESNET), key=lambda r: r.config["batch"]):
        for row in record.metrics["rows"]:
            yield record.config["batch"], row


def table(results: Results) -> list[dict[str, Any]]:
    """Return images/s by batch size, share of the bytes and rate of the link."""
    rows = []
    for batch, row in _rows(results):
        rates = {name: batch / row[f"{key}_s"] for name, key in _WAYS.items()}
        rows.append(
            {
                "batch": batch,
                "bytes": f"{row['share']:.0%}",
                "GB/s each way": f"{row['rate'] / 1e9:g}",
                **{name: f"{rate:.0f} ({rate / in_core():.0%})" for name, rate in rates.items()},
                "paper": f"{published(batch):g} ({published(batch) / in_core():.0%})",
            }
        )
    return rows


_WAYS = {"no schedule beats": "bound", "our fastest": "time"}
_LOOKS = {"no schedule beats": ("#c0392b", "-."), "our fastest": ("#3a9d6e", "-")}


def figure(results: Results) -> "Figure":
    """Draw the speed kept by the rate of the link, a panel for each batch size."""
    from repro.plots import legend_below, new_axes

    found = list(_rows(results))
    sizes = sorted({batch for batch, _ in found}) or [LINK_BATCHES[0]]
    figure, axes = new_axes(1, len(sizes), 3.4 * len(sizes) + 0.6, 3.2)
    for axis, batch in zip(axes[0], sizes, strict=True):
        for share, marker in ((1.0, "o"), (FEWER_BYTES, "s")):
            rows = [row for size, row in found if size == batch and row["share"] == share]
            rows.sort(key=lambda row: row["rate"])
            for name, key in _WAYS.items():
                colour, style = _LOOKS[name]
                axis.plot(
                    [row["rate"] / 1e9 for row in rows],
                    [batch / row[f"{key}_s"] / in_core() for row in rows],
                    color=colour,
                    ls=style,
                    marker=marker,
                    ms=4,
                    lw=1.2,
                    label=f"{name}, {share:.0%} of the bytes",
                )
        kept = published(batch) / in_core()
        axis.axhline(kept, color="#1f6fb4", lw=1, ls=":", label="paper")
        axis.set_title(f"{batch} images, simulated, V100", fontsize=9)
        axis.set_xlabel("link, each way (GB/s)")
        axis.set_ylim(0, 1.05)
    axes[0][0].set_ylabel("images/s over the\nlargest in core")
    legend_below(figure, 3)
    return figure


def _of(results: Results, batch: int, rate: float, share: float) -> dict[str, Any]:
    for size, row in _rows(results):
        if (size, row["rate"], row["share"]) == (batch, rate, share):
            return row
    raise NotRun("no records")


@claim(
    "out_of_reach",
    f"At {RATE / 1e9:g} GB/s each way no schedule of our traces reaches the paper's images/s at "
    "928 images and more (our question, not the paper's)",
    "none",
    "simulated",
)
def out_of_reach(results: Results, expected: Expectation) -> Verdict:
    """Judge what no schedule beats over the paper's images/s."""
    parts = []
    for batch in LINK_BATCHES:
        row = _of(results, batch, RATE, 1.0)
        gap = exactly(batch / row["bound_s"] / published(batch), log=True)
        parts.append(direction(f"at {batch}", gap, sign=expected.sign))
    return combine(parts)


@claim(
    "within_reach",
    f"On a link {FASTER:g} times as fast, or with {FEWER_BYTES:.0%} of the bytes, our schedule has "
    "the paper's images/s, or more (our question, not the paper's)",
    "none",
    "simulated",
)
def within_reach(results: Results, expected: Expectation) -> Verdict:
    """Judge our images/s over the paper's, for each way out and each batch size."""
    parts = []
    for rate, share, what in (
        (FASTER * RATE, 1.0, f"{FASTER * RATE / 1e9:g} GB/s"),
        (RATE, FEWER_BYTES, f"{FEWER_BYTES:.0%} of the bytes"),
    ):
        for batch in LINK_BATCHES:
            row = _of(results, batch, rate, share)
            gap = exactly(batch / row["time_s"] / published(batch), log=True)
            told = f"{what}: images/s at {batch} over the paper's"
            parts.append(equivalence(told, gap, expected.allowed(), side=-1))
    return combine(parts)


LINK = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "Images per second, and in brackets over the paper's best in core, by the rate of the link "
        "and the share of the bytes that variables have. No schedule beats: for all of the memory "
        "as a budget, and no allocator that loses any.",
        facts,
    ),
    claims=(out_of_reach, within_reach),
)
