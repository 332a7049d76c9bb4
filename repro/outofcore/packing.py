"""Schedules from measured times, of the whole iteration at once.

First they pack gaps in which variables stay on the device into the budget, the shortest first, less
a margin for running copies. Then, as far as there is room, a leaving variable is held until its
copy is done, and a returning variable enters as early as there is room for it up to its use, in the
order of the uses. The ends of copies are known from simulating the plan before; so a few plans are
made, each from the last.

Differs from the paper: this schedule is not in the paper, which calls its own not optimal and
leaves others to future work (section 6).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from repro.outofcore.bounds import check_budget
from repro.outofcore.plan import Draft, SwapPlan
from repro.outofcore.schedule import fastest, plan_swaps
from repro.outofcore.sequence import Action, Kind, Trace
from repro.outofcore.simulation import Simulation

MARGINS = (0.0, 0.03)  # of the budget
_ROUNDS = 2  # plans of each margin
Times = NDArray[np.float64]


def plan_packed(
    trace: Trace,
    budget_bytes: int,
    compute_times: Sequence[float] | Times,
    bandwidth: float | tuple[float, float],
    latency_s: float = 0.0,
    margins: Sequence[float] = MARGINS,
) -> SwapPlan:
    """Return the packed plan with the least simulated time; among equals with the fewest bytes.

    Args:
        trace: The iteration.
        budget_bytes: Device memory that may be taken at any time, including running transfers.
        compute_times: (n,) seconds of each function.
        bandwidth: Bytes/s of the copies; a pair gives (to the device, to the host).
        latency_s: Fixed seconds of each copy.
        margins: Shares of the budget that stay free for copies, all tried.

    Raises:
        BudgetTooSmall: One function alone needs more than the budget.
        ValueError: `margins` is empty, or has a number outside [0, 1).
    """
    plans = packed_plans(trace, budget_bytes, compute_times, bandwidth, latency_s, margins)
    best = fastest(plans, np.asarray(compute_times, dtype=np.float64), bandwidth, latency_s)
    assert best is not None  # there is a margin
    return best


def packed_plans(
    trace: Trace,
    budget_bytes: int,
    compute_times: Sequence[float] | Times,
    bandwidth: float | tuple[float, float],
    latency_s: float = 0.0,
    margins: Sequence[float] = MARGINS,
) -> Iterator[SwapPlan]:
    """Yield the plans from which `plan_packed` takes the fastest."""
    check_budget(trace, budget_bytes)
    if not margins or not all(0 <= margin < 1 for margin in margins):
        raise ValueError(f"margins is {margins!r}: give shares of the budget, 0 or more, below 1")
    if trace.peak_bytes - trace.held_bytes <= budget_bytes:
        yield plan_swaps(trace, budget_bytes)
        return
    for margin in margins:
        packing = _Packing(trace, budget_bytes, int(margin * budget_bytes))
        done: dict[tuple[str, int], int] | None = None
        for _ in range(_ROUNDS):
            plan = packing.plan(done)
            yield plan
            copied = _copied_before(plan.simulate(compute_times, bandwidth, latency_s), trace)
            if copied == done:
                break
            done = copied


@dataclass(slots=True)
class _Gap:
    """A gap of a trace, and the position of its variable meanwhile."""

    name: str
    use: int
    then: int
    ends: bool
    needed: bool
    nbytes: int
    stays: bool = False  # on the device throughout
    release: int = 0  # otherwise the function before which it leaves,
    enter: int = 0  # and the function before which it returns


class _Packing:
    """Plans of one margin: the same variables stay in all of them."""

    def __init__(self, trace: Trace, budget: int, margin: int) -> None:
        self.trace, self.budget = trace, budget
        self.n = len(trace.functions)
        self.gaps = every = [_Gap(*gap, trace.sizes[gap.variable]) for gap in trace.gaps]
        needs = np.array(trace.needs_bytes, dtype=np.int64)
        self.load = needs.copy()  # bytes while each function runs
        limit = np.maximum(needs, budget - margin)
        for gap in sorted(every, key=lambda gap: (gap.then - gap.use, -gap.nbytes)):
            spans = self._between(gap.use + 1, gap.then)
            gap.stays = all((self.load[span] + gap.nbytes <= limit[span]).all() for span in spans)
            if gap.stays:
                self._add(self.load, spans, gap.nbytes)
        self.away = [gap for gap in every if not gap.stays]

    def _between(self, start: int, end: int) -> list[slice]:
        """Return functions `start` to `end` - 1, which may lie in the next iteration."""
        n = self.n
        if end <= n:
            return [slice(start, end)]
        return [slice(start - n, end - n)] if start >= n else [slice(start, n), slice(0, end - n)]

    @staticmethod
    def _add(load: NDArray[np.int64], spans: list[slice], nbytes: int) -> None:
        for span in spans:
            load[span] += nbytes

    def _fits(self, load: NDArray[np.int64], start: int, end: int, nbytes: int) -> NDArray[np.bool]:
        parts = [load[span] for span in self._between(start, end)]
        return np.concatenate(parts) + nbytes <= self.budget

    def plan(self, done: dict[tuple[str, int], int] | None) -> SwapPlan:
        """Return a plan; `done` is of `_copied_before`, None if nothing is known."""
        load = self.load.copy()
        # The latest first: without room for all, the oldest copies are done soonest.
        for gap in sorted(self.away, key=lambda gap: -gap.use):
            start = gap.use + 1
            until = gap.then if done is None else done.get((gap.name, gap.use), start)
            fits = self._fits(load, start, min(until, gap.then), gap.nbytes)
            gap.release = start + (len(fits) if fits.all() else int(np.argmin(fits)))
            self._add(load, self._between(start, gap.release), gap.nbytes)
        for gap in sorted(self.away, key=lambda gap: gap.then):
            gap.enter = gap.then
            if gap.needed and not gap.ends:
                fits = self._fits(load, gap.release, gap.then, gap.nbytes)[::-1]
                gap.enter -= len(fits) if fits.all() else int(np.argmin(fits))
                self._add(load, self._between(gap.enter, gap.then), gap.nbytes)
        return _Writing(self.trace, self.budget, self.gaps).plan()


class _Writing(Draft):
    """Turns gaps, with stays, releases and returns, into the actions of a plan, and its start."""

    def __init__(self, trace: Trace, budget: int, gaps: Sequence[_Gap]) -> None:
        super().__init__(trace, budget)
        n = self.n
        self.begins: list[list[_Gap]] = [[] for _ in range(n)]
        self.releases: list[list[_Gap]] = [[] for _ in range(n)]
        self.enters: list[list[_Gap]] = [[] for _ in range(n)]
        for gap in gaps:
            # A variable that returns at once stays; one that ends needs no release.
            if gap.stays or gap.release >= (gap.then if gap.ends else gap.enter):
                continue
            self.begins[gap.use].append(gap)
            self.releases[gap.release % n].append(gap)
            if not gap.ends:
                self.enters[gap.enter % n].append(gap)
        for entering in self.enters:
            entering.sort(key=lambda gap: gap.then)
        # On the device when the iteration starts: live variables that have not left, or are back.
        for gap in gaps:
            alive = gap.use < n <= gap.then and not (gap.ends and gap.then == n)
            back = gap.enter < n and not gap.ends
            if alive and (gap.stays or gap.release >= n or back):
                self.allocate(gap.name)
        self.valid = set(trace.persistent)
        self.outgoing: set[str] = set()

    def plan(self) -> SwapPlan:
        """Walk until an iteration starts in the state of the one before; return it as a plan."""
        started = None
        while True:
            start = frozenset(self.device), frozenset(self.valid), frozenset(self.outgoing)
            if start == started:
                return self.written("packed", *start)
            started = start
            self.clear()
            for f in range(self.n):
                self._function(f)
            self._die(0)

    def _function(self, f: int) -> None:
        if f:
            self._die(f)
        self.before[f] += self._moves(f)
        for name in self.trace.functions[f].variables:
            self.allocate(name)
        self.valid.difference_update(self.trace.functions[f].outputs)
        for gap in self.begins[f]:
            if gap.needed and gap.name not in self.valid:
                self.after[f].append(Action(Kind.SWAP_OUT, gap.name))
                self.valid.add(gap.name)
                self.outgoing.add(gap.name)

    def _moves(self, f: int) -> Iterator[Action]:
        """Yield the releases before a function, and the arrivals, as soon as there is room."""
        leaving = [gap.name for gap in self.releases[f] if gap.name in self.device]
        for gap in self.enters[f]:
            while leaving and self.used + gap.nbytes > self.budget:
                yield self._release(leaving.pop(0))
            if gap.name in leaving:  # it returns for the same function
                leaving.remove(gap.name)
                yield self._release(gap.name)
            if gap.name not in self.device:
                self.allocate(gap.name)
                yield Action(Kind.SWAP_IN if gap.needed else Kind.ALLOCATE, gap.name)
        for name in leaving:
            yield self._release(name)

    def _release(self, name: str) -> Action:
        self.free(name)
        self.outgoing.discard(name)
        return Action(Kind.RELEASE, name)

    def _die(self, f: int) -> None:
        for name in self.trace.ending[f]:
            self.free(name)
            self.valid.discard(name)
            self.outgoing.discard(name)


def _copied_before(simulation: Simulation, trace: Trace) -> dict[tuple[str, int], int]:
    """Return, by (variable, function after which its copy to the host began), where it was done.

    That is the function before which the copy had ended.
    """
    n = len(trace.functions)
    ends = np.concatenate([simulation.ends_s, simulation.ends_s + simulation.time_s])
    copied = {}
    for kind, name, start, end in simulation.transfers:
        if kind is Kind.SWAP_OUT:
            used = [u for u in trace.accesses[name] if simulation.ends_s[u] <= start + 1e-12]
            if used:
                done = int(np.searchsorted(ends, end - 1e-12)) + 1
                copied[name, used[-1]] = min(done, used[-1] + n)
    return copied
