"""What do the paper's tables of configurations, machines and layers say here? (I to IV, VI)

Tables I, II and VI are of the records of Figures 8 and 13, III of the plans, IV of DeepBench.
"""

from collections.abc import Iterable
from typing import Any

from repro.experiments.design import Chosen, Exhibit, Run, check
from repro.experiments.microconv import benchmark, deepbench, devices, networks, shared_workspace
from repro.experiments.microconv.describing import marks
from repro.experiments.microconv.settings import HALF, NATIVE, NETWORK_TYPES, PAPER, mib
from repro.experiments.query import Results
from repro.experiments.view import caption

NOT_RUN = "not run"
TRUE_HALF = "cudnn_half:"  # algorithms that compute float16 in float16 begin so
GIB = 2**30


def runs(profile: str, chosen: Chosen) -> list[Run]:
    """Return the runs of Figures 8 and 13, whose records name algorithms and devices."""
    return benchmark.runs(profile, chosen) + devices.runs(profile, chosen)


def table(results: Results) -> list[dict[str, Any]]:
    """Return the rows of all five tables, the paper's beside ours."""
    here = {
        "table1": _configurations(results),
        "table2": _machine(results),
        "table3": _settings(results.profile),
        "table4": {name: _layers(name) for name in NETWORK_TYPES},
        "table6": {"devices": _devices(results)},
    }
    numbers = dict(zip(here, ("I", "II", "III", "IV", "VI"), strict=True))
    return [
        {
            "table": numbers[name],
            "row": row,
            "paper": published if isinstance(published, str) else _told(**published),
            "here": here[name][row] or NOT_RUN,
        }
        for name in here
        for row, published in PAPER[name].items()
    ]


def _family(algorithm: str) -> str:
    """Return the column of Table I that an algorithm belongs to."""
    if algorithm == NATIVE:
        return "torch's own"
    name = algorithm.partition(":")[2].lower()
    if "fft" in name or name.startswith("ft"):
        return "FFT"
    return "Winograd" if name.startswith(("winograd", "wt")) else "GEMM"


def _configurations(results: Results) -> dict[str, str]:
    """Return which algorithms the layers of Figure 8 take, with their largest workspace."""
    taken: dict[str, dict[str, int]] = {name: {} for name in PAPER["table1"]}
    for record in results.ok("deepbench"):
        half = record.config["setting"] == HALF
        if not half and record.config["setting"] != "fp32":
            continue
        for row in record.metrics["layers"]:
            division = row.get("divided", {"parts": [], "workspace_bytes": 0})
            for _, algorithm in division["parts"]:
                true_half = algorithm.startswith(TRUE_HALF)
                name = ("TRUE_HALF" if true_half else "PSEUDO_HALF") if half else "FLOAT"
                most = taken[name].get(_family(algorithm), 0)
                taken[name][_family(algorithm)] = max(most, division["workspace_bytes"])
    return {
        name: ", ".join(f"{family} (up to {mib(most)} MiB)" for family, most in families.items())
        for name, families in taken.items()
    }


def _machine(results: Results) -> dict[str, str]:
    """Return what the records ran on."""
    records = [record for record in results.records if record.status == "ok"]

    def told(values: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    return {
        "device": told(record.device["name"] for record in records),
        "memory": told(f"{record.device['memory_bytes'] / GIB:.0f} GiB" for record in records),
        "libraries": told(f"torch {record.versions['torch']}" for record in records),
        "frameworks": told("PyTorch" for _ in records),
        "solver": told("HiGHS, of scipy" for _ in records),
    }


def _settings(profile: str) -> dict[str, str]:
    """Return policies, limits and networks of the plans under a profile."""
    planned = {
        "layers": benchmark.runs(profile, {}),
        "Caffe": networks.figure9_runs(profile, {}) + shared_workspace.figure11_runs(profile, {}),
        "TensorFlow": networks.table5_runs(profile, {}),
        "cluster": devices.runs(profile, {}),
    }
    rows = {}
    for name, plan in planned.items():
        configs = [run.config for run in plan]
        modes = sorted({config.get("mode", "WR") for config in configs}, reverse=True)
        limits = sorted({c["limit_mib"] for c in configs if c.get("mode", "WR") == "WR"})
        roles = "DeepBench" if name == "layers" else ", ".join(sorted({c["role"] for c in configs}))
        rows[name] = f"{', '.join(modes)}; {', '.join(map(str, limits))} MiB; {roles}"
    return rows


def _layers(network_type: str) -> str:
    return _told(**_counted(network_type))


def _counted(network_type: str) -> dict[str, Any]:
    """Return kernel sizes, batch sizes and the number of a network type's layers."""
    layers = deepbench.layers(network_type)
    sizes = sorted({layer.conv.kernel_size for layer in layers})
    return {
        # DeepBench names the wider side first.
        "kernels": [f"{max(size)}×{min(size)}" for size in sizes],
        "batches": sorted({layer.batch for layer in layers}),
        "layers": len(layers),
    }


def _told(kernels: list[str], batches: list[int], layers: int) -> str:
    return f"{layers} layers: {', '.join(kernels)}; batch size {', '.join(map(str, batches))}"


def _devices(results: Results) -> str:
    record = results.first("cluster")
    named = record.metrics["devices"] if record else {}
    return ", ".join(f"{name}: {device}" for name, device in named.items())


@check("DeepBench's layers have Table IV's kernel sizes, batch sizes and numbers")
def same_layers(results: Results) -> tuple[bool, str]:
    """Compare each network type; needs no records."""
    same = [name for name in NETWORK_TYPES if _counted(name) == PAPER["table4"][name]]
    count = sum(_counted(name)["layers"] for name in NETWORK_TYPES)
    return len(same) == len(NETWORK_TYPES), f"{len(same)} of {len(NETWORK_TYPES)}; {count} layers"


TABLES = Exhibit(
    runs=runs,
    table=table,
    caption=caption(
        "The paper's tables that have no times. I names the algorithms that Figure 8's divisions "
        "take, with the largest workspace of such a division; limits in III are of each kernel.",
        marks,
    ),
    checks=(same_layers,),
)
