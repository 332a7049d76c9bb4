"""Small trainings for the tests of `repro.dualbatch`'s engines."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from repro import dualbatch
from repro.dualbatch import CyclicProgressiveSchedule, DualBatchPlan, DualBatchResult, Share, Stage
from repro.measure import TimeModel

SAMPLES = 60
TIMES = TimeModel(1e-3, 1e-2)
SYNCS: list[dict[str, Any]] = [{"sync": "asp"}, {"sync": "bsp"}, {"sync": "ssp", "staleness": 1}]


def make_model() -> nn.Module:
    """Return a network with weights, statistics, a counter and dropout."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(4, 3),
    )  # fmt: skip


def make_data(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Return images and labels, the same ones each time."""
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(samples, 2, 6, 6, generator=generator)
    return images, torch.randint(3, (samples,), generator=generator)


def make_plan(n_small: int = 2, n_large: int = 1, samples: int = SAMPLES) -> DualBatchPlan:
    """Return a plan with batches of up to 10 samples."""
    return DualBatchPlan.solve(TIMES, 1.1, n_small, n_large, 10, samples)


def epochs(count: int) -> CyclicProgressiveSchedule:
    """Return a schedule whose learning rate falls after the first half."""
    half = count // 2
    second = [Stage(half, 0.02)] if half else []
    return CyclicProgressiveSchedule([Stage(count - half, 0.1), *second])


def train(plan: DualBatchPlan | None = None, count: int = 4, **options: Any) -> DualBatchResult:
    """Train the small network."""
    given: dict[str, Any] = {"model_fn": make_model, "data": make_data(), "schedule": epochs(count)}
    given |= {"plan": plan or make_plan()}
    return dualbatch.train_dual_batch(**(given | options))


class Stop(Exception):
    """The end of a training that is to be resumed."""


def interrupt(path: Path, epoch: int, **options: Any) -> None:
    """Train with a checkpoint, and stop after an epoch."""

    def stop(entry: dualbatch.EpochResult) -> None:
        if entry.epoch == epoch:
            raise Stop

    with pytest.raises(Stop):
        train(checkpoint=path, on_epoch=stop, **options)


class Recorder:
    """Data that notes the shares that it is asked for."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.images, self.labels = make_data(samples)
        self.shares: list[Share] = []

    def __call__(self, share: Share) -> Iterator[tuple[Tensor, Tensor]]:
        self.shares.append(share)
        for index in share.indices.split(share.batch_size):
            yield self.images[index], self.labels[index]


def resumed(path: Path, epoch: int, **options: Any) -> DualBatchResult:
    """Return a whole training, which one that is stopped after an epoch and resumed repeats."""
    whole = train(**options)
    interrupt(path, epoch, **options)
    again = train(checkpoint=path, **options)
    assert same(again.state, whole.state) and again.log == whole.log
    return whole


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two states are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def without_wall_time(result: DualBatchResult) -> list[Any]:
    """Return the history with the measured seconds set to 0; they must be some."""
    assert all(0 < entry.wall_time_s < math.inf for entry in result.history)
    return [replace(entry, wall_time_s=0.0) for entry in result.history]


class Centre(nn.Module):
    """A loss that remembers in a buffer, or elsewhere."""

    def __init__(self, elsewhere: bool = False) -> None:
        super().__init__()
        self.register_buffer("c", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.count, self.elsewhere = 0, elsewhere

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(outputs - self.c, targets) / (1 + self.count)
        self.c = self.c.lerp(outputs.detach().mean(0), 0.1)
        self.steps += 1
        self.count += self.elsewhere
        return loss
