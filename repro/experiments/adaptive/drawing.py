"""How this paper's figures look: one colour and marker a strategy, and axes that can be read.

What the paper has is hollow, what we have is solid. Whoever draws imports this where it draws,
since plotting takes a second to import.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from repro.experiments.adaptive.settings import DECAY, GIVEN
from repro.plots import styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Look = Mapping[str, Any]

# The next colour would be too pale on white.
LOOKS: dict[str, dict[str, str]] = {
    **styles(("best", "theta", "scheduled", "linear", GIVEN, DECAY, "large")),
    "noise": {"color": "#56b4e9", "marker": "h"},
}
# Batch sizes by how many times the best one they are: the same for all tasks and scales.
TIMES = (1, 2, 4, 8, 16)
# In an order of light, and in no strategy's colours.
SIZES: dict[int, dict[str, str]] = {
    times: {"color": colour, "marker": marker}
    for times, colour, marker in zip(
        TIMES, ("#0d0887", "#7e03a8", "#cc4778", "#e8703a", "#f0b429"), "osD^v", strict=True
    )
}
PAPERS, GREY = "#5f6b7a", "#48536a"


def by_epoch(
    axis: "Axes",
    curves: Mapping[str, Sequence[Sequence[float]]],
    looks: Mapping[str, Look],
    ylabel: str,
) -> None:
    """Draw means over seeds by epoch; bars behind the ends are one standard deviation.

    Args:
        axis: To draw in.
        curves: By label, the curves of all seeds, shape (seeds, epochs).
        looks: Of each label.
        ylabel: What is drawn, with its unit.
    """
    longest = max((len(seeds[0]) for seeds in curves.values() if seeds), default=1)
    for row, (label, seeds) in enumerate(curves.items(), 1):
        if not seeds:
            continue
        values = np.asarray(seeds, dtype=float)
        epochs = np.arange(1, values.shape[1] + 1)
        mean, look = values.mean(0), {"lw": 1.6, "ms": 4.5, **looks[label]}
        axis.plot(epochs, mean, markevery=max(1, len(epochs) // 7), label=label, **look)
        if len(values) > 1:  # bands of so many curves would hide each other
            std = values[:, -1].std(ddof=1)
            behind = epochs[-1] + (0.02 + 0.1 * row / len(curves)) * longest
            axis.vlines(behind, mean[-1] - std, mean[-1] + std, color=look["color"], lw=2)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlabel="epoch", ylabel=ylabel)


def mark_epoch(axis: "Axes", epoch: float | None, label: str) -> None:
    """Draw a line where something happens after an epoch, None for nowhere."""
    if epoch is not None:
        axis.axvline(epoch + 0.5, color=GREY, ls=":", lw=1.3, label=label, zorder=1)


def papers_point(axis: "Axes", x: float, y: float, look: Look) -> None:
    """Draw a value of the paper's, hollow."""
    hollow: dict[str, Any] = {"ls": "none", "mfc": "none", "mew": 1.8, "ms": 9, "zorder": 5}
    axis.plot([x], [y], mec=look["color"], marker=look["marker"], **hollow)


def our_point(
    axis: "Axes",
    x: float,
    y: float,
    look: Look,
    interval: tuple[float, float] | None = None,
) -> None:
    """Draw a value of ours, solid, with its interval where it has one."""
    if interval is not None and not math.isnan(interval[0]):
        axis.plot([x, x], interval, "-", color=look["color"], lw=1.8, zorder=4)
    solid: dict[str, Any] = {"ls": "none", "mec": "white", "mew": 0.6, "ms": 8, "zorder": 5}
    axis.plot([x], [y], color=look["color"], marker=look["marker"], **solid)


def explain(axis: "Axes", *entries: tuple[str, Look]) -> None:
    """Name kinds of marks in the legend, by label and look; nothing is drawn."""
    for label, look in entries:
        if look.get("band"):
            axis.fill_between([], [], [], color=look["color"], alpha=0.25, lw=0, label=label)
        else:
            axis.plot([], [], label=label, **look)


HOLLOW: dict[str, Any] = {
    "marker": "o",
    "ls": "none",
    "mfc": "none",
    "mec": GREY,
    "mew": 1.8,
    "ms": 8,
}
SOLID: dict[str, Any] = {"marker": "o", "ls": "-", "color": GREY, "ms": 7, "lw": 1.8}


def in_powers_of_two(axis: "Axes", values: Iterable[float]) -> None:
    """Make a y axis logarithmic, with ticks such as 1/4, 1, 4 in words that are read."""
    powers = [math.log2(value) for value in values if value > 0] or [0.0]
    low, high = math.floor(min(powers) + 0.1), math.ceil(max(powers) - 0.1)
    ticks = [2.0**n for n in range(low, high + 1, 1 if high - low <= 6 else 2)]
    axis.set_yscale("log", base=2)
    axis.set_ylim(2.0 ** (min(low, min(powers)) - 0.25), 2.0 ** (max(high, max(powers)) + 0.25))
    axis.set_yticks(ticks, [power_of_two(tick) for tick in ticks])
    axis.minorticks_off()


def power_of_two(value: float) -> str:
    """Return a power of two as ``8`` or ``1/8``."""
    return f"{value:g}" if value >= 1 else f"1/{1 / value:g}"


def side_by_side(positions: Mapping[str, float]) -> dict[str, float]:
    """Return positions on a logarithmic axis; those that would hide each other are moved apart."""
    groups: list[list[str]] = []
    for name in sorted(positions, key=lambda name: positions[name]):
        if groups and positions[name] < 1.08 * positions[groups[-1][-1]]:
            groups[-1].append(name)
        else:
            groups.append([name])
    return {
        name: positions[name] * 1.09 ** (number - (len(group) - 1) / 2)
        for group in groups
        for number, name in enumerate(group)
    }


def in_decimals(axis: Any, unit: str = "", digits: Sequence[int] = (1, 2, 5)) -> None:
    """Let a logarithmic `axis.xaxis` or `axis.yaxis` have ticks such as 0.02, 200 or 5,000.

    Over a wide range powers of ten alone are told, where all would run into each other.
    """

    def told(value: float, _: Any) -> str:
        low, high = axis.get_view_interval()
        wide = high > _WIDE * low > 0
        return "" if wide and round(math.log10(value), 6) % 1 else f"{_decimal(value)}{unit}"

    axis.set_major_locator(LogLocator(10, digits))
    axis.set_minor_locator(LogLocator(10, ()))
    axis.set_major_formatter(FuncFormatter(told))


_WIDE = 60


def _decimal(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:.10f}".rstrip("0")
