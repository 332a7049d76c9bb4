"""Autocast around forward passes, and scaled losses in backward passes."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Precision:
    """How precisely a model computes.

    Args:
        device: Where.
        autocast: A dtype for forward passes; None leaves the caller's autocast as it is.
        scaler: Its scale is applied to losses; None for none.
    """

    def __init__(
        self,
        device: torch.device,
        autocast: torch.dtype | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._device = device
        self._autocast = autocast
        self._scaler = scaler

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of autocast: that around the call, or else that of forward passes."""
        ambient = torch.is_autocast_enabled(self._device.type)
        return torch.get_autocast_dtype(self._device.type) if ambient else self._autocast

    @property
    def scale(self) -> float:
        """What losses are multiplied by in backward passes."""
        return self._scaler.get_scale() if self._scaler is not None else 1.0

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)

    def without_autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a backward pass."""
        # It repeats the forward pass's precisions without autocast around it.
        if not torch.is_autocast_enabled(self._device.type):
            return nullcontext()
        return torch.autocast(self._device.type, enabled=False)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a loss, scaled."""
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        with self.without_autocast():
            loss.backward()
