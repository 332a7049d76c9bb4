"""That all processes train the same model with the same options on the same mini-batch."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from repro.adaptive.processes import PeerError, lost_peer
from repro.measure.untouched import bits, stored

MAKING = "making a DataParallel"


class Agreement:
    """Asks all processes whether they were given the same; each has to ask, in the same order.

    Args:
        rank: This process.
        processes: How many there are.
        group: Of them.
        device: Where numbers are compared.
    """

    def __init__(
        self,
        rank: int,
        processes: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._rank, self._processes = rank, processes
        self._group = group
        self._device = device

    def check_alike(self, lines: list[str]) -> None:
        """Refuse models and options that are not the same in all processes.

        Args:
            lines: What describes them, in this process.

        Raises:
            ValueError: A line differs in another process.
        """
        digest = hashlib.sha256("\n".join(lines).encode()).digest()[:6]  # float64 holds 53 bits
        if self._extremes(float(int.from_bytes(digest))) is None:
            return
        of_all: list[Any] = [None] * self._processes
        dist.all_gather_object(of_all, lines, group=self._group)
        for rank, other in enumerate(of_all):
            differing = [pair for pair in zip(lines, other, strict=False) if pair[0] != pair[1]]
            if differing or len(lines) != len(other):
                ours, theirs = (differing or [(f"{len(lines)} lines", f"{len(other)} lines")])[0]
                raise ValueError(
                    f"rank {self._rank} has {ours}, rank {rank} {theirs}; make the same model with "
                    "the same options in every process"
                )

    def check_same(self, samples: int, shares: Sequence[int] | None) -> None:
        """Refuse mini-batches that differ between processes.

        Args:
            samples: Of the mini-batch.
            shares: Samples of each process, as given.

        Raises:
            ValueError: Another process was given others.
        """
        digest = hashlib.sha256(repr(shares and list(shares)).encode()).digest()[:6]
        if self._extremes(float(int.from_bytes(digest))) is not None:
            raise ValueError(
                f"shares are {shares} in rank {self._rank}, and others in another process; give "
                "the same in every process, one number for each"
            )
        if (extremes := self._extremes(samples)) is not None:
            least, most = map(int, extremes)
            raise ValueError(
                f"mini-batches have {least} to {most} samples, {samples} in rank {self._rank}; "
                "give the whole mini-batch, the same in every process, which takes its own share"
            )

    def _extremes(self, number: float) -> tuple[float, float] | None:
        """Return the least and largest of a number over processes, None where all are the same."""
        both = torch.tensor([number, -number], dtype=torch.float64)
        both = both.to(self._device)
        all_reduce(both, self._group, MAKING, dist.ReduceOp.MAX)
        most, least = float(both[0]), -float(both[1])
        return None if most == least else (least, most)


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    what: str | int,
    op: Any = dist.ReduceOp.SUM,
) -> None:
    """Reduce a tensor over the processes, in place.

    Args:
        tensor: Of the same shape in all.
        group: Of the processes.
        what: What is done, or the number of the last step, see `lost_peer`.
        op: The reduction.

    Raises:
        PeerError: Another process was lost.
    """
    try:
        dist.all_reduce(tensor, op, group=group)
    except RuntimeError as error:
        raise PeerError(lost_peer(what, error)) from error


def broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Make a tensor of any layout and type that of rank 0; gloo knows few types, but bytes."""
    target = stored(tensor.detach())
    sent = bits(tensor)
    dist.broadcast(sent, 0, group=group)
    if sent.data_ptr() != target.data_ptr():
        target.copy_(sent.view(tensor.dtype).view(target.shape))
