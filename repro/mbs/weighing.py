"""What each micro-batch's loss counts, and what their sum is divided by."""

from collections.abc import Callable
from typing import Any

import torch

from repro.mbs.batches import Piece, Plan
from repro.mbs.distributed import Processes, unequal_counts
from repro.mbs.losses import KnownLoss, known_loss, normalization_of


class Weighing:
    """Weighs micro-batches by the normalisation that the loss needs.

    Args:
        normalization: As given to the streamer.
        two_pass: Whether the loss is taken over the whole mini-batch.
        loss_fn: The loss.

    Attributes:
        known: What the loss divides by, where it is one of torch's; else None.
        normalization: The one that the loss needs, as it is now.

    Raises:
        LossReductionError: The loss has ``reduction="none"``.
        UnsupportedLossError: The loss has no such normalisation.
    """

    known: KnownLoss | None
    normalization: str

    def __init__(
        self, normalization: str, two_pass: bool, loss_fn: Callable[..., torch.Tensor]
    ) -> None:
        self._given_normalization = normalization
        self._two_pass = two_pass
        self._read_loss_fn: Any = None
        self.read(loss_fn)

    def read(self, loss_fn: Callable[..., torch.Tensor]) -> bool:
        """Read what the loss divides by, as it is now; return whether it is another function."""
        self.known = known_loss(loss_fn)
        self.normalization = normalization_of(self.known, self._given_normalization, self._two_pass)
        changed = loss_fn is not self._read_loss_fn
        self._read_loss_fn = loss_fn
        return changed

    def plan(self, piece: Piece, size: int, as_in_paper: bool = False, fewest: int = 1) -> Plan:
        """Cut a piece into micro-batches of at most a size, and weigh them.

        Args:
            piece: The mini-batch, or a part of one.
            size: Most samples of a micro-batch.
            as_in_paper: Whether all but the last have that size, whatever the normalisation.
            fewest: Micro-batches that there are at least.

        Raises:
            DistributedModelError: There are not as many.
            MicroBatchError: See `Piece.plan`.
        """
        as_in_paper = as_in_paper or self.normalization == "paper"
        exact = self.normalization == "exact" and not self._two_pass
        plan = piece.plan(size, as_in_paper, self.known if exact else None, fewest)
        if len(plan.bounds) < fewest:
            raise unequal_counts(len(plan.bounds), fewest)
        return plan if exact else Plan(plan.bounds, [1.0] * len(plan.bounds), plan._part)

    def divisor(self, weight: float) -> float:
        """Return what the sum of this process's losses is divided by, of which `weight` is that."""
        return 1.0 if self.normalization == "none" and not self._two_pass else weight

    def shared_divisor(self, weight: float, processes: Processes) -> float | torch.Tensor:
        """Return what gradients are divided by, where all processes' are then averaged."""
        if self.normalization != "exact" or self._two_pass:
            return self.divisor(weight)
        return processes.mean_weight(weight)
