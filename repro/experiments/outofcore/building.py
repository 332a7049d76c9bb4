"""The iterations that the experiments of out-of-core training run: networks, losses, optimizers."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn import functional

from repro.experiments.outofcore.offload import Offload
from repro.models import Pix2PixHD, build

Config = Mapping[str, Any]
Step = Callable[[], None]
# Blocks that activation checkpointing recomputes as a whole, by the names of their classes.
_BLOCKS = {"Bottleneck", "_DenseBlock", "XceptionBlock", "ResidualBlock"}

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of float16, fixed: one that adapts asks the device for values, of which a recording has none.
LOSS_SCALE = 2.0**4


@dataclass(frozen=True)
class Precision:
    """The context of the forward pass and the loss, and the backward pass, in a precision."""

    name: str
    device: str

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context."""
        half = PRECISIONS[self.name]
        return (
            nullcontext() if half is None else torch.autocast(torch.device(self.device).type, half)
        )

    def backward(self, loss: torch.Tensor, parameters: Iterable[nn.Parameter]) -> None:
        """Backpropagate; with float16 scale the loss, and undo it in the gradients."""
        if self.name != "float16":
            loss.backward()
            return
        (loss * LOSS_SCALE).backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(gradients, 1 / LOSS_SCALE)


def training_step(
    config: Config, device: str, checkpointing: bool = False, offload: bool = False
) -> Step:
    """Return one training iteration, forward, backward and update, on one random mini-batch.

    Two peers are `checkpointing`, which recomputes the network's blocks in the backward pass, and
    `offload`, see `Offload`.
    """
    precision = Precision(config.get("precision", "float32"), device)
    torch.manual_seed(0)
    options = dict(config["model"])
    name = options.pop("name")
    with torch.device(device):
        model = Pix2PixHD(**options) if name == "pix2pixhd" else build(name, **options)
    model.train()
    if checkpointing:
        apply_activation_checkpointing(
            model,
            partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
            check_fn=lambda module: type(module).__name__ in _BLOCKS,
        )
    plain = (_gan_step if name == "pix2pixhd" else _step)(model, config, device, precision)
    if not offload:
        return plain
    hooks = Offload(device, [*model.parameters(), *model.buffers()])

    def step() -> None:
        with hooks:
            plain()

    return step


def _step(model: nn.Module, config: Config, device: str, precision: Precision) -> Step:
    size, batch = tuple(config["image"]), config["batch"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(batch, 3, *size, device=device)
    classes = config["model"].get("num_classes", 10)  # no network's own default is below
    shape = (batch, *size) if config["model"]["name"] == "deeplabv3plus" else (batch,)
    labels = torch.randint(classes, shape, device=device)

    def step() -> None:
        optimizer.zero_grad()
        with precision.autocast():
            loss = functional.cross_entropy(model(images), labels)
        precision.backward(loss, model.parameters())
        del loss
        optimizer.step()

    return step


def _gan_step(model: Any, config: Config, device: str, precision: Precision) -> Step:
    """An iteration of both players; one-hot label maps, Adam with the authors' values."""
    size, batch = tuple(config["image"]), config["batch"]
    players: tuple[nn.Module, nn.Module] = (model.generator, model.discriminator)
    first, second = (
        torch.optim.Adam(player.parameters(), lr=2e-4, betas=(0.5, 0.999)) for player in players
    )
    channels = model.in_channels
    classes = torch.randint(channels, (batch, 1, *size), device=device)
    labels = torch.zeros(batch, channels, *size, device=device).scatter_(1, classes, 1.0)
    real = torch.rand(batch, model.out_channels, *size, device=device) * 2 - 1

    def step() -> None:
        with precision.autocast():
            fake = model(labels)
            loss = model.generator_loss(labels, real, fake)
        first.zero_grad()
        precision.backward(loss, players[0].parameters())
        del loss
        first.step()
        second.zero_grad()
        with precision.autocast():
            loss = model.discriminator_loss(labels, real, fake)
        precision.backward(loss, players[1].parameters())
        del loss
        second.step()

    return step
