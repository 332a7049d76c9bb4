"""The times of a swap plan on a device with one compute stream and two copy streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repro.outofcore.sequence import Kind, Trace

if TYPE_CHECKING:
    from repro.outofcore.plan import SwapPlan

_CYCLES = 8  # iterations after which a time that still alternates is accepted


class Transfer(NamedTuple):
    """One simulated copy: seconds from the start of the iteration."""

    kind: Kind
    variable: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """One iteration of a plan once it repeats.

    Attributes:
        memory_bytes: (n,) bytes held on the device while each function runs, including its outputs
            and running copies in both directions.
        starts_s: (n,) start of each function, from the start of the iteration; `ends_s` likewise.
        transfers: The copies that begin in the iteration.
    """

    time_s: float
    compute_s: float  # of its functions alone
    bytes_in: int  # copied to the device
    bytes_out: int  # copied to the host
    memory_bytes: NDArray[np.int64] = field(repr=False)
    starts_s: NDArray[np.float64] = field(repr=False)
    ends_s: NDArray[np.float64] = field(repr=False)
    transfers: tuple[Transfer, ...] = field(repr=False)

    @property
    def stall_s(self) -> float:
        """Seconds in which no function runs, since the next one waits for a copy."""
        return max(0.0, self.time_s - self.compute_s)

    @property
    def bytes_moved(self) -> int:
        """Bytes copied in both directions."""
        return self.bytes_in + self.bytes_out

    @property
    def peak_bytes(self) -> int:
        """The most bytes held on the device."""
        return int(self.memory_bytes.max())


def simulate(
    plan: SwapPlan,
    compute_times: Sequence[float] | NDArray[np.float64],
    bandwidth: float | tuple[float, float],
    latency_s: float,
) -> Simulation:
    """Simulate a plan until its iterations repeat: `SwapPlan.simulate`."""
    times, rates = checked_times(plan.trace, compute_times, latency_s), checked_rates(bandwidth)
    device, before = _Device(plan, times.tolist(), rates, latency_s), None
    for _ in range(_CYCLES):
        began = device.compute_free
        device.run()
        took = device.compute_free - began
        if before is not None and abs(took - before) <= 1e-9 * took:
            break
        before = took
    transfers = tuple(t._replace(start_s=t[2] - began, end_s=t[3] - began) for t in device.moved)
    size = plan.trace.sizes
    return Simulation(
        time_s=took,
        compute_s=float(times.sum()),
        bytes_in=sum(size[t.variable] for t in transfers if t.kind is Kind.SWAP_IN),
        bytes_out=sum(size[t.variable] for t in transfers if t.kind is Kind.SWAP_OUT),
        memory_bytes=np.array(device.memory, dtype=np.int64),
        starts_s=np.array(device.starts) - began,
        ends_s=np.array(device.ends) - began,
        transfers=transfers,
    )


def checked_times(
    trace: Trace, compute_times: Sequence[float] | NDArray[np.float64], latency_s: float
) -> NDArray[np.float64]:
    """Return the times of a trace's functions, (n,), after a check."""
    times = np.asarray(compute_times, dtype=np.float64)
    n = len(trace.functions)
    if times.shape != (n,):
        raise ValueError(f"compute_times has the shape {times.shape}: give {n}, one a function")
    if not np.isfinite(times).all() or (times < 0).any() or not latency_s >= 0:
        raise ValueError("compute_times and latency_s must be finite seconds of 0 or more")
    return times


def checked_rates(bandwidth: float | tuple[float, float]) -> tuple[float, float]:
    """Return bytes/s (to the device, to the host), after a check."""
    rates = bandwidth if isinstance(bandwidth, tuple) else (bandwidth, bandwidth)
    if len(rates) != 2 or not min(rates) > 0:
        raise ValueError(f"bandwidth is {bandwidth!r}: give bytes/s above 0, or a pair of such")
    return rates


