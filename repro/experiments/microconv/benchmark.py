"""What does dividing gain over a benchmark's layers, at one limit? (Figure 8)

DeepBench's convolutions, forward, at four times their batch size, each by itself.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from repro.experiments.captions import panel
from repro.experiments.design import Chosen, Exhibit, Results, Run, one_machine
from repro.experiments.judge import Cases, Estimate, NotRun, exactly
from repro.experiments.microconv import measured, runs
from repro.experiments.microconv.measured import times
from repro.experiments.microconv.runs import HALF, MODERATE, PAPER, precisions_of
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.experiments.microconv.drawing import Effect

UNDIVIDED, TORCH = "undivided", "torch"  # what speed-ups are over
FIGURE = PAPER["figure8"]


def planned(profile: str, chosen: Chosen) -> list[Run]:
    """The layers of every network type at every precision."""
    return [
        runs.deepbench(profile, network_type, precision)
        for precision in runs.profile_of(profile)["benchmark_precisions"]
        for network_type in runs.NETWORK_TYPES
    ]


@dataclass(frozen=True)
class Gain:
    """A layer's speed-up, and how many comparisons with torch's own it was made of.

    Attributes:
        size: Of its filters, such as ``3×3``.
        ratio: Above 1 where dividing is faster.
        compared: 2 over undivided, 1 over torch's own; 0 where both ways are the same division.
        ours: This package's algorithms, where undivided is left to them.
    """

    size: str
    ratio: float
    compared: int
    ours: set[str] = field(default_factory=set)


def _layers(results: Results, precision: str) -> list[Mapping[str, Any]]:
    records = results.ok("deepbench", setting=precision)
    return [row for record in records for row in record.metrics["layers"]]


def layer_gains(results: Results, precision: str, over: str, size: str = "all") -> list[Gain]:
    """DeepBench's speed-ups, over ``undivided`` or ``torch``'s own, of a kernel size or of all.

    Where no undivided algorithm fits into the limit there is no ratio over ``undivided``. Both
    times were measured in turns with torch's own convolution, and are compared through it.
    """
    gains = []
    for row in _layers(results, precision):
        divided, undivided = row.get("divided"), row.get("undivided")
        if divided is None or size not in ("all", row["kernel_size"]):
            continue
        ratio = divided["native_s"] / divided["time_s"]
        if over == TORCH:
            gains.append(Gain(row["kernel_size"], ratio, 1))
        elif undivided is not None:
            ratio *= undivided["time_s"] / undivided["native_s"]
            count, ours = 0 if undivided == divided else 2, measured.ours_alone(undivided)
            gains.append(Gain(row["kernel_size"], ratio, count, ours))
    return gains


def _sizes(results: Results, precision: str) -> list[str]:
    """All layers, and the sizes of their filters by area."""
    sizes = {gain.size for gain in layer_gains(results, precision, TORCH)}
    return ["all", *sorted(sizes, key=lambda size: math.prod(map(int, size.split("×"))))]


def measured_gain(
    results: Results, over: str, size: str = "all", precision: str = "fp32"
) -> Estimate:
    """The mean speed-up of a kernel size's layers, or of all.

    The error is that of the comparisons it is made of: the layers are no sample of one another,
    and add no spread of their own.

    Raises:
        NotRun: There are no such layers.
    """
    results.need("deepbench", setting=precision)
    one_machine(results.ok("deepbench", setting=precision))
    gains = layer_gains(results, precision, over, size)
    if not gains:
        raise NotRun("no layers that fit both ways")
    layers = _layers(results, precision)
    forms = [row[form] | row for row in layers for form in ("undivided", "divided") if form in row]
    total = math.fsum(gain.ratio for gain in gains)
    weight = math.sqrt(math.fsum(gain.ratio**2 * gain.compared for gain in gains)) / total
    mean = measured.compared(math.log(total / len(gains)), weight, forms)
    return replace(mean, label=f"mean of {len(gains)} layers")


def _gain_or_none(results: Results, *of: str) -> Estimate | None:
    try:
        return measured_gain(results, *of)
    except NotRun:
        return None


def pseudo_half(results: Results, size: str = "all") -> list[bool]:
    """Whether each layer in half precision is computed in float32 throughout."""
    divisions = [
        row["divided"]
        for row in _layers(results, HALF)
        if "divided" in row and size in ("all", row["kernel_size"])
    ]
    return [not any(n.startswith("cudnn_half:") for n in measured.algorithms(d)) for d in divisions]


def table(results: Results) -> list[dict[str, Any]]:
    """The speed-ups of DeepBench's layers by kernel size and precision."""
    half = f"{FIGURE['three_by_three']['V100']:.2f}×"
    paper = {"all": f"{FIGURE['mean']:.2f}×, up to {FIGURE['largest']:.2f}×", "3×3": half}
    rows = []
    for precision in precisions_of(results):
        for size in _sizes(results, precision):
            row: dict[str, Any] = {"setting": precision, "kernel": size}
            row["paper, V100 half"] = paper.get(size, DASH)
            for over, name in ((UNDIVIDED, "over undivided"), (TORCH, "over torch's own")):
                gains = layer_gains(results, precision, over, size)
                ratios = [gain.ratio for gain in gains]
                row[f"{name}: n"] = len(gains)
                row[f"{name}: mean"] = str(_gain_or_none(results, over, size, precision) or DASH)
                row[f"{name}: least"] = times(min(ratios, default=None))
                row[f"{name}: largest"] = times(max(ratios, default=None))
                if over == UNDIVIDED:
                    row["undivided left to ours"] = sum(bool(gain.ours) for gain in gains)
            chosen = pseudo_half(results, size) if precision == HALF else []
            row["PSEUDO_HALF"] = f"{sum(chosen)} of {len(chosen)}" if chosen else DASH
            row["paper: PSEUDO_HALF"] = f"{FIGURE['pseudo_half']} of 94" if size == "all" else DASH
            rows.append(row)
    return rows


