"""Operations of the thread that trains, and what is done before and after each of them."""

import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload

from repro.outofcore.actions import Kind
from repro.outofcore.addresses import Addresses
from repro.outofcore.collectives import Collectives, wait_for
from repro.outofcore.following import Follower, Step
from repro.outofcore.iterations import Iterations, Statistics
from repro.outofcore.operands import Operands
from repro.outofcore.operations import (
    Timer,
    as_computed,
    by_values,
    divide,
    result_bytes,
    run_in_parts,
    say_once,
)
from repro.outofcore.recording import Signature, signature
from repro.outofcore.residency import Residency, Variable
from repro.outofcore.sums import ADD, ADD_INTO, Sums

_PART = 16  # an operation on lists is run in parts of at most budget / 16
UNLIMITED = 1 << 62  # bytes: only to be recorded, with a part for each element


class Running:
    """Runs each operation with its inputs on the device and room for its results.

    Args:
        residency: What moves variables.
        addresses: What keeps copies of them, until an operation writes.
        iterations: The plan that is followed, or the log that is written.
        statistics: Where to count.

    Attributes:
        operands: What finds an operation's variables.
        collectives: The collectives that have begun.
        active: The variables that the operation under way works on.
        promised: The bytes that it makes; None where none is under way.
        waiting: How many threads wait until nobody works on some variable.
        changed: The condition that they wait for.
    """

    def __init__(
        self,
        residency: Residency,
        addresses: Addresses,
        iterations: Iterations,
        statistics: Statistics,
    ) -> None:
        device = residency.device
        self._residency, self._lock = residency, residency.lock
        self._addresses, self._iterations, self._statistics = addresses, iterations, statistics
        self._computes = device.type != "meta"  # where nothing is, nothing takes room
        self._sums = Sums(device if self._computes else torch.device("cpu"))
        self.operands = Operands(residency, partial(addresses.bring, lock=True))
        self.collectives = Collectives()
        self.active: Iterable[Variable] = ()
        self.promised: int | None = None
        self.waiting = 0
        self.changed = threading.Condition(residency.lock)

    def follow(self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation by the shortest way where it is just the plan's next step."""
        iterations = self._iterations
        follower = iterations.follower
        if follower is None or iterations.log is not None:
            return self._run(operation, args, kwargs)
        step = follower.upcoming(operation)
        given = args
        if step is None and operation is ADD:
            step, given = self._planned_sum(follower, args, kwargs)
        if (
            step is None
            or step.signature.collective
            or (step.signature.by_values and by_values(operation, args))
        ):
            return self._run(operation, args, kwargs)
        residency, lock, known = self._residency, self._lock, step.signature
        lock.acquire()
        try:
            variables = follower.operands(step, residency.known, given, kwargs)
            if variables is not None:
                inputs, written = variables
                self._bring_in(step, known, inputs)
                self._promise(known, inputs, written, step.birth_bytes, True)
        except BaseException:
            self.active = ()
            raise
        finally:
            lock.release()
        if variables is None:
            return self._run(operation, args, kwargs)
        try:
            result = step.operation._op(*given, **kwargs)
        except BaseException:
            with lock:
                self.active, self.promised = (), None
            raise
        with lock:
            self.active, self.promised = (), None
            made = self.operands.made(result, inputs) if known.makes else []
            if known.resizes:
                self.operands.resized(known, given, kwargs, written, made)
            if residency.used_bytes > residency.peak_bytes:
                residency.peak_bytes = residency.used_bytes
            if residency.used_bytes > residency.budget_bytes:
                self._make_room_late(known, (*inputs, *made))
            if known.awaited:
                wait_for(result)
            if self.waiting:
                self.changed.notify_all()
            residency.clock += 1
            if step.births or made:
                step = iterations.ran(step, step.operation, inputs, written, made, None)
            else:
                follower.cursor += 1
            if step is not None and step.after:
                self._act(step.after, (), partial(self._name, known))
        return result

    def _planned_sum(
        self, follower: Follower, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Step | None, tuple[Any, ...]]:
        """Return the plan's next step where it makes this sum in place, and what it is given."""
        step = follower.upcoming(ADD_INTO)
        operand = None if step is None else self._sums.into(args, kwargs)
        if operand is None:
            return None, args
        return step, args[::-1] if operand else args

    def _bring_in(self, step: Step | None, known: Signature, inputs: list[Variable]) -> None:
        """Have an operation's inputs on the device."""
        residency = self._residency
        self.active = inputs
        if residency.ended:
            residency.bury()
        if residency.leaving:
            residency.let_go()
        if self.collectives.works:
            self.collectives.let_go()
        clock = residency.clock
        if step is not None and step.before:
            self._act(step.before, inputs, partial(self._name, known))
        for variable in inputs:
            variable.used = clock
            if not variable.resident:
                self._statistics.on_demand += 1
                residency.make_room(variable.nbytes, inputs, partial(self._name, known))
                residency.swap_in(variable)
            if variable.incoming is not None:
                residency.arrive(variable)

    def _promise(
        self,
        known: Signature,
        inputs: list[Variable],
        written: list[Variable],
        nbytes: int,
        certain: bool,
    ) -> None:
        """Have room for what an operation makes, and take note of what it writes."""
        residency = self._residency
        if residency.used_bytes + nbytes > residency.budget_bytes:
            residency.make_room(nbytes, inputs, partial(self._name, known), strict=certain)
        for variable in written:
            if variable.valid:
                residency.written(variable)
        if written and self._addresses.kept:
            self._addresses.kept.clear()
        self.promised = nbytes

    def _make_room_late(self, known: Signature, keep: tuple[Variable, ...]) -> None:
        """Be within the budget again after an operation made more than was foretold."""
        residency = self._residency
        held = residency.used_bytes
        residency.make_room(0, keep, partial(self._name, known))
        say_once(
            f"more {known.name}",
            f"{known.name} made more than could be foretold: for a moment there were {held} bytes "
            f"of tensors, above the budget of {residency.budget_bytes}. Give a custom operation "
            "its shapes (torch.library.register_fake), or lower the budget by the difference",
        )

    def _run(self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, whatever the plan says of it."""
        residency, iterations, lock = self._residency, self._iterations, self._lock
        known = signature(operation)
        if known.ignored:
            return operation._op(*args, **kwargs)
        into: int | None = None
        if operation is ADD and (operand := self._sums.into(args, kwargs)) is not None:
            if iterations.sums_in_place():
                operation, args = ADD_INTO, args if operand == 0 else args[::-1]
                known = signature(operation)
            else:
                into = operand
        lock.acquire()
        try:
            if known.grouped:
                budget = residency.budget_bytes
                parts = divide(args, budget / _PART if budget < UNLIMITED else 0)
                if len(parts) > 1:
                    return run_in_parts(self.follow, operation, parts, args, kwargs)
            step, inputs, written = self._prepare(operation, known, args, kwargs)
            clock = residency.clock
        except BaseException:
            self.active = ()
            raise
        finally:
            lock.release()
        result, timer = self._time(operation, args, kwargs)
        with lock:
            self.active, self.promised = (), None
            made = self.operands.made(result, inputs) if known.makes else []
            if known.resizes:
                self.operands.resized(known, args, kwargs, written, made)
            if known.collective or known.awaited:
                self._await(known, result, inputs)
            if residency.used_bytes > residency.peak_bytes:
                residency.peak_bytes = residency.used_bytes
            if residency.used_bytes > residency.budget_bytes:
                self._make_room_late(known, (*inputs, *made))
            if self.waiting:
                self.changed.notify_all()
            if not inputs and not made:
                return result
            residency.clock = clock + 1
            summed = None if into is None else residency.look_up(args[into])
            step = iterations.ran(step, operation, inputs, written, made, timer, summed)
            if step is not None and step.after:
                self._act(step.after, (), partial(self._name, known))
        return result

    def _await(self, known: Signature, result: Any, inputs: list[Variable]) -> None:
        if known.collective:
            self.collectives.work_on(result, inputs)
        else:
            wait_for(result)

    def _prepare(
        self, operation: OpOverload, known: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Step | None, list[Variable], list[Variable]]:
        """Have an operation's inputs on the device, and room for what it makes.

        Return its step of the plan, its inputs, and those of them that it writes.
        """
        inputs, written = self.operands.of(known, args, kwargs)
        step = self._iterations.expected(operation, inputs)
        if not self._statistics.iterations:
            _say_what_is_not_compiled()
        self._bring_in(step, known, inputs)
        nbytes, certain = 0, True
        if step is not None and not (known.by_values and by_values(operation, args)):
            nbytes = step.birth_bytes
        elif (known.makes or known.resizes) and not known.collective and self._computes:
            room = self._residency.budget_bytes - self._residency.used_bytes
            nbytes, certain = result_bytes(operation, args, kwargs, room)
        self._promise(known, inputs, written, nbytes, certain)
        return step, inputs, written

    def _time(
        self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Timer | None]:
        """Return an operation's result, and its time where the iteration is recorded."""
        timer = Timer(self._residency.device) if self._iterations.log is not None else None
        try:
            result = operation._op(*args, **kwargs)
        except BaseException:
            with self._lock:
                self.active, self.promised = (), None
            raise
        if timer:
            timer.stop()
        return result if self._computes else as_computed(operation, args, result), timer

    def _name(self, known: Signature) -> str:
        return f"function {self._residency.clock - self._iterations.origin} ({known.name})"

    def _act(
        self,
        actions: tuple[tuple[Kind, int], ...],
        keep: Iterable[Variable],
        what: Callable[[], str],
    ) -> None:
        assert self._iterations.follower is not None
        residency, bound = self._residency, self._iterations.follower.bound
        for kind, v in actions:
            variable = bound[v]
            if variable is None or variable.died is not None:
                continue
            if kind is Kind.SWAP_OUT and variable.raw:
                continue  # its copy is made at the end, when nothing writes any more
            if kind is Kind.SWAP_OUT:
                if self._iterations.plan is not None and self._iterations.plan.copies_again:
                    residency.written(variable)  # as if it were: the plan wants the copy
                residency.swap_out(variable)
            elif kind is Kind.RELEASE:
                residency.release(variable)
            elif not variable.resident:
                residency.make_room(variable.nbytes, keep, what)
                residency.swap_in(variable)
                if variable.raw:
                    residency.arrive(variable)
                variable.used = residency.clock


def _say_what_is_not_compiled() -> None:
    if in_compiled():
        say_once(
            "compile",
            "within OutOfCore a compiled function runs as if it were not compiled, as every "
            "operation has to be seen: its values are those of the function itself",
        )


def in_compiled() -> bool:
    """Return whether torch.compile is asked for what runs."""
    frame: FrameType | None = sys._getframe(1)
    if "torch._dynamo.eval_frame" not in sys.modules:
        return False
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    return frame is not None
