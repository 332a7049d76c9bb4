"""Some processes on this machine, for tests of what joined processes do."""

import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from repro.adaptive import averaging


def forked(*preloaded: str) -> ForkServerContext:
    """Return where processes come from that need not import torch again, nor these modules.

    The server is one for all of a session: what the first call names is what it imports.
    """
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "repro.adaptive", "pytest", *preloaded])
    return context


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(
    context: ForkServerContext, work: Callable[..., None], *given: Any, count: int = 2
) -> list[int | None]:
    """Run ``work(rank, port, *given)`` in some processes; return their exit codes."""
    port = free_port()
    arguments = [(rank, port, *given) for rank in range(count)]
    processes = [context.Process(target=work, args=args, daemon=True) for args in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=100)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def both(context: ForkServerContext, work: Callable[..., None], folder: Path) -> list[Any]:
    """Run ``work(rank, port, folder)`` in two processes; return what each saved as ``RANK.pt``."""
    run(context, work, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def pretend(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """Have another process that is not there, whose gradients are so many times this one's."""

    def all_to_all_single(received, flat, group):
        mine = flat.chunk(2)[0]
        received.copy_(torch.cat([mine, times * mine]))

    def all_gather(flat, part, group):
        mine, other = flat.chunk(2)
        mine.copy_(part)
        other.mul_((1 + times) / 2)  # which the other has averaged

    reduce_scatter = lambda out, flat, group: out.copy_((1 + times) * flat.chunk(2)[0])  # noqa: E731
    dist = SimpleNamespace(get_world_size=lambda group: 2, all_to_all_single=all_to_all_single)
    fakes = {"dist": dist, "reduce_scatter": reduce_scatter, "all_gather": all_gather}
    for name, fake in fakes.items():
        monkeypatch.setattr(averaging, name, fake)


def listening(process: int | str = "self") -> list[str]:
    """Return the addresses that a process listens on, in /proc's hexadecimal."""
    sockets = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            sockets.add(str(link.readlink()))
    addresses = []
    for name in ("tcp", "tcp6"):
        table = Path(f"/proc/{process}/net/{name}").read_text(encoding="utf-8")
        for line in table.splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                addresses.append(fields[1].rpartition(":")[0])
    return addresses
