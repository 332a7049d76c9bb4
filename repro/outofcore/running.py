"""Operations of the thread that trains and of others, with inputs brought in and room made."""

import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload

from repro.measure import accelerator
from repro.outofcore.bounds import BudgetTooSmall
from repro.outofcore.guards import Uninterrupted
from repro.outofcore.iterations import Follower, Iterations, Step
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
from repro.outofcore.recording import ADD, ADD_INTO, Signature, Sums, signature, tensors_in
from repro.outofcore.residency import Addresses, Residency, Variable
from repro.outofcore.sequence import Kind

_PART = 16  # an operation on lists is run in parts of at most budget / 16
_PATIENCE_S = 300.0  # for other threads and collectives to end what they do with a tensor
UNLIMITED = 1 << 62  # bytes: only to be recorded, with a part for each element


class Collectives:
    """The collectives of torch.distributed that a block has begun: their tensors stay.

    Attributes:
        works: Those under way, with the variables that each works on.
    """

    def __init__(self) -> None:
        self.works: list[tuple[list[Any], list[Variable]]] = []

    def work_on(self, result: Any, inputs: list[Variable]) -> None:
        """Keep the variables where they are that a collective works on, until it is done."""
        handles = [value for value in result if isinstance(value, torch.ScriptObject)]
        for variable in inputs:
            variable.pins += 1
        works = [torch._C._distributed_c10d.Work.unbox(handle) for handle in handles]
        self.works.append((works, inputs))
        self.let_go()

    def let_go(self) -> None:
        """Let go the variables of collectives that are done."""
        under_way = []
        for works, variables in self.works:
            if all(work.is_completed() for work in works):
                for variable in variables:
                    variable.pins -= 1
            else:
                under_way.append((works, variables))
        self.works = under_way


def wait_for(result: Any) -> None:
    """Wait for a collective whose tensors only its result tells of."""
    for tensor in tensors_in(result):
        torch.ops._c10d_functional.wait_tensor(tensor)


def in_compiled() -> bool:
    """Whether a function that torch.compile made is running."""
    frame: FrameType | None = sys._getframe(1)
    if "torch._dynamo.eval_frame" not in sys.modules:
        return False
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    return frame is not None


def _varies(known: Signature, operation: OpOverload, args: tuple[Any, ...]) -> bool:
    return known.collective or by_values(operation, args)


class Running:
    """Runs each operation with its inputs on the device and room for its results.

    Attributes:
        active: The variables that the operation under way works on.
        promised: The bytes that it makes; None where none is under way.
        waiting: Number of threads that wait until nobody works on some variable.
        changed: The condition that they wait for.
    """

    def __init__(self, residency: Residency, addresses: Addresses, iterations: Iterations) -> None:
        device = residency.device
        self._residency, self._lock = residency, residency.lock
        self._addresses, self._iterations = addresses, iterations
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
        if step is None or (step.varies and _varies(step.signature, operation, args)):
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
            made = self._ended(known, given, kwargs, inputs, written, result)
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
        """Return the plan's next step where it makes this sum in place, and its arguments."""
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
                self._residency.on_demand += 1
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
        """Have room for the results of an operation, and take note of its writes."""
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
        """Be within the budget again after an operation made more than was predicted."""
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
            made = self._ended(known, args, kwargs, inputs, written, result)
            if not inputs and not made:
                return result
            residency.clock = clock + 1
            summed = None if into is None else residency.look_up(args[into])
            step = iterations.ran(step, operation, inputs, written, made, timer, summed)
            if step is not None and step.after:
                self._act(step.after, (), partial(self._name, known))
        return result

    def _ended(
        self,
        known: Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Variable],
        written: list[Variable],
        result: Any,
    ) -> list[Variable]:
        """Count the results of an operation; return the variables that it has made."""
        residency = self._residency
        self.active, self.promised = (), None
        made = self.operands.made(result, inputs) if known.makes else []
        if known.resizes:
            self.operands.resized(known, args, kwargs, written, made)
        if known.collective:
            self.collectives.work_on(result, inputs)
        elif known.awaited:
            wait_for(result)
        if residency.used_bytes > residency.peak_bytes:
            residency.peak_bytes = residency.used_bytes
        if residency.used_bytes > residency.budget_bytes:
            self._make_room_late(known, (*inputs, *made))
        if self.waiting:
            self.changed.notify_all()
        return made

    def _prepare(
        self, operation: OpOverload, known: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Step | None, list[Variable], list[Variable]]:
        """Have an operation's inputs on the device, and room for its results.

        Return its step of the plan, its inputs, and those of them that it writes.
        """
        inputs, written = self.operands.of(known, args, kwargs)
        step = self._iterations.expected(operation, inputs)
        if self._iterations.recorded is None and in_compiled():
            say_once(
                "compile",
                "within OutOfCore a compiled function runs as if it were not compiled, as every "
                "operation has to be seen: its values are those of the function itself",
            )
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


