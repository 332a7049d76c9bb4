"""What do a benchmark's layers gain at one limit, and unequal devices together? (Figures 8 and 13)

DeepBench's convolutions, forward, at four times their batch size, each by itself. Besides, Tables
I to IV and VI: I, II and VI are of the records of both figures, IV of DeepBench.
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
from repro.experiments.microconv.measured import ms, or_none, times
from repro.experiments.microconv.runs import CONTENT, HALF, MODERATE, PAPER, cluster, precisions_of
from repro.experiments.query import Results, one_machine
from repro.experiments.view import panel
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.plots import Effect

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
    """DeepBench's layers of a kernel size, or all, that fit within the limit, one a row.

    Both times of a speed-up were measured in turns with torch's own convolution, and are compared
    through it. Columns: `size` of the kernel; the speed-ups `torch`, over torch's own, and
    `undivided`, over the best undivided algorithm (NaN where none fits); `shares`, how many
    comparisons the latter has (none of the same division); `half`, whether the division computes
    in float16; `row`, of the record.
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


def _sizes(results: Results, precision: str) -> list[str]:
    """All layers, and the sizes of their filters by area."""
    sizes = set(layers(results, precision)["size"])
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
    count = 1 if over == TORCH else rows.shares
    weight = math.sqrt((rows[over] ** 2 * count).sum()) / rows[over].sum()
    every = layers(results, precision)["row"]
    forms = [row[form] | row for row in every for form in (UNDIVIDED, "divided") if form in row]
    mean = measured.compared(math.log(rows[over].mean()), weight, forms)
    return replace(mean, label=f"mean of {len(rows)} layers")


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
            told = f" (paper: {FIGURE['pseudo_half']} of 94)" * (size == "all")
            pseudo = f"{len(own) - own.half.sum()} of {len(own)}" if precision == HALF else DASH
            row["PSEUDO_HALF"] = pseudo + told
            rows.append(row)
    return rows


def figure(results: Results) -> "Figure":
    """The mean speed-up of each kernel size with its interval, in the first precision."""
    precision, ran = precisions_of(results)[0], "not run"
    if records := results.ok("deepbench", setting=precision):
        run = sum(len(record.metrics["layers"]) for record in records)
        every = run + sum(record.metrics["left_out"] for record in records)
        factor = records[0].config["factor"]
        ran = f"{run} of DeepBench's {every} layers at {factor} times their batch size"
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
    told = "mean speed-up; the paper's on V100, in half precision"
    return measured.draw_effects(groups, told, panel(ran))


def over_undivided(results: Results, size: str) -> Cases:
    """The mean speed-up of a kernel size's layers over the best undivided within the limit."""
    gain, torchs = (measured_gain(results, over, size) for over in (UNDIVIDED, TORCH))
    rows = layers(results, "fp32", size).dropna(subset=UNDIVIDED)["row"]
    return {size: measured.noted(gain, torchs, [row[UNDIVIDED] for row in rows], "layers")}


def over_torch(results: Results) -> Cases:
    """The mean speed-up over torch's own of today, whatever memory that takes."""
    return {"all": measured_gain(results, TORCH)}


def pseudo_half_most(results: Results) -> Cases:
    """The share of layers whose divisions compute nothing in float16, over a half."""
    half = layers(results, HALF)["half"]
    if not len(half):
        raise NotRun("no layers in half precision: cuDNN has the two configurations")
    pseudo = len(half) - int(half.sum())
    share = 100 * pseudo / len(half)
    label = f"{pseudo} of {len(half)} layers, {share:.0f} %; over a half:"
    return {"all": replace(deterministic(share - 50, unit="points", digits=1), label=label)}


FIGURE8 = runs.artefact(
    "figure8",
    plan=planned,
    rows=table,
    draw=figure,
    claims={
        "layers_faster": partial(over_undivided, size="all"),
        "three_by_three": partial(over_undivided, size="3×3"),
        "over_torch": over_torch,
        "pseudo_half_most": pseudo_half_most,
    },
)


# Figure 13: unequal devices, each with a part of a mini-batch.

CLUSTER = PAPER["figure13"]

# One fast device is the baseline, as one GK210 is in the paper, which adds another and a K20Xm.
ALL = "2 fast + slow"
COMBINATIONS = {
    "fast": ("fast",),
    "slow": ("slow",),
    "fast + slow": ("fast", "slow"),
    ALL: ("fast 1", "fast 2", "slow"),
}


