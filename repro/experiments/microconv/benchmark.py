"""What do a benchmark's layers gain at one limit, and unequal devices together? (Figures 8 and 13)

DeepBench's convolutions, forward, at four times their batch size, each by itself. Besides, Tables
I to IV and VI: I, II and VI are of the records of both figures, IV of DeepBench.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import pandas as pd

from repro import plots
from repro.experiments.design import Chosen, Run
from repro.experiments.judge import Cases, Estimate, NotRun, deterministic, or_none, unsure
from repro.experiments.microconv import measured, runs
from repro.experiments.microconv.measured import TORCH, UNDIVIDED, ms
from repro.experiments.microconv.runs import CONTENT, HALF, MODERATE, PAPER, cluster, precisions_of
from repro.experiments.query import Results, one_machine
from repro.experiments.view import panel
from repro.records import Record
from repro.report import DASH

FIGURE = PAPER["figure8"]


def planned(profile: str, chosen: Chosen) -> list[Run]:
    """The layers of every network type at every precision."""
    return [
        runs.deepbench(profile, network_type, precision)
        for precision in runs.profile_of(profile)["benchmark_precisions"]
        for network_type in runs.NETWORK_TYPES
    ]


def layers(results: Results, precision: str, size: str = "all") -> pd.DataFrame:
    """DeepBench's layers of a kernel size, or all, that fit within the limit, one a row.

    Columns: `size` of the kernel; speed-ups over torch's own, and, through that, over the best
    undivided algorithm (NaN where none fits); `shares`, how many comparisons the latter has (none
    of the same division); `half`, whether it computes in float16; `row`, of the record.
    """
    rows = []
    for record in results.ok("deepbench", setting=precision):
        for row in record.metrics["layers"]:
            divided, undivided = row.get("divided"), row.get("undivided")
            if not divided:
                continue
            half = any(name.startswith("cudnn_half:") for name in measured.algorithms(divided))
            speed = divided["native_s"] / divided["time_s"]
            over = speed * undivided["time_s"] / undivided["native_s"] if undivided else math.nan
            shares = 2 * (undivided != divided)
            rows.append([row["kernel_size"], speed, over, shares, half, row])
    frame = pd.DataFrame(rows, columns=["size", TORCH, UNDIVIDED, "shares", "half", "row"])
    return frame if size == "all" else frame[frame["size"] == size]


def measured_gain(
    results: Results, over: str, size: str = "all", precision: str = "fp32"
) -> Estimate:
    """The mean speed-up of a kernel size's layers, or of all; see `measured.compared`.

    The layers are no sample of one another, and add no spread.
    """
    results.need("deepbench", setting=precision)
    one_machine(results.ok("deepbench", setting=precision))
    rows = layers(results, precision, size).dropna(subset=over)
    if not len(rows):
        raise NotRun("no layers that fit both ways")
    count = 1 if over == TORCH else rows.shares
    weight = math.sqrt((rows[over] ** 2 * count).sum()) / rows[over].sum()
    every = layers(results, precision)["row"]
    forms = [row[form] | row for row in every for form in ("undivided", "divided") if form in row]
    mean = measured.compared(math.log(rows[over].mean()), weight, forms)
    return mean.named(f"mean of {len(rows)} layers")


def table(results: Results) -> Iterator[dict[str, Any]]:
    """The speed-ups of DeepBench's layers by kernel size and precision."""
    paper = {"all": FIGURE["mean"], "3×3": FIGURE["three_by_three"]["V100"]}
    for precision in precisions_of(results):
        sizes = set(layers(results, precision)["size"])
        by_area = sorted(sizes, key=lambda size: math.prod(map(int, size.split("×"))))
        for size in ("all", *by_area):
            own = layers(results, precision, size)
            pseudo = f"{len(own) - own.half.sum()} of {len(own)}" if precision == HALF else DASH
            pseudo += f" (paper: {FIGURE['pseudo_half']} of 94)" * (size == "all")
            row: dict[str, Any] = {"setting": precision, "kernel": size, "layers": len(own)}
            row |= {"fit undivided": own[UNDIVIDED].count(), "paper": paper.get(size)}
            for over in (UNDIVIDED, TORCH):
                row[over] = or_none(measured_gain, results, over, size, precision)
            yield row | {"PSEUDO_HALF": pseudo}


def figure(results: Results) -> "plots.Figure":
    """The mean speed-up of each kernel size with its interval, in the first precision."""
    told = f"mean speed-up within {MODERATE} MiB; torch's own has no limit"
    return measured.draw(table(results), [], "kernel", told, panel("DeepBench's layers"))


def over_undivided(results: Results, size: str) -> Cases:
    """The mean speed-up of a kernel size's layers over the best undivided within the limit.

    In half precision, of which the paper says it, where that ran.
    """
    precision = HALF if HALF in precisions_of(results) else "fp32"
    gain, torchs = (measured_gain(results, over, size, precision) for over in (UNDIVIDED, TORCH))
    rows = layers(results, precision, size).dropna(subset=UNDIVIDED)["row"]
    return {size: measured.noted(gain, torchs, [row["undivided"] for row in rows], "layers")}


