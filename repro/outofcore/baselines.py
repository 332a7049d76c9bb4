"""Other schedulers on the same traces, as baselines for the window.

Sources: Rhu et al., vDNN (MICRO 2016), as Hayakawa and Narihira describe it in section 2: swap in
for a function at the function before; Le et al., Large Model Support (ISMM 2019): swap by fixed
distances; and demand paging. None copies a variable that is dead or unchanged on the host, which
favours these baselines.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from repro.outofcore.bounds import check_budget
from repro.outofcore.plan import SwapPlan
from repro.outofcore.schedule import Cycle, fastest
from repro.outofcore.sequence import Kind, Trace

_PASSES = 8


class DoesNotFit(ValueError):
    """A scheduler that ignores the budget needs more than the budget."""


def on_demand(trace: Trace, budget_bytes: int) -> SwapPlan:
    """Swap in a variable when a function needs it; swap out the least recently used."""
    check_budget(trace, budget_bytes)
    run = _Rules(trace, budget_bytes, "on demand")
    run.leaves = [[*range(a, b)] for a, b in pairwise(run.first)]
    return run.planned()


def vdnn(trace: Trace, budget_bytes: int) -> SwapPlan:
    """Swap out after the last forward use, and swap in one function ahead, as early works do.

    The longest gap between uses of a variable that does not persist is taken as the gap between
    forward and backward pass. In this gap the variable is away, even if there is room, and the next
    function waits until it is swapped out. All other variables stay.

    Raises:
        DoesNotFit: The variables that stay need more than the budget.
    """
    check_budget(trace, budget_bytes)
    n = len(trace.functions)
    run = _Rules(trace, budget_bytes, "vdnn", eager=True)
    for name in trace.lifetimes:
        used = trace.accesses[name]
        length, a, b = max(((b - a, a, b) for a, b in pairwise(used)), default=(0, 0, 0))
        if length > 2:
            run.leaves[a].append(run.use(name, a))
            run.enters[(b - 1) % n].append(run.use(name, b % n))
    return run.planned()


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
        raise ValueError(f"the distances are {swapout_threshold}, {swapin_ahead}: give 1 or more")
    n = len(trace.functions)
    run = _Rules(trace, budget_bytes, f"fixed distance {swapout_threshold}, {swapin_ahead}")
    for name, a, b, ends, _ in trace.gaps:
        if ends or b - a > swapout_threshold:
            run.leaves[a].append(run.use(name, a))
            if not ends:
                run.enters[max(a + 1, b - swapin_ahead) % n].append(run.use(name, b % n))
    return run.planned()


def tune_fixed_distance(
    trace: Trace,
    budget_bytes: int,
    compute_times: Sequence[float] | NDArray[np.float64],
    bandwidth: float | tuple[float, float],
    latency_s: float = 0.0,
) -> SwapPlan:
    """Return the plan for the distances with the least simulated time.

    Thresholds are powers of two up to 512, distances ahead up to 128. If no pair fits, it raises
    DoesNotFit.
    """
    times = np.asarray(compute_times, dtype=np.float64)
    plans = _that_fit(trace, budget_bytes)
    best = fastest(plans, times, bandwidth, latency_s)
    if best is None:
        raise DoesNotFit(f"no pair of distances fits {budget_bytes} bytes: raise the budget")
    return best


def _that_fit(trace: Trace, budget_bytes: int) -> Iterator[SwapPlan]:
    for threshold, ahead in product(range(10), range(8)):
        with suppress(DoesNotFit):
            yield fixed_distance(trace, budget_bytes, 2**threshold, 2**ahead)


class _Rules(Cycle):
    """Fixed rules for each function, applied to iteration after iteration until they repeat.

    Variables of `enters` are swapped in before a function, those of `leaves` may be released after
    it: when their memory is needed, or with `eager` before the next function.
    """

    def __init__(
        self, trace: Trace, budget_bytes: int, scheduler: str, eager: bool = False
    ) -> None:
        super().__init__(trace, budget_bytes)
        self.scheduler, self.eager = scheduler, eager
        # Numbers of uses: of those for which variables enter, and after which they leave.
        self.enters: list[list[int]] = [[] for _ in range(self.n)]
        self.leaves: list[list[int]] = [[] for _ in range(self.n)]

    def use(self, name: str, function: int) -> int:
        """Return the number of a variable's use by a function."""
        first = self.first[function]
        return first + self.trace.functions[function].variables.index(name)

    def entering(self, a: int) -> Iterator[tuple[Kind, int]]:
        """Yield the variables to bring in before f_a, and how."""
        number = a - self.start
        instances = self.instances[a // self.n % 2]
        uses = [*self.enters[number], *range(self.first[number], self.first[number + 1])]
        wanted = {instances[use]: self.read[use] for use in reversed(uses)}
        for x in wanted:
            self.reserved.pop(x, None)
        while self.eager and self.queue:
            self.release_oldest(self.before[number])
        for use in uses:
            x = instances[use]
            if self.alive[x] and not self.device[x]:
                yield (Kind.SWAP_IN if wanted[x] else Kind.ALLOCATE), x

    def leaving(self, a: int) -> list[int]:
        """Return the uses at f_a after which variables may leave."""
        passed = a // self.n * len(self.function)
        return [passed + use for use in self.leaves[a - self.start]]

    def release_oldest(self, actions: list[tuple[Kind, int]]) -> None:
        """Carry out the oldest reserved swap-out.

        Raises:
            DoesNotFit: None is reserved.
        """
        if not self.queue:
            number = self.at - self.start
            raise DoesNotFit(
                f"the schedule '{self.scheduler}' holds {self.used} bytes at function {number} "
                f"({self.trace.functions[number].name}), of which it releases none; the budget is "
                f"{self.budget} bytes"
            )
        super().release_oldest(actions)

    def planned(self) -> SwapPlan:
        """Return the plan.

        Raises:
            DoesNotFit: The plan needs more than the budget, or the iterations never repeat.
        """
        plan = self.settled(_PASSES)
        if plan is None:
            raise DoesNotFit(f"the schedule '{self.scheduler}' does not settle in {_PASSES} passes")
        return plan