def layers_run(results: Results) -> str:
    """How many layers the records of the first precision have, empty for none."""
    records = results.ok("deepbench", setting=precisions_of(results)[0])
    if not records:
        return ""
    run = sum(len(record.metrics["layers"]) for record in records)
    every = run + sum(record.metrics["left_out"] for record in records)
    factor = records[0].config["factor"]
    return f"{run} of DeepBench's {every} layers at {factor} times their batch size"


def figure(results: Results) -> "Figure":
    """The mean speed-up of each kernel size with its interval, in the first precision."""
    from repro.experiments.microconv.drawing import effect, effects

    precision = precisions_of(results)[0]
    means = {"all": FIGURE["mean"], "3×3": FIGURE["three_by_three"]["V100"]}
    groups: dict[str, list[Effect]] = {}
    for over, title, papers in (
        (UNDIVIDED, f"over the best undivided within {MODERATE} MiB", means),
        (TORCH, "over torch's own, without a limit", {}),
    ):
        rows = groups[title] = []
        for size in _sizes(results, precision):
            number = len(layer_gains(results, precision, over, size))
            gain = _gain_or_none(results, over, size, precision)
            rows.append(effect(f"{size} (n = {number})", papers.get(size), gain))
    layers = layers_run(results)
    title = panel(layers, data="SYNTHETIC inputs") if layers else "ours: not run"
    return effects(groups, "mean speed-up; the paper's on V100, in half precision", title)


def _over_undivided(results: Results, size: str) -> Cases:
    """`measured_gain` over undivided, noting what that is and torch's own speed."""
    gains = layer_gains(results, "fp32", UNDIVIDED, size)
    gain, over_torch = (measured_gain(results, over, size) for over in (UNDIVIDED, TORCH))
    note = f"divided is {over_torch} of torch's own speed without a limit"
    if unchanged := sum(not one.compared for one in gains):
        note += f"; best left undivided: {unchanged} of them"
    names = ", ".join(sorted(set().union(*(one.ours for one in gains))))
    left = sum(bool(one.ours) for one in gains)
    ours = f"undivided falls back to our own {names} on {left} of {len(gains)} layers"
    told = measured.judged(gain, note, ours if left else "", 2 * left > len(gains))
    return {size: replace(told, note=f"{told.note}; the paper's is in half precision")}


def layers_faster(results: Results) -> Cases:
    """DeepBench's mean speed-up over the best undivided algorithm within the limit."""
    return _over_undivided(results, "all")


def three_by_three(results: Results) -> Cases:
    """The mean speed-up of 3×3 kernels."""
    return _over_undivided(results, "3×3")


def over_torch(results: Results) -> Cases:
    """The mean speed-up over torch's own of today, whatever memory that takes."""
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
    if layers := layers_run(results):
        yield f"{layers}."


FIGURE8 = Exhibit(
    runs=planned,
    table=table,
    figure=figure,
    caption=runs.captioned("figure8", _facts),
    claims={
        "layers_faster": layers_faster,
        "three_by_three": three_by_three,
        "over_torch": over_torch,
        "pseudo_half_most": pseudo_half_most,
    },
)
