"""Does `repro advise` predict what Part 1 measured?"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from repro.experiments.judge import Exact, NotRun
from repro.experiments.query import Results
from repro.experiments.together.limit import facts, points
from repro.experiments.together.limit import speed as speed_of
from repro.experiments.together.runs import (
    FORETELL,
    LABELS,
    NETWORKS,
    artefact,
    predictions,
    under_limit,
)
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CELLS = 0.95  # the goal that was set for both questions
WITHIN = 0.15  # of the time
_COLUMNS = ("network", "mode", "right", "speed", "predicted", "time", "peak")


def cells(results: Results) -> pd.DataFrame:
    """Return every network, method and size that was both predicted and measured, one a row.

    Returns:
        Columns `network`, `mode`; `right`: whether it fits as predicted; `speed`, `predicted`:
        images/s over undivided; `time`, `peak`: errors of an image's time and of peak memory, as
        predicted over measured less 1. NaN where it does not fit.
    """
    rows = []
    for network in NETWORKS:
        record = results.first(FORETELL, network=network)
        for told in record.metrics["cells"] if record else ():
            point = points(results, network, told["mode"]).get(told["multiple"])
            if point is None or point["fits"] is None:
                continue
            speed = peak = math.nan
            if point["fits"]:
                speed = math.exp(speed_of(point).mean)
                peak = (told.get("peak_bytes") or math.nan) / point["peak_bytes"]
            slowdown, right = told["slowdown"] or math.nan, told["fits"] == point["fits"]
            times = speed, 1 / slowdown, slowdown * speed - 1
            rows.append((network, told["mode"], right, *times, peak - 1))
    return pd.DataFrame(rows, columns=_COLUMNS)


def table(results: Results) -> list[dict[str, Any]]:
    """A row for each network and method: how many cells are right, and how far off."""
    groups = cells(results).groupby(["network", "mode"], sort=False)
    return [
        {
            "network": network,
            "method": LABELS[mode],
            "fits as predicted": f"{group['right'].sum()} of {len(group)}",
            "peak, error (%)": _joined(100 * group["peak"], "+.1f"),
            "time of an image, error (%)": _joined(100 * group["time"], "+.1f"),
        }
        for (network, mode), group in groups
    ]


def _joined(values: Iterable[float], form: str) -> str:
    return ", ".join(DASH if math.isnan(value) else f"{value:{form}}" for value in values)


def figure(results: Results) -> "Figure":
    """Draw the speed kept as predicted against as measured, and 15 % to either side."""
    from matplotlib.ticker import NullLocator

    from repro.plots import MARKERS, PALETTE, legend_below, new_axes

    drawn, axes = new_axes(1, 1, 5.4, 5.0)
    axis = axes[0, 0]
    known = cells(results).dropna(subset="time")
    for number, network in enumerate(NETWORKS):
        of_it = known[known["network"] == network]
        if len(of_it):
            axis.plot(of_it["speed"], of_it["predicted"], MARKERS[number], color=PALETTE[number],
                      ms=6, alpha=0.8, label=network)  # fmt: skip
    if len(known):
        ends = known[["speed", "predicted"]].to_numpy()
        low, high = 0.8 * ends.min(), 1.25 * ends.max()
        line = np.array([low, high])
        axis.plot(line, line, color="#8d99ae", lw=1, label="as measured")
        axis.fill_between(line, line / (1 + WITHIN), line / (1 - WITHIN), color="#8d99ae",
                          alpha=0.2, lw=0, label=f"time within {100 * WITHIN:.0f} %")  # fmt: skip
        axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        ticks = [tick for tick in (0.125, 0.25, 0.5, 1, 2, 4) if low <= tick <= high]
        for side in (axis.xaxis, axis.yaxis):
            side.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
            side.set_minor_locator(NullLocator())
    on_cpu = any(record.device["type"] == "cpu" for record in results.ok(FORETELL))
    axis.set(
        xlabel="images/s over undivided, measured",
        ylabel="images/s over undivided, predicted",
        title="ours: small networks, SIMULATED limit" if on_cpu else "ours",
    )
    legend_below(drawn, 3)
    return drawn


def _share(held: pd.Series, name: str) -> Exact:
    if held.empty:
        raise NotRun("no records")
    right = int(held.sum())
    return Exact(right >= MOST_CELLS * len(held), f"{name} {right} of {len(held)} cases")


def fits(results: Results) -> dict[str, Exact]:
    """Count every method, network and size that was measured."""
    return {"": _share(cells(results)["right"], "right in")}


def time(results: Results) -> dict[str, Exact]:
    """Count the cases that fit, and those predicted to."""
    errors = cells(results)["time"].dropna().abs()
    shared = _share(errors <= WITHIN, f"within {100 * WITHIN:.0f} % in")
    half = f"half of all within {100 * float(errors.median()):.0f} %"
    return {"": shared._replace(text=f"{shared.text}; {half}")}


ADVICE = artefact(
    "advice",
    facts=facts,
    plan=lambda profile, chosen: [*under_limit(profile), *predictions(profile)],
    rows=table,
    draw=figure,
    claims={"fits": fits, "time": time},
)
