"""The times of a swap plan, and a lower bound on those of all plans.

Both are for a device with one compute stream and one copy stream in each direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from numbers import Real
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from repro.measure.checks import is_whole
from repro.outofcore.sequence import Kind, Trace

if TYPE_CHECKING:
    from repro.outofcore.plan import SwapPlan

_CYCLES = 8  # iterations after which a time that still alternates is accepted
_NEVER = -1
Vector = NDArray[np.float64]
Times = Sequence[float] | Vector  # seconds of each function
Rates = float | tuple[float, float]  # bytes/s of copies; a pair: to the device, to the host


class BudgetTooSmall(ValueError):
    """No schedule exists within a budget, since one function alone needs more.

    `function` names it: in a trace the largest, in training the first not to fit. `needed_bytes`
    are those of its variables; in training, later functions may need more than these.
    """

    def __init__(
        self, function: str, needed_bytes: int, budget_bytes: int, where: str, final: bool = True
    ) -> None:
        self.function, self.needed_bytes, self.budget_bytes = function, needed_bytes, budget_bytes
        advice = f"the smallest feasible budget is {needed_bytes} bytes"
        if not final:
            advice = (
                f"give {needed_bytes} bytes at least; what comes after may need more, and "
                "record(step).smallest_budget is the smallest feasible budget (more with sparse "
                "tensors)"
            )
        super().__init__(
            f"{where} needs {needed_bytes} bytes for its inputs and outputs alone, but the budget "
            f"is {budget_bytes}: {advice}"
        )


def check_budget(trace: Trace, budget_bytes: int) -> None:
    """Raise `BudgetTooSmall` if a function of the trace alone does not fit the budget."""
    if not is_whole(budget_bytes):
        raise ValueError(f"budget_bytes is {budget_bytes!r}: give whole bytes")
    needed = trace.smallest_budget
    if needed > budget_bytes:
        number = trace.needs_bytes.index(needed)
        name = trace.functions[number].name
        raise BudgetTooSmall(name, needed, budget_bytes, f"function {number} ({name})")


# ---- simulation


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
    starts_s: Vector = field(repr=False)
    ends_s: Vector = field(repr=False)
    transfers: tuple[Transfer, ...] = field(repr=False)

    @property
    def stall_s(self) -> float:
        """Seconds in which no function runs, since the next one waits for a copy."""
        return max(0.0, self.time_s - self.compute_s)

    @property
    def peak_bytes(self) -> int:
        """The most bytes held on the device."""
        return int(self.memory_bytes.max())


def simulate(
    plan: SwapPlan, compute_times: Times, bandwidth: Rates, latency_s: float = 0.0
) -> Simulation:
    """Return the times of an iteration of a plan on a device with two copy streams.

    Functions run in order on one stream, copies to the device on a second, copies to the host on a
    third; streams wait for each other exactly as in the plan. Iterations are repeated until two in
    a row take the same time; the last is returned. Arguments are those of `plan_packed`.
    """
    times, rates = _checked(plan.trace, compute_times, bandwidth, latency_s)
    device, before = _Device(plan, times.tolist(), rates, latency_s), None
    for _ in range(_CYCLES):
        began = device.compute_free
        device.run()
        took = device.compute_free - began
        if before is not None and abs(took - before) <= 1e-9 * took:
            break
        before = took
    transfers = tuple(t._replace(start_s=t[2] - began, end_s=t[3] - began) for t in device.moved)
    return Simulation(
        time_s=took,
        compute_s=float(times.sum()),
        bytes_in=plan.bytes_in,
        bytes_out=plan.bytes_out,
        memory_bytes=device.memory,
        starts_s=np.array(device.starts) - began,
        ends_s=np.array(device.ends) - began,
        transfers=transfers,
    )


def _checked(
    trace: Trace, compute_times: Times, bandwidth: Rates, latency_s: float
) -> tuple[Vector, tuple[float, float]]:
    """Return the times of a trace's functions, (n,), and bytes/s (to the device, to the host)."""
    times, n = np.asarray(compute_times, dtype=np.float64), len(trace.functions)
    if times.shape != (n,):
        raise ValueError(f"compute_times has the shape {times.shape}: give {n}, one a function")
    if not np.isfinite(times).all() or (times < 0).any() or not latency_s >= 0:
        raise ValueError("compute_times and latency_s must be finite seconds of 0 or more")
    rates = bandwidth if isinstance(bandwidth, tuple) else (bandwidth, bandwidth)
    if len(rates) != 2 or not all(isinstance(rate, Real) and rate > 0 for rate in rates):
        raise ValueError(f"bandwidth is {bandwidth!r}: give bytes/s above 0, or a pair as a tuple")
    return times, rates


