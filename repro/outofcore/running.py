"""Running operations, of the training thread and others, with inputs and room on the device."""

import sys
import time
from collections.abc import Iterable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from repro.measure import accelerator
from repro.measure.memory import components, tensors_in
from repro.outofcore.iterations import Iterations, Step
from repro.outofcore.operations import (
    as_computed,
    by_values,
    divide,
    result_bytes,
    run_in_parts,
    say_once,
)
from repro.outofcore.recording import ADD, ADD_INTO, Entry, Signature, Sums, form, signature, timed
from repro.outofcore.residency import Residency, Variable
from repro.outofcore.sequence import Kind

_EMPTY = torch.ops.aten.empty.memory_format  # each batch norm makes one of no bytes
_PART = 16  # an operation on lists is run in parts of at most budget / 16
_PATIENCE_S = 300.0  # longest wait for another thread's operation
UNLIMITED = 1 << 62  # bytes: a budget for recording only, with one part per element
Arguments = tuple[Any, ...]
Named = dict[str, Any]


def in_compiled() -> bool:
    """Whether a function that torch.compile made is running."""
    frame: FrameType | None = sys._getframe(1)
    if "torch._dynamo.eval_frame" not in sys.modules:
        return False
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    return frame is not None


def _foretold(step: Step, args: Arguments, kwargs: Named) -> bool:
    """Return whether an operation's results have the sizes of its step in the plan."""
    known = step.signature
    if known.by_values and by_values(step.operation, args):
        return False
    if not (known.makes or known.resizes):
        return True
    return step.form == form(known.name, (*args, *kwargs, *kwargs.values()))


