"""The state shared by a streamer's parts: model, device, precision, weighing of losses."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from repro.mbs.distributed import Processes
from repro.mbs.staging import Stager
from repro.mbs.transaction import Ledger
from repro.mbs.weighing import Weighing
from repro.measure.precision import without_autocast


@dataclass(frozen=True)
class Precision:
    """A model's numerical precision."""

    device: torch.device
    autocast: torch.dtype | None  # of forward passes; None keeps the caller's autocast
    scaler: torch.amp.GradScaler | None  # its scale is applied to losses

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of autocast: the caller's, or else the forward passes' own."""
        ambient = torch.is_autocast_enabled(self.device.type)
        return torch.get_autocast_dtype(self.device.type) if ambient else self.autocast

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        # Weights cast for an earlier pass may have no graph, or that of a part gathered before.
        torch.clear_autocast_cache()
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a loss, scaled."""
        # It repeats the forward pass's dtypes, and needs no autocast around it.
        with without_autocast(self.device.type):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()


@dataclass(frozen=True)
class Setting:
    """A streamer's model, processes, precision, and the state restored after an error."""

    module: nn.Module  # without its `DistributedDataParallel` wrapper
    device: torch.device
    precision: Precision
    stager: Stager
    processes: Processes
    ledger: Ledger
    weighing: Weighing
