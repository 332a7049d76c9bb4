"""Every wait, record and hold of out-of-core training is needed: without it, something shows."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from repro.measure import accelerator
from repro.outofcore import OutOfCore, host, recording, residency, running
from repro.outofcore.host import HostStore, StreamMover
from repro.outofcore.residency import Residency
from simulated_device.mutations import Omission, noticed

SIM = torch.device("sim", 0)
KIB = 2**10


def new(value: float) -> torch.Tensor:
    return torch.full((KIB // 4,), float(value), device=SIM)


class Device:
    """What is on the device within a budget, by hand: tensors of 1 KiB each."""

    def __init__(self, budget_bytes: int = 100 * KIB) -> None:
        self.store = HostStore(SIM, slab_bytes=704)  # so that a variable lies in two
        self.mover = StreamMover(self.store, SIM)
        self.residency = Residency(budget_bytes, SIM, self.store, self.mover)

    def add(self, value: float, away: bool = False) -> tuple[torch.Tensor, residency.Variable]:
        tensor = new(value)
        variable = self.residency.find(tensor)
        assert variable is not None
        variable.used = self.residency.clock
        if away:
            self.residency.release(variable)
        return tensor, variable

    def fetch(self, variable: residency.Variable) -> None:
        self.residency.swap_in(variable)
        self.residency.arrive(variable)


def there_and_back() -> Any:
    """A variable leaves, another takes its memory, and it comes again."""
    device = Device()
    a, variable = device.add(3)
    a.mul_(2)
    device.residency.release(variable)
    other = new(7)
    device.fetch(variable)
    return (a + 1).cpu(), (other + 1).cpu()


def memory_of_another() -> Any:
    """A variable comes into memory that an operation still has to use, as it freed it."""
    device = Device()
    a, variable = device.add(3, away=True)
    x = new(5)
    y = x * 2
    del x
    device.fetch(variable)
    return y.cpu(), a.cpu()


def released_before_it_is_used() -> Any:
    """A variable that was asked for in advance leaves again, as there is no room for it."""
    device = Device()
    a, variable = device.add(3, away=True)
    device.residency.swap_in(variable)
    device.residency.release(variable)
    result = (new(7) + 1).cpu()
    device.fetch(variable)
    return result, a.cpu()


def changed_while_it_leaves() -> Any:
    """An operation that no plan knows writes a variable whose copy to the host is under way."""
    device = Device()
    a, variable = device.add(3)
    device.residency.swap_out(variable)
    device.residency.written(variable)
    a.mul_(2)
    device.residency.release(variable)
    other = new(7)
    device.fetch(variable)
    return a.cpu(), other.cpu()


def ended_while_it_leaves() -> Any:
    """A variable is dropped while its copy to the host is under way."""
    device = Device()
    a, variable = device.add(3)
    device.residency.swap_out(variable)
    del a
    other = new(7)
    end = weakref.ref(variable.outgoing[1]) if variable.outgoing else None
    torch.accelerator.synchronize()
    device.residency.let_go()
    return other.cpu(), end is not None and end() is None


def ended_while_it_comes() -> Any:
    """A variable is dropped while its copy to the device is under way."""
    device = Device()
    a, variable = device.add(3, away=True)
    device.residency.swap_in(variable)
    del a
    result = (new(7) + 1).cpu()
    device.residency.arrive(variable)
    return result


def room_of_what_has_ended() -> Any:
    """Room is made of what has ended but for its copy, before anything else leaves."""
    device = Device(3 * KIB)
    _a, there = device.add(1)
    device.residency.clock += 1
    b, variable = device.add(2)
    device.residency.swap_out(variable)
    del b
    device.residency.make_room(2 * KIB, (), str)
    return device.residency.bytes_out, there.resident


def restored() -> Any:
    """Everything comes back, for whichever stream, and nothing is held afterwards."""
    before, device = accelerator.memory_allocated(SIM), Device()
    leaving, one = device.add(1)
    away, _ = device.add(2, away=True)
    device.residency.swap_out(one)
    device.residency.restore()
    side = torch.Stream(SIM)
    with side:
        numbers = [(leaving + 1).cpu(), (away + 1).cpu()]
    del leaving, away
    return *numbers, accelerator.memory_allocated(SIM) - before


def rates() -> Any:
    """Copies are timed."""
    device = Device()
    _tensor, variable = device.add(3, away=True)
    device.residency.swap_in(variable)
    return min(device.mover.bandwidth()) > 0


def trained() -> Any:
    """Some steps, swapped on demand and then by a plan."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 36, 5),
    ).to(SIM)  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(4, 2, 8, 8).to(SIM), torch.arange(4).to(SIM)
    losses = []
    with OutOfCore(30_000, device=SIM) as block:
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    assert block.statistics.bytes_in > 0 and block.statistics.replayed >= 2
    return [value.cpu() for value in (*losses, *network.state_dict().values())]