def pseudo_half_most(results: Results) -> Cases:
    """The share of layers whose divisions compute nothing in float16, over a half."""
    half = layers(results, HALF)["half"]
    if not len(half):
        raise NotRun("no layers in half precision: cuDNN has the two configurations")
    pseudo = len(half) - int(half.sum())
    share = 100 * pseudo / len(half)
    label = f"{pseudo} of {len(half)} layers, {share:.0f} %; over a half:"
    return {"all": deterministic(share - 50, unit="points", digits=1).named(label)}


FIGURE8 = runs.artefact(
    "figure8",
    plan=planned,
    rows=lambda results: measured.told(table(results)),
    draw=figure,
    claims={
        "layers_faster": partial(over_undivided, size="all"),
        "three_by_three": partial(over_undivided, size="3×3"),
        # Of today, whatever memory that takes.
        "over_torch": lambda results: {"all": measured_gain(results, TORCH)},
        "pseudo_half_most": pseudo_half_most,
    },
)


# Figure 13: unequal devices, each with a part of a mini-batch.

CLUSTER = PAPER["figure13"]

GAIN = "over the best one"
# One fast device is the baseline, as one GK210 is in the paper, which adds another and a K20Xm.
COMBINATIONS = {
    "fast": ("fast",),
    "slow": ("slow",),
    "fast + slow": ("fast", "slow"),
    "2 fast + slow": ("fast 1", "fast 2", "slow"),
    "all of the paper's": (),
}


def splits(results: Results) -> Iterator[dict[str, Any]]:
    """A mini-batch shared out by each combination of devices so that the slowest is the fastest.

    Gains are over the better device alone; even shares are None where they were not timed.
    """
    from repro.microconv import split_batch

    record = results.first("cluster")
    batch, metrics = (record.config["batch"], record.metrics) if record else (0, {"times": {}})
    times = {
        device: {int(size): seconds for size, seconds in sizes.items()}
        for device, sizes in metrics["times"].items()
    }
    for name, devices in COMBINATIONS.items():
        row: dict[str, Any] = {"devices": name, "paper": CLUSTER["speedup"].get(name), GAIN: None}
        row["paper, even"] = CLUSTER["even_slowdown"].get(name)
        if times and devices:
            own = {device: times[device.partition(" ")[0]] for device in devices}
            best = split_batch(batch, own)
            slowest = max(own[device][size] for device, size in best.items())
            share, rest = divmod(batch, len(devices))
            timed = not rest and all(share in sizes for sizes in own.values())
            even = max(sizes[share] for sizes in own.values()) / slowest if timed else None
            alone = min(sizes[batch] for sizes in times.values())
            row |= {GAIN: unsure(alone / slowest, log=True), "even is slower by": even}
            row |= {"batch sizes": _named(best), "slowest (ms)": ms(slowest)}
        yield row


def _named(values: Mapping[str, Any]) -> str:
    return _listed(f"{name}: {value}" for name, value in values.items())


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def figure13(results: Results) -> "plots.Figure":
    """The gain of devices together."""
    title = runs.title_of(results.first("cluster"), "ResNet-18")
    return measured.draw(splits(results), [], "devices", "speed-up", title, [GAIN])


FIGURE13 = runs.artefact(
    "figure13",
    plan=lambda profile, chosen: [cluster(profile)],
    rows=lambda results: measured.told(splits(results)),
    draw=figure13,
)


# The tables of settings.

NUMBERS = {"table1": "I", "table2": "II", "table3": "III", "table4": "IV", "table6": "VI"}


def tables(results: Results) -> list[dict[str, Any]]:
    """The rows of all five tables, the paper's and ours."""
    here = CONTENT["planned"] | _machine(results)
    here |= {name: _told(**counted(name)) for name in runs.NETWORK_TYPES}
    here["devices"] = _listed(_named(r.metrics["devices"]) for r in results.ok("cluster"))
    return [
        {
            "table": number,
            "row": row,
            "paper": published if isinstance(published, str) else _told(**published),
            "here": here.get(row) or "not run",
        }
        for name, number in NUMBERS.items()
        for row, published in PAPER[name].items()
    ]


def _machine(results: Results) -> dict[str, str]:
    records = [record for record in results.records if record.status == "ok"]
    facts: dict[str, Callable[[Record], str]] = {
        "device": lambda record: record.device["name"],
        "memory": lambda record: f"{record.device['memory_bytes'] / 2**30:.0f} GiB",
        "libraries": lambda record: f"torch {record.versions['torch']}",
    }
    return {name: _listed(dict.fromkeys(map(fact, records))) for name, fact in facts.items()}


def counted(network_type: str) -> dict[str, Any]:
    """Kernel sizes (DeepBench names the wider side first), batch sizes and number of layers."""
    layers = CONTENT["deepbench"][network_type]
    sizes = sorted({(rows, columns) for *_, rows, columns, _, _, _ in layers})
    batches = [batch for *_, batches in layers for batch in batches]
    kernels = [f"{max(size)}×{min(size)}" for size in sizes]
    return {"kernels": kernels, "batches": sorted(set(batches)), "layers": len(batches)}


def _told(kernels: list[str], batches: list[int], layers: int) -> str:
    return f"{layers} layers: {_listed(kernels)}; batch size {_listed(batches)}"


TABLES = runs.artefact(
    "tables",
    plan=lambda profile, chosen: [*planned(profile, chosen), cluster(profile)],
    rows=tables,
)