class _Device:
    """Three streams, each of which works in order, and waits for others according to the plan.

    A variable that ends while it is copied to the host keeps its memory until the copy is done; if
    the memory is needed sooner, the functions wait.
    """

    def __init__(
        self, plan: SwapPlan, times: list[float], rates: tuple[float, float], latency_s: float
    ) -> None:
        self.plan, self.times, self.rates, self.latency_s = plan, times, rates, latency_s
        self.memory = _memory(plan)
        self.ends_before = _ends_while_it_leaves(plan)
        self.lingering: list[tuple[float, int]] = []  # a heap: ends of copies, and bytes
        self.lingering_bytes = 0
        self.compute_free = self.in_free = self.out_free = 0.0
        self.arrives: dict[str, float] = {}  # end of each copy to the device
        self.leaves: dict[str, float] = {}

    def run(self) -> None:
        """Run one iteration, continuing from the one before."""
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.moved: list[Transfer] = []
        n = len(self.plan.trace.functions)
        self.linger(0)
        for number, function in enumerate(self.plan.trace.functions):
            self.act(self.plan.before[number])
            start = self.compute_free
            for name in function.variables:
                start = max(start, self.arrives.pop(name, 0.0))
            self.starts.append(start)
            self.compute_free = start + self.times[number]
            self.ends.append(self.compute_free)
            if number + 1 < n:
                self.linger(number + 1)
            self.act(self.plan.after[number])

    def linger(self, number: int) -> None:
        """Keep variables that end before a function while they are copied, if there is room."""
        free = self.plan.budget_bytes - self.memory[number]
        for name in self.ends_before[number]:
            if name in self.leaves:
                size = self.plan.trace.sizes[name]
                heappush(self.lingering, (self.leaves.pop(name), size))
                self.lingering_bytes += size
        while self.lingering and self.lingering_bytes > free:
            end, size = heappop(self.lingering)
            self.compute_free = max(self.compute_free, end)
            self.lingering_bytes -= size

    def act(self, actions: Sequence[tuple[Kind, str]]) -> None:
        for kind, name in actions:
            if kind is Kind.RELEASE:
                self.compute_free = max(self.compute_free, self.leaves.pop(name, 0.0))
            elif kind is Kind.SWAP_IN:
                # Its memory is free once the compute stream has reached this action.
                begin = max(self.in_free, self.compute_free)
                self.in_free = self.arrives[name] = self.copy(kind, name, begin, self.rates[0])
            elif kind is Kind.SWAP_OUT:
                begin = max(self.out_free, self.compute_free, self.arrives.get(name, 0.0))
                self.out_free = self.leaves[name] = self.copy(kind, name, begin, self.rates[1])

    def copy(self, kind: Kind, name: str, begin: float, rate: float) -> float:
        """Note a copy, and return its end."""
        end = begin + self.latency_s + self.plan.trace.sizes[name] / rate
        self.moved.append(Transfer(kind, name, begin, end))
        return end


def _ends_while_it_leaves(plan: SwapPlan) -> list[list[str]]:
    """Return for each function the variables that end before it while being copied."""
    leaving = set(plan.outgoing)
    for before, after in zip(plan.before, plan.after, strict=True):
        for kind, name in (*before, *after):
            if kind is Kind.SWAP_OUT:
                leaving.add(name)
            elif kind is Kind.RELEASE:
                leaving.discard(name)
    return [[name for name in names if name in leaving] for names in plan.trace.ending]


Changes = list[tuple[str, bool]]  # a variable, and whether it is on the device from then on


def phases(plan: SwapPlan, iterations: int = 1) -> Iterator[tuple[Changes, Changes]]:
    """Yield for each function the changes on the device before it runs, and after."""
    trace = plan.trace
    for _ in range(iterations):
        for f, function in enumerate(trace.functions):
            before, after = (
                [(name, kind is not Kind.RELEASE) for kind, name in actions]
                for actions in (plan.before[f], plan.after[f])
            )
            before = [(name, False) for name in trace.ending[f]] + before
            yield before + [(name, True) for name in function.variables], after


def _memory(plan: SwapPlan) -> list[int]:
    """Return the bytes held on the device while each function runs."""
    size, device = plan.trace.sizes, set(plan.resident)
    held, memory = sum(size[name] for name in device), []
    for number, changes in enumerate(chain.from_iterable(phases(plan))):
        for name, comes in changes:
            if (name in device) is not comes:
                held += size[name] if comes else -size[name]
                (device.add if comes else device.discard)(name)
        if number % 2 == 0:
            memory.append(held)
    return memory
