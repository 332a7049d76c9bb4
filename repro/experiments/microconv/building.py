"""The material of μ-cuDNN's experiments: networks, their kernels, shared measurements."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from repro.experiments.microconv.runs import CONTENT
from repro.measure.accelerator import is_accelerator
from repro.measure.files import cache_folder
from repro.microconv import BenchmarkCache, Convolution, Kernel, find_kernels
from repro.microconv.backends import check_names
from repro.microconv.kernels import precision
from repro.microconv.measuring import Bench
from repro.models import build
from repro.models.alexnet import alexnet

# Measured times, shared by the experiments on one network within a process.
caches: dict[str, BenchmarkCache] = {}

Config = Mapping[str, Any]
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
        wanted, kinds = config["layer"], config["kinds"]
        named = [entry for entry in named if entry[0] == wanted and entry[1].kind in kinds]
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
