"""Which machines and settings are ours, and what do unequal devices gain together?

Figure 13, and Tables I to IV and VI: I, II and VI are of the records of Figures 8 and 13, III of
the plans, IV of DeepBench.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from repro.experiments.design import Run
from repro.experiments.microconv import benchmark, measured, networks
from repro.experiments.microconv.measured import ms, times
from repro.experiments.microconv.runs import (
    CONTENT,
    HALF,
    NETWORK_TYPES,
    PAPER,
    artefact,
    cluster,
    title_of,
)
from repro.experiments.query import Results
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Split = dict[str, tuple[int, float]]  # by device: batch size and seconds
FIGURE = PAPER["figure13"]

# One fast device is the baseline, as one GK210 is in the paper, which adds another and a K20Xm.
ALL = "2 fast + slow"
COMBINATIONS = {
    "fast": ("fast",),
    "slow": ("slow",),
    "fast + slow": ("fast", "slow"),
    ALL: ("fast 1", "fast 2", "slow"),
}


def _shared_out(batch: int, seconds: Mapping[str, Mapping[int, float]]) -> Split:
    """The split of a batch whose slowest device is the fastest; idle devices are left out."""
    from repro.microconv import split_batch

    sizes = split_batch(batch, seconds)
    return {device: (size, seconds[device][size]) for device, size in sizes.items()}


def splits(results: Results) -> dict[str, tuple[Split, Split | None]]:
    """The best split of each combination of devices, and an even one, None where it is no size."""
    found = {}
    for record in results.ok("cluster")[:1]:
        measured = {
            device: {int(size): seconds for size, seconds in sizes.items()}
            for device, sizes in record.metrics["times"].items()
        }
        for name, devices in COMBINATIONS.items():
            seconds = {device: measured[device.partition(" ")[0]] for device in devices}
            share, rest = divmod(record.config["batch"], len(devices))
            even = None
            if not rest and all(share in sizes for sizes in seconds.values()):
                even = {device: (share, sizes[share]) for device, sizes in seconds.items()}
            found[name] = _shared_out(record.config["batch"], seconds), even
    return found


def slowest(split: Split) -> float:
    """Seconds of the slowest device."""
    return max(seconds for _, seconds in split.values())


def gains(results: Results) -> dict[str, float]:
    """The speed-up of each combination over the better device alone."""
    best = {name: slowest(split) for name, (split, _) in splits(results).items()}
    return {name: min(best["fast"], best["slow"]) / seconds for name, seconds in best.items()}


def published_splits() -> tuple[Split, Split]:
    """The best split of the paper's 750Ti and K20Xm by its own times, and the even one.

    The paper gives each GPU's time at half of the mini-batch; times are taken as proportional to
    the batch size from there, and batch sizes as multiples of 4 (section III-E; its splits are).
    """
    batch, half = FIGURE["batch"], FIGURE["batch"] // 2
    even = {device: (half, value / 1e3) for device, value in FIGURE["even_ms"].items()}
    seconds = {
        device: {size: size / half * second for size in range(4, batch + 1, 4)}
        for device, (_, second) in even.items()
    }
    return _shared_out(batch, seconds), even


def _sizes(split: Split) -> str:
    return ", ".join(f"{device}: {size}" for device, (size, _) in split.items())


def figure13_table(results: Results) -> list[dict[str, Any]]:
    """Mini-batches shared out among unequal devices, ours and then the paper's."""
    split = ", ".join(f"{device}: {size}" for device, size in FIGURE["split_k80_k20"].items())
    own = splits(results)
    rows = []
    for name, (best, even) in (own | {"the paper's 750Ti + K20Xm": published_splits()}).items():
        slower = slowest(even) / slowest(best) if even else None
        gain = gains(results).get(name)
        rows.append([name, _sizes(best), ms(slowest(best)), times(gain), times(slower)])
    k80, every = (times(FIGURE[key]) for key in ("speedup_k80_k20", "speedup_all"))
    rows.append(["the paper's K80 (two GK210) + K20Xm", split, DASH, k80, DASH])
    rows.append(["all of the paper's GPUs", DASH, DASH, every, DASH])
    heads = ("devices", "batch sizes", "slowest (ms)", "over the best one", "even is slower by")
    return [dict(zip(heads, row, strict=True)) for row in rows]


