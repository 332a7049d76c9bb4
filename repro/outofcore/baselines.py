"""Other schedulers on the same traces, as baselines for the window.

Sources: Rhu et al., vDNN (MICRO 2016), as Hayakawa and Narihira describe it in section 2: swap in
for a function at the function before; Le et al., Large Model Support (ISMM 2019): swap by fixed
distances; and demand paging. None of these copies a variable that is dead or unchanged on the host,
which favours them. Last comes the paper's own schedule to the letter.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise, product

from repro.outofcore.plan import Draft, SwapPlan
from repro.outofcore.schedule import Cycle, checked_window, fastest
from repro.outofcore.sequence import Action, Kind, Trace
from repro.outofcore.simulation import Rates, Times, check_budget

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
    trace: Trace, budget_bytes: int, compute_times: Times, bandwidth: Rates, latency_s: float = 0.0
) -> SwapPlan:
    """Return the plan for the distances with the least simulated time.

    Thresholds are powers of two up to 512, distances ahead up to 128. If no pair fits, it raises
    DoesNotFit.
    """
    best = fastest(_that_fit(trace, budget_bytes), compute_times, bandwidth, latency_s)
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

    def use(self, name: str, f: int) -> int:
        """Return the number of a variable's use by a function."""
        return self.first[f] + self.trace.functions[f].variables.index(name)

    def entering(self, a: int) -> Iterator[tuple[Kind, int]]:
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
        passed = a // self.n * len(self.function)
        return [passed + use for use in self.leaves[a - self.start]]

    def release_oldest(self, actions: list[tuple[Kind, int]]) -> None:
        """Carry out the oldest reserved swap-out; without one raise DoesNotFit."""
        if not self.queue:
            number = self.at - self.start
            raise DoesNotFit(
                f"the schedule '{self.scheduler}' holds {self.used} bytes at function {number} "
                f"({self.trace.functions[number].name}), of which it releases none; the budget is "
                f"{self.budget} bytes"
            )
        super().release_oldest(actions)

    def planned(self) -> SwapPlan:
        """Return the plan; raise DoesNotFit if it exceeds the budget or never repeats."""
        plan = self.settled(_PASSES)
        if plan is None:
            raise DoesNotFit(f"the schedule '{self.scheduler}' does not settle in {_PASSES} passes")
        return plan


# ---- the paper's schedule without our changes


def plan_literally(trace: Trace, budget_bytes: int, window_bytes: int | None = None) -> SwapPlan:
    """Schedule the swaps of an iteration as in section 3 and figure 2, to the letter.

    At each function f_i: (a) swap in the part of the variable-sequence that enters the window,
    counting repeated variables each time; (b) if that exceeds the budget, wait for the oldest
    swap-outs first; run f_i; (c) swap out the variables of f_i, (d) except those that are never
    used again or lie within the window. All variables begin and end on the host, and are copied to
    it again even if unchanged there. Points that the paper leaves open follow the authors' code
    (nnabla): the window ends at the first variable without room; if there is no room for a
    function's results, the variable prefetched for the latest use is withdrawn, as if it had not
    been requested yet. Arguments and errors are those of `plan_swaps`.

    Differs from the paper: a value that is overwritten next is not copied; and no copy to the host
    runs while its variable is written, since that variable's memory is not released.
    """
    check_budget(trace, budget_bytes)
    return _Literal(trace, budget_bytes, checked_window(window_bytes, budget_bytes)).plan()


