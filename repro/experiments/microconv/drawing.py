"""What the figures of μ-cuDNN share: one look for each algorithm and policy, dots, layers' bars."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from repro import plots
from repro.experiments.judge import Estimate

TORCHS = "torch's own"
POLICIES = plots.styles((TORCHS, "powerOfTwo", "undivided", "all"))
LIMITS = ("#a6cbe3", "#4a90c2", "#124a7d")  # from the smallest limit to the largest
UNFIT = "#9a4a22"  # ink of what does not fit

_CPU = ("ft16x16", "ft8x8", "wt8x8", "implicit_gemm")
_OURS = ("im2col", "direct", "winograd", "fft", "implicit")
_CUDNN = (
    "FFT",
    "FFT_TILING",
    "WINOGRAD",
    "WINOGRAD_NONFUSED",
    "IMPLICIT_GEMM",
    "IMPLICIT_PRECOMP_GEMM",
    "GEMM",
    "ALGO_0",
    "ALGO_1",
)
_NATIVE = "torch:native"
ALGORITHMS = plots.styles(
    (_NATIVE, *(f"nnpack:{name}" for name in _CPU), *(f"torch:{name}" for name in _OURS))
) | plots.styles((_NATIVE, *(f"cudnn:{name}" for name in _CUDNN)))

# Markers of the paper's devices, all hollow.
_PAPERS_MARKERS = "Ds^v"


def algorithm_colours(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each algorithm, the same in all figures for those that are known."""
    unknown = sorted(set(names) - ALGORITHMS.keys())
    looks = plots.styles(unknown) | ALGORITHMS
    return {name: looks[name]["color"] for name in names}


def ink_on(colour: str) -> str:
    """Return black or white, whichever is read more easily on a colour."""
    red, green, blue = to_rgb(colour)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue >= 0.5 else "white"


@dataclass(frozen=True)
class Dot:
    """A speed-up in one row: ours solid, the paper's hollow.

    Attributes:
        ours: None where there is none.
        ends: What the line through ours reaches from and to; None for no line.
        papers: The paper's values by what they are of, such as ``P100``.
    """

    ours: float | None
    ends: tuple[float, float] | None = None
    papers: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, gap: Estimate | None, papers: Mapping[str, float] | None = None) -> "Dot":
        """Return the dot of a ratio and its 95 % interval."""
        if gap is None:
            return cls(None, None, papers or {})
        low, high = map(math.exp, gap.interval())
        finite = math.isfinite(low) and math.isfinite(high)
        return cls(math.exp(gap.mean), (low, high) if finite else None, papers or {})


def draw_dots(
    axis: Axes, rows: Sequence[Dot], largest: float, line: str = "ours, 95 % interval"
) -> None:
    """Draw speed-ups from top to bottom, row 0 at height 0.

    Args:
        axis: Its ticks and limits of y are left to the caller.
        rows: One each.
        largest: The right end of the axis.
        line: What the lines are, for the legend.
    """
    axis.axvline(1, color="#48536a", linewidth=1)
    names = list(dict.fromkeys(name for dot in rows for name in dot.papers))
    for row, dot in enumerate(rows):
        # Below the paper's, where that is there.
        height = row + 0.2 * bool(dot.papers)
        if dot.ours is not None:
            axis.plot([dot.ours], [height], "o", color=plots.OURS, ms=7, label="ours")
        if dot.ends is not None:
            ends = list(dot.ends)
            axis.plot(ends, [height] * 2, "-", color=plots.OURS, lw=2.2, label=line)
    for row, dot in enumerate(rows):
        above = 0.32 if len(dot.papers) > 1 else 0.16
        for number, (name, value) in enumerate(dot.papers.items()):
            marker = _PAPERS_MARKERS[names.index(name) % 4]
            style: dict[str, Any] = {"mfc": "none", "mec": plots.INK, "ms": 7, "mew": 1.4}
            label = f"paper, {name}" if name else "paper"
            axis.plot([value], [row - above + 0.16 * number], marker, label=label, **style)
    axis.set_xlim(0, largest)
    axis.grid(axis="y", visible=False)


