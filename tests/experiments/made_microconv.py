"""Records of μ-cuDNN made up for tests: kernels, networks, layers, clusters, solved programmes."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import made
import pandas as pd
from made import FAILED, OUT_OF_MEMORY
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from repro.experiments import load_paper
from repro.experiments.design import Run
from repro.experiments.microconv.settings import NATIVE, label
from repro.experiments.query import Results

MIB = 2**20
KINDS = ("forward", "backward_data", "backward_filter")
Maker = Callable[[Run], Any]  # an outcome of a run, None for no record
MISSING, UNFIT = "missing", "unfit"  # in place of a time: no record; nothing fits

__all__ = ["FAILED", "OUT_OF_MEMORY"]


def results(artefact: str, make: Maker, profile: str = "quick") -> Results:
    """Return results with a record of every run that `make` gives an outcome."""

    def maker(run: Run, seed: int) -> Mapping[str, Any] | None:
        changes = make(run)
        return None if changes is None else {"dataset": None, **changes}

    return made.made_results(f"microconv/{artefact}", maker, {}, profile)


def judge(target: str, make: Maker, profile: str = "quick") -> tuple[str, str]:
    """Return word and evidence of the claim ``ARTEFACT/KEY``."""
    artefact, _, _ = target.partition("/")
    found = made.verdict(f"microconv/{target}", results(artefact, make, profile))
    return found.word, found.evidence


def table(artefact: str, make: Maker | None = None, profile: str = "quick") -> pd.DataFrame:
    """Return an artefact's table, by default as the paper has it."""
    found = results(artefact, make or plausible, profile)
    return load_paper("microconv").artefacts[artefact].table(found)


def figure(artefact: str, make: Maker | None = None, profile: str = "quick") -> Figure:
    """Return an artefact's figure, drawn: a glyph or a layout that does not fit warns."""
    found = results(artefact, make or plausible, profile)
    drawn = load_paper("microconv").artefacts[artefact].figure(found)
    FigureCanvasAgg(drawn).draw()
    return drawn


def texts_of(drawn: Figure) -> list[str]:
    """Return the texts in a figure's axes."""
    return [text.get_text() for axis in drawn.axes for text in axis.texts]


def hollow_of(drawn: Figure) -> list[float]:
    """Return where the paper's dots are: those without a face."""
    return [
        float(line.get_xdata()[0])
        for axis in drawn.axes
        for line in axis.get_lines()
        if str(line.get_markerfacecolor()) == "none" and "paper" in str(line.get_label())
    ]


def timing(*seconds: float) -> dict[str, Any]:
    """Return samples."""
    return {"samples_s": list(seconds), "warmup": 1}


def entry(
    layer: str = "conv2",
    kind: str = "forward",
    batch: int = 8,
    gain: float = 2.0,
    fast_mib: float = 2.0,
    slow_mib: float = 0.0,
    native: tuple[float, float] = (4e-3, 3.0),
) -> dict[str, Any]:
    """Return a kernel with two algorithms at every micro-batch size.

    The slow one takes 1 ms and `slow_mib` for each sample, the fast one is `gain` times as fast,
    plus 1 μs a call, with `fast_mib` for each sample.
    """
    ways = {
        str(b): [
            ["slow", 1e-3 * b, int(slow_mib * b * MIB)],
            ["fast", 1e-3 * b / gain + 1e-6, int(fast_mib * b * MIB)],
        ]
        for b in range(1, batch + 1)
    }
    return {
        "layer": layer,
        "kind": kind,
        "batch": batch,
        "shape": "64×27×27 to 192, 5×5, stride 1, padding 2",
        "native_s": native[0],
        "native_bytes": int(native[1] * MIB),
        "data_bytes": batch * MIB // 4,
        "filter_bytes": MIB // 8,
        "candidates": ways,
    }


