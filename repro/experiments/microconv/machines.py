"""Which machines and settings are ours, and what do unequal devices gain together?

Figure 13, and Tables I to IV and VI: I, II and VI are of the records of Figures 8 and 13, IV of
DeepBench.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from repro.experiments.microconv import benchmark, measured, runs
from repro.experiments.microconv.measured import ms, times
from repro.experiments.microconv.runs import CONTENT, PAPER, cluster
from repro.experiments.query import Results
from repro.report import DASH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from repro.plots import Effect

FIGURE = PAPER["figure13"]

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
            rows.append((name, _sizes(best), slowest, alone / slowest, loss))
    return rows


def _sizes(split: Mapping[str, int]) -> str:
    return ", ".join(f"{device}: {size}" for device, size in split.items())


def figure13_table(results: Results) -> list[dict[str, Any]]:
    """Mini-batches shared out among unequal devices, ours and then the paper's."""
    k80 = "the paper's K80 (two GK210) + K20Xm"
    rows = [[*one, ms(s), times(gain), times(even)] for *one, s, gain, even in splits(results)]
    rows += [
        ["the paper's 750Ti + K20Xm", DASH, DASH, DASH, times(FIGURE["even_slowdown"])],
        [k80, _sizes(FIGURE["split_k80_k20"]), DASH, times(FIGURE["speedup_k80_k20"]), DASH],
        ["all of the paper's GPUs", DASH, DASH, times(FIGURE["speedup_all"]), DASH],
    ]
    heads = ("devices", "batch sizes", "slowest (ms)", "over the best one", "even is slower by")
    return [dict(zip(heads, row, strict=True)) for row in rows]


def figure(results: Results) -> "Figure":
    """The gain of devices together, and the cost of an even split."""
    together: list[Effect] = []
    evenly: list[Effect] = []
    for name, sizes, _, gain, even in splits(results):
        if len(COMBINATIONS[name]) > 1:
            paper = FIGURE["speedup_k80_k20"] if name == ALL else None
            together.append((f"{name} ({sizes})", paper, gain, None))
            if even:
                evenly.append((name, FIGURE["even_slowdown"], even, None))
    groups = {"speed-up over the better device alone": together, "time of an even split": evenly}
    title = runs.title_of(results.first("cluster"), "ResNet-18")
    told = "over the better device alone, or over the best split"
    return measured.draw_effects(groups, told, title)


FIGURE13 = runs.artefact(
    "figure13",
    plan=lambda profile, chosen: [cluster(profile)],
    rows=figure13_table,
    draw=figure,
)


NUMBERS = {"table1": "I", "table2": "II", "table3": "III", "table4": "IV", "table6": "VI"}


def table(results: Results) -> list[dict[str, Any]]:
    """The rows of all five tables, the paper's and ours."""
    found = [record.metrics["devices"].items() for record in results.ok("cluster")]
    devices = [f"{name}: {device}" for named in found for name, device in named]
    here = _configurations(results) | _machine(results) | CONTENT["planned"]
    here |= {name: _told(**counted(name)) for name in runs.NETWORK_TYPES}
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
                name = half if record.config["setting"] == runs.HALF else "FLOAT"
                taken.setdefault(name, set()).add(algorithm)
    return {name: _listed(sorted(own)) for name, own in taken.items()}


def _machine(results: Results) -> dict[str, str]:
    """The machines and libraries of the records."""
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


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


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
    plan=lambda profile, chosen: [*benchmark.planned(profile, chosen), cluster(profile)],
    rows=table,
)
