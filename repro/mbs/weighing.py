"""The weight of each micro-batch's loss, their sum and its divisor, and the result."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from repro.mbs.batches import Piece, Plan
from repro.mbs.distributed import Processes
from repro.measure.loss_parts import KnownLoss, UnsupportedLossError, known_loss


@dataclass(frozen=True)
class StreamResult:
    """The result of one mini-batch.

    `loss` is a detached scalar on the device (under `DistributedDataParallel` that of this
    process's samples); reading it waits for the device.
    """

    loss: torch.Tensor
    num_samples: int  # N_B
    num_micro_batches: int  # N_Sμ
    micro_batch_size: int  # of the largest micro-batch
    retries: int  # with a smaller size


@dataclass
class Totals:
    """Sums over the micro-batches so far."""

    loss: Any = 0.0  # weighted, but not yet divided
    weight: float = 0.0
    sizes: tuple[int, ...] = ()  # samples of each micro-batch
    divided: float = 1.0  # by which gradients are divided already

    def add(self, loss: torch.Tensor, weight: float) -> None:
        """Add a detached loss times its weight."""
        # A sum of half-precision losses by token counts would overflow.
        term = loss.to(torch.promote_types(loss.dtype, torch.float32)) * weight
        self.loss, self.weight = self.loss + term, self.weight + weight

    def __add__(self, other: "Totals") -> "Totals":
        loss, weight = self.loss + other.loss, self.weight + other.weight
        return Totals(loss, weight, self.sizes + other.sizes, self.divided)

    def result(self, divisor: float, retries: int) -> StreamResult:
        """Return the sums as the mini-batch's result."""
        sizes = self.sizes
        return StreamResult(self.loss / divisor, sum(sizes), len(sizes), max(sizes), retries)


class Weighing:
    """Weighs micro-batches by the normalisation that the loss needs.

    `known` is one of torch's losses, without hooks, and None for any other; `normalization` is
    ``"none"`` for a sum.
    """

    def __init__(
        self, normalization: str, two_pass: bool, loss_fn: Callable[..., torch.Tensor]
    ) -> None:
        self._given, self._two_pass = normalization, two_pass
        self._loss_fn: Any = None
        self.known: KnownLoss | None = None
        self.normalization = normalization
        self.read(loss_fn)

    def read(self, loss_fn: Callable[..., torch.Tensor]) -> bool:
        """Read the loss's current divisor; return whether the loss is another function."""
        known = known_loss(loss_fn)
        self.known = None if known is None or known.hooked else known
        self.normalization = self._given
        if self.known is not None and self.known.reduction == "sum" and not self._two_pass:
            self.normalization = "none"
            if self._given == "paper":
                raise UnsupportedLossError(
                    "the loss has reduction='sum', which normalization='paper' would divide by "
                    "the number of micro-batches; use reduction='mean', or normalization='exact'"
                )
        changed, self._loss_fn = loss_fn is not self._loss_fn, loss_fn
        return changed

    def plan(self, piece: Piece, size: int, fewest: int = 1) -> Plan:
        """Cut a piece into micro-batches and weigh them (Algorithm 1, lines 1 to 6)."""
        exact = self.normalization == "exact" and not self._two_pass
        in_paper = self.normalization == "paper"
        plan = piece.plan(size, in_paper, self.known if exact else None, fewest)
        return plan if exact else replace(plan, weights=[1.0] * len(plan.bounds))

    def divisor(self, weight: float) -> float:
        """Return the divisor of the sum of this process's losses, of total weight `weight`."""
        return 1.0 if self.normalization == "none" and not self._two_pass else weight

    def shared_divisor(self, weight: float, processes: Processes) -> float | torch.Tensor:
        """Return the divisor of gradients before they are averaged over all processes."""
        if self.normalization != "exact" or self._two_pass:
            return self.divisor(weight)
        return processes.mean_weight(weight)


def token_counts(
    labels: torch.Tensor, *, shift: bool = False, ignore_index: int = -100
) -> torch.Tensor:
    """Return the number of counted tokens in each sample, for `weights`.

    A language model's loss is the mean over tokens without padding; samples differ in their number.

    Args:
        labels: Integers, (samples, tokens).
        shift: Whether each position predicts the next one, as in causal language models, so that
            no position predicts the first label.
        ignore_index: The label of tokens that do not count.
    """
    kept = (labels[:, 1:] if shift else labels).long()  # -100 as uint8 would be class 156
    return (kept != ignore_index).flatten(1).sum(1).to(torch.float64)