class _Device:
    """Three streams, each of which works in order, and waits for others according to the plan.

    A variable that ends while it is copied to the host keeps its memory until the copy is done; if
    the memory is needed sooner, the functions wait.
    """

    def __init__(
        self, plan: SwapPlan, times: list[float], rates: tuple[float, float], latency_s: float
    ) -> None:
        self.plan, self.times, self.rates, self.latency_s = plan, times, rates, latency_s
        self.sizes = sizes = plan.trace.sizes
        change = np.zeros((len(times), 2), dtype=np.int64)
        change[0, 0] = sum(sizes[name] for name in plan.resident)
        for number, after, name, comes in changes(plan):
            change[number, int(after)] += sizes[name] if comes else -sizes[name]
        self.memory = change.cumsum().reshape(-1, 2)[:, 0]  # while each function runs
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
        self.linger(0)
        for number, function in enumerate(self.plan.trace.functions):
            self.act(self.plan.before[number])
            start = self.compute_free
            for name in function.variables:
                start = max(start, self.arrives.pop(name, 0.0))
            self.starts.append(start)
            self.compute_free = start + self.times[number]
            self.ends.append(self.compute_free)
            if number + 1 < len(self.times):
                self.linger(number + 1)
            self.act(self.plan.after[number])

    def linger(self, number: int) -> None:
        """Keep variables that end before a function while they are copied, if there is room."""
        free = self.plan.budget_bytes - int(self.memory[number])
        for name in self.plan.trace.ending[number]:
            if name in self.leaves:
                heappush(self.lingering, (self.leaves.pop(name), self.sizes[name]))
                self.lingering_bytes += self.sizes[name]
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
        end = begin + self.latency_s + self.sizes[name] / rate
        self.moved.append(Transfer(kind, name, begin, end))
        return end


def changes(plan: SwapPlan, iterations: int = 1) -> Iterator[tuple[int, bool, str, bool]]:
    """Yield the changes on the device: (function, after it, variable, comes).

    Functions are numbered across iterations.
    """
    trace, device = plan.trace, set(plan.resident)
    for number in range(iterations * len(trace.functions)):
        f = number % len(trace.functions)
        before, after = (
            [(name, kind is not Kind.RELEASE) for kind, name in actions]
            for actions in (plan.before[f], plan.after[f])
        )
        before = [(name, False) for name in trace.ending[f]] + before
        before += [(name, True) for name in trace.functions[f].variables]
        for is_after, made in ((False, before), (True, after)):
            for name, comes in made:
                if (name in device) is not comes:
                    (device.add if comes else device.discard)(name)
                    yield number, is_after, name, comes


# ---- the bound


