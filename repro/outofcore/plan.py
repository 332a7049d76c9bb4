"""The plan of copies for a repeated iteration, its rules, and its requests for memory.

Source: Hayakawa and Narihira, section 3. Every scheduler returns a `SwapPlan`, so that the same
code checks, simulates and runs all of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from repro.outofcore.allocator import Event
from repro.outofcore.host import aligned
from repro.outofcore.sequence import Action, Function, Kind, Trace
from repro.outofcore.simulation import changes, simulate

Actions = tuple[tuple[Action, ...], ...]


class PlanError(ValueError):
    """A plan breaks a rule: it would exceed its budget, or compute with a missing value."""


@dataclass(frozen=True)
class SwapPlan:
    """The actions around each function of a repeated iteration.

    Attributes:
        budget_bytes: The device memory that may be taken at any time.
        before: (n) actions just before each function, in order; `after`: just after it.
        resident: Variables that are on the device when the iteration starts.
        host_valid: Variables with a correct copy on the host when the iteration starts.
        outgoing: Variables that began to be copied to the host in the iteration before, and still
            take device memory.
        window_bytes: The window, if the scheduler has one.
        copies_again: Whether it copies variables that the host has already, as in the paper.
    """

    trace: Trace = field(repr=False)
    budget_bytes: int
    before: Actions = field(repr=False)
    after: Actions = field(repr=False)
    resident: frozenset[str] = field(repr=False)
    host_valid: frozenset[str] = field(repr=False)
    outgoing: frozenset[str] = field(default=frozenset(), repr=False)
    scheduler: str = "window"
    window_bytes: int | None = None
    copies_again: bool = False

    @property
    def bytes_in(self) -> int:
        """Bytes copied to the device in one iteration."""
        return self._bytes(Kind.SWAP_IN)

    @property
    def bytes_out(self) -> int:
        """Bytes copied to the host in one iteration."""
        return self._bytes(Kind.SWAP_OUT)

    @property
    def bytes_moved(self) -> int:
        """Bytes copied in both directions in one iteration."""
        return self.bytes_in + self.bytes_out

    def _bytes(self, which: Kind) -> int:
        actions = chain(*self.before, *self.after)
        return sum(self.trace.sizes[name] for kind, name in actions if kind is which)

    @cached_property
    def host_bytes(self) -> int:
        """The most bytes of variables on the host at once; they stay there until they end."""
        return self.most_on_host(())

    def most_on_host(self, before: Iterable[str]) -> int:
        """Return `host_bytes` where the host holds persistent variables from `before`."""
        on_host = {name: aligned(self.trace.sizes[name]) for name in before}
        held = peak = sum(on_host.values())
        for number in 2 * [*range(len(self.trace.functions))]:
            held -= sum(on_host.pop(name, 0) for name in self.trace.ending[number])
            for kind, name in (*self.before[number], *self.after[number]):
                # A released variable is copied: its value may still be read from outside.
                if kind in (Kind.SWAP_OUT, Kind.RELEASE) and name not in on_host:
                    on_host[name] = aligned(self.trace.sizes[name])
                    held += on_host[name]
                    peak = max(peak, held)
        return peak

    def verify(self) -> int:
        """Execute the plan symbolically, twice; return the most bytes held at any time.

        The budget holds before and during every function, including running transfers; inputs are
        on the device when their function runs; a copy to the device has a correct copy on the host
        as its source; no variable is copied that is dead or already at the destination; no value
        that is still needed is lost; and the iteration ends as it started.

        Raises:
            PlanError: A rule is broken; the message names the function and the variable.
        """
        check = _Check(self)
        for cycle in range(2):
            check.iteration(cycle)
        return check.peak

    simulate = simulate


class Draft:
    """A plan that a scheduler writes function by function."""

    def __init__(self, trace: Trace, budget_bytes: int) -> None:
        self.trace, self.budget, self.sizes = trace, budget_bytes, trace.sizes
        self.n = len(trace.functions)
        self.alive = set(trace.alive_at_start)
        self.device: set[str] = set()  # live variables on the device
        self.used = 0  # their bytes
        self.clear()

    def clear(self) -> None:
        """Begin an iteration."""
        self.before: list[list[Action]] = [[] for _ in range(self.n)]
        self.after: list[list[Action]] = [[] for _ in range(self.n)]

    def allocate(self, name: str) -> None:
        """Count a variable on the device."""
        if name not in self.device:
            self.device.add(name)
            self.used += self.sizes[name]

    def free(self, name: str) -> None:
        """Count a variable off the device."""
        if name in self.device:
            self.device.discard(name)
            self.used -= self.sizes[name]

    def written(self, scheduler: str, resident: Iterable[str], valid: Iterable[str],
                outgoing: Iterable[str] = (), **more: Any) -> SwapPlan:  # fmt: skip
        """Return the plan; the arguments are those of `SwapPlan`."""
        before, after = tuple(map(tuple, self.before)), tuple(map(tuple, self.after))
        sets = frozenset(resident), frozenset(valid), frozenset(outgoing)
        return SwapPlan(self.trace, self.budget, before, after, *sets, scheduler, **more)


class _Check:
    """The state of device and host, from the trace alone and not from the schedulers' code."""

    def __init__(self, plan: SwapPlan) -> None:
        self.plan, self.trace, self.peak = plan, plan.trace, 0
        self.device, self.outgoing = set(plan.resident), set(plan.outgoing)
        self.valid = set(plan.host_valid)  # the host's copy is correct, or will be once done
        self.alive = set(plan.trace.alive_at_start)
        n = len(plan.trace.functions)
        if not len(plan.before) == len(plan.after) == n:
            counts = f"{len(plan.before)} lists of actions before and {len(plan.after)} after them"
            raise PlanError(f"the trace has {n} functions, but the plan {counts}")
        for what, names in (
            ("neither on the device nor on the host", self.alive - self.device - self.valid),
            ("resident, but not alive", self.device - self.alive),
            ("host_valid, but not alive", self.valid - self.alive),
        ):
            if names:
                raise PlanError(f"at the start {_list(names)} is {what}")
        self.measure("at the start")

    def iteration(self, cycle: int) -> None:
        """Run one iteration, and compare its end with its start."""
        plan, trace = self.plan, self.trace
        for number, function in enumerate(trace.functions):
            self.end(trace.ending[number])
            where = f"function {number} ({function.name})"
            self.act(plan.before[number], number, f"before {where}")
            self.execute(number, function, where)
            self.act(plan.after[number], number + 1, f"after {where}")
        # Variables that die with the last function.
        n = len(trace.functions)
        self.end([name for name in trace.ending[0] if trace.lifetimes[name][1] == n])
        for what, names in (
            ("on the device", self.device ^ plan.resident),
            ("under way to the host", self.outgoing ^ plan.outgoing),
            ("valid on the host", plan.host_valid - self.valid),
        ):
            if names:
                raise PlanError(
                    f"iteration {cycle} ends with {_list(names)} {what} otherwise than it "
                    "started: the plan cannot be repeated"
                )

    def end(self, names: list[str]) -> None:
        for state in (self.device, self.outgoing, self.alive, self.valid):
            state.difference_update(names)

    def measure(self, where: str) -> None:
        held, budget = sum(self.trace.sizes[name] for name in self.device), self.plan.budget_bytes
        self.peak = max(self.peak, held)
        if held > budget:
            raise PlanError(
                f"{where} {held} bytes are held, {held - budget} more than the budget of {budget}"
            )

    def needed(self, name: str, after: int) -> bool:
        """Whether a value must survive function `after` - 1: the next use does not replace it."""
        uses, persists = self.trace.accesses[name], name in self.trace.persistent
        following = next((number for number in uses if number >= after), None)
        # Left by the iteration before, or live without a use: it may be read from outside. What
        # persists is read first in the next iteration.
        if following is None or (after <= uses[0] and not persists):
            return True
        return name in self.trace.functions[following].inputs

    def act(self, actions: tuple[Action, ...], after: int, where: str) -> None:
        for kind, name in actions:
            there, valid = name in self.device, name in self.valid
            needed = name in self.alive and self.needed(name, after)
            comes, leaves = kind in (Kind.SWAP_IN, Kind.ALLOCATE), kind is Kind.SWAP_OUT
            for broken, rule in (
                (name not in self.alive, "it is not alive"),
                (comes and there, "it is on the device already"),
                (not (comes or there), "it is not on the device"),
                (kind is Kind.SWAP_IN and not valid, "the host has no right copy"),
                (kind is Kind.SWAP_IN and not needed, "its value is dead: it is overwritten next"),
                (kind is Kind.ALLOCATE and needed, "its value is needed, so it must be copied"),
                (leaves and valid and not self.plan.copies_again,
                 "the host's copy is right already"),
                (leaves and not needed, "its value is dead"),
                (kind is Kind.RELEASE and needed and not valid,
                 "its value is needed and the host has no right copy"),
            ):  # fmt: skip
                if broken:
                    raise PlanError(f"{where} {kind.value} {name!r}: {rule}")
            if kind is Kind.RELEASE:
                self.device.discard(name)
                self.outgoing.discard(name)
            elif leaves:
                self.valid.add(name)
                self.outgoing.add(name)
            else:
                self.device.add(name)
                self.measure(where)

    def execute(self, number: int, function: Function, where: str) -> None:
        for name in function.variables:
            if name not in self.alive:
                if self.trace.accesses[name][0] != number:
                    raise PlanError(f"{where} uses {name!r}, which is not alive")
                self.alive.add(name)  # born here, or given from outside
                self.device.add(name)
            elif name not in self.device:
                raise PlanError(f"{where} uses {name!r}, which is not on the device")
        self.measure(f"while {where} runs")
        for name in function.outputs:
            if name in self.outgoing:
                raise PlanError(f"{where} writes {name!r} while it is being copied to the host")
            self.valid.discard(name)


def _list(names: set[str] | frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(names)[:5])) + (", ..." if len(names) > 5 else "")


def requests(plan: SwapPlan, iterations: int = 2) -> list[Event]:
    """Return a repeated plan's requests for device memory, and their ends; see `by_function`."""
    return [event for _, event in by_function(plan, iterations)]


def by_function(plan: SwapPlan, iterations: int = 2) -> list[tuple[int, Event]]:
    """Return a repeated plan's requests for device memory, and their ends, with their functions.

    Functions are numbered across iterations; resident variables belong to the first. A swap-in is
    a new request: its memory comes from the allocator anew. Variables of 0 bytes make none.
    """
    sizes, resident = plan.trace.sizes, {*plan.resident}
    if plan.trace.peak_bytes <= plan.budget_bytes:
        resident.update(plan.trace.held)
    events = [(0, Event(name, sizes[name])) for name in sorted(resident) if sizes[name]]
    for number, _, name, comes in changes(plan, iterations):
        if sizes[name]:
            events.append((number, Event(name, sizes[name] if comes else None)))
    return events
