"""The networks, mini-batches and losses that are trained under one memory limit."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn import functional

from repro import models
from repro.models.densenet import DenseNet
from repro.models.unet import UNet

Config = Mapping[str, Any]
Loss = Callable[[Tensor, Tensor], Tensor]
CLASSES = 10
_BLOCKS = {"ResidualBlock", "TransformerLayer"}  # recomputed as a whole, by the name of the class


class TransformerLayer(nn.Module):
    """Causal attention and a perceptron, each behind a LayerNorm and added to what it read."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to the same shape."""
        b, t, c = x.shape
        # (B, T, 3 C) -> three of (B, heads, T, C / heads)
        parts = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(b, t, c))
        added: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return added


class Transformer(nn.Module):
    """A small language model: no convolution, and no layer that looks at more than one sample.

    A sample has `length` tokens of so large a `vocabulary`; `heads` divides `width`, the channels.
    """

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.Sequential(*(TransformerLayer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, vocabulary, T), as cross-entropy takes them."""
        x = self.layers(self.embed(tokens) + self.position)
        logits: Tensor = self.head(self.norm(x)).transpose(1, 2)
        return logits


def recompute(model: nn.Module) -> None:
    """Have a network's blocks computed again in the backward pass; parameters keep their order."""
    if isinstance(model, DenseNet):
        # One layer of it makes little and reads all: as many in a row as there are such rows.
        layers = list(model.features)
        each = math.ceil(math.sqrt(len(layers)))
        rows = (layers[i : i + each] for i in range(0, len(layers), each))
        model.features = nn.Sequential(*(nn.Sequential(*row) for row in rows))
        blocks = {*model.features}
    elif isinstance(model, UNet):
        blocks = {*model.contract, *model.expand, model.bottom}
    else:
        blocks = {block for block in model.modules() if type(block).__name__ in _BLOCKS}
    # No block draws random numbers, whose state need not be kept.
    wrap = partial(
        checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=False
    )
    apply_activation_checkpointing(model, wrap, check_fn=blocks.__contains__)


@dataclass(frozen=True)
class Problem:
    """A mini-batch in host memory, and what is to be computed of it.

    Attributes:
        inputs: Images (B, 3, H, W), or tokens (B, T).
        targets: Labels (B,), a mask (B, 1, H, W) of zeros and ones, or tokens (B, T).
        loss: A mean over the samples.
    """

    inputs: Tensor
    targets: Tensor
    loss: Loss


def build_model(config: Config, device: str) -> nn.Module:
    """Return the network with the same weights each time, on a device, in training mode."""
    options = dict(config["model"])
    name = options.pop("name")
    torch.manual_seed(0)
    if name == "transformer":
        model: nn.Module = Transformer(**options)
    elif name == "densenet":  # of any depth
        model = DenseNet(**options, num_classes=CLASSES, in_channels=3)
    else:
        model = models.build(name, **options)
    return model.to(device).train()


def build_problem(config: Config, batch: int) -> Problem:
    """Return the first `batch` samples of random numbers, the same each time."""
    name = config["model"]["name"]
    made = torch.Generator().manual_seed(1)
    if name == "transformer":
        words, length = config["model"]["vocabulary"], config["model"]["length"]
        tokens = torch.randint(words, (batch, length + 1), generator=made)
        # The next token is to be predicted.
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return Problem(inputs, targets, functional.cross_entropy)
    height, width = config["image"]
    images = torch.randn(batch, 3, height, width, generator=made)
    if name == "unet":
        mask = torch.randint(2, (batch, 1, height, width), generator=made).float()
        return Problem(images, mask, functional.binary_cross_entropy_with_logits)
    labels = torch.randint(CLASSES, (batch,), generator=made)
    return Problem(images, labels, functional.cross_entropy)