def bound(
    trace: Trace, budget_bytes: int, compute_times: Times, bandwidth: Rates, latency_s: float = 0.0
) -> float:
    """Return a lower bound on the seconds of an iteration, for every schedule.

    It is valid for every plan that `SwapPlan.verify` accepts and `SwapPlan.simulate` repeats: for
    any order of copies of whole variables, and any choice of resident variables. The best schedule
    may take longer, since the bound treats the choices of two functions as independent. Arguments
    and errors are those of `plan_packed`.

    While function p runs, its own variables are on the device; others have at most the rest of the
    budget. Further bytes that are read up to function r must be copied in after p has ended and
    before r starts; further bytes last written by function a or later, and still needed after p,
    must be copied out after a has ended and before p starts. Each such pair is an edge from the end
    of one function to the start of another, with the time of its copies as length. The bound is the
    longest path through an iteration, including the functions' own times.
    """
    check_budget(trace, budget_bytes)
    times, rates = _checked(trace, compute_times, bandwidth, latency_s)
    if trace.peak_bytes - trace.held_bytes <= budget_bytes:
        return float(times.sum())
    # Any function will do: the path leads from its end to its end in the next iteration.
    starts = {int(np.argmax(trace.live_bytes)), len(times) - 1}
    return max(_longest(trace, budget_bytes, times, rates, latency_s, at) for at in starts)


def _longest(
    trace: Trace, budget: int, times: Vector, rates: tuple[float, float], latency_s: float, at: int
) -> float:
    """Return the longest path from the end of function `at` to its end one iteration later."""
    n, number = len(times), {name: v for v, name in enumerate(trace.accesses)}
    size = np.array([trace.sizes[name] for name in number], dtype=np.float64)
    gaps: list[list[tuple[int, int, bool, int]]] = [[] for _ in times]
    for name, f, then, gap_ends, needed in trace.gaps:
        new = name in trace.functions[f].outputs or trace.lifetimes.get(name, [-1])[0] == f
        reads = then - f if needed and not gap_ends else _NEVER
        gaps[f].append((number[name], reads, new, then - f if needed else 0))

    def copies(demand: Vector, rate: float) -> Vector:  # seconds
        seconds: Vector = demand / rate + latency_s * np.ceil(demand / size.max())
        return seconds

    ends = np.full(n + 1, -np.inf)  # of function at + i
    ends[0] = 0.0
    starts = np.full(n + 1, -np.inf)
    # Per variable, counted from `at`: the next use that reads it, the last function that wrote it,
    # and the first function from which its value is no longer needed.
    read = np.full(len(size), _NEVER)
    wrote = np.full(len(size), -n - 1)
    until = np.full(len(size), -n - 1)
    for step in range(-n, n + 1):
        f = (at + step) % n
        room = float(budget - trace.needs_bytes[f])
        others = np.ones(len(size), dtype=bool)
        others[[v for v, *_ in gaps[f]]] = False
        if step > 0:
            away = np.flatnonzero(others & (until > step) & (wrote >= 0))
            start = max(starts[step], ends[step - 1])
            # demand[a]: bytes of variables written last by function a or later.
            demand = _beyond(wrote[away], size[away], room, step)
            leave = np.where(demand > 0, ends[:step] + copies(demand, rates[1]), start)
            starts[step] = max(start, leave.max())
            ends[step] = starts[step] + times[f]
        for v, reads, new, kept in gaps[f]:
            read[v] = step + reads if reads != _NEVER else _NEVER
            until[v] = step + kept
            if new:
                wrote[v] = step
        if 0 <= step < n:
            coming = np.flatnonzero(others & (read > step) & (read <= n))
            # demand[i]: bytes read up to function step + 1 + i.
            demand = _beyond(n - read[coming], size[coming], room, n - step)[::-1]
            reached = ends[step] + np.where(demand > 0, copies(demand, rates[0]), -np.inf)
            starts[step + 1 :] = np.maximum(starts[step + 1 :], reached)
    return float(ends[n])


def _beyond(position: NDArray[np.int64], size: Vector, room: float, length: int) -> Vector:
    """Return for i < length the bytes at positions from i on that do not fit into the room.

    Variables larger than the room do not fit at all.
    """
    summed, fitting = (
        np.bincount(position[some], size[some], length)[::-1].cumsum()[::-1]
        for some in (slice(None), size <= room)
    )
    beyond: Vector = np.maximum(0.0, summed - np.minimum(fitting, room))
    return beyond
