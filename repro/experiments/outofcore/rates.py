"""Where do the paper's figures come from? (our analysis of Table 1)

At the rate of the link as we read it, and with the bytes of torch's operations, no schedule reaches
the paper's rows beyond 512 images. This analysis asks how much faster the link would have to be, or
how many bytes fewer the variables would have to have.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import Chosen, Exhibit, Run, check
from repro.experiments.judge import NotRun
from repro.experiments.outofcore.panels import CEILING, no_records, styles, titled
from repro.experiments.outofcore.settings import (
    CHUNKS,
    FEWER_BYTES,
    FITTED,
    IN_CORE,
    LABELS,
    LINK_BATCHES,
    LINK_RATES,
    PAPER,
    RESNET,
    SCHEDULE,
    facts,
    link,
)
from repro.experiments.query import Results
from repro.experiments.view import caption, panel

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


def figure(results: Results) -> "Figure":
    """Draw the speed kept by the rate of the link, a panel for each batch size."""
    from repro import plots

    rows = list(_rows(results))
    sizes = sorted({batch for batch, _ in rows}) or [LINK_BATCHES[0]]
    figure, axes = plots.new_axes(1, len(sizes), 3.6 * len(sizes) + 0.4, 3.4)
    look = styles()[LABELS[FITTED]]
    hollow = {"marker": styles()[LABELS[CHUNKS]]["marker"], "mfc": "none", "mec": "#5f6b7a"}
    for axis, batch in zip(axes[0], sizes, strict=True):
        title = f"{batch:,} images\n{panel(RESNET, data='SIMULATED V100')}"
        axis.set_title(titled(title), fontsize=9)
        for share, line in ((FEWER_BYTES, "--"), (1.0, "-")):
            shown = sorted(
                (row["rate"] / 1e9, batch / row["bound_s"], batch / row["time_s"])
                for size, row in rows
                if size == batch and row["share"] == share
            )
            if not shown:
                continue
            rates, most, ours = (np.array(values) for values in zip(*shown, strict=True))
            portion = f"{share:.0%} of the bytes"
            axis.plot(
                rates, most / in_core(), color="#5f6b7a", ls=line, lw=3, alpha=0.4,
                label=f"{CEILING}, {portion}",
            )  # fmt: skip
            axis.plot(
                rates,
                ours / in_core(),
                ls=line,
                ms=5,
                lw=1.3,
                label=f"our fastest, {portion}",
                **look,
            )
        if not rows:
            no_records(axis)
            continue
        share = published(batch) / in_core()
        axis.axhline(share, color=plots.PAPER, lw=1, ls="--")
        axis.plot([RATE / 1e9], [share], ls="--", color=plots.PAPER, ms=8, label="paper", **hollow)
        rates_shown = [rate / 1e9 for rate in LINK_RATES]
        axis.set_xticks(rates_shown, [f"{rate:g}" for rate in rates_shown])
        axis.set_xlabel("link, each way (GB/s)")
        axis.set_ylim(0, 1.2)
    axes[0][0].set_ylabel("images/s over the\nlargest in core")
    plots.legend_below(figure, 3)
    return figure


def _of(results: Results, batch: int, rate: float, share: float) -> dict[str, Any]:
    for size, row in _rows(results):
        if (size, row["rate"], row["share"]) == (batch, rate, share):
            return row
    raise NotRun("no records")


@check(
    f"At {RATE / 1e9:g} GB/s each way no schedule of our traces reaches the paper's images/s at "
    "928 images and more"
)
def out_of_reach(results: Results) -> tuple[bool, str]:
    """Ask it of the bound over the paper's images/s."""
    shares = {
        batch: batch / _of(results, batch, RATE, 1.0)["bound_s"] / published(batch)
        for batch in LINK_BATCHES
    }
    said = "; ".join(f"at best ×{share:.2f} at {batch}" for batch, share in shares.items())
    return max(shares.values()) < 1, said


SHORT = 0.1  # how far images/s may lie below the paper's


@check(
    f"On a link {FASTER:g} times as fast, or with {FEWER_BYTES:.0%} of the bytes, our schedule has "
    f"the paper's images/s, to {100 * SHORT:g} %, or more"
)
def within_reach(results: Results) -> tuple[bool, str]:
    """Ask it of our images/s over the paper's, in both cases and at each batch size."""
    shares = {
        f"{what} at {batch}": batch / _of(results, batch, rate, share)["time_s"] / published(batch)
        for rate, share, what in (
            (FASTER * RATE, 1.0, f"{FASTER * RATE / 1e9:g} GB/s"),
            (RATE, FEWER_BYTES, f"{FEWER_BYTES:.0%} of the bytes"),
        )
        for batch in LINK_BATCHES
    }
    said = "; ".join(f"{name} ×{share:.2f}" for name, share in shares.items())
    return min(shares.values()) >= 1 - SHORT, said


LINK = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "The share of the speed in core by the rate of the link, with all the bytes of the "
        "variables and with fewer. All of the memory is the budget: no allocator loses any.",
        facts,
    ),
    checks=(out_of_reach, within_reach),
)