class _Literal(Draft):
    """One iteration, from everything on the host to everything on the host."""

    def __init__(self, trace: Trace, budget: int, window: int) -> None:
        super().__init__(trace, budget)
        self.window = window
        self.sequence = [(a, x) for a, f in enumerate(trace.functions) for x in f.variables]
        self.leaving: dict[str, int] = {}  # function after which it began to leave, oldest first
        self.ahead: dict[str, int] = {}  # function before which it was prefetched; not used yet
        self.late: dict[str, int] = {}  # prefetches withdrawn, and within the window
        self.begun: dict[str, int] = {}  # function after which a copy of its current value began

    def plan(self) -> SwapPlan:
        sequence = self.sequence
        head = entered = last = 0  # of the window: its end, its bytes, its start
        for a, function in enumerate(self.trace.functions):
            for name in self.trace.ending[a]:
                self.free(name)
                self.alive.discard(name)
                for names in (self.leaving, self.ahead, self.begun):
                    names.pop(name, None)
            variables = function.variables
            while last < len(sequence) and sequence[last][0] < a:
                entered -= self.sizes[sequence[last][1]] if last < head else 0
                last += 1
            head, entered = (last, 0) if head < last else (head, entered)
            self._make(a, variables)  # step (b) for f_i's own variables
            late = [x for x in self.late if x not in variables]
            all(self._ask(a, name) for name in late)  # until there is no room for one
            while head < len(sequence):  # step (a)
                b, name = sequence[head]
                if b > a and not self._enters(a, name, entered):
                    break
                entered += self.sizes[name]
                head += 1
            inside = {x for b, x in sequence[last:head] if b > a}
            for name in variables:  # steps (c) and (d)
                if name not in inside and self._next(name, a) is not None:
                    self._leave(a, name)
        for name in sorted(self.device):
            if self.trace.lifetimes.get(name, (0, 0))[1] != self.n:
                if name not in self.leaving:
                    self._leave(self.n - 1, name)
                self.after[-1].append(Action(Kind.RELEASE, name))
        return self.written("paper", (), self.trace.alive_at_start,
                            window_bytes=self.window, copies_again=True)  # fmt: skip

    def _enters(self, a: int, name: str, entered: int) -> bool:
        """Whether a later entry of the variable-sequence enters the window: (b) and (d)."""
        if entered + self.sizes[name] > self.window:
            return False
        born = self.trace.lifetimes.get(name, (-1, 0))[0] <= a
        return not born or self._ask(a, name)

    def _next(self, name: str, a: int) -> tuple[int, bool] | None:
        """Return the next use after function a and whether it reads; None without a next use."""
        for b in self.trace.accesses[name]:
            if b > a:
                return b, name in self.trace.functions[b].inputs
        if name in self.trace.persistent:
            first = self.trace.accesses[name][0]
            return self.n + first, name in self.trace.functions[first].inputs
        death = self.trace.lifetimes[name][1]
        return (death, True) if death > a + 1 else None

    def _make(self, a: int, variables: tuple[str, ...]) -> None:
        """Bring a function's variables to the device, and make room for its new ones."""
        function = self.trace.functions[a]
        for name in variables:
            for names in (self.leaving, self.ahead, self.late):
                names.pop(name, None)
        for name in variables:
            if name not in self.device:
                self._room(a, self.sizes[name], variables)
                if name in self.alive:
                    kind = Kind.SWAP_IN if name in function.inputs else Kind.ALLOCATE
                    self.before[a].append(Action(kind, name))
                self.alive.add(name)
                self.allocate(name)
            if name in function.outputs and name in self.begun:
                self.after[self.begun.pop(name)].remove(Action(Kind.SWAP_OUT, name))

    def _room(self, a: int, nbytes: int, variables: tuple[str, ...]) -> None:
        while self.used + nbytes > self.budget:
            if self.leaving:
                self._release(a, next(iter(self.leaving)))
            elif self.ahead:
                name = max(self.ahead, key=lambda x: (self._next(x, a - 1) or (0, True))[0])
                self.before[self.ahead.pop(name)].remove(Action(Kind.SWAP_IN, name))
                self.free(name)
                self.late[name] = a
            else:  # it had stayed, since it lies within the window
                name = next(x for x in sorted(self.device) if x not in variables)
                self._leave(max(u for u in (-1, *self.trace.accesses[name]) if u < a), name)
                self.late[name] = a

    def _ask(self, a: int, name: str) -> bool:
        """Take a variable into the window; return whether there is room for it."""
        if name in self.device:
            self.leaving.pop(name, None)  # figure 2 (d)
            return True
        following = self._next(name, a)
        if following is None or not following[1]:
            return True  # the next use overwrites it whole, and allocates it then
        may_go = sum(self.sizes[x] for x in self.leaving)
        if self.used - may_go + self.sizes[name] > self.budget:
            return False
        while self.used + self.sizes[name] > self.budget:
            self._release(a, next(iter(self.leaving)))
        self.before[a].append(Action(Kind.SWAP_IN, name))
        self.allocate(name)
        self.ahead[name] = a
        self.late.pop(name, None)
        return True

    def _leave(self, a: int, name: str) -> None:
        """Reserve the swap-out of a variable after function a, and begin its copy."""
        following = self._next(name, a)
        if following is not None and following[1] and name not in self.begun:
            self.after[a].append(Action(Kind.SWAP_OUT, name))
            self.begun[name] = a
        self.leaving[name] = a

    def _release(self, a: int, name: str) -> None:
        del self.leaving[name]
        self.begun.pop(name, None)
        self.before[a].append(Action(Kind.RELEASE, name))
        self.free(name)
