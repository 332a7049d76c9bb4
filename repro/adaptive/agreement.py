"""Checks that all processes train one model with the same options on the same mini-batch."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from repro.adaptive.processes import PeerError, lost_peer, with_peers
from repro.measure.untouched import bits, stored

MAKING = "making a DataParallel"


def check_alike(lines: list[str], group: dist.ProcessGroup) -> None:
    """Refuse models and options, described in lines, that differ between processes.

    Raises:
        ValueError: A line differs in another process.
        PeerError: Another process was lost.
    """
    for rank, other in enumerate(_gathered(lines, group)):
        differing = [pair for pair in zip(lines, other, strict=False) if pair[0] != pair[1]]
        if differing or len(lines) != len(other):
            ours, theirs = (differing or [(f"{len(lines)} lines", f"{len(other)} lines")])[0]
            raise ValueError(
                f"rank {dist.get_rank(group)} has {ours}, rank {rank} {theirs}; make the same "
                "model with the same options in every process"
            )


def check_same(samples: int, shares: Sequence[int] | None, group: dist.ProcessGroup) -> None:
    """Refuse mini-batch sizes and shares that differ between processes.

    Raises:
        ValueError: Another process has another size or other shares.
        PeerError: Another process was lost.
    """
    rank, ours = dist.get_rank(group), (samples, shares and list(shares))
    for other, theirs in enumerate(_gathered(ours, group)):
        if theirs != ours:
            raise ValueError(
                f"rank {rank} has a mini-batch of {ours[0]} samples in shares of {ours[1]}, rank "
                f"{other} one of {theirs[0]} in {theirs[1]}; give the same in every process: the "
                "whole mini-batch, of which it takes its share, and one number for each process"
            )


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The value of each process, by rank."""
    values: list[Any] = [None] * dist.get_world_size(group)
    with with_peers(MAKING):
        dist.all_gather_object(values, value, group=group)
    return values


def described(model: nn.Module) -> list[str]:
    """Describe in lines the properties of a model that all processes must share."""
    parameters = [
        f"{name} {tuple(p.shape)}, {p.dtype}, strides {p.stride()}, requires_grad {p.requires_grad}"
        for name, p in model.named_parameters()
    ]
    buffers = model.named_buffers()
    return parameters + [f"buffer {name} {tuple(b.shape)}, {b.dtype}" for name, b in buffers]


def all_reduce(tensor: Tensor, group: dist.ProcessGroup | None, what: str | int) -> None:
    """Sum a tensor over the processes, in place; an error names the step, see `lost_peer`.

    Raises:
        PeerError: Another process was lost.
    """
    try:
        dist.all_reduce(tensor, group=group)
    except RuntimeError as error:
        raise PeerError(lost_peer(what, error)) from error


def broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Copy rank 0's tensor of any layout and type to all, as bytes: gloo supports few types."""
    target = stored(tensor.detach())
    sent = bits(tensor)
    dist.broadcast(sent, 0, group=group)
    if sent.data_ptr() != target.data_ptr():
        target.copy_(sent.view(tensor.dtype).view(target.shape))
