"""What several processes have to agree on when each streams its share of a mini-batch."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Processes:
    """The processes of a `DistributedDataParallel` model; just this one for any other model.

    Every call of `mean_weight` and `sum_losses` is a collective of one number, made once per
    mini-batch by each process, however many micro-batches it has.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self.several = isinstance(model, DistributedDataParallel)
        self.module: nn.Module = model
        self._group: torch.distributed.ProcessGroup | None = None
        if isinstance(model, DistributedDataParallel):
            self.module = model.module
            self._group = model.process_group
        # Such gradients are overwritten by the backward pass.
        self.gradients_are_views = bool(getattr(model, "gradient_as_bucket_view", False))

    def mean_weight(self, weight: float) -> float | torch.Tensor:
        """Return the divisor that makes the mean over processes the mean over all samples."""
        if not self.several:
            return weight
        return self._sum(weight) / torch.distributed.get_world_size(self._group)

    def sum_losses(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the sum of the processes' losses: infinite or NaN for all if for one."""
        return self._sum(loss) if self.several else loss

    def synchronization(self, wanted: bool) -> AbstractContextManager[Any]:
        """Return a context in which a backward pass synchronises gradients only if `wanted`."""
        no_sync = getattr(self._model, "no_sync", None)
        return nullcontext() if wanted or no_sync is None else no_sync()

    def _sum(self, value: float | torch.Tensor) -> torch.Tensor:
        # Filled by a kernel: a copy from the host would wait for the device.
        total = torch.zeros((), device=self._device, dtype=torch.float64) + value
        torch.distributed.all_reduce(total, group=self._group)
        return total
