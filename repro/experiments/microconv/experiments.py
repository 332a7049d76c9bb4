"""The experiments of μ-cuDNN: their networks, and the functions that run one configuration."""

import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from repro.experiments.design import Config, Outcome
from repro.experiments.microconv.runs import CONTENT, MIB
from repro.measure import time_interleaved
from repro.measure.accelerator import is_accelerator
from repro.measure.files import cache_folder
from repro.measure.machine import machine
from repro.microconv import (
    POLICIES,
    BenchmarkCache,
    Candidate,
    Convolution,
    Division,
    Kernel,
    assign_workspaces,
    best_division,
    find_kernels,
    micro_batch_sizes,
    pareto_front,
    tune,
)
from repro.microconv.backends import BACKENDS, NATIVE, check_names
from repro.microconv.kernels import precision
from repro.microconv.measuring import Bench
from repro.microconv.optimize import desirable
from repro.microconv.torch_backend import native_workspace
from repro.models import build
from repro.models.alexnet import alexnet

CHECKED_MIB = (8, 64)  # limits at which the divisions of a single layer are run
_CAP_MIB = 512  # the largest limit of the paper; algorithms that need more are not measured
_AGAINST_ITSELF = 8  # kernels, by which it is told how far medians of the same thing lie apart

BySize = Mapping[int, Sequence[Candidate]]
Measured = dict[tuple[Kernel, int], BySize]  # by kernel and mini-batch
# Measured times, shared by the experiments on one network within a process.
caches: dict[str, BenchmarkCache] = {}

Named = tuple[str, Kernel, int]  # layer, kernel, mini-batch size


