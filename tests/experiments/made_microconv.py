"""Records of μ-cuDNN made up for tests: kernels, networks, layers, clusters, solved programmes."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import made
import pandas as pd
from made import timing

from repro.experiments import load_paper
from repro.experiments.design import Run
from repro.experiments.microconv.measured import NATIVE
from repro.experiments.query import Results

MIB = 2**20
KINDS = ("forward", "backward_data", "backward_filter")
Maker = Callable[[Run], Any]  # an outcome of a run, None for no record


def results(artefact: str, make: Maker, profile: str = "quick") -> Results:
    """Results with a record of every run that `make` gives an outcome."""

    def maker(run: Run, seed: int) -> Mapping[str, Any] | None:
        changes = make(run)
        return None if changes is None else {"dataset": None, **changes}

    return made.made_results(f"microconv/{artefact}", maker, {}, profile)


def judge(target: str, make: Maker, profile: str = "quick") -> tuple[str, str]:
    """Word and evidence of the claim ``ARTEFACT/KEY``."""
    found = made.verdict(f"microconv/{target}", results(target.split("/")[0], make, profile))
    return found.word, found.evidence


def table(artefact: str, make: Maker, profile: str = "quick") -> pd.DataFrame:
    """An artefact's table."""
    found = results(artefact, make, profile)
    return made.table_of(load_paper("microconv").artefacts[artefact], found)


