"""What does dividing gain over a benchmark's layers, at one limit? (Figure 8)

DeepBench's convolutions, forward, at four times their batch size, each by itself.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.experiments.design import Chosen, Exhibit, Run
from repro.experiments.judge import Cases, Estimate, NotRun, exactly
from repro.experiments.microconv.comparing import FALLBACK
from repro.experiments.microconv.describing import marks
from repro.experiments.microconv.settings import (
    HALF,
    LIMITS_MIB,
    NETWORK_TYPES,
    PAPER,
    Scatter,
    benchmark_settings,
    compared,
    deepbench,
    ours_alone,
    own_scatter,
    settings_of,
)
from repro.experiments.query import Results, one_machine
from repro.experiments.view import caption, panel
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
        ours: This package's algorithms, where undivided is left to them.
    """

    ratio: float
    compared: int
    ours: Sequence[str] = ()


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
            gain = Gain(ratio, 0 if undivided == divided else 2, ours_alone(undivided))
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
                    "over undivided: mean": _told_gain(results, UNDIVIDED, size, setting),
                    "least": _times(min, over_undivided),
                    "largest": _times(max, over_undivided),
                    "undivided left to ours": sum(bool(gain.ours) for gain in over_undivided),
                    "paper, V100 half": _published(size),
                    "n, torch": len(over_torch),
                    "over torch's own: mean": _told_gain(results, TORCH, size, setting),
                    "largest, torch": _times(max, over_torch),
                    "PSEUDO_HALF": _told_half(results, setting, size),
                    "paper, PSEUDO_HALF": (
                        f"{PAPER['figure8']['pseudo_half']} of 94" if size == "all" else DASH
                    ),
                }
            )
    return rows


def _told_gain(results: Results, over: str, size: str, setting: str) -> str:
    try:
        return str(measured_gain(results, over, size, setting))
    except NotRun:
        return DASH


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


def mean_gain(gains: Sequence[Gain], scatter: Scatter) -> Estimate:
    """Return the mean speed-up of layers, with the error of the comparisons it is made of.

    Args:
        gains: Of layers; they are no sample of one another, and add no spread of their own.
        scatter: Of one comparison with torch's own (`own_scatter`).

    Raises:
        NotRun: There is none.
    """
    if not gains:
        raise NotRun("no layers that fit both ways")
    total = math.fsum(gain.ratio for gain in gains)
    weight = math.sqrt(math.fsum(gain.ratio**2 * gain.compared for gain in gains)) / total
    mean = compared(math.log(total / len(gains)), weight, scatter)
    return replace(mean, label=f"mean of {len(gains)} layers")


def measured_gain(
    results: Results, over: str, size: str = "all", setting: str = "fp32"
) -> Estimate:
    """Return the mean speed-up of a kernel size's layers, or of all.

    Raises:
        NotRun: There are no such layers.
    """
    results.need("deepbench", setting=setting)
    one_machine(results.ok("deepbench", setting=setting))
    scatter = own_scatter(
        row[way] | {"batch": row["batch"]}
        for row in _layers(results, setting)
        for way in ("undivided", "divided")
        if way in row
    )
    return mean_gain(_of_size(layer_gains(results, setting, over), size), scatter)


def _of_size(groups: Mapping[str, list[Gain]], size: str) -> list[Gain]:
    return _flat(groups) if size == "all" else groups.get(size, [])


def _over_undivided(results: Results, size: str) -> Estimate:
    """Return `measured_gain` over undivided, noting what that is and torch's own speed.

    Raises:
        NotRun: There are no such layers, or this package's algorithms compute most of them.
    """
    gain = measured_gain(results, UNDIVIDED, size)
    gains = _of_size(layer_gains(results, "fp32", UNDIVIDED), size)
    over_torch = measured_gain(results, TORCH, size)
    notes = [f"divided is {over_torch} of torch's own speed without a limit"]
    left = sum(bool(one.ours) for one in gains)
    if unchanged := sum(not one.compared for one in gains):
        notes.append(f"best left undivided: {unchanged} of them")
    if left:
        names = ", ".join(sorted({name for one in gains for name in one.ours}))
        said = f"undivided falls back to our own {names} on {left} of {len(gains)} layers"
        notes.insert(0, said)
        if 2 * left > len(gains):
            raise NotRun(f"{FALLBACK}: {gain}; {'; '.join(notes)}")
    return replace(gain, note="; ".join([*notes, "the paper's is in half precision"]))


def layers_faster(results: Results) -> Cases:
    """DeepBench's mean speed-up over the best undivided algorithm within the limit."""
    return {"all": _over_undivided(results, "all")}


def three_by_three(results: Results) -> Cases:
    """The mean speed-up of 3×3 kernels."""
    return {"3×3": _over_undivided(results, "3×3")}


def over_torch(results: Results) -> Cases:
    """The mean speed-up over what torch does today, whatever memory that takes."""
    return {"all": measured_gain(results, TORCH)}


def pseudo_half_most(results: Results) -> Cases:
    """The share of layers whose divisions compute nothing in float16, over a half."""
    chosen = pseudo_half(results)
    if not chosen:
        raise NotRun("no layers in half precision: cuDNN has the two configurations")
    share = 100 * sum(chosen) / len(chosen)
    label = f"{sum(chosen)} of {len(chosen)} layers, {share:.0f} %; over a half:"
    return {"all": replace(exactly(share - 50, unit="points", digits=1), label=label)}


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
        f"Speed-up of the best division (powerOfTwo) within {LIMIT_MIB} MiB, forward; lines: least "
        "to largest. Left to ours: undivided, an algorithm of this package computes them.",
        _facts,
    ),
    claims={
        "layers_faster": layers_faster,
        "three_by_three": three_by_three,
        "over_torch": over_torch,
        "pseudo_half_most": pseudo_half_most,
    },
)
