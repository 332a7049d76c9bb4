"""The paper's schedule without our changes, as a baseline for them.

Source: Hayakawa and Narihira, section 3 and figure 2. At each function f_i: (a) swap in the part of
the variable-sequence that enters the window, counting repeated variables each time; (b) if that
exceeds the budget, wait for the oldest swap-outs first; run f_i; (c) swap out the variables of f_i,
(d) except those that are never used again or lie within the window. All variables begin and end on
the host, and are copied to it again even if unchanged there.

Points that the paper leaves open follow the authors' code (nnabla): the window ends at the first
variable without room; if there is no room for a function's results, the variable prefetched for the
latest use is withdrawn, as if it had not been requested yet.

Differs from the paper: a value that is overwritten next is not copied; and no copy to the host runs
while its variable is written, since that variable's memory is not released.
"""

from repro.outofcore.bounds import check_budget
from repro.outofcore.plan import Draft, SwapPlan
from repro.outofcore.sequence import Action, Kind, Trace

_DEFAULT_SHARE = 1.5  # of the budget: the authors' default


def plan_literally(trace: Trace, budget_bytes: int, window_bytes: int | None = None) -> SwapPlan:
    """Schedule the swaps of an iteration as in section 3.

    Arguments and errors are those of `plan_swaps`.
    """
    check_budget(trace, budget_bytes)
    if window_bytes is None:
        window_bytes = int(_DEFAULT_SHARE * budget_bytes)
    if window_bytes < 0:
        raise ValueError(f"window_bytes is {window_bytes}: give 0 or more, or None")
    return _Literal(trace, budget_bytes, window_bytes).plan()


class _Literal(Draft):
    """One iteration, from everything on the host to everything on the host."""

    def __init__(self, trace: Trace, budget: int, window: int) -> None:
        super().__init__(trace, budget)
        self.window = window
        self.sequence = [(a, x) for a, f in enumerate(trace.functions) for x in f.variables]
        self.leaving: dict[str, int] = {}  # function after which it began to leave, oldest first
        self.ahead: dict[str, int] = {}  # function before which it was prefetched; not used yet
        self.late: list[str] = []  # prefetches withdrawn, and within the window
        self.begun: dict[str, int] = {}  # function after which a copy of its current value began

    def plan(self) -> SwapPlan:
        """Return the plan."""
        sequence = self.sequence
        head = entered = last = 0  # of the window: its end, its bytes, its start
        for a, function in enumerate(self.trace.functions):
            for name in self.trace.ending[a]:
                self._end(name)
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

    def _end(self, name: str) -> None:
        self.free(name)
        for names in (self.leaving, self.ahead, self.begun):
            names.pop(name, None)
        self.alive.discard(name)

    def _make(self, a: int, variables: tuple[str, ...]) -> None:
        """Bring a function's variables to the device, and make room for its new ones."""
        function = self.trace.functions[a]
        for name in variables:
            self.leaving.pop(name, None)
            self.ahead.pop(name, None)
            if name in self.late:
                self.late.remove(name)
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
                self.late.append(name)
            else:  # it had stayed, since it lies within the window
                name = next(x for x in sorted(self.device) if x not in variables)
                self._leave(max(u for u in (-1, *self.trace.accesses[name]) if u < a), name)
                self.late.append(name)

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
        if name in self.late:
            self.late.remove(name)
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
