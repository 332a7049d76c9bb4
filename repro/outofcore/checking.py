"""The rules of a swap plan, checked by running it on paper.

Written apart from the schedulers, from the trace alone, so that a mistake of theirs is seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from repro.outofcore.actions import Action, Kind

if TYPE_CHECKING:
    from repro.outofcore.plan import SwapPlan
    from repro.outofcore.trace import Function, Trace


class PlanError(ValueError):
    """A plan breaks a rule: it would exceed its budget, or compute with what is not there."""


def check(plan: SwapPlan) -> int:
    """Check two iterations of a plan: `SwapPlan.verify`."""
    run = _Run(plan)
    for cycle in range(2):
        for number, function in enumerate(plan.trace.functions):
            run.end_lives(number)
            run.act(plan.before[number], f"before function {number} ({function.name})")
            run.execute(number, function)
            run.act(plan.after[number], f"after function {number} ({function.name})")
        run.compare(cycle)
    return run.peak


def _uses(trace: Trace) -> dict[str, list[tuple[int, bool]]]:
    """For each variable its uses as (function, whether its value is read), ascending."""
    uses: dict[str, list[tuple[int, bool]]] = {}
    for number, function in enumerate(trace.functions):
        for name in function.variables:
            uses.setdefault(name, []).append((number, name in function.inputs))
    return uses


class _Run:
    """The state of device and host as actions and functions follow each other."""

    def __init__(self, plan: SwapPlan) -> None:
        self.plan = plan
        self.sizes = plan.trace.sizes
        self.uses = _uses(plan.trace)
        self.device = set(plan.resident)
        self.held = sum(self.sizes[name] for name in self.device)
        self.valid = set(plan.host_valid)  # the host's copy is right, or will be when it is done
        self.outgoing = set(plan.outgoing)
        self.alive = set(plan.trace.persistent)
        self.deaths: dict[int, list[str]] = {}
        n = len(plan.trace.functions)
        if not len(plan.before) == len(plan.after) == n:
            raise PlanError(
                f"the trace has {n} functions, but the plan {len(plan.before)} lists of actions "
                f"before and {len(plan.after)} after them"
            )
        for name, (_, death) in plan.trace.lifetimes.items():
            self.deaths.setdefault(death % n, []).append(name)
            if death > n:
                self.alive.add(name)
        self.position = 0
        self.peak = 0
        lost = self.alive - self.device - self.valid
        if lost:
            raise PlanError(f"at the start {_list(lost)} is neither on the device nor on the host")
        for what, names in (("resident", self.device), ("host_valid", self.valid)):
            if names - self.alive:
                raise PlanError(f"at the start {_list(names - self.alive)}, {what}, is not alive")
        self.measure("at the start")

    def allocate(self, name: str) -> None:
        if name not in self.device:
            self.device.add(name)
            self.held += self.sizes[name]

    def free(self, name: str) -> None:
        if name in self.device:
            self.device.discard(name)
            self.held -= self.sizes[name]
        self.outgoing.discard(name)

    def end(self, name: str) -> None:
        self.free(name)
        self.alive.discard(name)
        self.valid.discard(name)

    def measure(self, where: str) -> None:
        held = self.held
        self.peak = max(self.peak, held)
        if held > self.plan.budget_bytes:
            raise PlanError(
                f"{where} {held} bytes are held on the device, {held - self.plan.budget_bytes} "
                f"more than the budget of {self.plan.budget_bytes}"
            )

    def end_lives(self, number: int) -> None:
        self.position = number
        for name in self.deaths.get(number, ()):
            self.end(name)

    def needed(self, name: str, after: int) -> bool:
        """Whether the value of an alive variable must survive function number `after` - 1.

        It must unless the next use overwrites it whole.
        """
        uses = self.uses[name]
        if after <= uses[0][0] and name not in self.plan.trace.persistent:
            return True  # what the iteration before left: alive without a use, as below
        for number, read in uses:
            if number >= after:
                return read
        if name in self.plan.trace.persistent:
            return uses[0][1]  # the next iteration's first use
        return True  # alive without a use: somebody may still look at it

    def act(self, actions: tuple[Action, ...], where: str) -> None:
        after = self.position + (1 if where.startswith("after") else 0)
        for kind, name in actions:
            what = f"{where} {kind.value} {name!r}"
            if name not in self.alive:
                raise PlanError(f"{what}: it is not alive")
            if kind in (Kind.SWAP_IN, Kind.ALLOCATE):
                if name in self.device:
                    raise PlanError(f"{what}: it is on the device already")
                if kind is Kind.SWAP_IN and name not in self.valid:
                    raise PlanError(f"{what}: the host has no right copy")
                if kind is Kind.SWAP_IN and not self.needed(name, after):
                    raise PlanError(f"{what}: its value is dead, for it is overwritten next")
                if kind is Kind.ALLOCATE and self.needed(name, after):
                    raise PlanError(f"{what}: its value is needed, so it must be copied")
                self.allocate(name)
            elif name not in self.device:
                raise PlanError(f"{what}: it is not on the device")
            elif kind is Kind.SWAP_OUT:
                if name in self.valid and not self.plan.copies_again:
                    raise PlanError(f"{what}: the host's copy is right already")
                if not self.needed(name, after):
                    raise PlanError(f"{what}: its value is dead")
                self.valid.add(name)
                self.outgoing.add(name)
            else:
                if name not in self.valid and self.needed(name, after):
                    raise PlanError(f"{what}: its value is needed and the host has no right copy")
                self.free(name)
            self.measure(what)

    def execute(self, number: int, function: Function) -> None:
        where = f"function {number} ({function.name})"
        for name in function.variables:
            if name not in self.alive:
                if self.uses[name][0][0] != number:
                    raise PlanError(f"{where} uses {name!r}, which is not alive")
                self.alive.add(name)  # born here, or given from outside
                self.allocate(name)
            elif name not in self.device:
                raise PlanError(f"{where} uses {name!r}, which is not on the device")
        self.measure(f"while {where} runs")
        for name in function.outputs:
            if name in self.outgoing:
                raise PlanError(f"{where} writes {name!r} while it is being copied to the host")
            self.valid.discard(name)

    def compare(self, cycle: int) -> None:
        n = len(self.plan.trace.functions)
        ended = [name for name in self.deaths.get(0, ()) if self.plan.trace.lifetimes[name][1] == n]
        for name in ended:  # those that die with the last function
            self.end(name)
        for what, now, start in (
            ("on the device", self.device, self.plan.resident),
            ("under way to the host", self.outgoing, self.plan.outgoing),
        ):
            if now != start:
                raise PlanError(
                    f"iteration {cycle} ends with {_list(now ^ start)} {what} otherwise than it "
                    "started: the plan cannot be repeated"
                )
        if not self.plan.host_valid <= self.valid:
            raise PlanError(
                f"iteration {cycle} ends without right copies of "
                f"{_list(self.plan.host_valid - self.valid)} on the host, with which it started"
            )


def _list(names: set[str] | frozenset[str]) -> str:
    shown = sorted(names)[:5]
    return ", ".join(map(repr, shown)) + (", ..." if len(names) > 5 else "")