def right_end(rows: Sequence[Dot]) -> float:
    """Return where an axis of speed-ups ends, so that all dots and lines within reason show."""
    dots = [value for dot in rows for value in (dot.ours, *dot.papers.values()) if value]
    largest = max([1.2, *dots])
    ends = [min(dot.ends[1], 2 * largest) for dot in rows if dot.ends]
    return 1.08 * max([largest, *ends])


@dataclass(frozen=True)
class Bar:
    """A network's time in one way.

    Attributes:
        label: Of its row.
        policy: Whose colour it has.
        parts: By layer, its time over that of torch's own for all layers; empty where not all
            kernels fit.
        time_ms: Of all layers.
        dot: The speed-up that stands beside it.
        shaded: Whether it is hatched, as WD is in the paper.
    """

    label: str
    policy: str
    parts: Mapping[str, float]
    time_ms: float
    dot: Dot
    shaded: bool = False


def draw_layers(whose: str, panels: Mapping[str, Sequence[Bar]], over: str) -> Figure:
    """Draw networks' times layer by layer as bars that lie, and beside them their speed-ups.

    Args:
        whose: Title of all.
        panels: By title, the bars of a limit.
        over: What speed-ups are over.
    """
    counts = [max(1, len(bars)) for bars in panels.values()]
    figure, axes = plots.new_axes(len(panels), 2, 10.5, 1.2 + sum(0.5 + 0.27 * n for n in counts))
    grid = axes[0, 0].get_gridspec()
    grid.set_height_ratios([n + 0.4 for n in counts])
    grid.set_width_ratios([3, 2])
    figure.suptitle(whose, fontsize=11)
    longest = max([1e-9, *(sum(b.parts.values()) for bars in panels.values() for b in bars)])
    end = right_end([bar.dot for bars in panels.values() for bar in bars])
    for (times, gains), (title, bars) in zip(axes, panels.items(), strict=True):
        for row, bar in enumerate(bars):
            _draw_bar(times, row, bar, longest)
        draw_dots(gains, [bar.dot for bar in bars], end)
        times.set_xlim(0, 1.28 * longest)
        times.axvline(1, color="#48536a", linewidth=1, zorder=0)
        for axis in (times, gains):
            axis.set_yticks(range(len(bars)), [bar.label for bar in bars] if axis is times else [])
            axis.set_ylim(max(1, len(bars)) - 0.4, -0.6)
            axis.grid(axis="y", visible=False)
        times.set_title(title, fontsize=10, loc="left")
    axes[0, 1].set_title(f"speed-up over {over}", fontsize=10, loc="left")
    axes[-1, 0].set_xlabel("time of the convolutions over torch's own, timed in turns (×)")
    axes[-1, 1].set_xlabel("speed-up (×); right of 1 is faster")
    plots.legend_below(figure, 5)
    return figure


def _draw_bar(axis: Axes, row: int, bar: Bar, longest: float) -> None:
    colour, left = POLICIES[bar.policy]["color"], 0.0
    for number, (layer, width) in enumerate(bar.parts.items()):
        axis.barh(
            row,
            width,
            left=left,
            height=0.74,
            color=colour,
            alpha=0.7 if number % 2 else 1.0,
            edgecolor="white",
            hatch="////" if bar.shaded else None,
        )
        if row == 0 and not bar.shaded and width > longest / 18:
            text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7}
            axis.text(left + width / 2, row, layer, color=ink_on(colour), **text)
        left += width
    label = f" {left:.2f} ({bar.time_ms:,.0f} ms)" if bar.parts else " does not fit"
    ink = "black" if bar.parts else UNFIT
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # over the line at 1
    axis.text(left, row, label, ha="left", va="center", fontsize=8, color=ink, bbox=ground)
