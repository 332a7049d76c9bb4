"""Cyclic progressive learning: resolution from low to high within each learning-rate stage.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", section 4 and
Tables 1, 7, 9.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from repro.dualbatch.checks import positive
from repro.dualbatch.plan import DualBatchPlan
from repro.measure.checks import is_number, whole

WARMUP_START = 0.2  # of the first rate


@dataclass(frozen=True)
class Stage:
    """Epochs that share a learning rate."""

    epochs: int
    lr: float


@dataclass(frozen=True)
class SubStage:
    """A part of every stage; None leaves what the images, the model or the training have."""

    resolution: int | None = None  # (short) side of the images, in pixels
    dropout: float | None = None  # for all dropout layers, not within attention or nn.LSTM
    plan: DualBatchPlan | None = None  # batch sizes and shares at this resolution


@dataclass(frozen=True)
class EpochSetting:
    """Settings of one epoch, with those of its `SubStage`; numbers are from 1."""

    epoch: int
    stage: int
    sub_stage: int
    lr: float  # warm-up included
    resolution: int | None
    dropout: float | None
    plan: DualBatchPlan | None

    @property
    def small_batch(self) -> int | None:
        """B_S; None without a plan or without small-batch workers."""
        return self.plan.small_batch if self.plan else None

    @property
    def large_batch(self) -> int | None:
        """B_L; None without a plan or without large-batch workers."""
        return self.plan.large_batch if self.plan and self.plan.n_large else None


class CyclicProgressiveSchedule(Sequence[EpochSetting]):
    """The setting of every epoch: stages of learning rates, each with all sub-stages in turn.

    Of a stage's epochs, sub-stage i of m ends after the share i / m, rounded down. A single
    sub-stage gives the ordinary schedule of dual-batch learning. Workers look up settings by the
    global progress of the training, never by their own count of epochs.

    Args:
        stages: At least one, each with at least one epoch for every sub-stage.
        sub_stages: At least one.
        warmup_epochs: Epochs in which the learning rate rises in equal steps from a fifth of the
            first stage's rate to that rate (gradual warm-up, section 5.1.3).
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        sub_stages: Sequence[SubStage] = (SubStage(),),
        warmup_epochs: int = 0,
    ) -> None:
        parts = len(sub_stages)
        if not stages or not parts:
            raise ValueError(
                f"there are {len(stages)} stages and {parts} sub-stages; give one of each"
            )
        # Python's numbers instead of numpy's: they go into checkpoints.
        self.stages = tuple(
            Stage(whole("a stage's epochs", stage.epochs, parts), positive("a rate", stage.lr))
            for stage in stages
        )
        self.sub_stages = tuple(
            SubStage(
                None if sub.resolution is None else whole("a resolution", sub.resolution, 1),
                None if sub.dropout is None else _rate(sub.dropout),
                sub.plan,
            )
            for sub in sub_stages
        )
        self.warmup_epochs = whole("warmup_epochs", warmup_epochs, 0, self.stages[0].epochs)
        self._settings: list[EpochSetting] = []
        for number, stage in enumerate(self.stages, 1):
            ends = [stage.epochs * part // parts for part in range(1, parts + 1)]
            for done in range(stage.epochs):
                part, epoch, lr = bisect_right(ends, done), len(self._settings) + 1, stage.lr
                if epoch <= self.warmup_epochs:
                    lr *= WARMUP_START + (1 - WARMUP_START) * ((epoch - 1) / self.warmup_epochs)
                sub = self.sub_stages[part]
                setting = (epoch, number, part + 1, lr, sub.resolution, sub.dropout, sub.plan)
                self._settings.append(EpochSetting(*setting))

    def __len__(self) -> int:
        return len(self._settings)

    def __getitem__(self, index: Any) -> Any:
        """Setting of epoch `index` + 1."""
        return self._settings[index]

    def at_progress(self, epochs_done: float) -> EpochSetting:
        """Setting for work that starts after `epochs_done` epochs of the whole training.

        Within an epoch it is the next epoch's: a worker that starts then has ended this one.
        After the end it is the last epoch's setting.
        """
        return self._settings[math.ceil(max(0, min(len(self) - 1, epochs_done - 1e-9)))]


def set_dropout(model: nn.Module, rate: float) -> None:
    """Set the rate, from 0 up to below 1, of every dropout layer of a model, which must be some."""
    rate, layers = _rate(rate), dropout_rates(model)
    if not layers:
        raise ValueError(
            f"the schedule sets dropout to {rate}, but {type(model).__name__} has no dropout "
            "layer; add one (nn.Dropout before the classifier), or leave dropout=None"
        )
    for layer in layers:
        layer.p = rate


def dropout_rates(model: nn.Module) -> dict[nn.modules.dropout._DropoutNd, float]:
    """Rate of every dropout layer of a model."""
    kind = nn.modules.dropout._DropoutNd
    return {module: module.p for module in model.modules() if isinstance(module, kind)}


def _rate(value: Any) -> float:
    if not is_number(value) or not 0 <= value < 1:
        raise ValueError(f"dropout is {value!r}; give a rate from 0 up to below 1")
    return float(value)
