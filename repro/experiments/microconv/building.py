"""The material of μ-cuDNN's experiments: networks, their kernels, shared measurements."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
_MAX_ERROR = 1e-4


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


@contextmanager
def rounding(config: Config, device: str) -> Iterator[None]:
    """Round products of float32 as a configuration says."""
    shape = Convolution(1, 1, 1, 1, (1, 1))
    with precision(Kernel("forward", shape, config["dtype"], device, math=config["math"])):
        yield


def make_bench(config: Config, device: str, cache: BenchmarkCache) -> Bench:
    """The measuring with a configuration's algorithms."""
    check_names(config["algorithms"], device)
    return Bench(config["algorithms"], cache, config.get("max_error", _MAX_ERROR))


def cache_key(config: Config, device: str) -> str:
    """The key that measured times are shared by: kernels tell networks of one size apart."""
    parts = ("image", "batch", "setting", "threads")
    return repr([config.get(part) for part in parts] + [device])


def share(config: Config, device: str, cache: BenchmarkCache) -> None:
    """Let the experiments on a network that follow use the measured times.

    On an accelerator also those of other processes: all sizes of a network take minutes there, and
    a run may have a process of its own.
    """
    if not is_accelerator(device):
        caches[cache_key(config, device)] = cache
        return
    shared(config, device).take(cache)
    BenchmarkCache(kept_times()).take(cache)


def shared(config: Config, device: str) -> BenchmarkCache:
    """The times that experiments on a network have measured so far, see `share`."""
    key = cache_key(config, device)
    if key not in caches:
        caches[key] = BenchmarkCache(None)
        if is_accelerator(device):
            caches[key].take(BenchmarkCache(kept_times()))
    return caches[key]


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
    """The relative differences of the loss and, at worst, of a parameter's gradient."""
    losses = []
    for model in (one, other):
        torch.manual_seed(1)  # the same dropout on both sides
        losses.append(iteration(model, images, labels).detach().double())
    return float((losses[0] - losses[1]).abs() / losses[1].abs()), gradient_gap(one, other)


def gradient_gap(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of a gradient's element, over the gradient's largest element."""
    worst = 0.0
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        scale = b.grad.double().abs().max().clamp_min(1e-30)
        gap = float((a.grad.double() - b.grad.double()).abs().max() / scale)
        worst = max(worst, gap if math.isfinite(gap) else math.inf)
    return worst


def own_difference(plain: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The distance of the gradients of torch's own two convolutions.

    A unit that lies at the edge of its ReLU falls on either side by rounding alone.
    """
    other = copy.deepcopy(plain)
    torch.manual_seed(1)
    with without_library(images.device.type):
        iteration(other, images, labels)
    torch.manual_seed(1)
    iteration(plain, images, labels)
    return gradient_gap(other, plain)


@contextmanager
def without_library(kind: str) -> Iterator[None]:
    """Have torch convolve without cuDNN or oneDNN; on other devices as ever.

    By hand: their own context managers also set how float32 is rounded, and refuse or warn.
    """
    if kind not in ("cpu", "cuda"):
        yield
        return
    library: Any = torch.backends.cudnn if kind == "cuda" else torch.backends.mkldnn
    before = library.enabled
    switch = torch._C._set_cudnn_enabled if kind == "cuda" else torch._C._set_mkldnn_enabled
    switch(False)
    try:
        yield
    finally:
        switch(before)


@dataclass(frozen=True)
class Layer:
    """One layer of DeepBench: its shape, and the batch size that it is defined with."""

    conv: Convolution
    batch: int

    def macs(self, factor: int) -> int:
        """Multiplications of a forward pass at `factor` times the batch size."""
        conv, (rows, columns) = self.conv, self.conv.out_size
        outputs = factor * self.batch * conv.out_channels * rows * columns
        return outputs * conv.in_channels * conv.taps


def layers(network_type: str) -> list[Layer]:
    """DeepBench's layers of one network type of Table IV, in its order of shapes."""
    return [
        Layer(Convolution(c, h, w, k, (rows, columns), (stride,) * 2, (padding,) * 2), batch)
        for c, h, w, k, rows, columns, stride, padding, batches in CONTENT["deepbench"][
            network_type
        ]
        for batch in batches
    ]


def chosen_layers(
    network_type: str, factor: int, largest_mmacs: float | None, of_each_size: int | None
) -> list[Layer]:
    """The layers of one network type that are run, in DeepBench's order.

    Args:
        network_type: Such as ``OCR``.
        factor: Of the batch size.
        largest_mmacs: Leave out layers of more multiplications, in millions; None for none.
        of_each_size: How many of each kernel size, cheapest first; None for all.
    """
    every = layers(network_type)
    kept: dict[tuple[int, int], list[Layer]] = {}
    for layer in sorted(every, key=lambda layer: layer.macs(factor)):
        group = kept.setdefault(layer.conv.kernel_size, [])
        small = largest_mmacs is None or layer.macs(factor) <= largest_mmacs * 1e6
        if small and (of_each_size is None or len(group) < of_each_size):
            group.append(layer)
    return sorted((layer for group in kept.values() for layer in group), key=every.index)
