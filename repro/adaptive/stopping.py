"""When training stops: section VI-A's rule."""

import math
from typing import Any

from repro.adaptive.controller import DivergedError


class NoImprovement:
    """Stop once a metric has not risen by more than `least` for `patience` epochs in a row.

    Section VI-A: "when the validation PSNR is not increased more than 0.1 dB for 50 consecutive
    epochs". Measured from the best value that itself was such a rise, so that a slow creep ends
    too.

    Args:
        least: Rise that counts, in the metric's unit (dB).
        patience: Epochs.

    Attributes:
        best: The last value that was a rise that counts; None before the first.
        best_epoch: When it was, from 1.

    Raises:
        ValueError: `least` is below 0 or `patience` below 1.
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
        """Take the metric of an epoch and return whether to stop.

        Raises:
            DivergedError: The value is NaN.
        """
        if math.isnan(value):
            raise DivergedError(
                f"the metric of epoch {self._epochs + 1} is NaN: training has diverged, or the "
                "validation set is empty"
            )
        self._epochs += 1
        if self.best is None or value > self.best + self.least:
            self.best, self.best_epoch = value, self._epochs
        return self._epochs - self.best_epoch >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs."""
        return {"best": self.best, "best_epoch": self.best_epoch, "epochs": self._epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another rule was."""
        self.best, self.best_epoch = state["best"], state["best_epoch"]
        self._epochs = state["epochs"]
