"""What does dividing gain over a benchmark's layers, at one limit? (Figure 8)

DeepBench's convolutions, forward, at four times their batch size, each by itself.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.captions import caption, panel
from repro.experiments.design import Chosen, Exhibit, Expectation, Results, Run, claim, one_machine
from repro.experiments.intervals import Gap, NotRun, Spread, exactly
from repro.experiments.judging import Verdict, combine, direction
from repro.experiments.microconv.describing import marks
from repro.experiments.microconv.settings import (
    HALF,
    LIMITS_MIB,
    NETWORK_TYPES,
    PAPER,
    benchmark_settings,
    compared,
    deepbench,
    own_spread,
    scatter,
    settings_of,
)
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMIT_MIB = LIMITS_MIB[1]
UNDIVIDED, TORCH = "undivided", "torch"  # what speed-ups are over


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the layers of every network type at every setting of precision."""
    return [
        deepbench(profile, network_type, setting)
        for setting in benchmark_settings(profile)
        for network_type in NETWORK_TYPES
    ]


@dataclass(frozen=True)
class Gain:
    """A layer's speed-up, and how many comparisons with torch's own it was made of.

    Attributes:
        ratio: Above 1 where dividing is faster.
        compared: 2 over undivided, 1 over torch's own; 0 where both ways are the same division.
    """

    ratio: float
    compared: int


def layer_gains(results: Results, setting: str, over: str) -> dict[str, list[Gain]]:
    """Return DeepBench's speed-ups by kernel size, over ``undivided`` or ``torch``'s own.

    Where no undivided algorithm fits into the limit there is no ratio over ``undivided``. Both
    times were measured in turns with torch's own convolution, and are compared through it.
    """
    gains: dict[str, list[Gain]] = {}
    for row in _layers(results, setting):
        divided, undivided = row.get("divided"), row.get("undivided")
        if divided is None:
            continue
        gain = Gain(divided["native_s"] / divided["time_s"], 1)
        if over == UNDIVIDED:
            if undivided is None:
                continue
            ratio = gain.ratio * undivided["time_s"] / undivided["native_s"]
            gain = Gain(ratio, 0 if undivided == divided else 2)
        gains.setdefault(row["kernel_size"], []).append(gain)
    return dict(sorted(gains.items(), key=lambda item: _area(item[0])))


def _layers(results: Results, setting: str) -> Iterable[Mapping[str, Any]]:
    for record in results.ok("deepbench", setting=setting):
        yield from record.metrics["layers"]


def _area(kernel_size: str) -> int:
    rows, columns = kernel_size.split("×")
    return int(rows) * int(columns)


def _flat(groups: Mapping[str, Sequence[Gain]]) -> list[Gain]:
    return [gain for gains in groups.values() for gain in gains]


def _ratios(gains: Iterable[Gain]) -> list[float]:
    return [gain.ratio for gain in gains]


def table(results: Results) -> list[dict[str, Any]]:
    """Return the speed-ups of DeepBench's layers by kernel size and setting."""
    rows = []
    for setting in settings_of(results):
        fitting = layer_gains(results, setting, UNDIVIDED)
        native = layer_gains(results, setting, TORCH)
        groups = {"all": (_flat(fitting), _flat(native))}
        groups |= {size: (fitting.get(size, []), native[size]) for size in native}
        for size, (over_undivided, over_torch) in groups.items():
            rows.append(
                {
                    "setting": setting,
                    "kernel": size,
                    "n": len(over_undivided),
                    "over undivided: mean": _times(np.mean, over_undivided),
                    "least": _times(min, over_undivided),
                    "largest": _times(max, over_undivided),
                    "paper, V100 half": _published(size),
                    "n, torch": len(over_torch),
                    "over torch's own: mean": _times(np.mean, over_torch),
                    "largest, torch": _times(max, over_torch),
                    "PSEUDO_HALF": _told_half(results, setting, size),
                    "paper, PSEUDO_HALF": (
                        f"{PAPER['figure8']['pseudo_half']} of 94" if size == "all" else DASH
                    ),
                }
            )
    return rows


def pseudo_half(results: Results, size: str = "all") -> list[bool]:
    """Return of each layer in half precision whether it is computed in float32 throughout."""
    return [
        not any(name.startswith("cudnn_half:") for _, name in row["divided"]["parts"])
        for row in _layers(results, HALF)
        if "divided" in row and size in ("all", row["kernel_size"])
    ]


