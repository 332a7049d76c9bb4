"""Other schedulers on the same traces, as baselines for the window.

Sources: Rhu et al., vDNN (MICRO 2016), as Hayakawa and Narihira describe it in section 2: swap in
for a function at the function before; Le et al., Large Model Support (ISMM 2019): swap by fixed
distances; and demand paging. None copies a variable that is dead or unchanged on the host, which
favours these baselines.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from repro.outofcore.bounds import check_budget
from repro.outofcore.plan import Draft, SwapPlan
from repro.outofcore.schedule import fastest
from repro.outofcore.sequence import Action, Kind, Trace

_PASSES = 8


class DoesNotFit(ValueError):
    """A scheduler that ignores the budget needs more than the budget."""


def on_demand(trace: Trace, budget_bytes: int) -> SwapPlan:
    """Swap in a variable when a function needs it; swap out the least recently used.

    Raises:
        BudgetTooSmall: One function alone needs more than the budget.
    """
    check_budget(trace, budget_bytes)
    run = _Run(trace, budget_bytes, "on demand")
    for a, function in enumerate(trace.functions):
        run.leaves[a] = list(function.variables)
    return run.plan()


def vdnn(trace: Trace, budget_bytes: int) -> SwapPlan:
    """Swap out after the last forward use, and swap in one function ahead, as early works do.

    The longest gap between uses of a variable that does not persist is taken as the gap between
    forward and backward pass. In this gap the variable is away, even if there is room, and the next
    function waits until it is swapped out. All other variables stay.

    Raises:
        BudgetTooSmall: One function alone needs more than the budget.
        DoesNotFit: The variables that stay need more than the budget.
    """
    check_budget(trace, budget_bytes)
    n = len(trace.functions)
    run = _Run(trace, budget_bytes, "vdnn", eager=True)
    for name in trace.lifetimes:
        used = trace.accesses[name]
        length, a, b = max(((b - a, a, b) for a, b in pairwise(used)), default=(0, 0, 0))
        if length > 2:
            run.leaves[a].append(name)
            run.enters[(b - 1) % n].append(name)
    return run.plan()


def fixed_distance(
    trace: Trace, budget_bytes: int, swapout_threshold: int, swapin_ahead: int
) -> SwapPlan:
    """Swap by distances in functions, the same everywhere, as Large Model Support does.

    After a function, its variables with a next use more than `swapout_threshold` functions away are
    swapped out; each is swapped in `swapin_ahead` functions before that use. The device waits for a
    swap-out only if the budget needs its memory.

    Differs from the paper: Hayakawa and Narihira print that a variable leaves if the distance is at
    most ``swapout_threshold``. LMS's manual says that a smaller threshold swaps out more, and the
    paper itself that a larger one takes more memory: both agree only with "more than". A distance
    here counts functions in their order, not edges of the graph.

    Raises:
        DoesNotFit: The distances, chosen without regard to the budget, exceed it.
        ValueError: A distance is below 1.
    """
    check_budget(trace, budget_bytes)
    if swapout_threshold < 1 or swapin_ahead < 1:
        raise ValueError(
            f"swapout_threshold is {swapout_threshold} and swapin_ahead {swapin_ahead}: give "
            "whole numbers of functions, 1 or more"
        )
    n = len(trace.functions)
    run = _Run(trace, budget_bytes, f"fixed distance {swapout_threshold}, {swapin_ahead}")
    for name, a, b, ends, _ in trace.gaps:
        if ends or b - a > swapout_threshold:
            run.leaves[a].append(name)
            if not ends:
                run.enters[max(a + 1, b - swapin_ahead) % n].append(name)
    return run.plan()


def tune_fixed_distance(
    trace: Trace,
    budget_bytes: int,
    compute_times: Sequence[float] | NDArray[np.float64],
    bandwidth: float | tuple[float, float],
    latency_s: float = 0.0,
) -> SwapPlan:
    """Return the plan for the distances with the least simulated time.

    Thresholds are powers of two up to 512, distances ahead up to 128.

    Raises:
        DoesNotFit: No pair fits the budget.
    """
    times = np.asarray(compute_times, dtype=np.float64)
    plans = _that_fit(trace, budget_bytes)
    best = fastest(plans, times, bandwidth, latency_s)
    if best is None:
        raise DoesNotFit(
            f"no pair of distances fits the budget of {budget_bytes} bytes: raise the budget"
        )
    return best


def _that_fit(trace: Trace, budget_bytes: int) -> Iterator[SwapPlan]:
    for threshold, ahead in product(range(10), range(8)):
        with suppress(DoesNotFit):
            yield fixed_distance(trace, budget_bytes, 2**threshold, 2**ahead)


class _Run(Draft):
    """Fixed rules for each function, applied to iteration after iteration until they repeat.

    `enters` are swapped in before a function, and `leaves` may be released after it. Releases are
    delayed until their memory is needed, oldest first, unless `eager`.
    """

    def __init__(
        self, trace: Trace, budget_bytes: int, scheduler: str, eager: bool = False
    ) -> None:
        super().__init__(trace, budget_bytes)
        self.scheduler, self.eager = scheduler, eager
        self.enters: list[list[str]] = [[] for _ in range(self.n)]
        self.leaves: list[list[str]] = [[] for _ in range(self.n)]
        self.alive, self.valid = set(trace.persistent), set(trace.persistent)
        self.reserved: dict[str, int] = {}
        self.queue: deque[tuple[str, int]] = deque()

    def plan(self) -> SwapPlan:
        """Return the plan once an iteration starts in the state of the one before.

        Raises:
            DoesNotFit: The plan needs more than the budget, or the iterations never repeat.
        """
        for cycle in range(_PASSES):
            start = (self.device.copy(), self.valid.copy(), self._waiting(cycle))
            self.carried: set[str] = set()
            self.clear()
            self.start = cycle * self.n
            for number in range(self.n):
                self._function(self.start + number, number)
            for name in self.trace.ending[0]:  # variables that die with the last function
                if self.trace.lifetimes[name][1] == self.n:
                    self._die(name)
            if start == (self.device, self.valid, self._waiting(cycle + 1)):
                carried = self.carried
                return self.written(self.scheduler, start[0], start[1] | carried, carried)
        raise DoesNotFit(f"the schedule '{self.scheduler}' does not settle in {_PASSES} iterations")

    def _waiting(self, cycle: int) -> list[tuple[str, int]]:
        return [
            (name, after - cycle * self.n)
            for name, after in self.queue
            if self.reserved.get(name) == after
        ]

    def _die(self, name: str) -> None:
        self.free(name)
        self.alive.discard(name)
        self.valid.discard(name)
        self.reserved.pop(name, None)

    def _function(self, a: int, number: int) -> None:
        function, sizes = self.trace.functions[number], self.sizes
        for name in self.trace.ending[number]:
            self._die(name)
        wanted = [name for name in self.enters[number] if name in self.alive]
        wanted += [name for name in function.variables if name in self.alive]
        for name in wanted:
            self.reserved.pop(name, None)
        while self.eager and self.queue:
            self._release_oldest(number)
        for name in dict.fromkeys(wanted):
            self._take(number, name)
        born = [name for name in function.variables if name not in self.alive]
        self._make_room(number, sum(sizes[name] for name in born))
        for name in born:
            self.alive.add(name)
            self.allocate(name)
        self.valid.difference_update(function.outputs)
        for name in self.leaves[number]:
            ends = self.trace.lifetimes[name][1] if name not in self.trace.persistent else None
            if ends != number + 1:
                self.reserved[name] = a
                self.queue.append((name, a))

    def _needed(self, name: str, after: int) -> bool:
        """Whether the value is still needed after function `after` of an iteration."""
        used = self.trace.accesses[name]
        birth = self.trace.lifetimes.get(name, (-1, 0))[0]
        following = next((b for b in used if b > after), None)
        if after < birth or following is None:
            return True
        return name in self.trace.functions[following].inputs

    def _take(self, number: int, name: str) -> None:
        if name in self.device:
            return
        self._make_room(number, self.trace.sizes[name])
        kind = Kind.SWAP_IN if self._needed(name, number - 1) else Kind.ALLOCATE
        self.before[number].append(Action(kind, name))
        self.allocate(name)

    def _make_room(self, number: int, nbytes: int) -> None:
        while self.used + nbytes > self.budget:
            if not self.queue:
                function = self.trace.functions[number].name
                raise DoesNotFit(
                    f"the schedule '{self.scheduler}' holds {self.used} bytes at function {number} "
                    f"({function}) and needs {nbytes} more than it may release; the budget is "
                    f"{self.budget} bytes"
                )
            self._release_oldest(number)

    def _release_oldest(self, number: int) -> None:
        name, after = self.queue.popleft()
        if self.reserved.get(name) != after:
            return  # cancelled meanwhile
        del self.reserved[name]
        if name not in self.valid and self._needed(name, after % self.n):
            self.after[after % self.n].append(Action(Kind.SWAP_OUT, name))
            self.valid.add(name)
            if after < self.start:
                self.carried.add(name)
        self.before[number].append(Action(Kind.RELEASE, name))
        self.free(name)
