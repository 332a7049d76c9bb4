"""How much faster are a benchmark's layers when divided, at one limit? (Figure 8)

DeepBench's convolutions, forward, at four times their batch size, each by itself.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd

from repro.experiments.design import Chosen, Run
from repro.experiments.judge import Cases, Estimate, NotRun, deterministic
from repro.experiments.microconv import measured, runs
from repro.experiments.microconv.measured import or_none, times
from repro.experiments.microconv.runs import HALF, MODERATE, PAPER, precisions_of
from repro.experiments.query import Results, one_machine
from repro.experiments.view import panel
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNDIVIDED, TORCH = "undivided", "torch"  # the bases of speed-ups
FIGURE = PAPER["figure8"]


def planned(profile: str, chosen: Chosen) -> list[Run]:
    """The layers of every network type at every precision."""
    return [
        runs.deepbench(profile, network_type, precision)
        for precision in runs.profile_of(profile)["benchmark_precisions"]
        for network_type in runs.NETWORK_TYPES
    ]


def layers(results: Results, precision: str, size: str = "all") -> pd.DataFrame:
    """DeepBench's layers of a kernel size, or all, one a row.

    Both times of a speed-up were measured in turns with torch's own convolution, and are compared
    through it. Columns: `size` of the kernel; the speed-ups `torch`, over torch's own (NaN where
    nothing fits), and `undivided`, over the best undivided algorithm (NaN where none fits);
    `same`, whether that is the same division; `half`, whether the division computes in float16;
    `row`, of the record.
    """
    rows = []
    for record in results.ok("deepbench", setting=precision):
        for row in record.metrics["layers"]:
            divided, undivided = row.get("divided", {}), row.get("undivided", {})
            speed, slower = _over_torch(divided), _over_torch(undivided)
            half = any(name.startswith("cudnn_half:") for name in measured.algorithms(divided))
            same = undivided == divided
            rows.append([row["kernel_size"], speed, speed / slower, same, half, row])
    frame = pd.DataFrame(rows, columns=["size", TORCH, UNDIVIDED, "same", "half", "row"])
    return frame if size == "all" else frame[frame["size"] == size]


def _over_torch(division: Mapping[str, Any]) -> float:
    return division["native_s"] / division["time_s"] if division else math.nan


def _sizes(results: Results, precision: str) -> list[str]:
    """All layers, and the sizes of their filters by area."""
    sizes = set(layers(results, precision).dropna(subset=TORCH)["size"])
    return ["all", *sorted(sizes, key=lambda size: math.prod(map(int, size.split("×"))))]


def measured_gain(
    results: Results, over: str, size: str = "all", precision: str = "fp32"
) -> Estimate:
    """The mean speed-up of a kernel size's layers, or of all.

    The error is that of the comparisons with torch's own that it is made of, one over torch's own
    and two over undivided: the layers are no sample of one another, and add no spread.
    """
    results.need("deepbench", setting=precision)
    one_machine(results.ok("deepbench", setting=precision))
    rows = layers(results, precision, size).dropna(subset=over)
    if not len(rows):
        raise NotRun("no layers that fit both ways")
    count = 1 if over == TORCH else 2 * ~rows.same.astype(bool)
    weight = math.sqrt((rows[over] ** 2 * count).sum()) / rows[over].sum()
    every = layers(results, precision)["row"]
    forms = [row[form] | row for row in every for form in (UNDIVIDED, "divided") if form in row]
    mean = measured.compared(math.log(rows[over].mean()), weight, forms)
    return replace(mean, label=f"mean of {len(rows)} layers")


def _pseudo_half(results: Results, size: str = "all") -> pd.Series:
    """Whether each layer in half precision is computed in float32 throughout."""
    return ~layers(results, HALF, size).dropna(subset=TORCH)["half"].astype(bool)


def table(results: Results) -> list[dict[str, Any]]:
    """The speed-ups of DeepBench's layers by kernel size and precision."""
    half = times(FIGURE["three_by_three"]["V100"])
    paper = {"all": f"{times(FIGURE['mean'])}, up to {times(FIGURE['largest'])}", "3×3": half}
    rows = []
    for precision in precisions_of(results):
        for size in _sizes(results, precision):
            row: dict[str, Any] = {"setting": precision, "kernel": size}
            row["paper, V100 half"] = paper.get(size, DASH)
            own = layers(results, precision, size)
            for over, name in ((UNDIVIDED, "over undivided"), (TORCH, "over torch's own")):
                row[f"{name}: n"] = own[over].count()
                row[name] = str(or_none(measured_gain, results, over, size, precision) or DASH)
            chosen = _pseudo_half(results, size) if precision == HALF else ()
            told = f" (paper: {FIGURE['pseudo_half']} of 94)" * (size == "all")
            row["PSEUDO_HALF"] = (f"{sum(chosen)} of {len(chosen)}" if len(chosen) else DASH) + told
            rows.append(row)
    return rows


def layers_run(results: Results) -> Iterable[str]:
    """How many layers the records of the first precision have."""
    records = results.ok("deepbench", setting=precisions_of(results)[0])
    if records:
        run = sum(len(record.metrics["layers"]) for record in records)
        every = run + sum(record.metrics["left_out"] for record in records)
        factor = records[0].config["factor"]
        yield f"{run} of DeepBench's {every} layers at {factor} times their batch size."


def figure(results: Results) -> "Figure":
    """The mean speed-up of each kernel size with its interval, in the first precision."""
    precision = precisions_of(results)[0]
    means = {"all": FIGURE["mean"], "3×3": FIGURE["three_by_three"]["V100"]}
    groups = {
        title: [
            measured.effect(
                f"{size} (n = {layers(results, precision, size)[over].count()})",
                papers.get(size),
                or_none(measured_gain, results, over, size, precision),
            )
            for size in _sizes(results, precision)
        ]
        for over, title, papers in (
            (UNDIVIDED, f"over the best undivided within {MODERATE} MiB", means),
            (TORCH, "over torch's own, without a limit", {}),
        )
    }
    title = panel(next(iter(layers_run(results)), "not run").rstrip("."))
    told = "mean speed-up; the paper's on V100, in half precision"
    return measured.draw_effects(groups, told, title)


def over_undivided(results: Results, size: str) -> Cases:
    """The mean speed-up of a kernel size's layers over the best undivided within the limit."""
    gain, torchs = (measured_gain(results, over, size) for over in (UNDIVIDED, TORCH))
    rows = layers(results, "fp32", size).dropna(subset=UNDIVIDED)["row"]
    return {size: measured.judged(gain, torchs, [row[UNDIVIDED] for row in rows], "layers")}


def over_torch(results: Results) -> Cases:
    """The mean speed-up over torch's own of today, whatever memory that takes."""
    return {"all": measured_gain(results, TORCH)}


def pseudo_half_most(results: Results) -> Cases:
    """The share of layers whose divisions compute nothing in float16, over a half."""
    chosen = _pseudo_half(results)
    if not len(chosen):
        raise NotRun("no layers in half precision: cuDNN has the two configurations")
    share = 100 * sum(chosen) / len(chosen)
    label = f"{sum(chosen)} of {len(chosen)} layers, {share:.0f} %; over a half:"
    return {"all": replace(deterministic(share - 50, unit="points", digits=1), label=label)}


FIGURE8 = runs.artefact(
    "figure8",
    plan=planned,
    rows=table,
    draw=figure,
    facts=layers_run,
    claims={
        "layers_faster": partial(over_undivided, size="all"),
        "three_by_three": partial(over_undivided, size="3×3"),
        "over_torch": over_torch,
        "pseudo_half_most": pseudo_half_most,
    },
)
