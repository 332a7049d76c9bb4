"""Strategies to compare with θ-adaptive batch sizes, and section VI-A's stop rule."""

import math
from collections.abc import Callable
from typing import Any

from repro.adaptive.controller import BatchController, DivergedError, checked_number
from repro.adaptive.gradients import NoiseScale
from repro.measure.checks import whole

_WINDOW = 10  # epochs of the moving average of noise estimates; the last has weight 1 / 10


class FixedBatch(BatchController):
    """One batch size from beginning to end, with a decaying rate; see `BatchController`."""

    def __init__(self, batch_size: int, lr: float, **options: Any) -> None:
        super().__init__(batch_size, batch_size, lr, **options)


class LinearScaling(FixedBatch):
    """A large batch with a rate in proportion, reached by a gradual warm-up.

    Source: Goyal et al., "Accurate, Large Minibatch SGD" (arXiv:1706.02677), sections 2.1 and
    2.2: within five epochs the rate rises from η, `base_lr`, the rate of n samples, `base_batch`,
    to kη for kn samples, `batch_size`.
    """

    def __init__(
        self, batch_size: int, base_batch: int, base_lr: float, warmup: int = 5, **options: Any
    ) -> None:
        whole("base_batch", base_batch, 1)
        whole("batch_size", batch_size, base_batch)
        checked_number("base_lr", base_lr, lambda x: x > 0, "above 0")
        lr = base_lr * (batch_size / base_batch)
        super().__init__(batch_size, lr, warmup=warmup, **{"warmup_from": base_lr} | options)


class ScheduledBatch(BatchController):
    """A batch size that grows at regular intervals, with a constant rate.

    Source: the paper's third method, Smith et al., "Don't Decay the Learning Rate, Increase the
    Batch Size" (arXiv:1711.00489), which replaces each decay of the rate by a growth of the batch.

    `every` is the number of epochs between two growths; see `BatchController` for the others.
    """

    _SETTINGS = (*BatchController._SETTINGS, "every")

    def __init__(
        self,
        initial_batch: int,
        max_batch: int,
        lr: float,
        *,
        every: int,
        growth: float = 2,
        **options: Any,
    ) -> None:
        self.every = whole("every", every, 1)
        super().__init__(initial_batch, max_batch, lr, growth, lr_exponent=0.0, **options)

    def _next_batch(self, n: int, theta: float | None, cost: float) -> int:
        return self._batch if n % self.every else self._grown()


class NoiseScaleBatch(BatchController):
    """A batch size that follows the gradient noise scale.

    After each epoch the simple noise scale tr(Σ) / |G|² is measured, and the batch size grows once
    if it then does not exceed the scale. Batches below the scale learn equally much from each
    sample, larger batches learn less (McCandlish et al., "An Empirical Model of Large-Batch
    Training", arXiv:1812.06162, section 2). AdaptDL follows the same quantity. The batch size never
    shrinks.

    A ratio of two noisy estimates is unreliable. So tr(Σ) and |G|² are averaged over epochs
    separately (appendix A.1), if `measure` gives both; while the mean |G|² is not above 0, the
    batch size stays.

    Args:
        initial_batch: See `BatchController`, also for `max_batch`, `initial_lr` and `growth`.
        measure: Returns the noise scale in samples at the current parameters, preferably of other
            samples each time, such as `repro.adaptive.noise_scale` with another `seed`. A
            `NoiseScale` is averaged; a plain number is used directly. Called once per epoch.
        factors: Most factors of growth in an epoch; ``math.inf`` follows the scale at once.

    Attributes:
        scale: Measured noise scale, averaged over epochs, in samples; infinite if noise hides the
            gradient.
    """

    _SETTINGS = (*BatchController._SETTINGS, "factors")
    _STATE = (*BatchController._STATE, "scale", "_noise", "_signal")

    def __init__(
        self,
        initial_batch: int,
        max_batch: int,
        initial_lr: float,
        measure: Callable[[], float],
        growth: float = 2,
        *,
        factors: float = 1,
        **options: Any,
    ) -> None:
        if not factors >= 1:
            raise ValueError(f"factors is {factors!r}; give a whole number from 1, or math.inf")
        super().__init__(initial_batch, max_batch, initial_lr, growth, **options)
        self._measure, self.factors = measure, factors
        self.scale: float | None = None
        self._noise = self._signal = 0.0

    def _next_batch(self, n: int, theta: float | None, cost: float) -> int:
        scale, noise, signal = self._measure(), self._noise, self._signal
        if isinstance(scale, NoiseScale):
            # Both means begin at 0, which does not change their ratio.
            noise += (scale.noise - noise) / _WINDOW
            signal += (scale.signal - signal) / _WINDOW
            scale = NoiseScale(noise, signal)
        if math.isnan(scale) or not math.isfinite(noise):
            raise DivergedError(
                f"the noise scale after epoch {n} is NaN: training has diverged; lower initial_lr"
            )
        self._noise, self._signal, self.scale = noise, signal, float(scale)
        batch, times = self._batch, 0
        if isinstance(scale, NoiseScale) and math.isinf(scale):  # noise hides the gradient
            return batch
        while batch < self.max_batch and times < self.factors:
            grown = min(max(batch + 1, round(batch * self.growth)), self.max_batch)
            if grown > scale:
                break
            batch, times = grown, times + 1
        return batch


class NoImprovement:
    """Stop training once a metric has not risen by more than `least` for `patience` epochs.

    Section VI-A: "when the validation PSNR is not increased more than 0.1 dB for 50 consecutive
    epochs". A rise is measured from the value after the last such rise, so that training that
    improves only slowly ends, too.

    Args:
        least: Rises must exceed this, in the metric's unit (dB).
        patience: Epochs.

    Attributes:
        best: The value after the last rise by more than `least`; None before the first value.
        best_epoch: Epoch of that value, from 1.
    """

    def __init__(self, least: float = 0.1, patience: int = 50) -> None:
        if not least >= 0 or patience < 1:
            raise ValueError(
                f"least is {least} and patience {patience}; give at least 0 and at least 1"
            )
        self.least, self.patience = least, patience
        self.best: float | None = None
        self.best_epoch = 0
        self._epochs = 0

    def observe(self, value: float) -> bool:
        """Take the metric of an epoch and return whether to stop."""
        if math.isnan(value):
            raise DivergedError(
                f"the metric of epoch {self._epochs + 1} is NaN: training has diverged, or the "
                "validation set is empty"
            )
        self._epochs += 1
        if self.best is None or value > self.best + self.least:
            self.best, self.best_epoch = value, self._epochs
        return self._epochs - self.best_epoch >= self.patience
