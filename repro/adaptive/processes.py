"""Joining and leaving the processes of a job, on one machine by loopback only; their agreement."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from repro.measure import accelerator
from repro.measure.batches import bounds
from repro.measure.untouched import bits, stored

LOOPBACK = "127.0.0.1"
MAKING = "making a DataParallel"


class PeerError(RuntimeError):
    """Another process ended, hung or lost its connection."""


def _by_loopback(backend: str, timeout: timedelta) -> dict[str, Any]:
    """Connect by the loopback interface if all processes of the job run on this machine.

    Another interface stays if the environment names it. Returns where the processes meet: a store
    there, unless torchrun or the caller has another.
    """
    local_size, here = os.environ.get("LOCAL_WORLD_SIZE"), (LOOPBACK, "localhost")
    meet_here = os.environ.get("MASTER_ADDR") in here
    if not (meet_here if local_size is None else local_size == os.environ.get("WORLD_SIZE")):
        return {}
    if interfaces := {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        os.environ.setdefault(f"{backend.upper()}_SOCKET_IFNAME", min(interfaces))
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if of_torchrun or not meet_here:
        return {}
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    options: dict[str, Any] = {}
    if rank == 0:
        # torch would listen on every interface.
        options["master_listen_fd"] = socket.create_server((LOOPBACK, port)).detach()
    store = dist.TCPStore(LOOPBACK, port, size, rank == 0, timeout, False, **options)
    return {"store": store, "rank": rank, "world_size": size}


def join_processes(device: torch.device | str = "cpu", timeout_s: float = 120.0) -> tuple[int, int]:
    """Join the other processes that torchrun started; return rank and number of processes.

    Without torchrun there is one process, and nothing to join. gloo connects CPUs; NCCL, or torch's
    backend for another accelerator, connects GPUs, one per process. Processes on one machine use
    its loopback interface (unless ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` name another).

    Args:
        device: ``"cpu"``, or the type of an accelerator such as ``"cuda"``.
        timeout_s: Seconds after which a communication without an answer fails.

    Raises:
        PeerError: The other processes did not join.
    """
    if "RANK" not in os.environ:
        return 0, 1
    backend = "gloo"
    if accelerator.is_accelerator(device):
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
        backend = dist.get_default_backend_for_device(torch.device(device).type)
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        with with_peers("joining the other processes"):
            dist.init_process_group(backend, timeout=timeout, **_by_loopback(backend, timeout))
    return dist.get_rank(), dist.get_world_size()


def leave_processes() -> None:
    """Wait for the other processes and leave the group; nothing to do for a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    try:
        with with_peers("parting from the other processes"):
            dist.barrier()  # an early exit would close the others' connections
    finally:
        dist.destroy_process_group()


def share(samples: int, rank: int, processes: int, shares: Sequence[int] | None = None) -> slice:
    """A process's samples of a mini-batch; by default shares differ by at most one."""
    if samples < 0 or processes < 1 or not 0 <= rank < processes:
        raise ValueError(
            f"{samples} samples, rank {rank} of {processes}; ranks are 0 to {processes - 1}"
        )
    if shares is not None:
        if len(shares) != processes or min(shares) < 0 or sum(shares) != samples:
            raise ValueError(
                f"shares are {list(shares)} of a mini-batch of {samples} samples in {processes} "
                "processes; give one number of samples for each process, in all the mini-batch"
            )
        return slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    return slice(*bounds(samples, max(samples, 1), processes)[rank])


def lost_peer(what: str | int, why: object) -> str:
    """The error text for a step, or another action, that a lost process made fail."""
    done = f"averaging the gradients of step {what}" if isinstance(what, int) else what
    rank, processes = (os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE"))
    if dist.is_initialized():
        rank, processes = str(dist.get_rank()), str(dist.get_world_size())
    return (
        f"rank {rank} of {processes}: {done} failed ({str(why).strip().splitlines()[0]}): another "
        "process has ended or hangs, or a parameter that is used here got no gradient there (its "
        "own error names it). torchrun's summary names the first that ended (of one that "
        "hangs it knows nothing); run the same command again to go on from the checkpoint, or "
        "start it with torchrun --max-restarts=3, which does so by itself"
    )


@contextmanager
def with_peers(what: str | int) -> Iterator[None]:
    """Turn an error caused by a lost process into a `PeerError`, see `lost_peer`."""
    words = ["gloo", "nccl", "timed out", "timeout"]
    words += [f"connection {what}" for what in ("closed", "refused", "reset")]
    try:
        yield
    except PeerError:
        raise
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words):
            raise PeerError(lost_peer(what, error)) from error
        raise


# All processes train one model with the same options on the same mini-batch, or none does.


def gathered(value: Any, group: dist.ProcessGroup, what: str | int = MAKING) -> list[Any]:
    """The value of each process, by rank; `what` is done meanwhile, see `lost_peer`."""
    values: list[Any] = [None] * dist.get_world_size(group)
    with with_peers(what):
        dist.all_gather_object(values, value, group=group)
    return values


def check_alike(
    lines: Sequence[str], group: dist.ProcessGroup, remedy: str, what: str = MAKING
) -> None:
    """Refuse what differs between processes, described in lines."""
    for rank, others in enumerate(gathered(lines, group, what)):
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
