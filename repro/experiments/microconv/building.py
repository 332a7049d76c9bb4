"""What the experiments of μ-cuDNN run on: the machine's setting, networks, their kernels."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from repro.experiments.microconv import deepbench
from repro.measure.accelerator import is_accelerator
from repro.measure.files import cache_folder
from repro.microconv import BenchmarkCache, Kernel, find_kernels
from repro.microconv.backends import choose
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
    """Return a network in training mode, random images and labels."""
    torch.manual_seed(0)
    name, options = config["model"]["name"], _options(config["model"])
    made = alexnet(**options) if name == "alexnet" else build(name, **options)
    model = made.train()
    dtype = getattr(torch, config["dtype"])
    side = config["image"]
    images = torch.randn(config["batch"], 3, side, side, dtype=dtype, device=device)
    labels = torch.randint(10, (config["batch"],), device=device)
    return model.to(device=device, dtype=dtype), images, labels


def _options(model: Config) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name != "name"}


def network_kernels(config: Config, device: str, model: nn.Module | None = None) -> list[Named]:
    """Return the kernels of a network's convolutions, named conv1, conv2, ... in order of use."""
    if model is None:
        model, images, _ = build_network(config, device)
    else:
        side, dtype = config["image"], getattr(torch, config["dtype"])
        images = torch.zeros(config["batch"], 3, side, side, dtype=dtype, device=device)
    with rounding(config, device):
        kernels = find_kernels(model, images)
    order = {layer: index for index, layer in enumerate(dict.fromkeys(n for n, _, _ in kernels))}
    named = [(f"conv{order[layer] + 1}", kernel, batch) for layer, kernel, batch in kernels]
    if config.get("layer"):
        named = [
            entry
            for entry in named
            if entry[0] == config["layer"] and entry[1].kind in config["kinds"]
        ]
    return named


@contextmanager
def rounding(config: Config, device: str) -> Iterator[None]:
    """Round products of float32 as a configuration says."""
    shape = deepbench.layers("OCR")[0].conv
    with precision(Kernel("forward", shape, config["dtype"], device, math=config["math"])):
        yield


def make_bench(config: Config, device: str, cache: BenchmarkCache) -> Bench:
    """Return what measures with a configuration's algorithms."""
    max_error = config.get("max_error", _MAX_ERROR)
    return Bench(choose(config["algorithms"], device), cache, max_error)


def cache_key(config: Config, device: str) -> str:
    """Return what measured times are shared by: kernels tell networks of one size apart."""
    parts = ("image", "batch", "setting", "threads")
    return repr([config.get(part) for part in parts] + [device])


def share(config: Config, device: str, cache: BenchmarkCache) -> None:
    """Let the experiments on a network that follow use what was measured.

    On an accelerator also those of other processes: all sizes of a network take minutes there, and
    a run may have a process of its own.
    """
    if not is_accelerator(device):
        caches[cache_key(config, device)] = cache
        return
    shared(config, device).take(cache)
    BenchmarkCache(kept_times()).take(cache)


def shared(config: Config, device: str) -> BenchmarkCache:
    """Return what the experiments on a network have measured so far, see `share`."""
    key = cache_key(config, device)
    if key not in caches:
        caches[key] = BenchmarkCache(None)
        if is_accelerator(device):
            caches[key].take(BenchmarkCache(kept_times()))
    return caches[key]


def kept_times() -> Path:
    """Return the file of the times that outlive a process."""
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
    """Return the relative differences of the loss and, at worst, of a parameter's gradient."""
    losses = []
    for model in (one, other):
        torch.manual_seed(1)  # the same dropout on both sides
        losses.append(iteration(model, images, labels).detach().double())
    return float((losses[0] - losses[1]).abs() / losses[1].abs()), _gradient_gap(one, other)


def _gradient_gap(one: nn.Module, other: nn.Module) -> float:
    worst = 0.0
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        scale = b.grad.double().abs().max().clamp_min(1e-30)
        gap = float((a.grad.double() - b.grad.double()).abs().max() / scale)
        worst = max(worst, gap if math.isfinite(gap) else math.inf)
    return worst


def own_difference(plain: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return how far gradients of torch's own two convolutions lie apart, as a measure.

    A unit that lies at the edge of its ReLU falls on either side by rounding alone.
    """
    other = copy.deepcopy(plain)
    torch.manual_seed(1)
    with _without_library(images.device.type):
        iteration(other, images, labels)
    torch.manual_seed(1)
    iteration(plain, images, labels)
    return _gradient_gap(other, plain)


@contextmanager
def _without_library(kind: str) -> Iterator[None]:
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