def build_network(config: Config, device: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A network in training mode, random images and labels."""
    torch.manual_seed(0)
    options = dict(config["model"])
    name = options.pop("name")
    model = (alexnet(**options) if name == "alexnet" else build(name, **options)).train()
    dtype, side = getattr(torch, config["dtype"]), config["image"]
    images = torch.randn(config["batch"], 3, side, side, dtype=dtype, device=device)
    labels = torch.randint(10, (config["batch"],), device=device)
    return model.to(device=device, dtype=dtype), images, labels


def network_kernels(config: Config, device: str) -> list[Named]:
    """The kernels of a network's convolutions, named conv1, conv2, ... in order of use."""
    model, images, _ = build_network(config, device)
    with rounding(config, device):
        kernels = find_kernels(model, images)
    order = {layer: n for n, layer in enumerate(dict.fromkeys(k[0] for k in kernels), 1)}
    named = [(f"conv{order[layer]}", kernel, batch) for layer, kernel, batch in kernels]
    if config.get("layer"):
        named = [k for k in named if k[0] == config["layer"] and k[1].kind in config["kinds"]]
    return named


def rounding(config: Config, device: str) -> AbstractContextManager[None]:
    """Round products of float32 as a configuration says."""
    shape = Convolution(1, 1, 1, 1, (1, 1))
    return precision(Kernel("forward", shape, config["dtype"], device, math=config["math"]))


def make_bench(config: Config, device: str, cache: BenchmarkCache) -> Bench:
    """The measuring with a configuration's algorithms."""
    check_names(config["algorithms"], device)
    return Bench(config["algorithms"], cache, config.get("max_error", 1e-4))


def shared(config: Config, device: str) -> BenchmarkCache:
    """The times that experiments on a network have measured so far, in this process.

    On an accelerator, where all sizes of a network take minutes, also in other processes.
    """
    parts = ("image", "batch", "setting", "threads")
    key = repr([config.get(part) for part in parts] + [device])
    if key not in caches:
        caches[key] = BenchmarkCache(None)
        if is_accelerator(device):
            caches[key].take(BenchmarkCache(kept_times()))
    return caches[key]


def share(config: Config, device: str, cache: BenchmarkCache) -> None:
    """Let the experiments on a network that follow use the measured times; see `shared`."""
    shared(config, device).take(cache)
    if is_accelerator(device):
        BenchmarkCache(kept_times()).take(cache)


def kept_times() -> Path:
    """The file of the times that outlive a process."""
    return cache_folder() / "microconv-experiments.sqlite"


def iteration(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Run a forward and a backward pass; return the loss."""
    model.zero_grad(set_to_none=True)
    loss = functional.cross_entropy(model(images).float(), labels)
    loss.backward()
    return loss


def difference(
    one: nn.Module, other: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> tuple[float, float]:
    """The relative difference of the loss, and the largest of a gradient's elements."""
    losses = []
    for model in (one, other):
        torch.manual_seed(1)  # the same dropout on both sides
        losses.append(iteration(model, images, labels).detach().double())
    worst = 0.0
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        scale = b.grad.double().abs().max().clamp_min(1e-30)
        gap = float((a.grad.double() - b.grad.double()).abs().max() / scale)
        worst = max(worst, gap if math.isfinite(gap) else math.inf)
    return float((losses[0] - losses[1]).abs() / losses[1].abs()), worst


Layer = tuple[Convolution, int]  # with its batch size


def layers(config: Config) -> tuple[list[Layer], int]:
    """The layers of one network type that are run, in DeepBench's order, and how many are not.

    `factor` is of the batch size, `largest_mmacs` in millions of multiplications; `of_each_size`
    is how many of each kernel size are run, the cheapest first.
    """
    every: list[Layer] = [
        (Convolution(c, h, w, k, (rows, columns), (s, s), (p, p)), batch * config["factor"])
        for c, h, w, k, rows, columns, s, p, batches in CONTENT["deepbench"][config["role"]]
        for batch in batches
    ]

    def macs(layer: Layer) -> int:
        conv, batch = layer
        return math.prod(conv.output_shape(batch)) * conv.in_channels * conv.taps

    most, count = 1e6 * (config["largest_mmacs"] or math.inf), config["of_each_size"]
    run: list[Layer] = []
    for size in {conv.kernel_size for conv, _ in every}:
        own = [one for one in every if one[0].kernel_size == size and macs(one) <= most]
        run += sorted(own, key=macs)[:count]
    run.sort(key=every.index)
    return run, len(every) - len(run)


def candidates(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Measure every kernel of a network at every micro-batch size of a policy.

    Starts from nothing, as a first tuning; other experiments then use its times.
    """
    with machine(config, device):
        named = network_kernels(config, device)
        cache = BenchmarkCache(None)
        bench = make_bench(config, device, cache)
        native_workspace.cache_clear()
        start = time.perf_counter()
        measured = _measure(bench, named, config["policy"])
        benchmark_s = time.perf_counter() - start
        start = time.perf_counter()
        divided = [_divide(batch, ways, 64 * MIB) for (_, batch), ways in measured.items()]
        optimise_s = time.perf_counter() - start
        if not config.get("layer") or is_accelerator(device):
            share(config, device, cache)
        checked: list[dict[str, Any]] = []
        if config.get("layer"):
            _, kernel, batch = named[0]
            policies = POLICIES if config["policy"] == "all" else ("undivided", config["policy"])
            for limit, policy in itertools.product(CHECKED_MIB, policies):
                sizes = micro_batch_sizes(batch, policy)
                ways = {size: measured[kernel, batch][size] for size in sizes}
                if (division := _divide(batch, ways, limit * MIB)) is not None:
                    row = {"limit_mib": limit, "policy": policy}
                    checked.append(row | _run(bench, kernel, batch, division))
        metrics = {
            "checked": checked,
            "benchmark_s": benchmark_s,
            "optimise_s": optimise_s,
            "measured": bench.measured,
            "infeasible_at_64_mib": divided.count(None),
            "kernels": [_described(*entry, measured[entry[1:]]) for entry in named],
        }
        return Outcome(metrics)


def _measure(bench: Bench, named: Sequence[Named], policy: str) -> Measured:
    """Measure each kernel once at the micro-batch sizes of a policy."""
    return {
        (kernel, batch): bench.candidates(
            kernel, batch, micro_batch_sizes(batch, policy), _CAP_MIB * MIB
        )
        for kernel, batch in dict.fromkeys((kernel, batch) for _, kernel, batch in named)
    }


def _divide(batch: int, by_size: BySize, limit_bytes: int) -> Division | None:
    try:
        return best_division(batch, by_size, limit_bytes)
    except ValueError:
        return None


def _run(bench: Bench, kernel: Kernel, batch: int, division: Division) -> dict[str, Any]:
    """Run a division in turns with torch's own."""
    time_s, native_s = bench.compare(kernel, batch, division.parts).medians_s
    return {
        "parts": [list(part) for part in division.parts],
        "workspace_bytes": division.workspace_bytes,
        "time_s": time_s,
        "native_s": native_s,
        "predicted_s": division.time_s,
    }


def _described(layer: str, kernel: Kernel, batch: int, by_size: BySize) -> dict[str, Any]:
    """A kernel and its useful candidates as plain values."""
    native = _native(by_size[batch])
    conv, width = kernel.conv, kernel.torch_dtype.itemsize
    elements = math.prod(conv.input_shape(batch)) + math.prod(conv.output_shape(batch))
    return {
        "layer": layer,
        "kind": kernel.kind,
        "batch": batch,
        "shape": _shape(kernel),
        "native_s": native.time_s,
        "native_bytes": native.workspace_bytes,
        "data_bytes": width * elements,
        "filter_bytes": width * math.prod(conv.weight_shape),
        "candidates": {
            str(size): [[way.algorithm, way.time_s, way.workspace_bytes] for way in desirable(ways)]
            for size, ways in by_size.items()
        },
    }


def _native(ways: Sequence[Candidate]) -> Candidate:
    return next(way for way in ways if way.algorithm == NATIVE)


def _shape(kernel: Kernel) -> str:
    c = kernel.conv
    return (
        f"{c.in_channels}×{c.height}×{c.width} to {c.out_channels}, {_size(kernel)}, "
        f"stride {c.stride[0]}, padding {c.padding[0]}"
    )


def _size(kernel: Kernel) -> str:
    return "×".join(map(str, kernel.conv.kernel_size))


def network(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Divide a network's kernels under a limit and run them, kernel by kernel.

    Every byte of temporary memory is held to the limit, torch's own convolution included.
    """
    with machine(config, device), rounding(config, device):
        named, bench, measured = _kernels_of(config, device)
        if is_accelerator(device) and bench.measured:
            # Before divisions are timed, which each run does anew.
            share(config, device, shared(config, device))
        start = time.perf_counter()
        held, solved = _hold(config["mode"], named, measured, int(config["limit_mib"] * MIB))
        optimise_s = time.perf_counter() - start
        timed: dict[Any, dict[str, Any]] = {}
        rows, as_is = [], set()
        for (layer, kernel, batch), division in zip(named, held, strict=True):
            row: dict[str, Any] = {"layer": layer, "kind": kernel.kind, "batch": batch}
            if division is not None:
                key = (kernel, batch, str(division))
                timed[key] = timed.get(key) or _run(bench, kernel, batch, division)
                row |= timed[key]
                if list(division.parts) == [(batch, NATIVE)]:
                    as_is.add((kernel, batch))
            rows.append(row)
        # Where hardly a kernel is left to torch, torch's own convolutions against themselves tell
        # the error of every comparison with them.
        longest = sorted(measured.keys() - as_is, key=lambda k: -_native(measured[k][k[1]]).time_s)
        own = []
        for kernel, batch in longest[: max(0, _AGAINST_ITSELF - len(as_is))]:
            ran = _run(bench, kernel, batch, Division(0.0, 0, [(batch, NATIVE)]))
            row = {"kind": kernel.kind, "shape": _shape(kernel), "batch": batch}
            own.append(row | {name: ran[name] for name in ("parts", "time_s", "native_s")})
        return Outcome({"kernels": rows, "own": own, "variables": solved, "optimise_s": optimise_s})


def _kernels_of(config: Config, device: str) -> tuple[list[Named], Bench, Measured]:
    """A network's kernels with their candidates, by times that other experiments have measured."""
    named = network_kernels(config, device)
    bench = make_bench(config, device, shared(config, device))
    return named, bench, _measure(bench, named, config["policy"])


def _hold(
    mode: str, named: Sequence[Named], measured: Measured, limit: int
) -> tuple[Sequence[Division | None], int]:
    """A division for each kernel within the limit, and the number of 0-1 variables."""
    if mode == "WR":
        return [_divide(batch, measured[kernel, batch], limit) for _, kernel, batch in named], 0
    variables = 0
    try:
        choices = _fronts(named, measured, limit)
        variables = sum(map(len, choices.values()))
        return [*assign_workspaces(choices, limit).values()], variables
    except ValueError:
        return [None] * len(named), variables


def _fronts(
    named: Sequence[Named], measured: Measured, limit: int | None = None
) -> dict[int, list[Division]]:
    """The desirable divisions of each kernel within a limit, by its number."""
    fronts = {key: pareto_front(key[1], ways, limit) for key, ways in measured.items()}
    return {n: fronts[kernel, batch] for n, (_, kernel, batch) in enumerate(named)}


def bench_layers(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Divide the forward passes of DeepBench's layers under a limit, and run them."""
    with machine(config, device), rounding(config, device):
        bench = make_bench(config, device, BenchmarkCache(None))
        chosen, left_out = layers(config)
        limit, rows = config["limit_mib"] * MIB, {}
        for conv, batch in dict.fromkeys(chosen):
            kernel = Kernel("forward", conv, config["dtype"], device, math=config["math"])
            sizes = micro_batch_sizes(batch, config["policy"])
            by_size = bench.candidates(kernel, batch, sizes, limit)
            row: dict[str, Any] = {"shape": _shape(kernel), "kernel_size": _size(kernel)}
            for name, ways in (("undivided", {batch: by_size[batch]}), ("divided", by_size)):
                if (division := _divide(batch, ways, limit)) is not None:
                    row[name] = _run(bench, kernel, batch, division)
                    del row[name]["predicted_s"]
            rows[conv, batch] = row | {"batch": batch}
        return Outcome({"layers": [rows[layer] for layer in chosen], "left_out": left_out})


def cluster(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Time forward and backward passes of a tuned network at several sizes on unequal devices.

    They are CUDA's and its host's CPU, or two threads and one, one at a time: it is simulated.
    """
    batch = config["batch"]
    sizes = sorted({1, 2, 4, *range(4, batch + 1, 4), batch})
    fast, slow = (2, 1) if device == "cpu" else (None, None)  # threads
    metrics: dict[str, dict[str, Any]] = {"times": {}, "devices": {}, "divided": {}}
    for name, where, threads in (("fast", device, fast), ("slow", "cpu", slow)):
        with machine({"threads": threads}, where):
            model, images, labels = build_network(dict(config) | {"dtype": "float32"}, where)
            named = config["tuned_with"]
            here = [a for a in named if not BACKENDS[a.partition(":")[0]].missing(where)]
            limit, policy, cache = config["limit_mib"] * MIB, config["policy"], BenchmarkCache(None)
            report = tune(model, images, limit, policy, algorithms=here, cache=cache)
            steps = {
                str(size): partial(iteration, model, images[:size], labels[:size]) for size in sizes
            }
            timed = time_interleaved(steps, warmup=1, repeats=config["repeats"], device=where)
            count = torch.get_num_threads()
            cpu = f"CPU, {count} thread{'s' * (count > 1)}"
            metrics["times"][name] = {size: timing.median_s for size, timing in timed.items()}
            metrics["devices"][name] = cpu if where == "cpu" else where
            metrics["divided"][name] = sum(k.division is not None for k in report.kernels)
    return Outcome(metrics)


def solver(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Time the optimisers on made-up fronts of the paper's sizes, and on one made-up kernel."""
    generator = random.Random(seed)
    steps: dict[str, Callable[[], Any]] = {
        f"WD, {variables} variables": partial(
            assign_workspaces, *made_up_fronts(generator, kernels, variables)
        )
        for kernels, variables in config["sizes"]
    }
    kernel = made_up_kernel(generator)
    steps["front, B = 256, 6 algorithms, all"] = partial(pareto_front, 256, kernel)
    steps["WR, B = 256, 6 algorithms, all"] = partial(best_division, 256, kernel)
    timings = {
        # By themselves, not in turns.
        name: time_interleaved({name: step}, warmup=1, repeats=config["repeats"])[name]
        for name, step in steps.items()
    }
    return Outcome(metrics={"fronts": "made up at random"}, timings=timings)


def programme(config: Config, seed: int, data: None, device: str) -> Outcome:
    """Time the solver on WD of a network's own kernels: with a total, and with one that binds."""
    with machine(config, device), rounding(config, device):
        named, _, measured = _kernels_of(config, device)
        choices = _fronts(named, measured)
    least, most = (sum(front[end].workspace_bytes for front in choices.values()) for end in (0, -1))
    limit = config["limit_mib"] * MIB
    totals = {"as in the paper": max(limit, least), "binding": (least + most) // 2}
    steps = {name: partial(assign_workspaces, choices, total) for name, total in totals.items()}
    timed = time_interleaved(steps, warmup=1, repeats=config["repeats"])
    taken = {
        name: sum(division.workspace_bytes for division in step().values())
        for name, step in steps.items()
    }
    return Outcome(
        metrics={
            "kernels": len(named),
            "variables": sum(map(len, choices.values())),
            "total_bytes": totals,
            "taken_bytes": taken,
            "wanted_bytes": most,
        },
        timings=timed,
    )


def made_up_fronts(
    generator: random.Random, kernels: int, variables: int
) -> tuple[dict[int, list[Division]], int]:
    """Random fronts with a number of divisions in all, and half the workspace they want."""
    cuts = sorted(generator.sample(range(1, variables), kernels - 1))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, variables], strict=True)]
    fronts = {}
    for kernel, count in enumerate(counts):
        needs = sorted(generator.sample(range(64 * MIB), count))
        times = sorted((generator.uniform(1e-3, 1e-2) for _ in range(count)), reverse=True)
        pairs = zip(times, needs, strict=True)
        fronts[kernel] = [Division(time_s, need, [(1, "a")]) for time_s, need in pairs]
    least, most = (sum(front[end].workspace_bytes for front in fronts.values()) for end in (0, -1))
    return fronts, (least + most) // 2


def made_up_kernel(generator: random.Random) -> dict[int, list[Candidate]]:
    """Random candidates of 6 algorithms at every micro-batch size up to 256."""

    def candidate(number: int, size: int) -> Candidate:
        time_s = size**0.9 * generator.uniform(0.5, 1.5) * 1e-4
        return Candidate(f"a{number}", time_s, int(size * generator.uniform(1e5, 1e6)))

    return {size: [candidate(number, size) for number in range(6)] for size in range(1, 257)}