def _told_half(results: Results, setting: str, size: str) -> str:
    chosen = pseudo_half(results, size) if setting == HALF else []
    return f"{sum(chosen)} of {len(chosen)}" if chosen else DASH


def _published(size: str) -> str:
    paper = PAPER["figure8"]
    if size == "all":
        return f"{paper['mean']:.2f}×, up to {paper['largest']:.2f}×"
    return f"{paper['three_by_three']['V100']:.2f}×" if size == "3×3" else DASH


def _times(which: Any, gains: Sequence[Gain]) -> str:
    return f"{which(_ratios(gains)):.2f}×" if gains else DASH


def layers_run(results: Results, setting: str) -> str:
    """Return how many layers a setting's records have, empty for none."""
    records = results.ok("deepbench", setting=setting)
    if not records:
        return ""
    run = sum(len(record.metrics["layers"]) for record in records)
    every = run + sum(record.metrics["left_out"] for record in records)
    factor = records[0].config["factor"]
    return f"{run} of DeepBench's {every} layers at {factor} times their batch size"


def figure(results: Results) -> "Figure":
    """Draw the least, the mean and the largest speed-up of each kernel size, first setting."""
    from repro import plots
    from repro.experiments.microconv.drawing import Dot, draw_dots, right_end

    setting = next(iter(settings_of(results)), "fp32")
    panels = {
        f"over the best undivided within {LIMIT_MIB} MiB": UNDIVIDED,
        "over torch's own, without a limit": TORCH,
    }
    gains = {over: layer_gains(results, setting, over) for over in panels.values()}
    sizes = ["all", *sorted(gains[TORCH], key=_area)]
    figure, axes = plots.new_axes(1, 2, 10.5, 1.8 + 0.42 * len(sizes))
    layers = layers_run(results, setting)
    title = panel(layers, data="SYNTHETIC inputs") if layers else "ours: not run"
    figure.suptitle(title, fontsize=11)
    rows: dict[str, list[Dot]] = {}
    for over, groups in gains.items():
        rows[over] = []
        for size in sizes:
            values = _ratios(_flat(groups) if size == "all" else groups.get(size, []))
            mean = float(np.mean(values)) if values else None
            ends = (min(values), max(values)) if values else None
            rows[over].append(Dot(mean, ends, _papers(size) if over == UNDIVIDED else {}))
    end = right_end([dot for dots in rows.values() for dot in dots])
    for axis, (title, over) in zip(axes[0], panels.items(), strict=True):
        draw_dots(axis, rows[over], end, "ours, least to largest")
        for row, (size, dot) in enumerate(zip(sizes, rows[over], strict=True)):
            if dot.ours is None and size != "all":
                axis.text(0.02, row, "nothing undivided fits", va="center", fontsize=8)
        names = {size: len(gains[over].get(size, [])) for size in sizes}
        names["all"] = len(_flat(gains[over]))
        axis.set_yticks(range(len(sizes)), [f"{size} (n = {n})" for size, n in names.items()])
        axis.set_ylim(len(sizes) - 0.45, -0.55)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("mean speed-up (×); right of 1 is faster")
    plots.legend_below(figure, 5)
    return figure


def _papers(size: str) -> dict[str, float]:
    """Return the paper's mean speed-ups of a kernel size, in half precision."""
    paper = PAPER["figure8"]
    of_size = {"all": {"V100": paper["mean"]}, "3×3": paper["three_by_three"]}.get(size, {})
    return {f"{card}, half precision": of_size[card] for card in sorted(of_size, reverse=True)}


def mean_gain(gains: Sequence[Gain], spread: Spread) -> Gap:
    """Return the mean speed-up of layers, with the error of the comparisons it is made of.

    Args:
        gains: Of layers; they are no sample of one another, and add no spread of their own.
        spread: Of one comparison with torch's own (`own_spread`).

    Raises:
        NotRun: There is none.
    """
    if not gains:
        raise NotRun("no layers that fit both ways")
    total = math.fsum(gain.ratio for gain in gains)
    weight = math.sqrt(math.fsum(gain.ratio**2 * gain.compared for gain in gains)) / total
    return compared(math.log(total / len(gains)), weight, spread)