def splits(results: Results) -> list[tuple[str, str, float, float, float | None]]:
    """By combination of devices: shares, seconds, gain over the better one, loss by even shares.

    Of the best split, the slowest device of which is the fastest; idle devices are left out. The
    loss is None where even shares are no size that was timed.
    """
    from repro.microconv import split_batch

    rows: list[tuple[str, str, float, float, float | None]] = []
    for record in results.ok("cluster")[:1]:
        batch = record.config["batch"]
        times = {
            device: {int(size): seconds for size, seconds in sizes.items()}
            for device, sizes in record.metrics["times"].items()
        }
        alone = min(sizes[batch] for sizes in times.values())
        for name, devices in COMBINATIONS.items():
            own = {device: times[device.partition(" ")[0]] for device in devices}
            best = split_batch(batch, own)
            slowest = max(own[device][size] for device, size in best.items())
            share, rest = divmod(batch, len(devices))
            timed = not rest and all(share in sizes for sizes in own.values())
            loss = max(sizes[share] for sizes in own.values()) / slowest if timed else None
            rows.append((name, _named(best), slowest, alone / slowest, loss))
    return rows


def _named(values: Mapping[str, Any]) -> str:
    return _listed(f"{name}: {value}" for name, value in values.items())


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def figure13_table(results: Results) -> list[dict[str, Any]]:
    """Mini-batches shared out among unequal devices, ours and then the paper's."""
    k80 = "the paper's K80 (two GK210) + K20Xm"
    rows = [[*one, ms(s), times(gain), times(even)] for *one, s, gain, even in splits(results)]
    rows += [
        ["the paper's 750Ti + K20Xm", DASH, DASH, DASH, times(CLUSTER["even_slowdown"])],
        [k80, _named(CLUSTER["split_k80_k20"]), DASH, times(CLUSTER["speedup_k80_k20"]), DASH],
        ["all of the paper's GPUs", DASH, DASH, times(CLUSTER["speedup_all"]), DASH],
    ]
    heads = ("devices", "batch sizes", "slowest (ms)", "over the best one", "even is slower by")
    return [dict(zip(heads, row, strict=True)) for row in rows]


def figure13(results: Results) -> "Figure":
    """The gain of devices together, and the cost of an even split."""
    together: list[Effect] = []
    evenly: list[Effect] = []
    for name, sizes, _, gain, even in splits(results):
        if len(COMBINATIONS[name]) > 1:
            paper = CLUSTER["speedup_k80_k20"] if name == ALL else None
            together.append((f"{name} ({sizes})", paper, gain, None))
            if even:
                evenly.append((name, CLUSTER["even_slowdown"], even, None))
    groups = {"speed-up over the better device alone": together, "time of an even split": evenly}
    title = runs.title_of(results.first("cluster"), "ResNet-18")
    told = "over the better device alone, or over the best split"
    return measured.draw_effects(groups, told, title)


FIGURE13 = runs.artefact(
    "figure13",
    plan=lambda profile, chosen: [cluster(profile)],
    rows=figure13_table,
    draw=figure13,
)


# The tables of settings.

NUMBERS = {"table1": "I", "table2": "II", "table3": "III", "table4": "IV", "table6": "VI"}


def tables(results: Results) -> list[dict[str, Any]]:
    """The rows of all five tables, the paper's and ours."""
    here = _configurations(results) | _machine(results) | CONTENT["planned"]
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


def _configurations(results: Results) -> dict[str, str]:
    """The algorithms that the layers of Figure 8 take, by configuration of Table I."""
    taken: dict[str, set[str]] = {}
    for record in results.ok("deepbench"):
        for row in record.metrics["layers"]:
            for algorithm in measured.algorithms(row.get("divided", {})):
                half = "TRUE_HALF" if algorithm.startswith("cudnn_half:") else "PSEUDO_HALF"
                name = half if record.config["setting"] == runs.HALF else "FLOAT"
                taken.setdefault(name, set()).add(algorithm)
    return {name: _listed(sorted(own)) for name, own in taken.items()}


def _machine(results: Results) -> dict[str, str]:
    records = [record for record in results.records if record.status == "ok"]
    if not records:
        return {}
    memory = (f"{r.device['memory_bytes'] / 2**30:.0f} GiB" for r in records)
    return {
        "device": _listed(dict.fromkeys(r.device["name"] for r in records)),
        "memory": _listed(dict.fromkeys(memory)),
        "libraries": _listed(dict.fromkeys(f"torch {r.versions['torch']}" for r in records)),
        "frameworks": "PyTorch",
        "solver": "HiGHS, of scipy",
    }


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
