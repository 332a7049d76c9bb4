"""The iterations of a block: recorded until there is a plan, then matched with the plan."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from repro.measure.memory import components, tensors_in
from repro.outofcore.operations import say_once
from repro.outofcore.plan import SwapPlan
from repro.outofcore.planning import Planner
from repro.outofcore.recording import Entry, Recording, Signature, build, signature, sum_in_place
from repro.outofcore.residency import Residency, Variable
from repro.outofcore.sequence import Action, Kind

_MOST = 2**18  # most operations recorded in an iteration
_REFINEMENTS = 2  # most new plans for better known ends of variables


@dataclass
class Statistics:
    """Counts since the block was entered."""

    iterations: int = 0  # ended iterations
    replayed: int = 0  # iterations that followed a plan completely
    plans: int = 0  # plans made from recorded iterations
    tuned: int = 0  # replacements of a plan by a better one of the same iteration
    off_order: int = 0  # operations that deviated from the current plan
    on_demand: int = 0  # swap-ins that no plan had started, so that an operation waited
    bytes_in: int = 0  # copied to the device
    bytes_out: int = 0  # copied to the host
    peak_bytes: int = 0  # the most bytes of storages on the device at once
    host_bytes: int = 0  # the most bytes swapped out at once
    locked_bytes: int = 0  # stay on the device, since their address is in use elsewhere
    uncounted_bytes: int = 0  # not managed, since operations use only slices of them


@dataclass(slots=True)
class Step:
    """One function of a plan, by the numbers of its variables."""

    operation: OpOverload
    signature: Signature
    form: list[Any]  # of its arguments, as it was recorded
    inputs: tuple[int, ...]
    written: tuple[int, ...]
    arrivals: frozenset[int]  # inputs given anew each iteration, with their first use here
    births: tuple[int, ...]
    birth_bytes: int
    before: tuple[tuple[Kind, int], ...] = ()
    after: tuple[tuple[Kind, int], ...] = ()


class Follower:
    """Matches the operations of iterations with the steps of a recorded iteration's plan."""

    def __init__(self, recorded: Recording, plan: SwapPlan) -> None:
        trace = recorded.trace
        self._number = number = {name: v for v, name in enumerate(trace.accesses)}
        self.sizes = [variable.nbytes for variable in recorded.order]
        self.persistent = {number[name] for name in trace.persistent}
        # The actual variable for each of the trace's; until it is replaced, of the one before.
        self.bound: list[Variable | None] = list(recorded.order)
        for v, variable in enumerate(recorded.order):
            variable.bound = v
        self.cursor = 0  # the number of the next step; -1 off the plan
        self.steps = []
        for f, function in enumerate(trace.functions):
            first = [name for name in function.variables if trace.accesses[name][0] == f]
            births = tuple(number[name] for name in first if name not in function.inputs)
            given = {number[n] for n in first if n in function.inputs and n not in trace.persistent}
            operation, shapes = recorded.calls[f]
            inputs = tuple(number[name] for name in function.inputs)
            written = tuple(number[n] for n in function.outputs if n in function.inputs)
            nbytes = sum(self.sizes[v] for v in births)
            kind = operation, signature(operation), shapes
            self.steps.append(Step(*kind, inputs, written, frozenset(given), births, nbytes))
        self.follow(plan)

    def follow(self, plan: SwapPlan) -> None:
        """Follow a plan of the same trace from now on."""

        def numbered(actions: tuple[Action, ...]) -> tuple[tuple[Kind, int], ...]:
            return tuple((kind, self._number[name]) for kind, name in actions)

        for step, before, after in zip(self.steps, plan.before, plan.after, strict=True):
            step.before, step.after = numbered(before), numbered(after)

    def upcoming(self, operation: OpOverload) -> Step | None:
        """Return the next step if it runs this operation, else None."""
        if not 0 <= self.cursor < len(self.steps):
            return None
        step = self.steps[self.cursor]
        return step if step.operation is operation else None

    def operands(
        self,
        step: Step,
        known: dict[int, Variable | None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[list[Variable], list[Variable]] | None:
        """Return an operation's variables, and the written ones, if they match the step exactly.

        None if they differ, or if a slower check is needed, such as for a new mini-batch. `known`
        has variables by the address of their storage.
        """
        bound, numbers, kind = self.bound, step.inputs, step.signature
        if kwargs and not kind.takes_named.isdisjoint(kwargs):
            return None
        writes, count, expected = kind.writes, len(args), len(numbers)
        inputs: list[Variable] = []
        written: list[Variable] = []
        for position in kind.takes:
            if position >= count:
                break
            value = args[position]
            if value is None:
                continue
            for tensor in (value,) if isinstance(value, torch.Tensor) else tensors_in(value):
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
        """Return the next step if this operation matches it, else None.

        While the plan is not followed, the next step is the first: the iteration may begin here.
        `origin` is the clock at the start of this iteration.
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
                taken = False  # left by the iteration before; in this one given from outside
            if v not in step.arrivals or taken or self.sizes[v] != variable.nbytes:
                return None
            given.append((variable, v))
        for variable, v in given:
            self._bind(variable, v)
        self.cursor = position
        return step

    def bind_made(self, step: Step, made: list[Variable]) -> bool:
        """Match an operation's results with the step's births; return whether they match."""
        if [variable.nbytes for variable in made] != [self.sizes[v] for v in step.births]:
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
        """Return this iteration's operations that followed the plan, as log entries."""
        entries = []
        for step in self.steps[: max(self.cursor, 0)]:
            inputs, written, made = (
                [variable for v in numbers if (variable := self.bound[v]) is not None]
                for numbers in (step.inputs, step.written, step.births)
            )
            entries.append(Entry(step.operation, inputs, written, made, step.form))
        return entries


class Iterations:
    """Iterations, recorded until there is a plan, then matched with it.

    The first is not planned: the second often runs other functions, since an optimizer makes its
    state in the first, and it shows the ends of variables that an iteration leaves behind. The
    third shows whether the second repeats. Then nothing is recorded until an operation deviates
    from the plan. Without a planner they are only recorded; `reserve` gets a plan's host bytes.
    """

    def __init__(
        self,
        planner: Planner | None,
        statistics: Statistics,
        reserve: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.planner, self._reserve, self._statistics = planner, reserve, statistics
        self.origin = 0  # the clock at the start of the iteration
        self.log: list[Entry] | None = []  # its operations, None if they are not recorded
        self.recorded: Recording | None = None  # the last recorded iteration
        self.follower: Follower | None = None
        self.plan: SwapPlan | None = None
        self._proved = False  # the plan was once followed to its end
        self._settled = False  # the trace is known completely
        self._refined = 0  # plans made since the functions last changed
        self._strays = 0  # consecutive iterations that did not follow the plan

    def expected(self, operation: OpOverload, inputs: list[Variable]) -> Step | None:
        """Return the plan's next step if this operation matches it; else leave the plan."""
        if self.follower is None:
            return None
        step = self.follower.match(operation, inputs, self.origin)
        if step is None and inputs:
            self._statistics.off_order += 1
            self.leave()
        return step

    def leave(self) -> None:
        """Continue on demand; write the operations that followed the plan into the log."""
        assert self.follower is not None
        if self.log is None:
            self.log = self.follower.passed()
        self.follower.cursor = -1

    def ran(self, step: Step | None, entry: Entry) -> Step | None:
        """Note an operation that ran; return its step if it followed the plan."""
        if step is not None and self.follower is not None:
            if self.follower.bind_made(step, entry.made):
                self.follower.cursor += 1
            else:
                self.leave()
                step = None
        if self.log is not None:
            self.log.append(entry)
            if len(self.log) > _MOST:  # too many for one iteration: forget them
                self.origin += len(self.log)
                self.log.clear()
                say_once(
                    "endless",
                    f"no iteration has ended in {_MOST} operations, so that nothing is planned: "
                    "where no torch optimizer steps, call step() of the OutOfCore block after each",
                )
        return step

    def end(self, clock: int) -> None:
        """End an iteration after `clock` operations, and make a new plan if needed.

        `BudgetTooSmall` where one function alone needs more than the budget.
        """
        if clock == self.origin:
            return  # nothing ran since the last iteration
        done = self.follower is not None and self.follower.cursor == len(self.follower.steps)
        self._statistics.iterations += 1
        self._statistics.replayed += done
        self._proved = self._proved or done
        self._strays = 0 if done else self._strays + 1
        if self.log is not None:
            self._end_recording(self.log, done)
        self.origin = clock
        if self.follower is not None:
            self.follower.cursor = 0

    def _end_recording(self, log: list[Entry], done: bool) -> None:
        recorded = build(sum_in_place(log, self.origin), self.origin, self.recorded)
        planner, follower, followed = self.planner, self.follower, self.plan if done else None
        final = self._settled or self._refined == _REFINEMENTS
        if planner and follower and followed and (final or recorded.trace == followed.trace):
            better = None if self._settled else planner.better(followed, recorded)
            if better is not None:
                self._reserve(better.host_bytes)
                follower.follow(better)
                self.plan = better
                self._statistics.tuned += 1
            self._settled, self.log = True, None  # its trace is final: recording ends
        else:
            # A plan that was once followed survives a single stray iteration, such as one after an
            # evaluation. If many in a row stray, a plan is made after the 2nd, 4th, 8th and so on.
            few = 2 if self._proved or self.recorded is None else 1
            strayed = self._strays >= few and self._strays & (self._strays - 1) == 0
            if planner and (done or strayed):
                for variable in filter(None, follower.bound if follower else ()):
                    variable.bound = -1
                self.plan = planner.plan(recorded)
                self._reserve(self.plan.host_bytes)
                self.follower = Follower(recorded, self.plan)
                self._refined = self._refined + 1 if done else 0
                self._settled = self._proved = False
                self._statistics.plans += 1
            self.log = []
        self.recorded = recorded


# ---- kinds, known from modules and optimizers; until then a variable's operations suggest its kind


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def held_by(holder: object) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a module or an optimizer, each with its kind."""
    others: list[tuple[str, object]]
    if isinstance(holder, nn.Module):
        parameters: list[torch.Tensor] = [*holder.parameters()]
        others = [("buffer", buffer) for buffer in holder.buffers()]
    else:
        assert isinstance(holder, torch.optim.Optimizer)
        parameters, state = parameters_of(holder), holder.state
        others = [("optimizer state", v) for p in parameters for v in tensors_in(state.get(p))]
    # `torch.func.functional_call` puts others in the place of parameters.
    gradients = [("gradient", p.grad) for p in parameters if p.is_leaf]
    named = [("parameter", p) for p in parameters] + gradients
    return [(kind, part) for kind, v in (*named, *others) for part in _parts_of(v)]


def _parts_of(value: object) -> list[torch.Tensor]:
    """Return a tensor, or those of which a sparse one or a wrapper, such as a DTensor, consists."""
    if not isinstance(value, torch.Tensor):
        return []
    if not is_traceable_wrapper_subclass(value):
        return components(value) or [value]
    names, _ = value.__tensor_flatten__()
    return [part for name in names for part in _parts_of(getattr(value, name))]


def meet(residency: Residency, holder: object) -> None:
    """Count the tensors of a module or an optimizer: parameters, gradients, buffers, state."""
    for kind, value in held_by(holder):
        variable = residency.find(value, named=True)
        if variable is not None and not variable.kind:
            variable.kind = kind
            variable.raw = kind == "parameter" and value.requires_grad
