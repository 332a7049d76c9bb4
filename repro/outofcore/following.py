"""Which function of a recorded iteration an operation is."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload

from repro.outofcore.actions import Kind
from repro.outofcore.plan import SwapPlan
from repro.outofcore.recording import Entry, Recording, Signature, signature, tensors_in
from repro.outofcore.residency import Variable


@dataclass(frozen=True, slots=True)
class Step:
    """One function of a plan, by the numbers of its variables."""

    operation: OpOverload
    signature: Signature
    inputs: tuple[int, ...]
    written: tuple[int, ...]
    arrivals: frozenset[int]  # inputs that are given anew each iteration and come here first
    births: tuple[int, ...]
    birth_bytes: int
    before: tuple[tuple[Kind, int], ...]
    after: tuple[tuple[Kind, int], ...]


class Follower:
    """Matches the operations of iterations with the steps of a plan.

    Args:
        recorded: The iteration that was planned.
        plan: The plan of its trace.

    Attributes:
        steps: The functions in order.
        cursor: The number of the next step; -1 while the operations do not follow the plan.
        bound: The variable that stands for each of the trace's, in this iteration or still from the
            one before.
    """

    def __init__(self, recorded: Recording, plan: SwapPlan) -> None:
        trace = recorded.trace
        number = {name: v for v, name in enumerate(trace.accesses)}
        self.trace = trace
        self.sizes = [variable.nbytes for variable in recorded.order]
        self.persistent = {number[name] for name in trace.persistent}
        self.bound: list[Variable | None] = list(recorded.order)
        for v, variable in enumerate(recorded.order):
            variable.bound = v
        self.cursor = 0
        self.steps = []
        for f, function in enumerate(trace.functions):
            first = [name for name in function.variables if trace.accesses[name][0] == f]
            births = tuple(number[name] for name in first if name not in function.inputs)
            given = {number[n] for n in first if n in function.inputs and n not in trace.persistent}
            self.steps.append(
                Step(
                    recorded.operations[f],
                    signature(recorded.operations[f]),
                    tuple(number[name] for name in function.inputs),
                    tuple(number[name] for name in function.outputs if name in function.inputs),
                    frozenset(given),
                    births,
                    sum(self.sizes[v] for v in births),
                    tuple((kind, number[name]) for kind, name in plan.before[f]),
                    tuple((kind, number[name]) for kind, name in plan.after[f]),
                )
            )

    def replan(self, plan: SwapPlan) -> None:
        """Follow another plan of the same trace from now on."""
        number = {name: v for v, name in enumerate(self.trace.accesses)}
        self.steps = [
            replace(
                step,
                before=tuple((kind, number[name]) for kind, name in before),
                after=tuple((kind, number[name]) for kind, name in after),
            )
            for step, before, after in zip(self.steps, plan.before, plan.after, strict=True)
        ]

    @property
    def done(self) -> bool:
        """Whether the iteration has run through."""
        return self.cursor == len(self.steps)

    def upcoming(self, operation: OpOverload) -> Step | None:
        """Return the next step if it runs this operation, else None."""
        cursor = self.cursor
        if not 0 <= cursor < len(self.steps):
            return None
        step = self.steps[cursor]
        return step if step.operation is operation else None

    def operands(
        self,
        step: Step,
        known: dict[int, Variable | None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[list[Variable], list[Variable]] | None:
        """Return an operation's variables, and those written, where they are just a step's.

        None where they are others, or where more has to be found out, such as of a new mini-batch.

        Args:
            step: What runs this operation.
            known: Variables by the address of their storage.
            args: The operation's.
            kwargs: Likewise.
        """
        bound, numbers, kind = self.bound, step.inputs, step.signature
        if kwargs and not kind.takes_named.isdisjoint(kwargs):
            return None
        writes, count, expected = kind.writes, len(args), len(numbers)
        inputs: list[Variable] = []
        written: list[Variable] = []
        tensors: Iterable[torch.Tensor]
        for position in kind.takes:
            if position >= count:
                break
            value = args[position]
            if value is None:
                continue
            tensors = (value,) if isinstance(value, torch.Tensor) else tensors_in(value)
            for tensor in tensors:
                try:
                    variable = known[tensor.untyped_storage()._cdata]
                except (KeyError, NotImplementedError, RuntimeError):
                    return None
                if variable is None:
                    continue
                n = len(inputs)
                if n < expected and bound[numbers[n]] is variable:
                    inputs.append(variable)
                elif variable not in inputs:
                    return None
                if writes[position]:
                    written.append(variable)
        return (inputs, written) if len(inputs) == expected else None

    def match(self, operation: OpOverload, inputs: list[Variable], origin: int) -> Step | None:
        """Return the next step where this operation is it, else None.

        Off the plan, the next step is the first: the iteration may begin here.

        Args:
            operation: What is to run.
            inputs: Its variables.
            origin: The clock at the start of this iteration.
        """
        position = max(self.cursor, 0)
        if position == len(self.steps):
            return None
        step = self.steps[position]
        if operation is not step.operation or len(inputs) != len(step.inputs):
            return None
        given = []
        for variable, v in zip(inputs, step.inputs, strict=True):
            if self.bound[v] is variable:
                continue
            taken = variable.bound >= 0 and self.bound[variable.bound] is variable
            if taken and variable.since < origin and variable.bound not in self.persistent:
                taken = False  # the iteration before left it; in this one it is given from outside
            if v not in step.arrivals or taken or self.sizes[v] != variable.nbytes:
                return None
            given.append((variable, v))
        for variable, v in given:
            self._bind(variable, v)
        self.cursor = position
        return step

    def bind_made(self, step: Step, made: list[Variable]) -> bool:
        """Take an operation's results as the step's births; return whether they are."""
        if len(made) != len(step.births):
            return False
        for variable, v in zip(made, step.births, strict=True):
            if variable.nbytes != self.sizes[v]:
                return False
        for variable, v in zip(made, step.births, strict=True):
            self._bind(variable, v)
        return True

    def _bind(self, variable: Variable, v: int) -> None:
        bound = self.bound
        old = bound[v]
        if old is not None:
            old.bound = -1
        if variable.bound >= 0:
            bound[variable.bound] = None
        bound[v] = variable
        variable.bound = v

    def passed(self) -> list[Entry]:
        """Return what ran by the plan in this iteration, as it would have been logged."""
        entries = []
        for step in self.steps[: max(self.cursor, 0)]:
            inputs, written, made = (
                [variable for v in numbers if (variable := self.bound[v]) is not None]
                for numbers in (step.inputs, step.written, step.births)
            )
            entries.append(Entry(step.operation, inputs, written, made))
        return entries
