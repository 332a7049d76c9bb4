"""Autocast around forward passes, and scaled losses in backward passes."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Precision:
    """How precisely a model computes.

    Attributes:
        device: The device that computes.
        autocast: A dtype for forward passes; None leaves the caller's autocast as it is.
        scaler: Its scale is applied to losses; None for none.
    """

    device: torch.device
    autocast: torch.dtype | None
    scaler: torch.amp.GradScaler | None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of autocast: that around the call, or else that of forward passes."""
        ambient = torch.is_autocast_enabled(self.device.type)
        return torch.get_autocast_dtype(self.device.type) if ambient else self.autocast

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def without_autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a backward pass."""
        # It repeats the forward pass's precisions without autocast around it.
        if not torch.is_autocast_enabled(self.device.type):
            return nullcontext()
        return torch.autocast(self.device.type, enabled=False)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a loss, scaled."""
        with self.without_autocast():
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
