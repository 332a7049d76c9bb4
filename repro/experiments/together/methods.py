"""Networks with their mini-batches and losses, and all methods to compute one under a memory limit.

Each method is by its public functions. Methods do not know each other: they are combined here, as a
user would.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from repro import models
from repro.experiments.design import Config
from repro.experiments.saving import save_pinned
from repro.mbs import MicroBatchStreamer
from repro.measure import accelerator
from repro.microconv import tune
from repro.models.densenet import DenseNet
from repro.models.unet import UNet
from repro.outofcore import OutOfCore

CLASSES = 10
_BLOCKS = {"ResidualBlock", "TransformerLayer"}  # recomputed as a whole, by the name of the class


class TransformerLayer(nn.Module):
    """Causal attention and a perceptron, each behind a LayerNorm and added to its input."""

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
    """A mini-batch in host memory, and what is to be computed of it."""

    inputs: Tensor  # images (B, 3, H, W), or tokens (B, T)
    targets: Tensor  # labels (B,), a mask (B, 1, H, W) of zeros and ones, or tokens (B, T)
    loss: Callable[[Tensor, Tensor], Tensor]  # a mean over the samples


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


RATE, MOMENTUM = 1e-3, 0.9
WORKSPACE = 8 * 2**20  # bytes of each tuned convolution's kernels
OUT_OF_CORE_SHARE = 0.8  # of an accelerator's limit: kernels and gaps take the rest

ACCUMULATES = "accumulation"
STREAMS = {"mbs", "mbs_deferred", "checkpointing_mbs", "mbs_in_outofcore", "tuned_mbs"}
SWAPS = {"outofcore", "outofcore_file", "mbs_in_outofcore", "tuned_outofcore"}
RECOMPUTES = {"checkpointing", "checkpointing_mbs"}
TUNES = {"tuned_mbs", "tuned_outofcore"}


class Refused(Exception):
    """A method that is not for this device; the text says why."""


class Method:
    """One method on one network: a model of its own, its passes and its step.

    Args:
        config: Names the method and the network.
        micro: Most samples of a micro-batch, None for methods that take the mini-batch whole.
        limit: In bytes, of out-of-core training.
    """

    def __init__(
        self, config: Config, problem: Problem, micro: int | None, limit: int, device: str
    ) -> None:
        self.mode, self.problem, self.device = config["mode"], problem, device
        self.size, self.limit = micro or len(problem.inputs), limit
        self.block: OutOfCore | None = None
        self.host_bytes = 0
        self.model = build_model(config, device)
        if self.mode in RECOMPUTES:
            recompute(self.model)
        if self.mode in TUNES:
            some = problem.inputs[: self.size].to(device)
            torch.manual_seed(0)
            tune(self.model, some, WORKSPACE, config["policy"], strict=False, cache=None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)
        if self.mode in STREAMS:
            rule = "deferred" if self.mode == "mbs_deferred" else "micro"
            # The loss is torch's own, and a check's cost is not to be timed.
            self._streamer = MicroBatchStreamer(
                self.model, problem.loss, self.size, device=device, batchnorm=rule, check="off"
            )

    def passes(self) -> None:
        """Leave the gradients of the mini-batch in the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        inputs, targets, device = self.problem.inputs, self.problem.targets, self.device
        if self.mode in STREAMS:
            self._streamer.backward(inputs, targets)
            return
        for some, wanted in zip(inputs.split(self.size), targets.split(self.size), strict=True):
            with self._saving():
                loss = self.problem.loss(self.model(some.to(device)), wanted.to(device))
            share = len(some) / len(inputs)
            (loss * share if self.mode == ACCUMULATES else loss).backward()

    def _saving(self) -> Any:
        if self.mode != "save_on_cpu":
            return nullcontext()
        self.host_bytes = 0
        if accelerator.is_accelerator(self.device):
            return save_pinned(self.device)
        return saved_tensors_hooks(self._to_host, torch.clone)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Copy as `save_on_cpu` does, where a simulated limit does not count it: to the host."""
        with _disable_current_modes():
            copied = tensor.detach().clone()
        self.host_bytes += copied.nbytes
        return copied

    def step(self) -> None:
        """Train one step."""
        self.passes()
        self.optimizer.step()
        if self.block is not None:
            self.block.step()

    @contextmanager
    def within(self) -> Iterator[None]:
        """Enter out-of-core's block, or none; `Refused` where it is not for this device."""
        if self.mode not in SWAPS:
            yield
            return
        queued, to_file = accelerator.is_accelerator(self.device), self.mode == "outofcore_file"
        if queued and to_file:
            raise Refused("a file takes what a CPU swaps; an accelerator swaps to the host")
        with (
            tempfile.TemporaryDirectory() if to_file else nullcontext() as folder,
            OutOfCore(
                int(OUT_OF_CORE_SHARE * self.limit) if queued else self.limit,
                device=self.device,
                swap_folder=folder,
                # In host memory for all methods.
                exclude=(self.problem.inputs, self.problem.targets),
                model=self.model,
                optimizer=self.optimizer,
            ) as self.block,
        ):
            yield


def micro_batches(mode: str, fits: int, batch: int) -> Sequence[int | None]:
    """Return the sizes of micro-batches to try, largest first; [None] for methods without.

    `fits` is the largest mini-batch that fits undivided, `batch` the mini-batch.
    """
    if mode not in STREAMS and mode != ACCUMULATES:
        return [None]
    # Recomputing and swapping make room for larger ones.
    most = {"checkpointing_mbs": 8.0, "mbs_in_outofcore": 2.0}.get(mode, 1.0)
    shares = [most / 2**n for n in range(math.ceil(math.log2(most * fits)) + 1)]
    shares += [0.75] if most == 1 else []
    sizes = {max(1, int(share * fits)) for share in shares}
    return sorted({min(size, batch) for size in sizes}, reverse=True)