def measured_gain(
    results: Results, over: str, size: str | None = None
) -> tuple[Gap, Sequence[Gain], Spread]:
    """Return the mean speed-up in float32 of a kernel size's layers, or of all, and what made it.

    Raises:
        NotRun: There are no such layers.
    """
    results.need("deepbench", setting="fp32")
    one_machine(results.ok("deepbench", setting="fp32"))
    groups = layer_gains(results, "fp32", over)
    gains = _flat(groups) if size is None else groups.get(size, [])
    spread = own_spread(
        row[way] | {"batch": row["batch"]}
        for row in _layers(results, "fp32")
        for way in ("undivided", "divided")
        if way in row
    )
    return mean_gain(gains, spread), gains, spread


def _judged(
    results: Results,
    expected: Expectation,
    over: str,
    size: str | None = None,
    paper: float | None = None,
    of: str = "",
) -> Verdict:
    """Judge the mean speed-up of the layers of a kernel size, or of all, in float32."""
    gap, gains, spread = measured_gain(results, over, size)
    unchanged = sum(not gain.compared for gain in gains)
    word, evidence = direction(f"mean of {len(gains)} layers", gap, paper, sign=expected.sign)
    if of:
        evidence += f"; the paper's is of a {of} in half precision"
    if unchanged:
        evidence += f"; best left undivided: {unchanged} of them"
    return Verdict(word, f"{evidence}; {scatter(spread)}")


@claim(
    "layers_faster",
    f"Dividing makes DeepBench's layers faster at {LIMIT_MIB} MiB",
    "Section IV-A",
)
def layers_faster(results: Results, expected: Expectation) -> Verdict:
    """Judge DeepBench's mean speed-up over the best undivided algorithm within the limit."""
    return _judged(results, expected, UNDIVIDED, None, PAPER["figure8"]["mean"], "V100")


@claim("three_by_three", "3×3 kernels gain", "Section IV-A")
def three_by_three(results: Results, expected: Expectation) -> Verdict:
    """Judge the mean speed-up of 3×3 kernels."""
    paper = PAPER["figure8"]["three_by_three"]["P100"]
    return _judged(results, expected, UNDIVIDED, "3×3", paper, "P100")


@claim("five_by_five", "5×5 kernels gain", "Section IV-A")
def five_by_five(results: Results, expected: Expectation) -> Verdict:
    """Judge the mean speed-up of 5×5 kernels, of which the paper gives no number."""
    return _judged(results, expected, UNDIVIDED, "5×5")


@claim(
    "over_torch",
    "Dividing is faster than what the library does by itself (as we put it: than torch's own "
    "convolution of today, without a limit)",
    "Abstract",
)
def over_torch(results: Results, expected: Expectation) -> Verdict:
    """Judge whether dividing beats what torch does today, whatever memory that takes."""
    return _judged(results, expected, TORCH)


@claim(
    "pseudo_half_most",
    "In half precision, most kernels are computed in float32 (PSEUDO_HALF) where both are allowed",
    "Section IV-A",
)
def pseudo_half_most(results: Results, expected: Expectation) -> Verdict:
    """Judge the share of layers whose divisions compute nothing in float16."""
    chosen = pseudo_half(results)
    if not chosen:
        raise NotRun("no layers in half precision: cuDNN has the two configurations")
    share, paper = 100 * sum(chosen) / len(chosen), PAPER["figure8"]["pseudo_half_percent"]
    name = (
        f"{sum(chosen)} of {len(chosen)} layers, {share:.0f} %, paper {paper:.0f} %; over a half:"
    )
    gap = exactly(share - 50, unit="points", digits=1)
    return combine([direction(name, gap, paper - 50, sign=expected.sign)])


def _facts(results: Results) -> Iterable[str]:
    """Yield how many layers ran, and what is not the paper's."""
    setting = next(iter(settings_of(results)), "fp32")
    if layers := layers_run(results, setting):
        yield f"{layers}."
    yield from marks(results)


FIGURE8 = Exhibit(
    runs=runs,
    table=table,
    figure=figure,
    caption=caption(
        f"Speed-up of the best division (powerOfTwo) within {LIMIT_MIB} MiB, forward, by kernel "
        "size; lines reach from the least to the largest.",
        _facts,
    ),
    claims=(layers_faster, three_by_three, five_by_five, over_torch, pseudo_half_most),
)
