"""All processes train one model with the same options on the same mini-batch, or none does."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from repro.adaptive.processes import with_peers
from repro.measure.untouched import bits, stored

MAKING = "making a DataParallel"


def gathered(value: Any, group: dist.ProcessGroup, what: str | int = MAKING) -> list[Any]:
    """The value of each process, by rank; `what` is done meanwhile, see `lost_peer`."""
    values: list[Any] = [None] * dist.get_world_size(group)
    with with_peers(what):
        dist.all_gather_object(values, value, group=group)
    return values


def check_alike(lines: Sequence[str], group: dist.ProcessGroup, remedy: str) -> None:
    """Refuse what differs between processes, described in lines."""
    for rank, others in enumerate(gathered(lines, group)):
        for ours, theirs in zip_longest(lines, others, fillvalue="nothing"):
            if ours != theirs:
                raise ValueError(
                    f"rank {dist.get_rank(group)} has {ours}, rank {rank} has {theirs}; {remedy}"
                )


def described(model: nn.Module) -> list[str]:
    """The lines that describe the properties of a model that all processes must share."""
    parameters = [
        f"{name} {tuple(p.shape)}, {p.dtype}, strides {p.stride()}, requires_grad {p.requires_grad}"
        for name, p in model.named_parameters()
    ]
    buffers = model.named_buffers()
    return parameters + [f"buffer {name} {tuple(b.shape)}, {b.dtype}" for name, b in buffers]


def broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Copy rank 0's tensor of any layout and type to all, as bytes: gloo supports few types."""
    target = stored(tensor.detach())
    sent = bits(tensor)
    dist.broadcast(sent, 0, group=group)
    if sent.data_ptr() != target.data_ptr():
        target.copy_(sent.view(tensor.dtype).view(target.shape))
