"""That all processes train the same model with the same options on the same mini-batch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from repro.adaptive.processes import PeerError, lost_peer
from repro.measure.untouched import bits, stored

MAKING = "making a DataParallel"


@dataclass(frozen=True)
class Agreement:
    """Asks all processes whether they were given the same; each has to ask, in the same order."""

    rank: int
    processes: int
    group: dist.ProcessGroup
    device: torch.device

    def check_alike(self, lines: list[str]) -> None:
        """Refuse models and options, described by lines, that differ between processes.

        Raises:
            ValueError: A line differs in another process.
        """
        if self._extremes(_digest("\n".join(lines))) is None:
            return
        of_all: list[Any] = [None] * self.processes
        dist.all_gather_object(of_all, lines, group=self.group)
        for rank, other in enumerate(of_all):
            differing = [pair for pair in zip(lines, other, strict=False) if pair[0] != pair[1]]
            if differing or len(lines) != len(other):
                ours, theirs = (differing or [(f"{len(lines)} lines", f"{len(other)} lines")])[0]
                raise ValueError(
                    f"rank {self.rank} has {ours}, rank {rank} {theirs}; make the same model with "
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
        if self._extremes(_digest(repr(shares and list(shares)))) is not None:
            raise ValueError(
                f"shares are {shares} in rank {self.rank}, and others in another process; give "
                "the same in every process, one number for each"
            )
        if (extremes := self._extremes(samples)) is not None:
            least, most = map(int, extremes)
            raise ValueError(
                f"mini-batches have {least} to {most} samples, {samples} in rank {self.rank}; "
                "give the whole mini-batch, the same in every process, which takes its own share"
            )

    def _extremes(self, number: float) -> tuple[float, float] | None:
        """Return the least and largest of a number over processes, None where all are the same."""
        both = torch.tensor([number, -number], dtype=torch.float64)
        both = both.to(self.device)
        all_reduce(both, self.group, MAKING, dist.ReduceOp.MAX)
        most, least = float(both[0]), -float(both[1])
        return None if most == least else (least, most)


def described(model: nn.Module) -> list[str]:
    """Describe in lines the properties of a model that are to be the same in all processes."""
    parameters = [
        f"{name} {tuple(p.shape)}, {p.dtype}, strides {p.stride()}, requires_grad {p.requires_grad}"
        for name, p in model.named_parameters()
    ]
    buffers = model.named_buffers()
    return parameters + [f"buffer {name} {tuple(b.shape)}, {b.dtype}" for name, b in buffers]


def _digest(text: str) -> float:
    """Return a number that differs for other texts, of 48 of the 53 bits that float64 holds."""
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]))


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup | None, what: str | int, op: Any = dist.ReduceOp.SUM
) -> None:
    """Reduce a tensor over the processes, in place; `what` is for the error, see `lost_peer`.

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