def entry(
    layer: str = "conv2", kind: str = "forward", batch: int = 8, gain: float = 2.0,
    fast_mib: float = 2.0, slow_mib: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """A kernel with two algorithms at every micro-batch size.

    The slow one takes 1 ms and `slow_mib` for each sample, the fast one is `gain` times as fast,
    plus 1 μs a call, with `fast_mib` for each sample. Torch's own takes 4 ms and 3 MiB.
    """
    ways = {
        str(b): [
            ["slow", 1e-3 * b, int(slow_mib * b * MIB)],
            ["fast", 1e-3 * b / gain + 1e-6, int(fast_mib * b * MIB)],
        ]
        for b in range(1, batch + 1)
    }
    named = {"layer": layer, "kind": kind, "batch": batch, "shape": "64×27×27 to 192"}
    memory = {"data_bytes": batch * MIB // 4, "filter_bytes": MIB // 8}
    native = {"native_s": 4e-3, "native_bytes": 3 * MIB}
    return named | native | memory | {"candidates": ways}


def candidates(*entries: dict[str, Any], checked: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """A measurement of kernels."""
    metrics = {"benchmark_s": 2.0, "optimise_s": 0.5, "measured": 34, "infeasible_at_64_mib": 0}
    return {"metrics": metrics | {"kernels": list(entries), "checked": list(checked)}}


def alexnet(**of: Mapping[str, Any]) -> dict[str, Any]:
    """The 14 kernels of AlexNet, with changes to those of a layer."""
    names = itertools.product([f"conv{n}" for n in range(1, 6)], KINDS)
    kernels = [pair for pair in names if pair != ("conv1", "backward_data")]
    return candidates(*(entry(name, kind, **of.get(name, {})) for name, kind in kernels))


def conv2(fast_mib: float = 3.0, **relative: float) -> dict[str, Any]:
    """The record of conv2, given times over torch's own by policy and limit: ``all_64=0.5``.

    Undivided, the fast algorithm takes 32 times `fast_mib`; by default no limit has room for it.
    """
    rows = []
    for number, (cell, value) in enumerate(relative.items(), 1):
        policy, limit = cell.rsplit("_", 1)
        whole = policy == "undivided"
        row = {"limit_mib": int(limit), "policy": policy, "workspace_bytes": 3 * MIB}
        row["parts"] = [[32, "slow"]] if whole else [[16, "fast"], [16, "fast"]]
        native_s = 0.01 * number  # each met another speed of the machine
        row |= {"time_s": value * native_s, "native_s": native_s, "predicted_s": 1e-3}
        rows.append(row)
    return candidates(entry(batch=32, fast_mib=fast_mib), checked=rows)


def network(
    relative: float, mib: float = 1.0, native_s: float = 0.010, scatter: float | None = 0.01,
    name: str = "fast", whole: bool = False, **metrics: Any,
) -> dict[str, Any]:  # fmt: skip
    """A network of two layers, its kernels `relative` times as slow as torch's own.

    Args:
        relative: Of the kernels' times to those of torch's own.
        mib: Workspace of each kernel.
        native_s: Of each kernel.
        scatter: Of torch's own against itself, in twenty tiny kernels; None for none.
        name: The algorithm.
        whole: Whether kernels are undivided.
        metrics: Others.
    """
    rows = []
    for layer, kind in itertools.product(("conv1", "conv2"), ("forward", "backward_filter")):
        row: dict[str, Any] = {"layer": layer, "kind": kind, "batch": 8}
        row["parts"] = [[8, name]] if whole else [[4, name], [4, name]]
        row |= {"time_s": relative * native_s, "native_s": native_s}
        rows.append(row | {"predicted_s": row["time_s"], "workspace_bytes": int(mib * MIB)})
    for number, sign in enumerate((1, -1) * 10 if scatter is not None else ()):
        row = {"layer": f"conv{number + 3}", "kind": "forward", "batch": 8}
        tiny = {"predicted_s": 1e-9, "native_s": 1e-9, "workspace_bytes": 0}
        own = 1e-9 * (1 + (scatter or 0) * (1 + number / 100)) ** sign
        rows.append(row | tiny | {"parts": [[8, NATIVE]], "time_s": own})
    return {"metrics": {"kernels": rows, "variables": 0, "optimise_s": 0.002, **metrics}}


def bench(*rows: tuple[str, float, float], scatter: float | None = 0.001) -> dict[str, Any]:
    """Layers: kernel size, and time over torch's own of undivided and divided; 3 are left out.

    Where both are equal, both are the same measured division. Four layers of 9×9 are best left to
    torch's own, which scatters against itself; none where `scatter` is None.
    """

    def form(relative: float, native_s: float, *parts: list[Any]) -> dict[str, Any]:
        times = {"time_s": relative * native_s, "native_s": native_s}
        return {"parts": list(parts), "workspace_bytes": MIB, **times}

    found = []
    for size, undivided, divided in rows:
        # Torch's own took twice as long while the divided one was measured: a slow spell.
        whole = form(undivided, 0.01, [16, "fast"])
        parts = form(divided, 0.02, [8, "fast"], [8, "fast"]) if divided != undivided else whole
        row = {"shape": "a shape", "kernel_size": size, "batch": 16}
        found.append(row | {"undivided": whole, "divided": parts})
    for number, sign in enumerate((1, -1, 1, -1) if scatter is not None else ()):
        own = form((1 + (scatter or 0)) ** sign, 0.01 + number * 1e-4, [16, NATIVE])
        row = {"shape": "own", "kernel_size": "9×9", "batch": 16}
        found.append(row | {"undivided": own, "divided": own})
    return {"metrics": {"layers": found, "left_out": 3}}


def solved(*seconds: float) -> dict[str, Any]:
    """The solver's times for 562 and for 2,500 variables."""
    names = ("WD, 562 variables", "WD, 2500 variables", "front, B = 256")
    return {"metrics": {}, "timings": dict.fromkeys(names, timing(*seconds))}


def programme() -> dict[str, Any]:
    """The solver's times for ResNet-152's own kernels."""
    totals = {"as in the paper": 5088 * MIB, "binding": 100 * MIB}
    metrics = {"kernels": 464, "variables": 1200, "total_bytes": totals}
    metrics["taken_bytes"] = dict.fromkeys(totals, 90 * MIB)
    return {"metrics": metrics, "timings": {name: timing(0.1, 0.101, 0.102) for name in totals}}


def iterations(run: Run, **relative: Any) -> dict[str, Any]:
    """A network's iterations, each form `relative` times as slow as torch's own.

    Args:
        run: Whose forms are made.
        relative: By form, its blanks as ``_``: a number, one for each process, or bytes that would
            do as ``"1000 bytes"``; of a setting of torch ``"failed"``.
    """
    rivals = run.config.get("rivals", [])
    names = ["plain", *rivals] if rivals else ["plain", "plain again", "tuned, no limit"]
    for mode, total, policy in run.config["ways"]:
        names.append(f"WR {policy}" if mode == "WR" else f"WD {total:g} MiB {policy}")
    limit = int((run.config["limit_mib"] or 1) * MIB)
    forms: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    samples: list[dict[str, list[float]]] = [{} for _ in range(3)]
    for name in names:
        value = relative.get(name.replace(" ", "_").replace(",", "").replace(".", "_"), 1.0)
        if name in rivals:
            failed = {"seen_bytes": None, "error": "a process that times iterations failed"}
            settings[name] = failed if value == "failed" else {"seen_bytes": 100 * MIB}
        elif not name.startswith("plain"):
            forms[name] = {"kernels": 14, "divided": 5 * ("undivided" not in name), "needed": 2}
            forms[name] |= {"predicted_s": 0.05, "native_s": 0.06}
            forms[name] |= {"loss_error": 1e-7, "gradient_error": 1e-6}
            forms[name] |= {"workspace_bytes": limit, "seen_bytes": limit - 1}
        if isinstance(value, str):
            if name in forms:
                forms[name] = {"least_bytes": int(value.split()[0]), "kernels": 2}
            continue
        each = value if isinstance(value, tuple) else (value, value * 1.001, value / 1.001)
        each = (1.0, 1.0, 1.0) if name == "plain" else each
        for process, factor in enumerate(each):
            samples[process][name] = [0.1 * factor * (1 + process)] * 3
    extra = {"rivals": settings} if rivals else {}
    return {"metrics": {"forms": forms, "samples_s": samples, **extra}}


Cell = tuple[str, str, int, str]  # network, mode, limit in MiB, policy

# Which of the algorithms a cell takes: the fast one needs twice as much undivided.
SLOW = {"name": "slow", "whole": True, "mib": 0.1}
FAST = {"mib": 60.0}


def world(cells: Mapping[Cell, Any], scatter: float | None = 0.01) -> Maker:
    """A maker: by cell a time over torch's own, or that and options of `network`."""

    def make(run: Run) -> dict[str, Any] | None:
        config = run.config
        if config["setting"] != "fp32":
            return network(9.0)
        cell = (config["role"], config["mode"], config["limit_mib"], config["policy"])
        if cell not in cells:
            return None
        value = cells[cell]
        relative, options = value if isinstance(value, tuple) else (value, {})
        # Each run met another speed of the machine: only ratios to torch's own count.
        native_s = 0.001 * (1 + config["limit_mib"]) * (1 + 0.1 * len(config["policy"]))
        defaults = SLOW if config["policy"] == "undivided" else FAST
        return network(relative, native_s=native_s, scatter=scatter, **(defaults | options))

    return make


def at(limit: int, policy: str, role: str = "AlexNet", mode: str = "WR") -> Cell:
    """A cell, AlexNet's under WR by default."""
    return role, mode, limit, policy
