"""The result of a mini-batch, and the running sums."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StreamResult:
    """The result of one mini-batch.

    Attributes:
        loss: The mini-batch's loss, a detached scalar on the device (under
            `DistributedDataParallel` that of this process's samples). Reading it waits for the
            device.
        num_samples: Samples in the mini-batch, N_B.
        num_micro_batches: Micro-batches it was split into, N_Sμ.
        micro_batch_size: Size of the largest micro-batch; the others have the same size or one
            sample less (with the paper's normalisation the last has the rest).
        retries: Number of retries of the mini-batch, or a piece of it, with a smaller size.
    """

    loss: torch.Tensor
    num_samples: int
    num_micro_batches: int
    micro_batch_size: int
    retries: int


@dataclass
class Totals:
    """Sums over the micro-batches so far; `loss` is weighted but not yet divided."""

    loss: torch.Tensor | None = None
    weight: float = 0.0
    num_samples: int = 0
    num_micro_batches: int = 0
    micro_batch_size: int = 0
    retries: int = 0

    @classmethod
    def over(cls, bounds: list[tuple[int, int]]) -> "Totals":
        """Return initial sums for micro-batches with these sample ranges."""
        return cls(
            num_samples=bounds[-1][1],
            num_micro_batches=len(bounds),
            micro_batch_size=bounds[0][1] - bounds[0][0],
        )

    def add(self, loss: torch.Tensor, weight: float) -> None:
        """Add a detached loss times its weight."""
        # A sum of half-precision losses by token counts would overflow.
        term = loss.to(torch.promote_types(loss.dtype, torch.float32)) * weight
        self.loss = term if self.loss is None else self.loss + term
        self.weight += weight

    def merge(self, part: "Totals") -> None:
        """Add the totals of a piece."""
        assert part.loss is not None
        self.loss = part.loss if self.loss is None else self.loss + part.loss
        self.weight += part.weight
        self.num_samples += part.num_samples
        self.num_micro_batches += part.num_micro_batches
        # The first piece is full; the last may be smaller than a micro-batch.
        self.micro_batch_size = self.micro_batch_size or part.micro_batch_size

    def result(self, divisor: float) -> StreamResult:
        """Return the sums as the mini-batch's result."""
        assert self.loss is not None
        return StreamResult(
            self.loss / divisor,
            self.num_samples,
            self.num_micro_batches,
            self.micro_batch_size,
            self.retries,
        )