@contextmanager
def away(back: bool = False) -> Iterator[tuple[OutOfCore, torch.Tensor]]:
    """A block with a tensor that is swapped out and, where asked for, on its way back.

    Within, nothing sees what is called, as where torch has called the block.
    """
    with OutOfCore(100 * KIB, device=SIM) as block:
        tensor = new(3) * 2
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            variable = block._residency.look_up(tensor)
            assert variable is not None
            block._residency.release(variable)
            if back:
                block._residency.swap_in(variable)
            yield block, tensor


def saved() -> Any:
    """A tensor is saved from the host."""
    with away() as (block, tensor):
        return block.snapshot(tensor).tolist()


def saved_while_it_comes() -> Any:
    """A tensor is saved while its copy to the device is under way."""
    with away(back=True) as (block, tensor):
        return block.snapshot(tensor).tolist()


def changed_by_address() -> Any:
    """Somebody writes a tensor by its address, and it leaves again."""
    with away(back=True) as (block, tensor):
        block.bring(tensor, lock=False)
        tensor.mul_(2)
        variable = block._residency.look_up(tensor)
        assert variable is not None
        block._residency.release(variable)
    return tensor.cpu()


def _settle(where: str) -> Omission:
    return Omission(residency, "self.settle(variable)", within=f"Residency.{where}")


def _arrive(where: str) -> Omission:
    return Omission(residency, "self.arrive(variable)", within=f"Residency.{where}")


WRITTEN = "Residency.written"
BRING = "Residency.bring"
OUT = "self.mover.start(OUT, storage, variable.place), storage"
IN = "self.mover.start(IN, target, variable.place), storage, target"
OMISSIONS: list[tuple[Callable[[], Any], Omission]] = [
    (memory_of_another, Omission(host, "stream.wait_stream(current)")),
    (there_and_back, Omission(host, "stream.wait_stream(current)")),
    (there_and_back, Omission(host, "        event.record(stream)", "        pass")),
    (there_and_back, Omission(host, "accelerator.current_stream(self.device).wait_event(ticket)")),
    (restored, Omission(host, "stream.synchronize()")),
    (saved, Omission(host, "stream.synchronize()")),
    (rates, Omission(host, "begin.record(stream)")),
    (rates, Omission(accelerator, "end.synchronize()")),
    (there_and_back, _settle("release")),
    (released_before_it_is_used, _arrive("release")),
    (changed_while_it_leaves, _settle("written")),
    (changed_while_it_leaves, Omission(residency, "variable.valid = False", within=WRITTEN)),
    (ended_while_it_leaves, Omission(residency, OUT, f"{OUT.removesuffix('storage')}None")),
    (ended_while_it_leaves, _settle("let_go")),
    (
        ended_while_it_comes,
        Omission(residency, IN, f"{IN.removesuffix('storage, target')}None, None"),
    ),
    (
        room_of_what_has_ended,
        Omission(residency, "self.settle(self.leaving.popleft())", "self.leaving.popleft()"),
    ),
    (restored, _settle("restore")),
    (restored, _arrive("restore")),
    (restored, Omission(residency, "self.mover.finish()", within="Residency.restore")),
    (trained, Omission(running, "residency.arrive(variable)", within="Running._bring_in")),
    (trained, Omission(running, "residency.written(variable)", within="Running._promise")),
    (trained, Omission(recording, "begin.record()")),
    (trained, Omission(recording, "end.record()")),
    (trained, Omission(accelerator, "end.synchronize()")),
    (saved, Omission(residency, "self.mover.finish()", within="Residency.snapshot")),
    (saved_while_it_comes, _arrive("snapshot")),
    (changed_by_address, _arrive("bring")),
    (changed_by_address, Omission(residency, "self.written(variable)", within=BRING)),
]
PROGRAMS = list(dict.fromkeys(program for program, _ in OMISSIONS))


@cache
def expected(program: Callable[[], Any]) -> Any:
    """Return what a program returns where nothing is missing."""
    return program()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_nothing_shows_where_nothing_is_missing(sim, program):
    found = noticed(program, expected(program))
    assert not found, found.told


@pytest.mark.parametrize(
    ("program", "omission"), OMISSIONS, ids=[f"{p.__name__}-{o}" for p, o in OMISSIONS]
)
def test_an_omission_shows(sim, program, omission):
    assert noticed(program, expected(program), omission)
