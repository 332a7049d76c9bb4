"""Does `repro advise` predict what Part 1 measured?"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import Chosen, Exhibit, Run
from repro.experiments.judge import Exact, NotRun
from repro.experiments.query import Results
from repro.experiments.together.settings import (
    FORETELL,
    LABELS,
    NETWORKS,
    Point,
    facts,
    foretold,
    points,
    under_limit,
)
from repro.experiments.view import caption
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CELLS = 0.95  # the goal that was set for both questions
WITHIN = 0.15  # of the time


@dataclass(frozen=True)
class Cell:
    """One method at one size on one network, measured and predicted.

    Attributes:
        network: Its name.
        mode: Of the method.
        multiple: Of what fits undivided.
        measured: In Part 1.
        fits: What was predicted of it.
        slowdown: Seconds of an image over those undivided, as predicted; None where nothing was.
        peak_bytes: As predicted; None where it does not fit.
        bound: What no schedule beats, as predicted; None where nothing bounds it.
    """

    network: str
    mode: str
    multiple: int
    measured: Point
    fits: bool
    slowdown: float | None
    peak_bytes: int | None
    bound: float | None

    @property
    def right(self) -> bool:
        """Whether it fits as predicted."""
        return self.fits == self.measured.fits

    @property
    def time_error(self) -> float | None:
        """The time of an image predicted over the one measured, less 1; None without both."""
        speed = self.measured.speed if self.measured.fits else None
        return None if speed is None or self.slowdown is None else self.slowdown * speed - 1

    @property
    def peak_error(self) -> float | None:
        """The same of peak memory."""
        if not self.measured.fits or self.peak_bytes is None:
            return None
        return self.peak_bytes / self.measured.peak_bytes - 1


def cells(results: Results) -> Iterator[Cell]:
    """Yield every cell that was both predicted and measured."""
    for network in NETWORKS:
        record = results.first(FORETELL, network=network)
        for row in record.metrics["cells"] if record else ():
            point = points(results, network, row["mode"]).get(row["multiple"])
            if point is not None and point.fits is not None:
                yield Cell(
                    network,
                    row["mode"],
                    row["multiple"],
                    point,
                    row["fits"],
                    row["slowdown"],
                    row.get("peak_bytes"),
                    row.get("bound"),
                )


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return Part 1's measurements, and what is predicted of them."""
    return [*under_limit(profile), *foretold(profile)]


def table(results: Results) -> list[dict[str, Any]]:
    """Return a row for each network and method: how many cells are right, and how far off."""
    rows: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells(results):
        rows.setdefault((cell.network, cell.mode), []).append(cell)
    return [
        {
            "network": network,
            "method": LABELS[mode],
            "fits as predicted": f"{sum(cell.right for cell in group)} of {len(group)}",
            "peak, error (%)": _errors([cell.peak_error for cell in group]),
            "time of an image, error (%)": _errors([cell.time_error for cell in group]),
            "measured over its bound": ", ".join(map(_over_bound, group)),
        }
        for (network, mode), group in rows.items()
    ]


def _over_bound(cell: Cell) -> str:
    speed = cell.measured.speed if cell.measured.fits else None
    return f"{1 / (speed * cell.bound):.2f}" if speed and cell.bound else DASH


def _errors(values: list[float | None]) -> str:
    return ", ".join(DASH if value is None else f"{100 * value:+.1f}" for value in values)


def figure(results: Results) -> "Figure":
    """Draw the speed kept as predicted against as measured, and 15 % either way."""
    from matplotlib.ticker import NullLocator

    from repro.plots import MARKERS, PALETTE, legend_below, new_axes

    drawn, axes = new_axes(1, 1, 5.4, 5.0)
    axis = axes[0, 0]
    ends = []
    for number, network in enumerate(NETWORKS):
        pairs = [
            (cell.measured.speed, 1 / cell.slowdown)
            for cell in cells(results)
            if cell.network == network and cell.time_error is not None and cell.slowdown
        ]
        if pairs:
            axis.plot(*zip(*pairs, strict=True), MARKERS[number], color=PALETTE[number], ms=6,
                      alpha=0.8, label=network)  # fmt: skip
            ends += [value for pair in pairs for value in pair if value]
    if ends:
        low, high = 0.8 * min(ends), 1.25 * max(ends)
        line = np.array([low, high])
        axis.plot(line, line, color="#8d99ae", lw=1, label="as measured")
        axis.fill_between(line, line / (1 + WITHIN), line / (1 - WITHIN), color="#8d99ae",
                          alpha=0.2, lw=0, label=f"time within {100 * WITHIN:.0f} %")  # fmt: skip
        axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        ticks = [tick for tick in (0.125, 0.25, 0.5, 1, 2, 4) if low <= tick <= high]
        for side in (axis.xaxis, axis.yaxis):
            side.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            side.set_minor_locator(NullLocator())
    axis.set(
        xlabel="images/s over undivided, measured",
        ylabel="images/s over undivided, predicted",
        title="ours: small networks, SIMULATED limit" if _on_cpu(results) else "ours",
    )
    legend_below(drawn, 3)
    return drawn


def _on_cpu(results: Results) -> bool:
    return any(record.device["type"] == "cpu" for record in results.ok(FORETELL))


def _share(held: list[bool], name: str) -> Exact:
    if not held:
        raise NotRun("no records")
    return Exact(sum(held) >= MOST_CELLS * len(held), f"{name} {sum(held)} of {len(held)} cases")


def right(results: Results) -> Exact:
    """Count every way, network and size that was measured."""
    return _share([cell.right for cell in cells(results)], "right in")


def near(results: Results) -> Exact:
    """Count what fits, and was predicted to."""
    errors = [abs(cell.time_error) for cell in cells(results) if cell.time_error is not None]
    shared = _share([error <= WITHIN for error in errors], f"within {100 * WITHIN:.0f} % in")
    half = f"half of all within {100 * float(np.median(errors)):.0f} %"
    return shared._replace(text=f"{shared.text}; {half}")


ADVICE = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        "What `repro advise` predicted beside what Part 1 measured; errors in the order of growing "
        "mini-batches. Over its bound below 1: predicted times were too long. Tuned convolutions "
        "are not predicted.",
        facts,
    ),
    claims={
        "fits": lambda results: {"": right(results)},
        "time": lambda results: {"": near(results)},
    },
)
