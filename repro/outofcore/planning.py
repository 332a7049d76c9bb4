"""Plans of a recorded iteration: packed ones, and all schedules by name.

A packed plan is made of the whole iteration at once, from measured times. First the gaps in which
variables stay on the device are packed into the budget, the shortest first, less a margin for
running copies. Then, as far as there is room, a leaving variable is held until its copy is done,
and a returning variable enters as early as there is room for it up to its use, in the order of the
uses. The ends of copies are known from simulating the plan before; so a few plans are made, each
from the last. This schedule is not in the paper, which calls its own not optimal and leaves others
to future work (section 6).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from repro.outofcore.baselines import (
    DoesNotFit,
    on_demand,
    plan_literally,
    tune_fixed_distance,
    vdnn,
)
from repro.outofcore.host import SLAB_BYTES
from repro.outofcore.plan import Draft, PlanError, SwapPlan
from repro.outofcore.recording import Recording
from repro.outofcore.schedule import fastest, plan_swaps, score, windows
from repro.outofcore.sequence import Action, Function, Kind, Trace
from repro.outofcore.simulation import Rates, Simulation, Times, Vector, check_budget

MARGINS = (0.0, 0.03)  # of the budget
_ROUNDS = 2  # packed plans of each margin
TRYING_S = 1.0  # time for better plans of a repeated iteration; at least one plan is tried
_COPY_LATENCY_S = 3e-5  # the cost of starting a copy, for the simulation
_MARGIN = 0.01  # least gain of a better plan, as a share of an iteration
_SMALL_SHARE = 0.01  # of the budget, for variables that are too small to be worth a copy


def plan_packed(
    trace: Trace,
    budget_bytes: int,
    compute_times: Times,
    bandwidth: Rates,
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
    margins = tuple(margins)
    if not margins or not all(0 <= margin < 1 for margin in margins):
        raise ValueError(f"margins is {margins!r}: give shares of the budget, 0 or more, below 1")
    plans = packed_plans(trace, budget_bytes, compute_times, bandwidth, latency_s, *margins)
    best = fastest(plans, compute_times, bandwidth, latency_s)
    assert best is not None  # there is a margin
    return best


def packed_plans(
    trace: Trace, budget: int, times: Times, rates: Rates, latency_s: float = 0.0, *margins: float
) -> Iterator[SwapPlan]:
    """Yield the plans from which `plan_packed` takes the fastest, by default of its margins."""
    check_budget(trace, budget)
    if trace.peak_bytes - trace.held_bytes <= budget:
        yield plan_swaps(trace, budget)
        return
    for margin in margins or MARGINS:
        packing = _Packing(trace, budget, int(margin * budget))
        done: dict[tuple[str, int], int] | None = None
        for _ in range(_ROUNDS):
            plan = packing.plan(done)
            yield plan
            copied = _copied_before(plan.simulate(times, rates, latency_s), trace)
            if copied == done:
                break
            done = copied


@dataclass(slots=True)
class _Gap:
    """A `Gap` of a trace, and where its variable is meanwhile."""

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
        self.gaps = [_Gap(*gap, trace.sizes[gap.variable]) for gap in trace.gaps]
        needs = np.array(trace.needs_bytes, dtype=np.int64)
        self.load = needs.copy()  # bytes while each function runs
        limit = np.maximum(needs, budget - margin)
        for gap in sorted(self.gaps, key=lambda gap: (gap.then - gap.use, -gap.nbytes)):
            within = self._between(gap.use + 1, gap.then)
            gap.stays = bool((self.load[within] + gap.nbytes <= limit[within]).all())
            if gap.stays:
                self.load[within] += gap.nbytes
        self.away = [gap for gap in self.gaps if not gap.stays]

    def _between(self, start: int, end: int) -> NDArray[np.int64]:  # the end excluded
        return np.arange(start, end) % len(self.load)

    def plan(self, done: dict[tuple[str, int], int] | None) -> SwapPlan:
        """Return a plan; `done` is of `_copied_before`, None if nothing is known."""
        load = self.load.copy()

        def fitting(within: NDArray[np.int64], nbytes: int) -> int:
            """Take room for bytes in the first of these functions; return how many have it."""
            fits = load[within] + nbytes <= self.budget
            count = len(fits) if fits.all() else int(np.argmin(fits))
            load[within[:count]] += nbytes
            return count

        # The latest first: without room for all, the oldest copies are done soonest.
        for gap in sorted(self.away, key=lambda gap: -gap.use):
            start = gap.use + 1
            until = gap.then if done is None else done.get((gap.name, gap.use), start)
            held = self._between(start, min(until, gap.then))
            gap.release = start + fitting(held, gap.nbytes)
        for gap in sorted(self.away, key=lambda gap: gap.then):
            gap.enter = gap.then
            if gap.needed and not gap.ends:
                gap.enter -= fitting(self._between(gap.release, gap.then)[::-1], gap.nbytes)
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
            # On the device when the iteration starts: live variables that are there or back.
            alive = gap.use < n <= gap.then and not (gap.ends and gap.then == n)
            back = gap.enter < n and not gap.ends
            if alive and (gap.stays or gap.release >= n or back):
                self.allocate(gap.name)
            # A variable that returns at once stays; one that ends needs no release.
            if gap.stays or gap.release >= (gap.then if gap.ends else gap.enter):
                continue
            self.begins[gap.use].append(gap)
            self.releases[gap.release % n].append(gap)
            if not gap.ends:
                self.enters[gap.enter % n].append(gap)
        for entering in self.enters:
            entering.sort(key=lambda gap: gap.then)
        self.valid = set(trace.persistent)
        self.outgoing: set[str] = set()

    def plan(self) -> SwapPlan:
        """Return the plan of the first iteration that starts in the state of the one before."""
        started = None
        while True:
            start = frozenset(self.device), frozenset(self.valid), frozenset(self.outgoing)
            if start == started:
                return self.written("packed", *start)
            started = start
            self.clear()
            for f in range(self.n):
                self._function(f)
                self._die((f + 1) % self.n)

    def _function(self, f: int) -> None:
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
    """Return, by variable and its use before a copy to the host, the function after the copy."""
    ends = np.concatenate([simulation.ends_s, simulation.ends_s + simulation.time_s])
    copied = {}
    for kind, name, start, end in simulation.transfers:
        uses = trace.accesses[name] if kind is Kind.SWAP_OUT else ()
        if used := [u for u in uses if simulation.ends_s[u] <= start + 1e-12]:
            done = int(np.searchsorted(ends, end - 1e-12)) + 1
            copied[name, used[-1]] = min(done, used[-1] + len(trace.functions))
    return copied


# ---- schedules by name. To find the fastest schedule, many plans are simulated, which for a long
# iteration takes far longer than a step. So the first plan is followed as soon as it is made; after
# it was once followed to its end, others are tried for a bounded time.

Name = Literal["auto", "window", "packed", "paper", "lms", "vdnn", "on_demand"]
# Given a trace, a budget in bytes, seconds of each function, and bytes/s (to the device, to the
# host), returns a plan of the trace within the budget.
Scheduler = Callable[[Trace, int, Sequence[float], tuple[float, float]], SwapPlan]


def check_schedule(schedule: object) -> None:
    """Raise a ValueError if a schedule is neither one of the names nor callable."""
    if not callable(schedule) and schedule not in get_args(Name):
        names = ", ".join(get_args(Name))
        raise ValueError(f"schedule is {schedule!r}: give one of {names}, or a function")


def host_bytes(trace: Trace, budget_bytes: int) -> int:
    """Return the bytes of host memory for swapping within a budget, in whole slabs.

    They are the most that demand paging, which runs the first iteration, or a plan that may follow
    it by the default schedule needs, if each function takes as long as a copy of its variables.
    Variables that no function uses count as well. 0 if all variables fit the budget.

    Raises:
        BudgetTooSmall: One function alone needs more than the budget.
    """
    if trace.peak_bytes <= budget_bytes:
        return 0
    plans = [plan_swaps(trace, budget_bytes)]
    with suppress(DoesNotFit):  # if its iterations never repeat
        plans.append(on_demand(trace, budget_bytes))
    part = without_small(trace, budget_bytes)
    times = np.asarray(trace.needs_bytes, dtype=float)
    tried = chain(packed_plans(*part, times, (1.0, 1.0)), windows(*part, times))
    plans += (with_small(plan, trace, budget_bytes) for plan in tried)
    # Demand paging may leave each persistent variable on the host.
    needed = max(plan.most_on_host(trace.persistent) for plan in plans) + trace.held_bytes
    return -(-needed // SLAB_BYTES) * SLAB_BYTES


def without_small(trace: Trace, budget_bytes: int) -> tuple[Trace, int]:
    """Return an iteration without its smallest variables, and the budget that is left.

    They stay on the device, as many as take 1 % of the budget in all: to start a copy costs as much
    for a few bytes as for many. An iteration that fits, or needs that room, is returned whole.
    """
    sizes, left, large = trace.sizes, budget_bytes, set(trace.sizes)
    for name in sorted(trace.accesses, key=sizes.__getitem__):
        if budget_bytes - left + sizes[name] > _SMALL_SHARE * budget_bytes:
            break
        large.discard(name)
        left -= sizes[name]

    def kept(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name in large}

    functions = [
        Function(f.name, *(tuple(filter(large.__contains__, of)) for of in (f.inputs, f.outputs)))
        for f in trace.functions
    ]
    rest = Trace(tuple(functions), kept(sizes), kept(trace.kinds), kept(trace.deaths))
    fits = trace.peak_bytes - trace.held_bytes <= budget_bytes
    return (trace, budget_bytes) if fits or rest.smallest_budget > left else (rest, left)


def with_small(plan: SwapPlan, trace: Trace, budget_bytes: int) -> SwapPlan:
    """Return a plan of an iteration `without_small` as one of the whole iteration."""
    stays = trace.alive_at_start - plan.trace.alive_at_start
    return replace(plan, trace=trace, budget_bytes=budget_bytes, resident=plan.resident | stays)


class Planner:
    """Plans iterations by a schedule; the first arguments are those of `OutOfCore`.

    `rates` returns the copies' measured bytes/s (to the device, to the host).
    """

    def __init__(
        self,
        schedule: Name | Scheduler,
        window_bytes: int | Literal["auto"] | None,
        budget_bytes: int,
        rates: Callable[[], tuple[float, float]],
    ) -> None:
        self.schedule, self.budget_bytes, self._rates = schedule, budget_bytes, rates
        self._window = None if window_bytes == "auto" else window_bytes
        chosen = schedule in ("auto", "window") and window_bytes == "auto"
        self._tunes = schedule == "packed" or chosen
        self._spares = self._tunes and window_bytes == "auto"  # small variables

    def plan(self, recorded: Recording) -> SwapPlan:
        """Return a plan of an iteration quickly; errors are those of `OutOfCore`."""
        trace, budget, rates = recorded.trace, self.budget_bytes, self._rates()
        given = trace, budget, recorded.times, rates, _COPY_LATENCY_S
        part, left = self._part(trace)
        match self.schedule:
            case "auto" | "window":
                return with_small(plan_swaps(part, left, self._window), trace, budget)
            case "packed":
                packed = next(packed_plans(part, left, recorded.times, rates, _COPY_LATENCY_S))
                return with_small(packed, trace, budget)
            case "paper":
                return plan_literally(trace, budget, self._window)
            case "lms":
                return tune_fixed_distance(*given)
            case "vdnn":
                return vdnn(trace, budget)
            case "on_demand":
                return on_demand(trace, budget)
        plan = self.schedule(*given[:4])
        if not isinstance(plan, SwapPlan):
            raise PlanError(f"the schedule returned {plan!r:.200}: return a SwapPlan")
        if plan.trace != trace or plan.budget_bytes > budget:
            raise PlanError(
                f"the schedule planned another trace, or for {plan.budget_bytes} bytes: plan the "
                f"given trace, of {len(trace.functions)} functions, within {budget}"
            )
        plan.verify()
        return plan

    def better(self, plan: SwapPlan, recorded: Recording) -> SwapPlan | None:
        """Return a faster plan than `plan`, tried in a bounded time; None if none was found."""
        other = len(recorded.times) != len(plan.trace.functions)
        if not self._tunes or other or not plan.bytes_moved:
            return None
        given = np.asarray(recorded.times), self._rates(), _COPY_LATENCY_S
        until, best, found = time.perf_counter() + TRYING_S, score(plan, *given), None
        for part in self._candidates(self._part(plan.trace), *given):
            candidate = with_small(part, plan.trace, self.budget_bytes)
            tried = score(candidate, *given)
            if tried[0] < (1 - _MARGIN) * best[0] or (tried[0] <= best[0] and tried[1] < best[1]):
                best, found = tried, candidate
            if time.perf_counter() > until:
                break
        return found

    def _part(self, trace: Trace) -> tuple[Trace, int]:
        whole = trace, self.budget_bytes
        return without_small(*whole) if self._spares else whole

    def _candidates(
        self, part: tuple[Trace, int], times: Vector, rates: tuple[float, float], latency_s: float
    ) -> Iterator[SwapPlan]:
        if self.schedule != "window":
            yield from packed_plans(*part, times, rates, latency_s)
        if self.schedule != "packed":
            yield from windows(*part, times)