class Running:
    """Runs one operation at a time, with its inputs on the device and room for its results."""

    def __init__(self, residency: Residency, iterations: Iterations) -> None:
        device, self._iterations = residency.device, iterations
        self._residency, self._lock = residency, residency.lock
        self._computes = device.type != "meta"  # tensors on meta take no room
        self._sums = Sums(device if self._computes else torch.device("cpu"))
        self._in_parts = False  # the last operation's inputs include a sparse or nested tensor
        # Running collectives of torch.distributed, each with the variables that it pins.
        self.collectives: list[tuple[list[Any], list[Variable]]] = []

    def follow(self, operation: OpOverload, args: Arguments, kwargs: Named) -> Any:
        """Run an operation on the fast path, if it is exactly the plan's next step."""
        iterations = self._iterations
        follower = iterations.follower
        if follower is None or iterations.log is not None:
            return self._run(operation, args, kwargs)
        step = follower.upcoming(operation)
        given = args
        if step is None and operation is ADD:
            summing = follower.upcoming(ADD_INTO)
            operand = None if summing is None else self._sums.into(args, kwargs)
            if operand is not None:
                step, given = summing, args[::-1] if operand else args
        if step is None or step.signature.collective or not _foretold(step, args, kwargs):
            return self._run(operation, args, kwargs)
        residency, known = self._residency, step.signature
        with self._lock:
            variables = follower.operands(step, residency.known, given, kwargs)
            if variables is None:
                return self._run(operation, args, kwargs)
            inputs, written = variables
            self._bring_in(step, known.name, inputs)
            self._promise(known.name, inputs, written, step.birth_bytes, True)
            result = step.operation._op(*given, **kwargs)
            made = self._ended(known, given, kwargs, inputs, written, result)
            residency.clock += 1
            if not (step.births or made) or follower.bind_made(step, made):
                follower.cursor += 1
                if step.after:
                    self._act(step.after, (), known.name)
            else:
                iterations.leave()
                iterations.ran(None, Entry(step.operation, inputs, written, made, step.form))
        return result

    def _run(self, operation: OpOverload, args: Arguments, kwargs: Named) -> Any:
        """Run an operation, whether it is planned or not."""
        residency, iterations = self._residency, self._iterations
        known = signature(operation)
        if known.ignored or (operation is _EMPTY and 0 in args[0]):
            return operation._op(*args, **kwargs)
        into: int | None = None
        if operation is ADD and (operand := self._sums.into(args, kwargs)) is not None:
            follower = iterations.follower
            if follower is not None and follower.upcoming(ADD_INTO) is not None:
                operation, args = ADD_INTO, args if operand == 0 else args[::-1]
                known = signature(operation)
            else:
                into = operand
        with self._lock:
            if known.grouped:
                budget = residency.budget_bytes
                parts = divide(args, budget / _PART if budget < UNLIMITED else 0)
                if len(parts) > 1:
                    return run_in_parts(self.follow, operation, parts, args, kwargs)
            self._in_parts = False
            inputs, written = self._operands(known, args, kwargs)
            step = iterations.expected(operation, inputs)
            if iterations.recorded is None and in_compiled():
                say_once(
                    "compile",
                    "within OutOfCore a compiled function runs as if it were not compiled, as "
                    "every operation has to be seen: its values are those of the function itself",
                )
            self._bring_in(step, known.name, inputs)
            if step is not None and not self._in_parts and _foretold(step, args, kwargs):
                promised = step.birth_bytes, True
            else:
                promised = self._result_bytes(operation, known, args, kwargs)
            self._promise(known.name, inputs, written, *promised)
            if iterations.log is None:
                result, events = operation._op(*args, **kwargs), None
            else:
                result, events = timed(residency.device, operation._op, args, kwargs)
            if not self._computes:
                result = as_computed(operation, args, result)
            made = self._ended(known, args, kwargs, inputs, written, result)
            if not inputs and not made:
                return result
            residency.clock += 1
            summed = None if into is None else residency.look_up(args[into])
            given = form(known.name, (*args, *kwargs, *kwargs.values()))
            entry = Entry(operation, inputs, written, made, given, summed, events)
            step = iterations.ran(step, entry)
            if step is not None and step.after:
                self._act(step.after, (), known.name)
        return result

    # ---- before an operation

    def _operands(
        self, known: Signature, args: Arguments, kwargs: Named
    ) -> tuple[list[Variable], list[Variable]]:
        """Return an operation's input variables, and the inputs that it writes."""
        find = self._residency.look_up if known.view else self._residency.find
        inputs: dict[Variable, bool] = {}  # whether it is written; a list would be searched
        writes = (*known.writes, *(False for _ in args))
        given = [(value, write, True) for value, write in zip(args, writes, strict=False)]
        given += [(value, name in known.writes_named, False) for name, value in kwargs.items()]
        for value, writes_it, by_position in given:
            for tensor in (value,) if isinstance(value, torch.Tensor) else tensors_in(value):
                variable = find(tensor)
                if variable is None and writes_it:
                    variable = self._residency.adopt(tensor)
                if variable is None:
                    self._hold_components(tensor)
                    continue
                if by_position and not variable.kind:  # what it does suggests what it is
                    if writes_it and known.name.endswith("batch_norm"):
                        variable.kind = "buffer"
                    elif not writes_it and isinstance(tensor, nn.Parameter):
                        variable.kind, variable.raw = "parameter", tensor.requires_grad
                inputs[variable] = writes_it or inputs.get(variable, False)
        return list(inputs), [variable for variable, writes_it in inputs.items() if writes_it]

    def _hold_components(self, tensor: torch.Tensor) -> None:
        """Lock the parts of a sparse or nested tensor for good: C++ code holds them."""
        for part in components(tensor):
            self._in_parts = True  # a result's are in no plan
            self._residency.bring(part, lock=True)

    def _bring_in(self, step: Step | None, name: str, inputs: list[Variable]) -> None:
        residency = self._residency
        if residency.ended:
            residency.bury()
        if residency.leaving:
            residency.let_go()
        if self.collectives:
            self._unpin()
        clock = residency.clock
        if step is not None and step.before:
            self._act(step.before, inputs, name)
        for variable in inputs:
            variable.used = clock
            if not variable.resident:
                residency.on_demand += 1
                residency.make_room(variable.nbytes, inputs, partial(self._where, name))
                residency.swap_in(variable)
            if variable.incoming is not None:
                residency.arrive(variable)

    def _result_bytes(
        self, operation: OpOverload, known: Signature, args: Arguments, kwargs: Named
    ) -> tuple[int, bool]:
        if not (known.makes or known.resizes) or known.collective or not self._computes:
            return 0, True
        room = self._residency.budget_bytes - self._residency.used_bytes
        return result_bytes(operation, args, kwargs, room)

    def _promise(
        self, name: str, inputs: list[Variable], written: list[Variable], nbytes: int, certain: bool
    ) -> None:
        """Make room for the results of an operation, and note its writes."""
        residency = self._residency
        if residency.used_bytes + nbytes > residency.budget_bytes:
            residency.make_room(nbytes, inputs, partial(self._where, name), strict=certain)
        for variable in written:
            if variable.valid:
                residency.written(variable)
        if written and residency.kept:
            residency.kept.clear()

    def _where(self, name: str) -> str:
        return f"function {self._residency.clock - self._iterations.origin} ({name})"

    # ---- after an operation

    def _ended(
        self,
        known: Signature,
        args: Arguments,
        kwargs: Named,
        inputs: list[Variable],
        written: list[Variable],
        result: Any,
    ) -> list[Variable]:
        """Count the results of an operation; return its new variables."""
        residency = self._residency
        made = self._made(result, inputs) if known.makes else []
        if known.resizes:  # also storages that were empty
            for variable in written:
                if variable.died is None:
                    residency.resized(variable)
            values = [a for a, write in zip(args, known.writes, strict=False) if write]
            values += [value for name, value in kwargs.items() if name in known.writes_named]
            made += (v for v in self._made(values, written) if v not in made)
        if known.collective:
            self._pin(result, inputs)
        elif known.awaited:  # a functional collective is waited for
            for tensor in tensors_in(result):
                torch.ops._c10d_functional.wait_tensor(tensor)
        held = residency.used_bytes
        if held > residency.peak_bytes:
            residency.peak_bytes = held
        if held > residency.budget_bytes:
            residency.make_room(0, (*inputs, *made), partial(self._where, known.name))
            say_once(
                f"more {known.name}",
                f"{known.name} made more than could be foretold: for a moment there were {held} "
                f"bytes of tensors, above the budget of {residency.budget_bytes}. Give a custom "
                "operation its shapes (torch.library.register_fake), or lower the budget",
            )
        return made

    def _made(self, result: Any, inputs: list[Variable]) -> list[Variable]:
        residency = self._residency
        made: list[Variable] = []
        for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in(result):
            variable = residency.find(tensor, made=True)
            if variable is None:
                self._hold_components(tensor)
            if variable is None or variable in inputs or variable in made:
                continue
            variable.used = residency.clock
            if variable.since == residency.clock and variable.bound < 0:
                made.append(variable)
        return made

    def _act(
        self, actions: tuple[tuple[Kind, int], ...], keep: Iterable[Variable], name: str
    ) -> None:
        iterations, residency = self._iterations, self._residency
        assert iterations.follower is not None and iterations.plan is not None
        for kind, v in actions:
            variable = iterations.follower.bound[v]
            if variable is None or variable.died is not None:
                continue
            if kind is Kind.SWAP_OUT:
                if variable.raw:
                    continue  # copied at the end, when nothing writes it any more
                if iterations.plan.copies_again:
                    residency.written(variable)  # marked as written: the plan copies again
                residency.swap_out(variable)
            elif kind is Kind.RELEASE:
                residency.release(variable)
            elif not variable.resident:
                residency.make_room(variable.nbytes, keep, partial(self._where, name))
                residency.swap_in(variable)
                if variable.raw:
                    residency.arrive(variable)
                variable.used = residency.clock

    def _pin(self, result: Any, inputs: list[Variable]) -> None:
        """Keep the variables of a collective on the device until it is done."""
        handles = [value for value in result if isinstance(value, torch.ScriptObject)]
        works = [torch._C._distributed_c10d.Work.unbox(handle) for handle in handles]
        for variable in inputs:
            variable.pins += 1
        self.collectives.append((works, inputs))
        self._unpin()

    def _unpin(self) -> None:
        under_way = []
        for works, variables in self.collectives:
            done = all(work.is_completed() for work in works)
            for variable in variables if done else ():
                variable.pins -= 1
            if not done:
                under_way.append((works, variables))
        self.collectives = under_way

    def wait(self) -> bool:
        """Give collectives some time to end; return whether any were running."""
        if not self.collectives:
            return False
        time.sleep(0.002)
        self._unpin()
        return True

    # ---- operations outside all plans

    def run_beside(self, operation: Any, args: Arguments, kwargs: Named) -> Any:
        """Run an operation of another thread, or of higher order, which calls functions."""
        known = signature(operation) if isinstance(operation, OpOverload) else None
        if known is None and in_compiled():
            raise NotImplementedError(
                f"{operation} needs torch.compile, which does not look into an OutOfCore block: "
                "use what computes the same without (Python's if and while, "
                "F.scaled_dot_product_attention), or train without the block"
            )
        if known is not None and known.ignored:
            return operation(*args, **kwargs)
        name = f"an operation beside the training, {known.name if known else operation}"
        if not self._lock.acquire(timeout=_PATIENCE_S):
            raise RuntimeError(
                f"{name}, has waited {_PATIENCE_S:.0f} s: operations within an OutOfCore block "
                "run one at a time, and one of them does not end; it must not wait for a thread"
            )
        try:
            residency = self._residency
            if known is not None:
                inputs, written = self._operands(known, args, kwargs)
            else:  # the operations of its functions are unseen
                inputs = written = self._held(args, kwargs)
            self._bring_in(None, name, inputs)
            promised = self._result_bytes(operation, known, args, kwargs) if known else (0, True)
            self._promise(name, inputs, written, *promised)
            accelerator.synchronize(residency.device)  # each thread has its own current stream
            result = (operation._op if known else operation)(*args, **kwargs)
            accelerator.synchronize(residency.device)
            if known is not None:
                self._ended(known, args, kwargs, inputs, written, result)
            else:
                made = self._made(result, inputs)
                residency.peak_bytes = max(residency.peak_bytes, residency.used_bytes)
                residency.make_room(0, (*inputs, *made), lambda: name, strict=False)
            return result
        finally:
            self._lock.release()

    def _held(self, *arguments: Any) -> list[Variable]:
        """Return the variables of all tensors in arguments, at any depth, modules included."""
        tensors: list[torch.Tensor] = []
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, nn.Module):
                tensors += [*leaf.parameters(), *leaf.buffers()]
            elif isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
        found = dict.fromkeys(map(self._residency.find, tensors))
        return [variable for variable in found if variable is not None]
