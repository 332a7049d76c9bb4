"""The iterations of the experiments: computed, or traced at any batch size and timed by rates."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoints
from torch.nn import functional

from repro.experiments.design import Config
from repro.experiments.outofcore.offload import Offload
from repro.experiments.outofcore.runs import GIB
from repro.models import Pix2PixHD, build
from repro.outofcore import Trace, record

Step = Callable[[], None]
# Blocks that activation checkpointing recomputes as a whole, by the names of their classes.
_BLOCKS = {"Bottleneck", "_DenseBlock", "XceptionBlock", "ResidualBlock"}

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of float16, fixed: one that adapts asks the device for values, of which a recording has none.
LOSS_SCALE = 2.0**4
_RECORDED = (2, 4)  # batch sizes; one of 1 may take other paths


def _autocast(config: Config, device: str) -> AbstractContextManager[object]:
    """The context of the forward pass and the loss."""
    half = PRECISIONS[config.get("precision", "float32")]
    return torch.autocast(torch.device(device).type, half) if half else nullcontext()


def _backward(loss: torch.Tensor, model: nn.Module, config: Config) -> None:
    """Backpropagate; with float16 scale the loss, and undo it in the gradients."""
    if config.get("precision") != "float16":
        loss.backward()
        return
    (loss * LOSS_SCALE).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    torch._foreach_mul_(gradients, 1 / LOSS_SCALE)


def training_step(
    config: Config, device: str, checkpointing: bool = False, offload: bool = False
) -> Step:
    """Return one training iteration on one random mini-batch, plain or as one of two peers."""
    torch.manual_seed(0)
    options = dict(config["model"])
    name = options.pop("name")
    with torch.device(device):
        model = Pix2PixHD(**options) if name == "pix2pixhd" else build(name, **options)
    model.train()
    if checkpointing:
        kind = checkpoints.CheckpointImpl.NO_REENTRANT
        checkpoints.apply_activation_checkpointing(
            model,
            partial(checkpoints.checkpoint_wrapper, checkpoint_impl=kind),
            check_fn=lambda module: type(module).__name__ in _BLOCKS,
        )
    plain = (_gan_step if name == "pix2pixhd" else _step)(model, config, device)
    if not offload:
        return plain
    hooks = Offload(device, [*model.parameters(), *model.buffers()])

    def step() -> None:
        with hooks:
            plain()

    return step


def _step(model: nn.Module, config: Config, device: str) -> Step:
    size, batch = tuple(config["image"]), config["batch"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(batch, 3, *size, device=device)
    classes = config["model"].get("num_classes", 10)  # no network's own default is below
    shape = (batch, *size) if config["model"]["name"] == "deeplabv3plus" else (batch,)
    labels = torch.randint(classes, shape, device=device)

    def step() -> None:
        optimizer.zero_grad()
        with _autocast(config, device):
            loss = functional.cross_entropy(model(images), labels)
        _backward(loss, model, config)
        del loss
        optimizer.step()

    return step


def _gan_step(model: Any, config: Config, device: str) -> Step:
    """An iteration of both players; one-hot label maps, Adam with the authors' values."""
    size, batch = tuple(config["image"]), config["batch"]
    first, second = (
        torch.optim.Adam(player.parameters(), lr=2e-4, betas=(0.5, 0.999))
        for player in (model.generator, model.discriminator)
    )
    channels = model.in_channels
    classes = torch.randint(channels, (batch, 1, *size), device=device)
    labels = torch.zeros(batch, channels, *size, device=device).scatter_(1, classes, 1.0)
    real = torch.rand(batch, model.out_channels, *size, device=device) * 2 - 1

    def step() -> None:
        with _autocast(config, device):
            fake = model(labels)
            loss = model.generator_loss(labels, real, fake)
        first.zero_grad()
        _backward(loss, model.generator, config)
        del loss
        first.step()
        second.zero_grad()
        with _autocast(config, device):
            loss = model.discriminator_loss(labels, real, fake)
        _backward(loss, model.discriminator, config)
        del loss
        second.step()

    return step


def trace_at(config: Config, batch: int) -> Trace:
    """The trace of an iteration at a batch size: bytes are linear in it between two small ones."""
    precision = config.get("precision", "float32")
    small, large = _recorded(json.dumps([config["model"], config["image"], precision]))
    few, more = _RECORDED
    sizes = {
        name: size + (large.sizes[name] - size) * (batch - few) // (more - few)
        for name, size in small.sizes.items()
    }
    return replace(small, sizes=sizes)


def limit_bytes(config: Config) -> int:
    """The memory limit: as given, or the mean of the needs of two batch sizes."""
    if "limit_gib" in config:
        return int(config["limit_gib"] * GIB)
    return sum(trace_at(config, batch).peak_bytes for batch in config["limit_between"]) // 2


@lru_cache(maxsize=8)
def _recorded(described: str) -> tuple[Trace, Trace]:
    model, image, precision = json.loads(described)
    traces = []
    # When variables end shows in the third iteration; their sizes in the second already.
    for batch, warmup in zip(_RECORDED, (2, 1), strict=True):
        with FakeTensorMode():
            config = {"model": model, "image": image, "precision": precision, "batch": batch}
            step = training_step(config, "cpu")
            traces.append(record(step, warmup=warmup, device="meta", in_parts=False))
    small, large = traces
    if small.functions != large.functions or small.kinds != large.kinds:
        raise ValueError(
            f"iterations of {model} at batch sizes of {_RECORDED} differ in more than "
            "sizes: its trace cannot be extended"
        )
    return small, large


def published_times(trace: Trace, baseline: Config) -> NDArray[np.float64]:
    """The seconds of each function of a trace, (n,), by throughputs published for training in core.

    In proportion to the bytes of its variables, as figure 1 has it: least squares of an iteration's
    seconds = fixed + bytes / rate, not followed beyond the fastest that was published.
    """
    batches = baseline["batches"]
    seconds = np.divide(batches, baseline["images_per_s"])
    touched = np.array([sum(trace_at(baseline, batch).needs_bytes) for batch in batches], float)
    most = (touched / seconds).max()
    rate, fixed = most, 0.0
    if len(batches) > 1:
        slope, fixed = np.polyfit(touched, seconds, 1)
        rate = 1 / slope
    own = np.array(trace.needs_bytes, dtype=np.float64)
    times = own / rate + fixed / len(own)
    return times * max(1.0, own.sum() / most / times.sum())