class Others:
    """Runs operations of other threads, next to those of the thread that trains.

    Nobody waits any longer where `guard` has an interrupt pending.
    """

    def __init__(self, running: Running, residency: Residency, guard: Uninterrupted) -> None:
        self._running, self._residency, self._lock = running, residency, residency.lock
        self._guard = guard

    def run(self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of another thread: it may take room, and nothing that it uses leaves."""
        # One of higher order, such as torch.cond, calls functions whose operations nobody sees.
        known = signature(operation) if isinstance(operation, OpOverload) else None
        if known is None and in_compiled():
            raise NotImplementedError(
                f"{operation} needs torch.compile, which does not look into an OutOfCore block: "
                "use what computes the same without (Python's if and while, "
                "F.scaled_dot_product_attention), or train without the block"
            )
        if known is not None and known.ignored:
            return operation(*args, **kwargs)
        residency, running = self._residency, self._running

        def what() -> str:
            return f"an operation of another thread ({known.name})" if known else str(operation)

        with self._lock:
            if known is None:
                inputs = written = running.operands.held(args, kwargs)
            else:
                inputs, written = running.operands.of(known, args, kwargs)
            nbytes = self._reserve(operation, known, (args, kwargs), inputs, what)
            for variable in inputs:
                variable.pins += 1
            for variable in written:
                residency.written(variable)
            residency.used_bytes += nbytes
        try:
            self._other_streams()
            result = (operation if known is None else operation._op)(*args, **kwargs)
            self._other_streams()
        except BaseException:
            with self._lock:
                self._end(inputs, nbytes)
            raise
        with self._lock:  # without a gap, in which another thread could take the room
            self._end(inputs, nbytes)
            makes = known is None or known.makes
            made = running.operands.made(result, inputs) if makes else []
            if known is not None and known.resizes:
                running.operands.resized(known, args, kwargs, written, made)
            residency.peak_bytes = max(residency.peak_bytes, residency.used_bytes)
            keep = (*inputs, *made, *running.active)
            residency.make_room(running.promised or 0, keep, what, strict=False)
        return result

    def _reserve(
        self,
        operation: Any,
        known: Signature | None,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        inputs: list[Variable],
        what: Callable[[], str],
    ) -> int:
        """Have inputs on the device and room for the results; return the bytes of these."""
        residency, nbytes, certain = self._residency, 0, True
        while True:
            for variable in inputs:
                if not variable.resident:
                    residency.on_demand += 1
                    self._make_room(variable.nbytes, inputs, what, strict=True)
                    residency.swap_in(variable)
                residency.arrive(variable)
                variable.used = residency.clock
            if known is not None and (known.makes or known.resizes):
                nbytes, certain = result_bytes(operation, *given)
            self._make_room(nbytes, inputs, what, strict=certain)
            if all(variable.resident for variable in inputs):  # also where we had to wait
                return nbytes

    def _make_room(
        self, nbytes: int, inputs: list[Variable], what: Callable[[], str], strict: bool
    ) -> None:
        """Have room besides the variables of the thread that trains, or else when it is done."""
        residency, running = self._residency, self._running
        until = time.monotonic() + _PATIENCE_S
        while True:
            active, promised = tuple(running.active), running.promised
            need, keep = nbytes + (promised or 0), (*inputs, *active)
            try:
                return residency.make_room(need, keep, what, strict, patient=False)
            except BudgetTooSmall:
                busy = active or promised or any(v.pins for v in residency.variables())
                if not busy or time.monotonic() > until or self._guard.pending is not None:
                    raise
                running.changed.wait(0.002)
                running.collectives.let_go()

    def _end(self, inputs: list[Variable], nbytes: int) -> None:
        self._residency.used_bytes -= nbytes
        for variable in inputs:
            variable.pins -= 1
        self._running.changed.notify_all()

    def _other_streams(self) -> None:
        device = self._residency.device
        if accelerator.is_accelerator(device):  # each thread has a current stream of its own
            accelerator.synchronize(device)

    def wait(self) -> bool:
        """Wait until nobody else works on some tensor: other threads, or collectives."""
        residency, running = self._residency, self._running
        until = time.monotonic() + _PATIENCE_S
        before = sum(v.pins for v in residency.variables())
        if not before and running.promised is None:
            return False
        running.waiting += 1
        try:
            while time.monotonic() < until and self._guard.pending is None:
                running.changed.wait(0.002)
                running.collectives.let_go()
                if sum(v.pins for v in residency.variables()) < before:
                    return True
                if not before and running.promised is None:
                    return True
        finally:
            running.waiting -= 1
        return False
