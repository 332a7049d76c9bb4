"""Swap schedules by a window of bytes that slides over the variable-sequence.

Source: Hayakawa and Narihira, section 3 and figure 2. The algorithm is `Cycle.iteration`;
`_Window.entering` and `leaving` say which variables enter and leave the window.

Differs from the paper: the window counts a variable once, and takes it in only if all functions up
to its use stay within the budget, so that no prefetch is withdrawn. A reserved swap-out is carried
out only if its memory is needed before the variable enters the window again. Values that are
unchanged on the host are not copied. The iteration is planned as a cycle.
"""

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from repro.outofcore.plan import SwapPlan
from repro.outofcore.sequence import Action, Kind, Trace
from repro.outofcore.simulation import Rates, Times, Vector, check_budget

WINDOW_SHARES = (0.02, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1.0, 1.5)
TIME_SHARES = (0.002, 0.005, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
FUNCTIONS_AHEAD = (2, 4, 8, 16, 32, 64, 128, 256)
Reach = list[int]  # for each function, the first function beyond its window
_PASSES = 6  # iterations after which a schedule that has not settled is forced to close


def plan_swaps(trace: Trace, budget_bytes: int, window_bytes: int | None = None) -> SwapPlan:
    """Schedule the swaps of an iteration by a sliding window (section 3).

    Args:
        trace: The iteration.
        budget_bytes: Device memory that may be taken at any time, including running transfers.
        window_bytes: Look-ahead, in bytes of distinct variables from the current function on; None
            for 1.5 times the budget. `tune_window` finds a good value.

    Raises:
        BudgetTooSmall: One function alone needs more than the budget.
        ValueError: The window is negative.
    """
    check_budget(trace, budget_bytes)
    window_bytes = checked_window(window_bytes, budget_bytes)
    if trace.peak_bytes - trace.held_bytes <= budget_bytes:
        none: tuple[tuple[Action, ...], ...] = ((),) * len(trace.functions)
        sets = trace.alive_at_start, frozenset[str]()
        return SwapPlan(trace, budget_bytes, none, none, *sets, window_bytes=window_bytes)
    return _schedule(trace, budget_bytes, window_bytes, None)


def checked_window(window_bytes: int | None, budget_bytes: int) -> int:
    """Return the bytes of a window, for None 1.5 times the budget: the authors' default."""
    if window_bytes is not None and window_bytes < 0:
        raise ValueError(f"window_bytes is {window_bytes}: give 0 or more, or None")
    return int(1.5 * budget_bytes) if window_bytes is None else window_bytes


def _schedule(trace: Trace, budget_bytes: int, window_bytes: int, reach: Reach | None) -> SwapPlan:
    given, collects = (trace, budget_bytes, window_bytes, reach), gc.isenabled()
    gc.disable()  # planning makes no cycles, and many small objects
    try:
        plan = _Window(*given).settled(_PASSES) or _Window(*given, closed=True).settled(3)
    finally:
        if collects:
            gc.enable()
    assert plan is not None  # a closed iteration begins with nothing on the device
    return plan


class Cycle:
    """An endless sequence of iterations, with the variables on the device and on the host.

    `iteration` is the paper's algorithm. A subclass decides which variables enter before a function
    and leave after it. A leaving variable is only reserved to leave: it is copied and released when
    its memory is needed, oldest first.

    Variables are numbers here. A variable that does not persist has two instances, 2 v and 2 v + 1,
    in alternate iterations, since a window may hold its next birth while the earlier one is still
    alive. Functions are numbered across iterations: f_a is number a % n of iteration a // n.
    """

    scheduler = "window"
    window: int | None = None
    closed = False  # empty the device after each iteration

    def __init__(self, trace: Trace, budget_bytes: int) -> None:
        self.trace, self.budget = trace, budget_bytes
        self.n = n = len(trace.functions)
        self.names = list(trace.accesses)
        number = {name: v for v, name in enumerate(self.names)}
        self.persists = [name in trace.persistent for name in self.names]
        self.size = [trace.sizes[name] for name in self.names for _ in range(2)]
        self.death = [trace.lifetimes.get(name, (0, 0))[1] for name in self.names]
        self.ending = [[number[name] for name in names] for names in trace.ending]
        # The variable-sequence in flat lists, one entry per use; entries first[a] to first[a + 1]
        # belong to f_a.
        self.first = [0]
        self.function: list[int] = []
        self.instances: list[list[int]] = [[], []]  # for even and for odd iterations
        self.born: list[bool] = []
        self.read: list[bool] = []
        self.written: list[bool] = []
        self.value_used: list[bool] = []  # whether the value is still needed after the use
        needed = {(gap.variable, gap.use): gap.needed for gap in trace.gaps}
        for a, function in enumerate(trace.functions):
            inputs, outputs = set(function.inputs), set(function.outputs)
            for name in function.variables:
                v = number[name]
                self.function.append(a)
                self.instances[0].append(2 * v)
                self.instances[1].append(2 * v + (not self.persists[v]))
                self.born.append(not self.persists[v] and trace.accesses[name][0] == a)
                self.read.append(name in inputs)
                self.written.append(name in outputs)
                self.value_used.append(needed[name, a])
            self.first.append(len(self.function))
        # State. Everything that persists starts on the host.
        total = 2 * len(self.names)
        self.at = self.start = self.used = 0  # the function, the iteration's first one, and bytes
        self.alive = [x % 2 == 0 and self.persists[x // 2] for x in range(total)]
        self.valid = self.alive.copy()
        self.device = [False] * total
        # Reserved swap-outs: by variable the use after which, numbered across iterations; and these
        # uses, oldest first, including cancelled ones.
        self.reserved: dict[int, int] = {}
        self.queue: deque[int] = deque()
        self.before: list[list[tuple[Kind, int]]] = [[] for _ in range(n)]
        self.after = self.before

    def iteration(self) -> None:
        """Plan one iteration: steps (a) to (d) of section 3 and figure 2."""
        n = self.n
        self.before, self.after = [[] for _ in range(n)], [[] for _ in range(n)]
        self.carried: set[int] = set()  # the iteration before's swap-outs that are carried out
        self.start = start = self.at
        for a in range(start, start + n):
            self.at, number = a, a - start
            actions = self.before[number]
            for v in self.ending[number]:  # of this iteration or the one before
                self._die(2 * v if self.persists[v] else 2 * v + (a - self.death[v]) // n % 2)
            # (a) Swap in the variables that enter,
            for kind, x in self.entering(a):
                # (b) and if that exceeds the budget, wait for the oldest swap-outs first.
                self._allocate(x, actions)
                actions.append((kind, x))
            # Run f_a.
            instances = self.instances[start // n % 2]
            for entry in range(self.first[number], self.first[number + 1]):
                x = instances[entry]
                if self.born[entry]:
                    self._allocate(x, actions)
                    self.alive[x] = True
                if self.written[entry]:
                    self.valid[x] = False
            # (c) Reserve the swap-outs of the variables that leave,
            for use in self.leaving(a):
                x = instances[use % len(self.function)]
                # (d) except of dead variables, and of those that stay: see `_Window.entering`.
                if self.persists[x // 2] or self.death[x // 2] != number + 1:
                    self.reserved[x] = use
                    self.queue.append(use)
        self.at = start + n
        while self.closed and self.queue:
            self.release_oldest(self.after[-1])

    def entering(self, a: int) -> Iterable[tuple[Kind, int]]:
        """Return the variables to bring in before f_a, and how."""
        raise NotImplementedError

    def leaving(self, a: int) -> Iterable[int]:
        """Return the uses at f_a, numbered across iterations, after which variables may leave."""
        raise NotImplementedError

    def settled(self, iterations: int) -> SwapPlan | None:
        """Return the plan of the iteration that starts as the one before; None without one."""
        for _ in range(iterations):
            start = self.state()
            self.iteration()
            if self.state() == start:
                return self.plan(start)
        return None

    def state(self) -> tuple[Any, ...]:
        """Return the state that determines the next iteration, counted from its start."""
        passed, reserved = self.at // self.n * len(self.function), set(self.reserved.values())
        sets = (
            frozenset(self.relative(x) for x, flag in enumerate(flags) if flag)
            for flags in (self.device, self.valid, self.alive)
        )
        return *sets, tuple(use - passed for use in self.queue if use in reserved)

    def relative(self, x: int) -> tuple[int, int]:
        """Return a variable, and whether it is of another iteration than this one."""
        return x // 2, 0 if self.persists[x // 2] else (x - self.at // self.n) % 2

    def _die(self, x: int) -> None:
        if self.device[x]:
            self.used -= self.size[x]
        self.alive[x] = self.device[x] = self.valid[x] = False
        self.reserved.pop(x, None)

    def _allocate(self, x: int, actions: list[tuple[Kind, int]]) -> None:
        while self.used + self.size[x] > self.budget:
            self.release_oldest(actions)
        self.device[x] = True
        self.used += self.size[x]

    def release_oldest(self, actions: list[tuple[Kind, int]]) -> None:
        """Carry out the oldest reserved swap-out."""
        use = self.queue.popleft()
        cycle, entry = divmod(use, len(self.function))
        x = self.instances[cycle % 2][entry]
        if self.reserved.get(x) != use:
            return  # cancelled meanwhile
        del self.reserved[x]
        if not self.valid[x] and self.value_used[entry]:
            self.after[self.function[entry]].append((Kind.SWAP_OUT, x))
            self.valid[x] = True
            if cycle * self.n < self.start:
                self.carried.add(x)
        actions.append((Kind.RELEASE, x))
        self.device[x] = False
        self.used -= self.size[x]

    def plan(self, start: tuple[Any, ...]) -> SwapPlan:
        """Return the plan of the last iteration, which started and ended in state `start`."""
        alive = self.trace.alive_at_start  # without variables that die with the last function
        resident, valid = (alive & {self.names[v] for v, _ in names} for names in start[:2])
        outgoing = alive & {self.names[x // 2] for x in self.carried}
        before, after = (
            tuple(tuple(Action(kind, self.names[x // 2]) for kind, x in made) for made in actions)
            for actions in (self.before, self.after)
        )
        sets = resident, valid | outgoing, outgoing
        named = self.scheduler, self.window
        return SwapPlan(self.trace, self.budget, before, after, *sets, *named)


class _Window(Cycle):
    """The variables from the current function on, as many as the window and the budget hold."""

    window: int

    def __init__(
        self,
        trace: Trace,
        budget_bytes: int,
        window_bytes: int,
        reach: Reach | None,
        closed: bool = False,  # keep the window within the iteration
    ) -> None:
        super().__init__(trace, budget_bytes)
        self.window, self.reach, self.closed = window_bytes, reach, closed
        self.head = self.window_used = 0  # the next entry to take into the window, and bytes
        self.last_seen = [-1] * 2 * len(self.names)  # the last use within the window
        # Bytes that the window takes at each function from `at` to `frontier`: committed + offset.
        self.committed = np.zeros((_PASSES + 3) * self.n, dtype=np.int64)
        self.offset = 0
        self.most = 0  # the largest of committed[at : frontier + 1]
        self.frontier = -1

    def state(self) -> tuple[Any, ...]:
        at, seen = self.at, enumerate(self.last_seen)
        return (
            *super().state(),
            self.head - at // self.n * len(self.function),
            frozenset((self.relative(x), last - at) for x, last in seen if last >= at),
            (self.committed[at : self.frontier + 1] + self.offset).tobytes(),
        )

    def entering(self, a: int) -> list[tuple[Kind, int]]:
        """Take variables into the window while there is room; return those to bring in."""
        function, size, last_seen = self.function, self.size, self.last_seen
        count, last = len(function), self.start + self.n
        end = a + self.n if self.reach is None else self.start + self.reach[a - self.start]
        end = min(end, last) if self.closed else end
        incoming: list[tuple[Kind, int]] = []
        if a and self.committed[a - 1] >= self.most:  # the function that needed most has run
            self.most = int(self.committed[a : self.frontier + 1].max(initial=-self.offset))
        cycle, position = divmod(self.head, count)
        instances, shift = self.instances[cycle % 2], cycle * self.n
        while (j := function[position] + shift) < end:
            x, birth = instances[position], self.born[position]
            seen = last_seen[x] >= a
            if j > a and not seen and self.window_used + size[x] > self.window:
                break
            if not self._commit(x, j, a, seen, birth):
                break
            last_seen[x] = j
            if not seen:
                self.window_used += size[x]
            if not (seen or birth):
                self.reserved.pop(x, None)  # it is on the device, and stays: step (d)
                if not self.device[x]:
                    incoming.append((Kind.SWAP_IN if self.read[position] else Kind.ALLOCATE, x))
            position += 1
            if position == count:
                cycle, position = cycle + 1, 0
                instances, shift = self.instances[cycle % 2], cycle * self.n
        self.head = cycle * count + position
        return incoming

    def _commit(self, x: int, j: int, a: int, seen: bool, birth: bool) -> bool:
        """Commit memory to a variable of the window up to f_j; return whether it fits."""
        committed, nbytes = self.committed, self.size[x]
        if j > self.frontier:
            committed[self.frontier + 1 : j + 1] = -self.offset
            self.frontier = j
            self.most = max(self.most, -self.offset)
        if seen or birth:  # it takes memory from within the window on
            low = self.last_seen[x] + 1 if seen else j
            if low <= j:
                most = int(committed[low : j + 1].max()) + nbytes
                if j > a and most + self.offset > self.budget:
                    return False
                committed[low : j + 1] += nbytes
                self.most = max(self.most, most)
        else:  # it takes memory from now on
            if j > a and self.most + self.offset + nbytes > self.budget:
                return False
            self.offset += nbytes
        return True

    def leaving(self, a: int) -> Iterator[int]:
        """Yield the last uses in the window of the variables that leave it with f_a."""
        cycle, number = divmod(a, self.n)
        instances, passed = self.instances[cycle % 2], cycle * len(self.function)
        for entry in range(self.first[number], self.first[number + 1]):
            x = instances[entry]
            if self.last_seen[x] == a:
                self.window_used -= self.size[x]
                yield passed + entry


# ---- the choice of a window


def tune_window(
    trace: Trace, budget_bytes: int, compute_times: Times, bandwidth: Rates, latency_s: float = 0.0
) -> SwapPlan:
    """Return the plan of the window with the least simulated time.

    Tried are windows of `WINDOW_SHARES` of the budget in bytes, as in the paper; and, since times
    may be far from proportional to bytes, windows of `TIME_SHARES` of the computation in seconds
    and of 2 to 256 functions. Arguments and errors are those of `plan_packed`.
    """
    plans = windows(trace, budget_bytes, np.asarray(compute_times, dtype=np.float64))
    best = fastest(plans, compute_times, bandwidth, latency_s)
    assert best is not None  # WINDOW_SHARES is not empty
    return best


def score(plan: SwapPlan, *costs: Any) -> tuple[float, int]:
    """Return a plan's simulated seconds and its bytes; `costs` are those of `fastest`."""
    return round(plan.simulate(*costs).time_s, 9), plan.bytes_moved


def fastest(
    plans: Iterable[SwapPlan], compute_times: Times, bandwidth: Rates, latency_s: float
) -> SwapPlan | None:
    """Return the fastest plan, among equals that with the fewest bytes; None without plans."""
    best: tuple[tuple[float, int], SwapPlan] | None = None
    for plan in plans:
        scored = score(plan, compute_times, bandwidth, latency_s)
        if best is None or scored < best[0]:
            best = scored, plan
        if not plan.bytes_moved:  # it cannot be beaten
            break
    return best[1] if best else None


def windows(trace: Trace, budget_bytes: int, times: Vector) -> Iterator[SwapPlan]:
    """Yield the plans from which `tune_window` takes the fastest."""
    for share in WINDOW_SHARES:
        plan = plan_swaps(trace, budget_bytes, int(share * budget_bytes))
        yield plan
        if not plan.bytes_moved:  # no other is better
            return
    n, unlimited = len(trace.functions), sum(trace.sizes.values())
    functions = np.arange(n)
    reaches = [functions + 1 + count for count in FUNCTIONS_AHEAD]
    starts = np.concatenate([[0.0], np.cumsum(np.tile(times, 2))])
    for share in TIME_SHARES:  # functions that start within this time after the current one
        until = starts[1 : n + 1] + share * times.sum()
        reaches.append(np.searchsorted(starts[:-1], until, side="right"))
    for reach in reaches:
        clipped = np.clip(reach, functions + 1, functions + n).tolist()
        yield _schedule(trace, budget_bytes, unlimited, clipped)