def figure(results: Results) -> "Figure":
    """The gain of devices together, and the cost of an even split."""
    from repro.experiments.microconv.drawing import Effect, effects

    together: list[Effect] = []
    even: list[Effect] = []
    for name, (best, split) in splits(results).items():
        if len(COMBINATIONS[name]) > 1:
            paper = FIGURE["speedup_k80_k20"] if name == ALL else None
            together.append((f"{name} ({_sizes(best)})", paper, gains(results)[name], None))
        if split and len(split) > 1:
            even.append((name, FIGURE["even_slowdown"], slowest(split) / slowest(best), None))
    title = f"{title_of(results.first('cluster'), 'ResNet-18')}, SIMULATED"
    groups = {"speed-up over the better device alone": together, "time of an even split": even}
    return effects(groups, "over the better device alone, or over the best split", title)


def even_split(results: Results) -> tuple[bool, str]:
    """The even split over the best one by the paper's own times; needs no records."""
    best, even = published_splits()
    slowdown = slowest(even) / slowest(best)
    near = abs(slowdown / FIGURE["even_slowdown"] - 1) <= 0.05
    return near, f"{times(slowdown)} ({_sizes(best)})"


FIGURE13 = artefact(
    "figure13",
    plan=lambda profile, chosen: [cluster(profile)],
    rows=figure13_table,
    draw=figure,
    checks={"paper": even_split},
)


NUMBERS = {"table1": "I", "table2": "II", "table3": "III", "table4": "IV", "table6": "VI"}


def table(results: Results) -> list[dict[str, Any]]:
    """The rows of all five tables, the paper's and ours."""
    found = [record.metrics["devices"].items() for record in results.ok("cluster")]
    devices = [f"{name}: {device}" for named in found for name, device in named]
    here = _configurations(results) | _machine(results) | _settings(results.profile)
    here |= {name: _told(**_counted(name)) for name in NETWORK_TYPES}
    here |= {"devices": ", ".join(devices)}
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
                name = half if record.config["setting"] == HALF else "FLOAT"
                taken.setdefault(name, set()).add(algorithm)
    return {name: _listed(sorted(own)) for name, own in taken.items()}


def _machine(results: Results) -> dict[str, str]:
    """The machines and libraries of the records."""
    told = [
        (r.device["name"], f"{r.device['memory_bytes'] / 2**30:.0f} GiB", f"torch {version}")
        for r in results.records
        if r.status == "ok" and (version := r.versions["torch"])
    ]
    if not told:
        return {}
    columns = enumerate(("device", "memory", "libraries"))
    found = {name: _listed(dict.fromkeys(row[n] for row in told)) for n, name in columns}
    return found | {"frameworks": "PyTorch", "solver": "HiGHS, of scipy"}


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _settings(profile: str) -> dict[str, str]:
    """Policies, limits and networks of the plans under a profile."""
    planned: dict[str, Sequence[Run]] = {
        "layers": benchmark.planned(profile, {}),
        "Caffe": networks.figure9_runs(profile, {}) + networks.figure11_runs(profile, {}),
        "TensorFlow": networks.table5_runs(profile, {}),
        "cluster": [cluster(profile)],
    }
    rows = {}
    for name, plan in planned.items():
        configs = [{"mode": "WR"} | run.config for run in plan]
        modes = sorted({config["mode"] for config in configs}, reverse=True)
        limits = sorted({c["limit_mib"] for c in configs if c["mode"] == "WR"})
        roles = ["DeepBench"] if name == "layers" else sorted({c["role"] for c in configs})
        rows[name] = f"{_listed(modes)}; {_listed(limits)} MiB; {_listed(roles)}"
    return rows


def _counted(network_type: str) -> dict[str, Any]:
    """Kernel sizes (DeepBench names the wider side first), batch sizes and number of layers."""
    layers = CONTENT["deepbench"][network_type]
    sizes = sorted({(rows, columns) for *_, rows, columns, _, _, _ in layers})
    batches = [batch for *_, batches in layers for batch in batches]
    kernels = [f"{max(size)}×{min(size)}" for size in sizes]
    return {"kernels": kernels, "batches": sorted(set(batches)), "layers": len(batches)}


def _told(kernels: list[str], batches: list[int], layers: int) -> str:
    return f"{layers} layers: {_listed(kernels)}; batch size {_listed(batches)}"


def same_layers(results: Results) -> tuple[bool, str]:
    """Each network type; needs no records."""
    same = [name for name in NETWORK_TYPES if _counted(name) == PAPER["table4"][name]]
    count = sum(_counted(name)["layers"] for name in NETWORK_TYPES)
    return len(same) == len(NETWORK_TYPES), f"{len(same)} of {len(NETWORK_TYPES)}; {count} layers"


TABLES = artefact(
    "tables",
    plan=lambda profile, chosen: [*benchmark.planned(profile, chosen), cluster(profile)],
    rows=table,
    checks={"layers": same_layers},
)
