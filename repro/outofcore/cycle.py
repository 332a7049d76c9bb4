"""Iterations planned one after another until they repeat: what schedulers of a cycle share."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from repro.outofcore.plan import SwapPlan
from repro.outofcore.sequence import Action, Kind, Trace


class Cycle:
    """An endless sequence of iterations, with what is on the device and on the host.

    A subclass decides what enters before a function and what leaves after it. A leaving variable is
    only reserved to leave: it is copied and released when its memory is needed, oldest first.

    Variables are numbers here. A variable that does not persist has two instances, 2 v and 2 v + 1,
    in alternate iterations, since a window may hold its next birth while the earlier one is still
    alive. Functions are numbered across iterations: f_a is number a % n of iteration a // n.
    """

    scheduler = "window"
    window: int | None = None
    closed = False  # empty the device after each iteration

    def entering(self, a: int) -> Iterable[tuple[Kind, int]]:
        """Return the variables to bring in before f_a, and how."""
        raise NotImplementedError

    def leaving(self, a: int) -> Iterable[int]:
        """Return the uses at f_a, numbered across iterations, after which variables may leave."""
        raise NotImplementedError

    def __init__(self, trace: Trace, budget_bytes: int) -> None:
        self.trace, self.budget = trace, budget_bytes
        self.n = n = len(trace.functions)
        self.names = list(trace.accesses)
        self.number = number = {name: v for v, name in enumerate(self.names)}
        self.persists = [name in trace.persistent for name in self.names]
        self.size = [trace.sizes[name] for name in self.names for _ in range(2)]
        self.death = [trace.lifetimes.get(name, (0, 0))[1] for name in self.names]
        self.ending = [[number[name] for name in names] for names in trace.ending]
        # The variable-sequence in flat lists, one entry per use; entries first[a] to first[a + 1]
        # belong to f_a. Many small objects would keep the garbage collector busy.
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

    def settled(self, iterations: int) -> SwapPlan | None:
        """Return the plan of the iteration that starts as the one before; None without one."""
        for _ in range(iterations):
            start = self.state()
            self.iteration()
            if self.state() == start:
                return self.plan(start)
        return None

    def iteration(self) -> None:
        """Plan one iteration (section 3, figure 2)."""
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
                # (d) except of dead variables.
                if self.persists[x // 2] or self.death[x // 2] != number + 1:
                    self.reserved[x] = use
                    self.queue.append(use)
        self.at = start + n
        while self.closed and self.queue:
            self.release_oldest(self.after[-1])

    def state(self) -> tuple[Any, ...]:
        """Return the state that determines the next iteration, counted from its start."""
        passed, reserved = self.at // self.n * len(self.function), set(self.reserved.values())
        return (
            self._turned(self.device),
            self._turned(self.valid),
            self._turned(self.alive),
            tuple(use - passed for use in self.queue if use in reserved),
        )

    def _turned(self, flags: list[bool]) -> frozenset[tuple[int, int]]:
        return frozenset(self.relative(x) for x, flag in enumerate(flags) if flag)

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
