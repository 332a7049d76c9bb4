"""What do the paper's tables of configurations, machines and layers say here? (I to IV, VI)

Tables I, II and VI are of the records of Figures 8 and 13, III of the plans, IV of DeepBench.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from repro.experiments.design import Run
from repro.experiments.microconv import benchmark, measured, networks
from repro.experiments.microconv.runs import CONTENT, HALF, NETWORK_TYPES, PAPER, artefact, cluster
from repro.experiments.query import Results

NUMBERS = {"table1": "I", "table2": "II", "table3": "III", "table4": "IV", "table6": "VI"}


def table(results: Results) -> list[dict[str, Any]]:
    """The rows of all five tables, the paper's beside ours."""
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


def family_of(algorithm: str) -> str:
    """The column of Table I that an algorithm belongs to."""
    if algorithm == measured.NATIVE:
        return "torch's own"
    name = algorithm.partition(":")[2].lower()
    if "fft" in name or name.startswith("ft"):
        return "FFT"
    return "Winograd" if name.startswith(("winograd", "wt")) else "GEMM"


def _configurations(results: Results) -> dict[str, str]:
    """The algorithms that the layers of Figure 8 take, with their largest workspace."""
    taken: dict[str, dict[str, int]] = {name: {} for name in PAPER["table1"]}
    for record in results.ok("deepbench"):
        for division in (row["divided"] for row in record.metrics["layers"] if "divided" in row):
            for algorithm in sorted(measured.algorithms(division)):
                name = "TRUE_HALF" if algorithm.startswith("cudnn_half:") else "PSEUDO_HALF"
                most = taken[name if record.config["setting"] == HALF else "FLOAT"]
                family = family_of(algorithm)
                most[family] = max(division["workspace_bytes"], most.get(family, 0))
    return {
        name: _listed(f"{family} (up to {measured.mib(most)} MiB)" for family, most in own.items())
        for name, own in taken.items()
    }


def _machine(results: Results) -> dict[str, str]:
    """The machines and libraries of the records."""
    records = [record for record in results.records if record.status == "ok"]
    if not records:
        return {}
    memory = (f"{record.device['memory_bytes'] / 2**30:.0f} GiB" for record in records)
    return {
        "device": _listed(dict.fromkeys(record.device["name"] for record in records)),
        "memory": _listed(dict.fromkeys(memory)),
        "libraries": _listed(dict.fromkeys(f"torch {r.versions['torch']}" for r in records)),
        "frameworks": "PyTorch",
        "solver": "HiGHS, of scipy",
    }


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
        configs = [run.config for run in plan]
        modes = sorted({config.get("mode", "WR") for config in configs}, reverse=True)
        limits = sorted({c["limit_mib"] for c in configs if c.get("mode", "WR") == "WR"})
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
