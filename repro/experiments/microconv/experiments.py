"""The experiments of μ-cuDNN: what is executed and measured."""

import itertools
import math
import os
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from repro.datasets import ImageData
from repro.experiments.design import Outcome
from repro.experiments.microconv import deepbench
from repro.experiments.microconv.building import (
    Config,
    Named,
    build_network,
    iteration,
    make_bench,
    network_kernels,
    rounding,
    share,
    shared,
)
from repro.measure import time_interleaved
from repro.measure.accelerator import is_accelerator
from repro.measure.allocations import keep_freed_memory
from repro.measure.machine import machine
from repro.microconv import (
    POLICIES,
    BenchmarkCache,
    Candidate,
    Division,
    Kernel,
    assign_workspaces,
    best_division,
    micro_batch_sizes,
    pareto_front,
    tune,
)
from repro.microconv.backends import BACKENDS, NATIVE
from repro.microconv.measuring import Bench
from repro.microconv.torch_backend import TorchBackend

MIB = 2**20
CHECKED_MIB = (8, 64)  # limits at which the divisions of a single layer are run
_CAP_MIB = 512  # the largest limit of the paper; algorithms that need more are not measured
_AGAINST_ITSELF = 8  # kernels, by which it is told how far medians of the same thing lie apart


def candidates(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Measure every kernel of a network at every micro-batch size of a policy.

    Starts from nothing, as a first tuning; other experiments then use what was measured.
    """
    with machine(config, device):
        named = network_kernels(config, device)
        cache = BenchmarkCache(None)
        bench = make_bench(config, device, cache)
        backend = BACKENDS["torch"]
        assert isinstance(backend, TorchBackend)
        backend.forget()
        start = time.perf_counter()
        measured: dict[tuple[Kernel, int], dict[int, list[Candidate]]] = {}
        for _, kernel, batch in named:
            if (kernel, batch) not in measured:
                sizes = micro_batch_sizes(batch, config["policy"])
                measured[kernel, batch] = bench.candidates(kernel, batch, sizes, _CAP_MIB * MIB)
        benchmark_s = time.perf_counter() - start
        start = time.perf_counter()
        divided = {
            key: _divide(key[1], by_size, 64 * MIB, "kernel") for key, by_size in measured.items()
        }
        optimise_s = time.perf_counter() - start
        checked: list[dict[str, Any]] = []
        if not config.get("layer") or is_accelerator(device):
            share(config, device, cache)
        if config.get("layer"):
            (_, kernel, batch), *_ = named
            policies = POLICIES if config["policy"] == "all" else ("undivided", config["policy"])
            checked = _checked(bench, kernel, batch, measured[kernel, batch], policies)
        return Outcome(
            metrics={
                "checked": checked,
                "benchmark_s": benchmark_s,
                "optimise_s": optimise_s,
                "measured": bench.counts.measured,
                "infeasible_at_64_mib": sum(division is None for division in divided.values()),
                "kernels": [
                    _described(layer, kernel, batch, measured[kernel, batch])
                    for layer, kernel, batch in named
                ],
            }
        )


def _checked(
    bench: Bench,
    kernel: Kernel,
    batch: int,
    by_size: Mapping[int, Sequence[Candidate]],
    policies: Sequence[str],
) -> list[dict[str, Any]]:
    """Run the divisions of one kernel by limit and policy, in turns with torch's own."""
    rows = []
    for limit, policy in itertools.product(CHECKED_MIB, policies):
        sizes = set(micro_batch_sizes(batch, policy))
        ways = {size: candidates for size, candidates in by_size.items() if size in sizes}
        division = _divide(batch, ways, limit * MIB, "layer")
        if division is not None:
            time_s, native_s = bench.compare(kernel, batch, division.parts).medians_s
            rows.append(
                {
                    "limit_mib": limit,
                    "policy": policy,
                    "parts": [list(part) for part in division.parts],
                    "workspace_bytes": division.workspace_bytes,
                    "predicted_s": division.time_s,
                    "time_s": time_s,
                    "native_s": native_s,
                }
            )
    return rows


def _divide(
    batch: int, by_size: Mapping[int, Sequence[Candidate]], limit_bytes: int, name: str
) -> Division | None:
    try:
        return best_division(batch, by_size, limit_bytes, kernel=name)
    except ValueError:
        return None


def _described(
    layer: str, kernel: Kernel, batch: int, by_size: Mapping[int, Sequence[Candidate]]
) -> dict[str, Any]:
    """Return a kernel and its useful candidates as plain values, torch's own at the end."""
    native = next(way for way in by_size[batch] if way.algorithm == NATIVE)
    useful: dict[str, list[list[Any]]] = {}
    for size, ways in by_size.items():
        fastest = float("inf")
        useful[str(size)] = []
        for way in sorted(ways, key=lambda way: (way.workspace_bytes, way.time_s)):
            if way.time_s < fastest:
                fastest = way.time_s
                useful[str(size)].append([way.algorithm, way.time_s, way.workspace_bytes])
    conv, width = kernel.conv, kernel.torch_dtype.itemsize
    out_shape = conv.output_shape(batch)
    return {
        "layer": layer,
        "kind": kernel.kind,
        "batch": batch,
        "shape": _shape(kernel),
        "native_s": native.time_s,
        "native_bytes": native.workspace_bytes,
        "data_bytes": width * (math.prod(conv.input_shape(batch)) + math.prod(out_shape)),
        "filter_bytes": width * math.prod(conv.weight_shape),
        "candidates": useful,
    }


def _shape(kernel: Kernel) -> str:
    c = kernel.conv
    size = "×".join(map(str, c.kernel_size))
    return (
        f"{c.in_channels}×{c.height}×{c.width} to {c.out_channels}, {size}, stride {c.stride[0]}, "
        f"padding {c.padding[0]}"
    )


def network(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Divide a network's kernels under a limit and run them, kernel by kernel.

    Every byte of temporary memory is held to the limit, torch's own convolution included. Whole
    iterations are `iterating.iterations`.
    """
    with machine(config, device), rounding(config, device):
        named = network_kernels(config, device)
        cache = shared(config, device)
        bench = make_bench(config, device, cache)
        limit = int(config["limit_mib"] * MIB)
        sizes = {batch: micro_batch_sizes(batch, config["policy"]) for _, _, batch in named}
        measured = {
            (kernel, batch): bench.candidates(kernel, batch, sizes[batch], _CAP_MIB * MIB)
            for _, kernel, batch in named
        }
        if is_accelerator(device) and bench.counts.measured:
            share(config, device, cache)  # before divisions are timed, which each run does anew
        start = time.perf_counter()
        held, solved = _hold(config["mode"], named, measured, limit)
        optimise_s = time.perf_counter() - start
        timed: dict[Any, tuple[float, float]] = {}
        rows = []
        for (layer, kernel, batch), division in zip(named, held, strict=True):
            row: dict[str, Any] = {"layer": layer, "kind": kernel.kind, "batch": batch}
            if division is not None:
                key = (kernel, batch, str(division))
                if key not in timed:
                    timed[key] = bench.compare(kernel, batch, division.parts).medians_s
                row |= {
                    "parts": [list(part) for part in division.parts],
                    "workspace_bytes": division.workspace_bytes,
                    "time_s": timed[key][0],
                    "native_s": timed[key][1],
                    "predicted_s": division.time_s,
                }
            rows.append(row)
        as_is = {
            (kernel, batch)
            for (_, kernel, batch), division in zip(named, held, strict=True)
            if division is not None and list(division.parts) == [(batch, NATIVE)]
        }
        own = _own(bench, measured, as_is)
        return Outcome(
            metrics={"kernels": rows, "own": own, "variables": solved, "optimise_s": optimise_s}
        )


def _own(
    bench: Bench,
    measured: Mapping[tuple[Kernel, int], Mapping[int, Sequence[Candidate]]],
    as_is: Collection[tuple[Kernel, int]],
) -> list[dict[str, Any]]:
    """Time torch's own convolutions against themselves, the longest that no division left as is.

    What the two differ by is the error of every comparison with torch's own: where hardly a kernel
    is left to torch, nothing else tells it.
    """
    longest = sorted(
        measured.keys() - as_is,
        key=lambda key: -next(w.time_s for w in measured[key][key[1]] if w.algorithm == NATIVE),
    )
    rows = []
    for kernel, batch in longest[: max(0, _AGAINST_ITSELF - len(as_is))]:
        parts = [(batch, NATIVE)]
        time_s, native_s = bench.compare(kernel, batch, parts).medians_s
        rows.append(
            {
                "kind": kernel.kind,
                "shape": _shape(kernel),
                "batch": batch,
                "parts": [[batch, NATIVE]],
                "time_s": time_s,
                "native_s": native_s,
            }
        )
    return rows


def _hold(
    mode: str,
    named: Sequence[Named],
    measured: Mapping[tuple[Kernel, int], Mapping[int, Sequence[Candidate]]],
    limit: int,
) -> tuple[list[Division | None], int]:
    """Return a division for each kernel within the limit, and the number of 0-1 variables."""
    if mode == "WR":
        return [_divide(n, measured[kernel, n], limit, layer) for layer, kernel, n in named], 0
    fronts = {}
    for key, by_size in measured.items():
        try:
            fronts[key] = pareto_front(key[1], by_size, limit)
        except ValueError:
            return [None] * len(named), 0
    choices = {index: fronts[kernel, batch] for index, (_, kernel, batch) in enumerate(named)}
    variables = sum(map(len, choices.values()))
    try:
        chosen = assign_workspaces(choices, limit)
    except ValueError:
        return [None] * len(named), variables
    return [chosen[index] for index in range(len(named))], variables


def bench_layers(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Divide the forward passes of DeepBench's layers under a limit, and run them."""
    with machine(config, device), rounding(config, device):
        bench = make_bench(config, device, BenchmarkCache(None))
        limit = config["limit_mib"] * MIB
        rows: list[dict[str, Any]] = []
        known: dict[Any, dict[str, Any]] = {}
        rules = (config["factor"], config["largest_mmacs"], config["of_each_size"])
        chosen = deepbench.choose(config["role"], *rules)
        for layer in chosen:
            batch = layer.batch * config["factor"]
            kernel = Kernel("forward", layer.conv, config["dtype"], device, math=config["math"])
            if (kernel, batch) not in known:
                known[kernel, batch] = _layer_row(bench, kernel, batch, limit, config["policy"])
            rows.append(known[kernel, batch])
        left_out = len(deepbench.layers(config["role"])) - len(chosen)
        return Outcome(metrics={"layers": rows, "left_out": left_out})


def _layer_row(bench: Bench, kernel: Kernel, batch: int, limit: int, policy: str) -> dict[str, Any]:
    by_size = bench.candidates(kernel, batch, micro_batch_sizes(batch, policy), limit)
    row: dict[str, Any] = {
        "shape": _shape(kernel),
        "kernel_size": "×".join(map(str, kernel.conv.kernel_size)),
        "batch": batch,
    }
    for name, ways in (("undivided", {batch: by_size[batch]}), ("divided", by_size)):
        division = _divide(batch, ways, limit, "layer")
        if division is not None:
            time_s, native_s = bench.compare(kernel, batch, division.parts).medians_s
            row[name] = {
                "parts": [list(part) for part in division.parts],
                "workspace_bytes": division.workspace_bytes,
                "time_s": time_s,
                "native_s": native_s,
            }
    return row


def cluster(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Time forward and backward passes of a tuned network at several sizes on unequal devices.

    With CUDA they are the GPU and its host's CPU; on a CPU alone two threads and one stand for
    them. They are tuned and timed one at a time: the cluster is simulated.
    """
    batch = config["batch"]
    sizes = sorted({1, 2, 4, *range(4, batch + 1, 4), batch})
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    devices = {"fast": (device, min(2, cores)), "slow": ("cpu", 1)}
    if device != "cpu":
        devices = {"fast": (device, before), "slow": ("cpu", before)}
    keep_freed_memory()
    times: dict[str, dict[str, float]] = {}
    divided: dict[str, int] = {}
    try:
        for name, (device_name, threads) in devices.items():
            torch.set_num_threads(threads)
            model, images, labels = build_network(dict(config) | {"dtype": "float32"}, device_name)
            report = tune(
                model,
                images,
                config["limit_mib"] * MIB,
                config["policy"],
                algorithms=[
                    name
                    for name in config["tuned_with"]
                    if BACKENDS[name.partition(":")[0]].missing(device_name) is None
                ],
                cache=BenchmarkCache(None),
            )
            divided[name] = sum(entry.division is not None for entry in report.kernels)
            steps: dict[str, Callable[[], Any]] = {
                str(size): _bound(model, images[:size], labels[:size]) for size in sizes
            }
            timed = time_interleaved(steps, warmup=1, repeats=config["repeats"], device=device_name)
            times[name] = {size: timing.median_s for size, timing in timed.items()}
    finally:
        torch.set_num_threads(before)
    described = {
        name: device_name if device_name != "cpu" else f"CPU, {threads} thread{'s' * (threads > 1)}"
        for name, (device_name, threads) in devices.items()
    }
    return Outcome(metrics={"times": times, "devices": described, "divided": divided})


def _bound(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], Any]:
    return lambda: iteration(model, images, labels)


def solver(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Time the optimisers on made-up fronts of the paper's sizes, and on one made-up kernel."""
    generator = random.Random(seed)
    timings = {}
    for kernels, variables in config["sizes"]:
        fronts, total = made_up_fronts(generator, kernels, variables)
        timings[f"WD, {variables} variables"] = time_interleaved(
            {"": lambda f=fronts, t=total: assign_workspaces(f, t)},  # type: ignore[misc]
            warmup=1,
            repeats=config["repeats"],
        )[""]
    kernel = made_up_kernel(generator)
    for name, run in (("front", pareto_front), ("WR", best_division)):
        timings[f"{name}, B = 256, 6 algorithms, all"] = time_interleaved(
            {"": lambda run=run: run(256, kernel)},  # type: ignore[misc]
            warmup=1,
            repeats=config["repeats"],
        )[""]
    return Outcome(metrics={"fronts": "made up at random"}, timings=timings)


def programme(config: Config, seed: int, data: ImageData | None, device: str) -> Outcome:
    """Time the solver on WD of a network's own kernels: with a total, and with one that binds."""
    with machine(config, device), rounding(config, device):
        named = network_kernels(config, device)
        bench = make_bench(config, device, shared(config, device))
        limit = config["limit_mib"] * MIB
        fronts: dict[tuple[Kernel, int], list[Division]] = {}
        for layer, kernel, batch in named:
            if (kernel, batch) not in fronts:
                sizes = micro_batch_sizes(batch, config["policy"])
                by_size = bench.candidates(kernel, batch, sizes, _CAP_MIB * MIB)
                fronts[kernel, batch] = pareto_front(batch, by_size, kernel=layer)
    choices = {index: fronts[kernel, batch] for index, (_, kernel, batch) in enumerate(named)}
    least, most = (sum(front[end].workspace_bytes for front in choices.values()) for end in (0, -1))
    totals = {"as in the paper": max(limit, least), "binding": (least + most) // 2}
    timed = time_interleaved(
        {
            name: lambda total=total: assign_workspaces(choices, total)  # type: ignore[misc]
            for name, total in totals.items()
        },
        warmup=1,
        repeats=config["repeats"],
    )
    chosen = {name: assign_workspaces(choices, total) for name, total in totals.items()}
    return Outcome(
        metrics={
            "kernels": len(named),
            "variables": sum(map(len, choices.values())),
            "total_bytes": totals,
            "taken_bytes": {
                name: sum(d.workspace_bytes for d in divisions.values())
                for name, divisions in chosen.items()
            },
            "wanted_bytes": most,
        },
        timings=timed,
    )


def made_up_fronts(
    generator: random.Random, kernels: int, variables: int
) -> tuple[dict[int, list[Division]], int]:
    """Return random fronts with a number of divisions in all, and half the workspace they want."""
    cuts = sorted(generator.sample(range(1, variables), kernels - 1))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, variables], strict=True)]
    fronts = {}
    for kernel, count in enumerate(counts):
        needs = sorted(generator.sample(range(64 * MIB), count))
        times = sorted((generator.uniform(1e-3, 1e-2) for _ in range(count)), reverse=True)
        fronts[kernel] = [
            Division(t, need, [(1, "a")]) for t, need in zip(times, needs, strict=True)
        ]
    least = sum(front[0].workspace_bytes for front in fronts.values())
    most = sum(front[-1].workspace_bytes for front in fronts.values())
    return fronts, (least + most) // 2


def made_up_kernel(generator: random.Random) -> dict[int, list[Candidate]]:
    """Return random candidates of 6 algorithms at every micro-batch size up to 256."""
    return {
        b: [
            Candidate(
                f"a{number}",
                b**0.9 * generator.uniform(0.5, 1.5) * 1e-4,
                int(b * generator.uniform(1e5, 1e6)),
            )
            for number in range(6)
        ]
        for b in range(1, 257)
    }
