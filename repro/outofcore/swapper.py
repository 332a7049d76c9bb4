"""Training within a byte budget: `OutOfCore`, a context around anyone's own training steps."""

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self
from weakref import WeakValueDictionary

import torch
from torch._ops import OpOverload
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from repro.measure import accelerator
from repro.measure.checks import is_whole
from repro.outofcore.following import Step
from repro.outofcore.host import (
    HostStore,
    Mover,
    StreamMover,
    ThreadMover,
    give_back_freed_memory,
)
from repro.outofcore.iterations import Iterations, Statistics
from repro.outofcore.operations import (
    Operations,
    RawAccess,
    Timer,
    divide,
    result_bytes,
    run_in_parts,
)
from repro.outofcore.paced import PacedMover
from repro.outofcore.plan import Kind, SwapPlan
from repro.outofcore.recording import Recording, Signature, signature, tensors_in
from repro.outofcore.residency import Residency, Variable
from repro.outofcore.schedule import plan_swaps, tune_window
from repro.outofcore.schedules import Name, Scheduler, check_schedule, make_plan
from repro.outofcore.trace import Trace

_process = os.getpid()


def _forked() -> None:
    global _process
    _process = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)  # to ask the system at every operation takes time

_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})
_COPY_LATENCY_S = 3e-5  # what starting a copy costs, for the simulation that chooses the window
_PART = 16  # an operation on lists is run in parts of at most budget / 16


