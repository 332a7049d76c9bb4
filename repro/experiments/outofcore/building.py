"""The iterations that the experiments of out-of-core training run: networks, losses, optimizers."""

from collections.abc import Callable, Mapping
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

from repro.models import Pix2PixHD, build

Config = Mapping[str, Any]
Step = Callable[[], None]
# What activation checkpointing recomputes as a whole, by the name of its class.
_BLOCKS = {"Bottleneck", "_DenseBlock", "XceptionBlock", "ResidualBlock"}


def training_step(config: Config, device: str, checkpointing: bool = False) -> Step:
    """Return one training iteration, forward, backward and update, on one random mini-batch.

    Args:
        config: Its model, image (height, width) and batch count.
        device: Where it runs.
        checkpointing: Recompute the network's blocks in the backward pass (a peer).
    """
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
    size, batch = tuple(config["image"]), config["batch"]
    if isinstance(model, Pix2PixHD):
        return _gan_step(model, batch, size, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(batch, 3, *size, device=device)
    classes = options.get("num_classes", 10)  # no network's own default is below
    shape = (batch, *size) if name == "deeplabv3plus" else (batch,)
    labels = torch.randint(classes, shape, device=device)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def _gan_step(model: Pix2PixHD, batch: int, size: tuple[int, ...], device: str) -> Step:
    """Return an iteration of both players; one-hot label maps, Adam with the authors' values."""
    players: tuple[nn.Module, nn.Module] = (model.generator, model.discriminator)
    first, second = (
        torch.optim.Adam(player.parameters(), lr=2e-4, betas=(0.5, 0.999)) for player in players
    )
    channels = model.in_channels
    classes = torch.randint(channels, (batch, 1, *size), device=device)
    labels = torch.zeros(batch, channels, *size, device=device).scatter_(1, classes, 1.0)
    real = torch.rand(batch, model.out_channels, *size, device=device) * 2 - 1

    def step() -> None:
        fake = model(labels)
        first.zero_grad()
        model.generator_loss(labels, real, fake).backward()
        first.step()
        second.zero_grad()
        model.discriminator_loss(labels, real, fake).backward()
        second.step()

    return step