def candidates(*entries: dict[str, Any], checked: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return a measurement of kernels."""
    metrics = {"benchmark_s": 2.0, "optimise_s": 0.5, "measured": 34, "infeasible_at_64_mib": 0}
    return {"metrics": metrics | {"kernels": list(entries), "checked": list(checked)}}


def alexnet(**of: Mapping[str, Any]) -> dict[str, Any]:
    """Return the 14 kernels of AlexNet, with changes to those of a layer."""
    names = [f"conv{n}" for n in range(1, 6)]
    return candidates(
        *(
            entry(layer, kind, **of.get(layer, {}))
            for layer, kind in itertools.product(names, KINDS)
            if (layer, kind) != ("conv1", "backward_data")
        )
    )


def one_layer(name: str) -> dict[str, Any]:
    """Return the kernels of a layer of AlexNet, of conv2 with what was run of its forward pass."""
    ran = conv2(undivided_8=1.0, all_8=0.9, undivided_64=1.0, powerOfTwo_64=0.6, all_64=0.5)
    kernels = [entry(name, kind) for kind in KINDS if (name, kind) != ("conv1", KINDS[1])]
    if name == "conv2":
        return candidates(
            *ran["metrics"]["kernels"], *kernels[1:], checked=ran["metrics"]["checked"]
        )
    return candidates(*kernels)


def checked(
    limit: int, policy: str, relative: float, native_s: float = 0.02, name: str = "fast"
) -> dict[str, Any]:
    """Return conv2 as it ran under a limit with a policy."""
    return {
        "limit_mib": limit,
        "policy": policy,
        "parts": [[32, name]] if policy == "undivided" else [[16, name], [16, name]],
        "workspace_bytes": 3 * MIB,
        "predicted_s": 0.9 * relative * native_s,
        "time_s": relative * native_s,
        "native_s": native_s,
    }


def conv2(fast_mib: float = 3.0, **relative: float) -> dict[str, Any]:
    """Return conv2's record, given times over torch's own by policy and limit: ``all_64=0.5``.

    Undivided, the fast algorithm takes 32 times `fast_mib`; by default no limit has room for it.
    """
    rows = []
    for number, (cell, value) in enumerate(relative.items()):
        policy, limit = cell.rsplit("_", 1)
        name = "slow" if policy == "undivided" else "fast"
        rows.append(checked(int(limit), policy, value, 0.01 * (number + 1), name))
    return candidates(entry(batch=32, fast_mib=fast_mib), checked=rows)


def network(
    relative: float | None = 1.0,
    mib: float = 1.0,
    native_s: float = 0.010,
    unfit: Sequence[str] = (),
    scatter: float | None = 0.01,
    name: str = "fast",
    tuned_s: float = 0.5,
    whole: bool = False,
    **metrics: Any,
) -> dict[str, Any]:
    """Return a network of two layers, its kernels `relative` times as slow as torch's own.

    Args:
        relative: Of the kernels' times to those of torch's own; None where none of them fits.
        mib: Workspace of each kernel.
        native_s: Of each kernel.
        unfit: Kernels that do not fit, such as ``conv2 F``.
        scatter: Of torch's own against itself, in two tiny kernels of conv3; None for none.
        name: The algorithm.
        tuned_s: Of a whole iteration; untuned it takes 0.6 s.
        whole: Whether kernels are undivided.
        metrics: Others.
    """
    rows = []
    for layer, kind in itertools.product(("conv1", "conv2"), ("forward", "backward_filter")):
        row: dict[str, Any] = {"layer": layer, "kind": kind, "batch": 8}
        if relative is not None and label(row) not in unfit:
            row |= {
                "parts": [[8, name]] if whole else [[4, name], [4, name]],
                "workspace_bytes": int(mib * MIB),
                "time_s": relative * native_s,
                "native_s": native_s,
                "predicted_s": relative * native_s,
            }
        rows.append(row)
    if scatter is not None:
        for number, sign in enumerate((1, -1) * 10):
            row = {"layer": f"conv{number + 3}", "kind": "forward", "batch": 8}
            tiny = {"predicted_s": 1e-9, "native_s": 1e-9, "workspace_bytes": 0}
            own = 1e-9 * (1 + scatter * (1 + number / 100)) ** sign
            rows.append(row | tiny | {"parts": [[8, NATIVE]], "time_s": own})
    errors = {"loss_error": 1e-7, "gradient_error": 1e-6, "own_gradient_error": 0.0}
    sizes = {"variables": 0, "optimise_s": 0.002, "tuned_kernels": 1, "allocated_bytes": MIB}
    return {
        "metrics": {"kernels": rows, **sizes, **errors, **metrics},
        # The first sample is far off.
        "timings": {"tuned": timing(9 * tuned_s, tuned_s, tuned_s), "plain": timing(5.4, 0.6, 0.6)},
    }


def bench(
    *rows: tuple[str, float | None, float | None], left_out: int = 3, scatter: float | None = None
) -> dict[str, Any]:
    """Return layers: kernel size, and time over torch's own of undivided and divided.

    Args:
        rows: Where both are equal, both are the same measured division.
        left_out: Layers that were not run.
        scatter: Of torch's own against itself, in four layers of 9×9 best left to it.
    """

    def way(relative: float, native_s: float, parts: Any) -> dict[str, Any]:
        return {
            "parts": parts,
            "workspace_bytes": MIB,
            "time_s": relative * native_s,
            "native_s": native_s,
        }

    found = []
    for size, undivided, divided in rows:
        row: dict[str, Any] = {"shape": "a shape", "kernel_size": size, "batch": 16}
        # Torch's own took twice as long while the divided one was measured: a slow spell.
        if undivided is not None:
            row["undivided"] = way(undivided, 0.01, [[16, "fast"]])
        if divided is not None:
            row["divided"] = way(divided, 0.02, [[8, "fast"], [8, "fast"]])
            if divided == undivided:
                row["divided"] = row["undivided"]
        found.append(row)
    for number, sign in enumerate((1, -1, 1, -1) if scatter is not None else ()):
        assert scatter is not None
        own = way((1 + scatter) ** sign, 0.01 + number * 1e-4, [[16, NATIVE]])
        row = {"shape": "own", "kernel_size": "9×9", "batch": 16}
        found.append(row | {"undivided": own, "divided": own})
    return {"metrics": {"layers": found, "left_out": left_out}}


def cluster(fast: Callable[[int], float], slow: Callable[[int], float]) -> dict[str, Any]:
    """Return devices' seconds at the batch sizes of the plan."""
    sizes = (1, 2, *range(4, 33, 4))
    times = {"fast": {str(b): fast(b) for b in sizes}, "slow": {str(b): slow(b) for b in sizes}}
    devices = {"fast": "CPU, 2 threads", "slow": "CPU, 1 thread"}
    divided = {"fast": 3, "slow": 0}
    return {"metrics": {"times": times, "devices": devices, "divided": divided}}


def solved(small_s: Sequence[float] = (0.9, 0.1, 0.1), large_s: Sequence[float] = (0.5, 0.5)):
    """Return the solver's times for 562 and for 2,500 variables."""
    timings = {
        "WD, 562 variables": timing(*small_s),
        "WD, 2500 variables": timing(*large_s),
        "front, B = 256, 6 algorithms, all": timing(0.02),
    }
    return {"metrics": {"fronts": "made up at random"}, "timings": timings}


def programme(tight_s: float = 0.2, wide_s: float = 0.1, n: int = 5) -> dict[str, Any]:
    """Return the solver's times for ResNet-152's own kernels."""
    totals = {"as in the paper": 5088 * MIB, "binding": 100 * MIB}
    metrics = {
        "kernels": 464,
        "variables": 1200,
        "total_bytes": totals,
        "taken_bytes": dict.fromkeys(totals, 90 * MIB),
        "wanted_bytes": 150 * MIB,
    }
    seconds = {"as in the paper": wide_s, "binding": tight_s}
    timings = {name: timing(*[(1 + 0.01 * k) * s for k in range(n)]) for name, s in seconds.items()}
    return {"metrics": metrics, "timings": timings}


def iterations(run: Run, **relative: Any) -> dict[str, Any]:
    """Return a network's iterations, each form `relative` times as slow as torch's own.

    Args:
        run: Whose forms are made.
        relative: By form, its blanks as ``_``: a number, one for each process, or bytes that would
            do as ``"1000 bytes"``.
    """
    names = ["plain", "plain again", "tuned, no limit"]
    for mode, total, policy in run.config["ways"]:
        names.append(f"WR {policy}" if mode == "WR" else f"WD {total:g} MiB {policy}")
    if "rivals" in run.config:
        return rivals(run, **relative)
    forms: dict[str, Any] = {}
    samples: list[dict[str, list[float]]] = [{} for _ in range(3)]
    for name in names:
        value = relative.get(name.replace(" ", "_").replace(",", ""), 1.0)
        if isinstance(value, str):
            forms[name] = {"least_bytes": int(value.split()[0]), "kernels": 2}
            continue
        each = value if isinstance(value, tuple) else (value, value * 1.001, value / 1.001)
        each = (1.0, 1.0, 1.0) if name == "plain" else each
        for process, factor in enumerate(each):
            samples[process][name] = [0.1 * factor * (1 + process)] * 3
        if not name.startswith("plain"):
            forms[name] = {
                "kernels": 14,
                "divided": 0 if "undivided" in name else 5,
                "needed": 2,
                "untied": 1,
                "predicted_s": 0.05,
                "native_s": 0.06,
                "workspace_bytes": int((run.config["limit_mib"] or 1) * MIB),
                "allocated_bytes": 0,
                "seen_bytes": int((run.config["limit_mib"] or 1) * MIB) - 1,
                "loss_error": 1e-7,
                "gradient_error": 1e-6,
                "own_gradient_error": 0.0,
            }
    return {"metrics": {"forms": forms, "samples_s": samples}}


def rivals(run: Run, **relative: Any) -> dict[str, Any]:
    """Return torch's own under its other settings, each `relative` times as slow; see `iterations`.

    What is given as ``"failed"`` failed.
    """
    samples: list[dict[str, list[float]]] = [{"plain": [0.1] * 3} for _ in range(3)]
    found: dict[str, Any] = {}
    for name in run.config["rivals"]:
        value = relative.get(name.replace(" ", "_").replace(",", "").replace(".", "_"), 0.8)
        found[name] = {"seen_bytes": 100 * MIB} if value != "failed" else {"seen_bytes": None}
        if value == "failed":
            found[name]["error"] = "a process that times iterations failed"
            continue
        for number, sample in enumerate(samples):
            sample[name] = [0.1 * value * (1 + number / 1000)] * 3
    return {"metrics": {"forms": {}, "rivals": found, "samples_s": samples}}


def plausible(run: Run) -> dict[str, Any]:
    """Return an outcome of any run, as the paper has it."""
    divided = run.config.get("policy") != "undivided"
    if run.experiment == "candidates":
        if "backward_filter" in run.config.get("kinds", ()):  # a layer of all that are measured
            return one_layer(run.config["layer"])
        if run.config.get("layer"):
            return conv2(
                undivided_8=1.0,
                powerOfTwo_8=1.0,
                all_8=0.9,
                undivided_64=1.0,
                powerOfTwo_64=0.6,
                all_64=0.5,
            )
        late = {"gain": 0.5}
        return alexnet(conv1=late, conv4=late, conv5=late)
    if run.experiment == "network":
        variables = 30 if run.config["mode"] == "WD" else 0
        return network(0.5 if divided else 1.0, variables=variables)
    if run.experiment == "iterations":
        return iterations(run, WR_undivided=1.3, **{"WD_82.5_MiB_powerOfTwo": 0.9})
    if run.experiment == "deepbench":
        return bench(("3×3", 1.0, 0.5), ("5×5", 1.0, 0.8), ("1×1", None, 2.0))
    if run.experiment == "cluster":
        return cluster(lambda b: 1e-3 * b, lambda b: 2e-3 * b)
    if run.experiment == "programme":
        return programme()
    return solved()


def nowhere(run: Run) -> dict[str, Any]:
    """Return outcomes of kernels of which none fits."""
    if run.experiment == "network":
        return network(None)
    if run.experiment == "deepbench":
        return bench(("3×3", None, None))
    if run.experiment == "candidates":
        huge = {"slow_mib": 1e4, "fast_mib": 2e4}
        if run.config.get("layer"):
            return candidates(entry(**huge))
        return alexnet(**{f"conv{n}": huge for n in range(1, 6)})
    return plausible(run)


def fastest_split(batch: int, seconds: Sequence[Mapping[int, float]]) -> float:
    """Return the least time of the slowest device, trying all batch sizes."""
    best = float("inf")
    for sizes in itertools.product(*([0, *times] for times in seconds)):
        if sum(sizes) == batch:
            used = [t[size] for t, size in zip(seconds, sizes, strict=True) if size]
            best = min(best, max(used))
    return best


Cell = tuple[str, str, int, str]  # network, mode, limit in MiB, policy

# Which of the algorithms a cell takes: the fast one needs twice as much undivided.
SLOW = {"name": "slow", "whole": True, "mib": 0.1}
FAST = {"mib": 60.0}
TINY = {"mib": 0.1}  # fits undivided into any limit


def world(cells: Mapping[Cell, Any], scatter: float = 0.01, otherwise: Any = MISSING):
    """Return a maker: by cell a time over torch's own, or that and options of `network`."""

    def make(run):
        config = run.config
        if config["setting"] != "fp32":
            return network(9.0)
        cell = tuple(config[name] for name in ("role", "mode", "limit_mib", "policy"))
        value = cells.get(cell, otherwise)
        if value == MISSING:
            return None
        if value == UNFIT:
            return network(None, scatter=scatter)
        relative, options = value if isinstance(value, tuple) else (value, {})
        # Each run met another speed of the machine: only ratios to torch's own count.
        native_s = 0.001 * (1 + config["limit_mib"])
        native_s *= 1 + 0.1 * len(config["policy"])
        defaults = SLOW if config["policy"] == "undivided" else FAST
        return network(relative, native_s=native_s, scatter=scatter, **(defaults | options))

    return make


def at(limit: int, policy: str, role: str = "AlexNet", mode: str = "WR") -> Cell:
    """Return a cell, AlexNet's under WR by default."""
    return role, mode, limit, policy