class OutOfCore:
    """Train within a budget of device memory: what does not fit is swapped to the host.

    Within the block every operation of this thread, of its backward passes and of its optimizers is
    seen. The first iteration runs by swapping on demand and is recorded; the following ones run by
    the schedule that the recording gives (Hayakawa and Narihira, section 3). What runs otherwise
    (a changed step, an evaluation) swaps on demand, and is planned anew where it recurs. Values are
    those of ordinary training, bit for bit.

    An iteration ends when the first optimizer that stepped within the block has stepped again; call
    `step` where that does not fit, such as without an optimizer.

    Args:
        budget_bytes: Bytes of tensor storages that may be on the device at once. What operations
            take inside for themselves comes on top.
        window_bytes: How far to look ahead (`plan_swaps`); ``"auto"`` chooses by simulation with
            measured times.
        device: The device whose tensors are managed; None for the current accelerator, or else the
            CPU.
        swap_folder: On the CPU, a folder for the file that swapped-out tensors lie in, to train
            with less memory; None keeps them in memory beside the budget. With a folder, this
            process returns what it frees to the system from then on, which costs page faults.
        exclude: Tensors to leave alone and not to count, such as a whole dataset.
        host_bytes: Host memory to reserve before the first swap, pinned for an accelerator:
            `Trace.host_bytes` predicts it. Beyond it, or with None, more is taken as it is needed.
            All of it is given back at the end.
        schedule: What plans the iterations: ``"window"``, the paper's with our changes;
            ``"packed"``, which looks at the whole iteration; ``"paper"`` to the letter, ``"lms"``,
            ``"vdnn"`` or ``"on_demand"``, to compare with; or a function (`schedules.Scheduler`).
        link_bytes_per_s: On the CPU, the rate each way that copies are slowed down to, for studies
            of what a link costs; None for as fast as the memory.

    Raises:
        BudgetTooSmall: An operation alone needs more than the budget.
        HostMemoryError: The host (not the device) has not the memory to swap to.
        DoesNotFit: The schedule is "lms" or "vdnn", and holds more than the budget.
        PlanError: The schedule is a function, and its plan breaks a rule.
        ValueError: The budget is not positive, `host_bytes` is negative, the device is not here,
            `swap_folder` is given for an accelerator, or the schedule or the link's rate is none.
    """

    def __init__(
        self,
        budget_bytes: int,
        window_bytes: int | Literal["auto"] | None = "auto",
        device: str | torch.device | None = None,
        swap_folder: str | Path | None = None,
        exclude: Iterable[torch.Tensor] = (),
        host_bytes: int | None = None,
        schedule: Name | Scheduler = "window",
        link_bytes_per_s: float | None = None,
    ) -> None:
        if not is_whole(budget_bytes, 1):
            raise ValueError(f"budget_bytes is {budget_bytes!r}: give whole bytes above 0")
        if isinstance(window_bytes, str) and window_bytes != "auto":
            raise ValueError(f'window_bytes is {window_bytes!r}: give bytes, None or "auto"')
        if host_bytes is not None and not is_whole(host_bytes, 0):
            raise ValueError(f"host_bytes is {host_bytes!r}: give whole bytes, 0 or more, or None")
        check_schedule(schedule)
        self.schedule, self.link_bytes_per_s = schedule, link_bytes_per_s
        self.device = accelerator.resolve(device)
        if self.device.type == "meta":
            raise ValueError("the device meta is not supported: choose cpu or an accelerator")
        if swap_folder is not None and self.device.type != "cpu":
            raise ValueError(
                f"swap_folder is for the CPU: {self.device} swaps to pinned memory, give None"
            )
        if link_bytes_per_s is not None and (self.device.type != "cpu" or link_bytes_per_s <= 0):
            raise ValueError(
                f"link_bytes_per_s is {link_bytes_per_s!r} on {self.device}: give bytes/s above 0 "
                "on a CPU, or None"
            )
        self.budget_bytes, self.window_bytes = budget_bytes, window_bytes
        self.host_bytes = host_bytes or 0
        self.swap_folder = Path(swap_folder) if swap_folder is not None else None
        self._excluded = tuple(exclude)
        self._statistics = Statistics()
        self._iterations = Iterations(self._make_plan, self._statistics)
        self._stack: ExitStack | None = None

    @property
    def trace(self) -> Trace | None:
        """The last recorded iteration, or None before the first has ended."""
        return self._iterations.recorded.trace if self._iterations.recorded else None

    @property
    def plan(self) -> SwapPlan | None:
        """The plan that is followed, or None before the first."""
        return self._iterations.plan

    @property
    def statistics(self) -> Statistics:
        """What happened so far."""
        if self._stack is not None:
            self._count()
        return self._statistics

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise RuntimeError("this OutOfCore block is entered already: leave it first")
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, Operations) and mode.owner.device == self.device:
                raise RuntimeError(
                    f"another OutOfCore block of {self.device} is entered here already: leave it "
                    "first, as both would move the same tensors"
                )
        self._store = HostStore(self.device, self.swap_folder)
        try:
            self._store.reserve(self.host_bytes)
        except accelerator.HostMemoryError:
            self._store.close()
            raise
        if self.swap_folder is not None:
            give_back_freed_memory()
        mover: Mover
        if accelerator.is_accelerator(self.device):
            mover = StreamMover(self._store, self.device)
        elif self.link_bytes_per_s is not None:
            mover = PacedMover(self._store, self.link_bytes_per_s)
        else:
            mover = ThreadMover(self._store)
        self._process = _process
        excluded = [tensor.untyped_storage()._cdata for tensor in self._excluded]
        self._mover = mover
        self._residency = Residency(self.budget_bytes, self.device, self._store, mover, excluded)
        self._statistics = Statistics()
        self._iterations = Iterations(self._make_plan, self._statistics)
        self._leader: object = None  # the optimizer whose steps end the iterations
        self._saved: WeakValueDictionary[tuple[int, int], torch.UntypedStorage] = (
            WeakValueDictionary()
        )
        self._stack = ExitStack()
        hook = register_optimizer_step_post_hook(self._stepped)
        self._stack.callback(hook.remove)
        self._stack.enter_context(RawAccess(self))
        self._stack.enter_context(Operations(self))
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._stack is not None
        self._stack.close()
        self._count()
        try:
            self._residency.restore()
        finally:
            self._stack = None
            self._mover.close()
            self._store.close()
            self._iterations.log = self._iterations.follower = None

    def _count(self) -> None:
        residency, statistics = self._residency, self._statistics
        statistics.bytes_in, statistics.bytes_out = residency.bytes_in, residency.bytes_out
        residency.note_peak()
        statistics.peak_bytes = residency.peak_bytes
        statistics.host_bytes = self._store.peak_bytes
        statistics.locked_bytes = sum(v.nbytes for v in residency.variables() if v.locked)

    # ---- iterations

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(self._knows(parameter) for parameter in parameters):
            return  # it has stepped out of our sight
        for parameter in parameters if self._iterations.log is not None else ():
            self._classify("parameter", [parameter])
            self._classify("gradient", [parameter.grad])
            self._classify("optimizer state", optimizer.state.get(parameter, {}).values())
        if self._leader is None:
            self._leader = optimizer
        if self._leader is optimizer:
            self._end_iteration()

    def _knows(self, tensor: torch.Tensor) -> Variable | None:
        with torch._C.DisableTorchFunction():
            return self._residency.look_up(tensor)

    def _classify(self, kind: str, values: Iterable[object]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and (known := self._knows(value)) is not None:
                known.kind = kind

    def step(self) -> None:
        """End an iteration here; from now on optimizers no longer do."""
        if self._stack is None:
            raise RuntimeError("step() belongs inside the block: with OutOfCore(...) as ooc")
        self._leader = self
        self._end_iteration()

    def _end_iteration(self) -> None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self._iterations.end(self._residency.clock)

    def _make_plan(self, recorded: Recording, careful: bool) -> SwapPlan:
        for variable in self._residency.variables():
            variable.bound = -1
        trace, budget_bytes = recorded.trace, self.budget_bytes
        if self.schedule != "window":
            window = None if isinstance(self.window_bytes, str) else self.window_bytes
            rates = self._mover.bandwidth()
            plan = make_plan(
                self.schedule,
                trace,
                budget_bytes,
                recorded.times,
                rates,
                _COPY_LATENCY_S,
                window,
            )
        elif self.window_bytes != "auto":
            plan = plan_swaps(trace, budget_bytes, self.window_bytes)
        elif careful:
            rates = self._mover.bandwidth()
            plan = tune_window(trace, budget_bytes, recorded.times, rates, _COPY_LATENCY_S)
        else:
            plan = plan_swaps(trace, budget_bytes)
        self._store.reserve(plan.host_bytes)
        return plan

    # ---- operations

    def run(self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation with its inputs on the device and room for its results."""
        residency, iterations = self._residency, self._iterations
        if _process != self._process:  # such as a loader's worker
            return operation(*args, **kwargs)
        step: Step | None
        found = self._next(operation, args, kwargs) if iterations.log is None else None
        if found is not None:
            step, inputs, written = found
            known = step.signature
        else:
            known = signature(operation)
            if known.ignored:
                return operation(*args, **kwargs)
            if known.grouped:
                parts = divide(args, self.budget_bytes / _PART)
                if len(parts) > 1:
                    return run_in_parts(self.run, operation, parts, args, kwargs)
            inputs, written = self._variables(known, args, kwargs)
            step = iterations.expected(operation, inputs)
        if residency.leaving:
            residency.let_go()
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
        if step is not None:
            nbytes = step.birth_bytes
        else:
            # Where nothing is computed, nothing takes room.
            takes_none = not known.makes or self.device.type == "meta"
            nbytes = 0 if takes_none else result_bytes(operation, args, kwargs)
        if residency.used_bytes + nbytes > residency.budget_bytes:
            residency.make_room(nbytes, inputs, partial(self._name, known))
        for variable in written:
            if variable.valid:
                residency.written(variable)
        timed = Timer(self.device) if iterations.log is not None else None
        result = operation._op(*args, **kwargs)
        if timed:
            timed.stop()
        made = self._made(result, inputs) if known.makes else []
        if residency.used_bytes > residency.peak_bytes:
            residency.peak_bytes = residency.used_bytes
        if residency.used_bytes > residency.budget_bytes:  # a result was larger than foretold
            residency.make_room(0, (*inputs, *made), partial(self._name, known))
        if not inputs and not made:
            return result
        residency.clock = clock + 1
        if made or iterations.log is not None or step is None or step.births:
            step = iterations.ran(step, operation, inputs, written, made, timed)
        elif iterations.follower is not None:  # the plan's, which makes nothing
            iterations.follower.cursor += 1
        if step is not None and step.after:
            self._act(step.after, (), partial(self._name, known))
        return result

    def _name(self, known: Signature) -> str:
        return f"function {self._residency.clock - self._iterations.origin} ({known.name})"

    def _next(
        self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Step, list[Variable], list[Variable]] | None:
        """Return the plan's next step with its inputs and those written, where this is just it.

        None where it is not, or where more has to be found out, such as of a new mini-batch.
        """
        follower = self._iterations.follower
        assert follower is not None
        if follower.done or operation is not follower.steps[follower.cursor].operation:
            return None
        step = follower.steps[follower.cursor]
        known, bound, numbers, writes = (
            self._residency.known,
            follower.bound,
            step.inputs,
            step.signature.writes,
        )
        inputs: list[Variable] = []
        written: list[Variable] = []
        n, expected = 0, len(numbers)
        for position, value in enumerate((*args, *kwargs.values()) if kwargs else args):
            if type(value) in _PLAIN:
                continue
            for tensor in (value,) if isinstance(value, torch.Tensor) else tensors_in(value):
                try:
                    variable = known[tensor.untyped_storage()._cdata]
                except (KeyError, NotImplementedError, RuntimeError):
                    return None
                if variable is None:
                    continue
                if n < expected and bound[numbers[n]] is variable:
                    inputs.append(variable)
                    n += 1
                elif variable not in inputs:
                    return None
                if step.written and variable not in written:
                    if position < len(args):
                        write = writes[position]
                    else:
                        name = list(kwargs)[position - len(args)]
                        write = name in step.signature.writes_named
                    if write:
                        written.append(variable)
        return (step, inputs, written) if n == expected else None

    def _made(self, result: Any, inputs: list[Variable]) -> list[Variable]:
        """Return the variables that an operation has made."""
        residency = self._residency
        made: list[Variable] = []
        for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in(result):
            variable = residency.find(tensor, made=True)
            if variable is None or variable in inputs or variable in made:
                continue
            variable.used = residency.clock
            if variable.since == residency.clock and variable.bound < 0:
                made.append(variable)
        return made

    def _variables(
        self, known: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Variable], list[Variable]]:
        writes = known.writes
        find = self._residency.look_up if known.view else self._residency.find
        inputs: list[Variable] = []
        written: list[Variable] = []
        for position, value in enumerate(args):
            if isinstance(value, torch.Tensor | list | tuple):
                for tensor in (value,) if isinstance(value, torch.Tensor) else tensors_in(value):
                    variable = find(tensor)
                    if variable is None:
                        continue
                    if variable not in inputs:
                        inputs.append(variable)
                    if position < len(writes) and writes[position] and variable not in written:
                        written.append(variable)
                        if not variable.kind and known.name.endswith("batch_norm"):
                            variable.kind = "buffer"
                    elif not variable.kind and isinstance(tensor, torch.nn.Parameter):
                        variable.kind = "parameter"
        for name, value in kwargs.items():
            for tensor in tensors_in(value):
                variable = find(tensor)
                if variable is None:
                    continue
                if variable not in inputs:
                    inputs.append(variable)
                if name in known.writes_named and variable not in written:
                    written.append(variable)
        return inputs, written

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
            if kind is Kind.SWAP_OUT:
                if self._iterations.plan is not None and self._iterations.plan.copies_again:
                    residency.written(variable)  # as if it were: the plan wants the copy
                residency.swap_out(variable)
            elif kind is Kind.RELEASE:
                residency.release(variable)
            elif not variable.resident:
                residency.make_room(variable.nbytes, keep, what)
                residency.swap_in(variable)
                variable.used = residency.clock

    # ---- addresses

    def bring(self, tensor: torch.Tensor, lock: bool) -> None:
        """Have a tensor's bytes on the device for who reads its address."""
        with _disable_current_modes():
            self._bring(tensor, lock)

    def _bring(self, tensor: torch.Tensor, lock: bool) -> None:
        residency = self._residency
        variable = residency.find(tensor)
        if variable is None:
            return
        if not variable.resident:
            self._statistics.on_demand += 1
            residency.make_room(variable.nbytes, (variable,), lambda: "reading a tensor's address")
            residency.swap_in(variable)
        residency.arrive(variable)
        residency.written(variable)  # it may be, without a word to us
        variable.used = residency.clock
        variable.locked = variable.locked or lock

    def snapshot(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Return a copy of a tensor's storage on the host, for whoever pickles it."""
        with _disable_current_modes():
            return self._snapshot(tensor)

    def _snapshot(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        residency = self._residency
        variable = residency.find(tensor)
        if variable is None:
            return tensor.untyped_storage()
        key = id(variable), residency.clock
        saved = self._saved.get(key)
        if saved is None:
            if variable.resident:
                residency.arrive(variable)
                saved = variable.storage().cpu()
                if self.device.type == "cpu":
                    saved = saved.clone()
            else:
                assert variable.place is not None
                self._mover.finish()
                saved = torch.UntypedStorage(variable.nbytes)
                self._store.read(variable.place, saved.data_ptr())
            self._saved[key] = saved
        return saved
