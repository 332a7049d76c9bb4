"""A worker: it trains its share of an epoch from the state that it pulled, and returns the result.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", sections 2.3, 3.3.

A worker has no memory: its result depends on the pulled state, its number and the number of its
share alone. So a share that was lost with its worker is done again to the same bits, and engines
agree. What the papers leave open follows from it: the optimizer, and its momentum, start anew with
each share.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from repro.dualbatch.plan import DualBatchPlan
from repro.dualbatch.progressive import EpochSetting, dropout_rates, set_dropout

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Share:
    """What a worker trains in one go: a part of one shuffled pass over the data.

    Attributes:
        indices: int64, (d_S,) or (d_L,): which samples, in order.
        batch_size: B_S or B_L.
        resolution: Side of the images in pixels; None for their own.
        seed: Of augmentation and dropout; another one for each share of each worker.
    """

    indices: Tensor
    batch_size: int
    resolution: int | None
    seed: int


Data = tuple[Tensor, Tensor] | Callable[[Share], Batches]


@dataclass(frozen=True)
class Recipe:
    """How every worker trains, whichever the engine. What crosses processes has to be picklable.

    Attributes:
        model_fn: Makes a model; its weights are those of the server.
        data: Inputs (N, ...) and targets (N, ...) on one device, or a function from a `Share` to
            its mini-batches, such as one that augments. Tensors of images (N, C, H, W) are
            resized bilinearly where a schedule has resolutions. torch's generators are seeded
            while it runs; whatever else is random in it has to follow `Share.seed`.
        loss_fn: Mean loss of (outputs, targets).
        optimizer_fn: Given parameters and a learning rate, makes the optimizer of a share.
        factor: Scheme of the model-update factor, a key of `FACTORS`.
        seed: Of the initial weights, the order of the data and all else.
        device: Where to train.
        autocast: `torch.bfloat16` in the forward pass; None for none. float16 is refused: it needs
            its loss scaled.
        channels_last: Lay images and weights out with channels last.

    Raises:
        ValueError: `autocast` is something else.
    """

    model_fn: Callable[[], nn.Module]
    data: Data
    loss_fn: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    optimizer_fn: Callable[[Any, float], torch.optim.Optimizer] | None = None
    factor: str = "linear"
    seed: int = 0
    device: str = "cpu"
    autocast: torch.dtype | None = None
    channels_last: bool = False

    def __post_init__(self) -> None:
        if self.autocast not in (None, torch.bfloat16):
            raise ValueError(
                f"autocast is {self.autocast}; give torch.bfloat16 or None (float16 would need its "
                "loss scaled)"
            )

    def make_model(self) -> nn.Module:
        """Return a model with the initial weights, on the device."""
        with seeded(self.device, self.seed):
            model = self.model_fn()
        if not isinstance(model, nn.Module):
            raise ValueError(f"model_fn returns {type(model).__name__}; give a function to a model")
        model = model.to(self.device)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model


@dataclass(frozen=True)
class Trained:
    """A share's result: the state to push, its factor, the mean training loss, (), on device."""

    state: dict[str, Tensor]
    factor: float
    loss: Tensor


class Worker:
    """Trains shares, one after the other, for any worker of a plan.

    Args:
        recipe: How to train.
        plan: Used where a setting has none of its own.
    """

    def __init__(self, recipe: Recipe, plan: DualBatchPlan) -> None:
        self.recipe, self.plan = recipe, plan
        self.model = recipe.make_model()
        self._optimizer_fn = recipe.optimizer_fn or sgd
        self._dropout = dropout_rates(self.model)

    def train(
        self, worker: int, iteration: int, state: dict[str, Tensor], setting: EpochSetting
    ) -> Trained:
        """Train one share from a pulled state, which is left as it is.

        The returned state is the model's own: push it before training the next share.
        """
        recipe, model = self.recipe, self.model
        model.load_state_dict(state)
        model.train()
        if setting.dropout is not None:
            set_dropout(model, setting.dropout)
        else:
            for layer, rate in self._dropout.items():  # a setting before may have changed it
                layer.p = rate
        share = share_of(setting.plan or self.plan, worker, iteration, setting, recipe.seed)
        optimizer = self._optimizer_fn(model.parameters(), setting.lr)
        kind = torch.device(recipe.device).type
        total, samples = torch.zeros((), device=recipe.device), 0
        with seeded(recipe.device, share.seed):
            for inputs, targets in batches_of(recipe.data, share):
                inputs = inputs.to(recipe.device, non_blocking=True)
                targets = targets.to(recipe.device, non_blocking=True)
                if recipe.channels_last and inputs.dim() == 4:
                    inputs = inputs.contiguous(memory_format=torch.channels_last)
                optimizer.zero_grad(set_to_none=True)
                low = recipe.autocast is not None
                with torch.autocast(kind, recipe.autocast) if low else nullcontext():
                    loss = recipe.loss_fn(model(inputs), targets)
                loss.backward()
                optimizer.step()
                # Kept on the device: reading it would wait for every step.
                total += loss.detach() * len(inputs)
                samples += len(inputs)
        if not samples:
            raise ValueError(f"the data gives no mini-batch for a share of {len(share.indices)}")
        plan = setting.plan or self.plan
        factor = plan.factor_of(plan.kinds[worker], recipe.factor)
        return Trained(dict(model.state_dict()), factor, total / samples)


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Return SGD with momentum 0.9 and weight decay 5e-4, the default of a recipe."""
    return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=5e-4)


def share_of(
    plan: DualBatchPlan, worker: int, iteration: int, setting: EpochSetting, seed: int
) -> Share:
    """Return a worker's part of the shuffled pass number `iteration` (equation 6).

    The shares of a pass follow each other in one permutation, so that together they are the data,
    each sample once: d = n_L d_L + n_S d_S but for rounding. Differs from the authors' code, where
    each worker draws from a shuffle of its own.
    """
    kind = plan.kinds[worker]
    start = sum(plan.share_of(other) for other in plan.kinds[:worker])
    order = torch.randperm(plan.samples, generator=_generator(seed, iteration))
    # Rounding up may ask for a few more samples than there are.
    places = (start + torch.arange(plan.share_of(kind))) % plan.samples
    own_seed = int(np.random.SeedSequence([seed, iteration, worker]).generate_state(1)[0])
    return Share(order[places], plan.batch_of(kind), setting.resolution, own_seed)


def batches_of(data: Data, share: Share) -> Batches:
    """Yield the mini-batches of a share."""
    if callable(data):
        yield from data(share)
        return
    inputs, targets = data
    for index in share.indices.to(inputs.device).split(share.batch_size):
        batch = inputs[index]
        side = share.resolution
        if side is not None and batch.shape[2:] != (side, side):
            batch = functional.interpolate(
                batch, (side, side), mode="bilinear", antialias=True, align_corners=False
            )
        yield batch, targets[index]


@contextmanager
def seeded(device: str, seed: int) -> Iterator[None]:
    """Seed torch's generators inside a ``with`` block, and put them back as they were."""
    place = torch.device(device)
    devices = [place.index or 0] if place.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _generator(seed: int, iteration: int) -> torch.Generator:
    state = np.random.SeedSequence([seed, iteration]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))
