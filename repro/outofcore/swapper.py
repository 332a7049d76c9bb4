"""Training within a byte budget, `OutOfCore`, and the trace of an iteration, `record`."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any, Literal, Self, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from repro.measure import accelerator
from repro.measure.allocations import give_back_freed_memory
from repro.measure.checks import is_whole
from repro.measure.memory import keep_conjugates
from repro.measure.precision import uncompiled
from repro.outofcore import guards
from repro.outofcore.guards import Uninterrupted, watch
from repro.outofcore.host import HostStore, Mover, StreamMover, ThreadMover
from repro.outofcore.iterations import Iterations, Statistics, held_by, meet, parameters_of
from repro.outofcore.operations import Operations, RawAccess, say_once
from repro.outofcore.plan import SwapPlan
from repro.outofcore.planning import Name, Planner, Scheduler, check_schedule
from repro.outofcore.residency import Residency
from repro.outofcore.running import UNLIMITED, Running
from repro.outofcore.sequence import Trace
from repro.outofcore.simulation import BudgetTooSmall

_T = TypeVar("_T")
Modules = nn.Module | Iterable[nn.Module]
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def _all_of(kind: type[_T], given: object, name: str) -> tuple[_T, ...]:
    values = (given,) if isinstance(given, kind) else given
    if isinstance(values, Iterable) and not isinstance(values, str | type):
        values = tuple(values)
        if all(isinstance(value, kind) for value in values):
            return values
    raise ValueError(f"{name} is {given!r:.200}: give one {kind.__name__} or several")


def _device(device: str | torch.device | None) -> torch.device:
    try:
        found = accelerator.resolve(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}: choose cpu or an accelerator") from error
    if found.type != "cpu" and not accelerator.is_accelerator(found):
        raise ValueError(f"the device {found} is not supported: choose cpu or an accelerator")
    return found


class OutOfCore:
    """Train within a budget of device memory, by swapping tensors to the host.

    The block sees every operation of this thread, of its backward passes and optimizers, and of
    threads started within it. The first two iterations swap on demand and are recorded: an
    optimizer makes its state in the first. The following ones run by a schedule of the recording
    (Hayakawa and Narihira, section 3), and by better ones found between iterations. Other
    operations (a changed step, an evaluation) swap on demand, and are planned anew if they recur.
    Values are those of ordinary training, bit for bit. `docs/details.md` says what is unsupported.

    An iteration ends when the first optimizer that stepped within the block has stepped again, and
    where it is gone, the next that steps; call `step` for any other end, such as without one.

    Differs from the paper: one more iteration runs on demand, so that one plan is enough.

    Args:
        budget_bytes: Bytes of tensor storages that may be on the device at once. Workspace of
            operations comes on top.
        window_bytes: Look-ahead (`plan_swaps`), None for 1.5 times the budget; ``"auto"`` chooses
            by simulation with measured times, for about a second, and leaves the smallest
            variables, 1 % of the budget, on the device.
        device: The device of the managed tensors; None for the current accelerator, else the CPU.
        swap_folder: On the CPU, a folder for a file of swapped-out tensors; None keeps them in
            memory, on top of the budget. With a folder, this process returns freed memory to the
            system from then on, which costs page faults.
        exclude: Tensors that are neither managed nor counted, such as a whole dataset.
        host_bytes: Host memory to reserve before the first swap, pinned for an accelerator:
            `planning.host_bytes` predicts it. More is taken as needed, and given back at the end.
        model: One or more modules; their parameters, buffers and gradients count from the start.
            Those of others count from their first use on, of the first called module from its call.
        optimizer: One or more optimizers; their parameters and state count from the start.
        schedule: ``"window"``, the paper's with our changes; ``"packed"``, of the whole iteration;
            ``"auto"``, the faster of both in simulation, or the window if `window_bytes` is given;
            ``"paper"`` without our changes, ``"lms"``, ``"vdnn"`` or ``"on_demand"`` to compare
            with; or a function (`planning.Scheduler`).
        link_bytes_per_s: On the CPU, a limit on the rate of copies each way; None for none.

    Raises:
        BudgetTooSmall: An operation alone needs more than the budget.
        HostMemoryError: The host (not the device) has too little memory to swap to.
        DoesNotFit: The schedule is "lms" or "vdnn", and holds more than the budget.
        PlanError: The schedule is a function, and its plan breaks a rule.
        ValueError: An argument has a wrong type or is out of range, the device is not present, or
            `swap_folder` is given for an accelerator or is no folder for a new file.
        RuntimeError: A block of the device is entered already.
    """

    def __init__(
        self,
        budget_bytes: int,
        window_bytes: int | Literal["auto"] | None = "auto",
        device: str | torch.device | None = None,
        swap_folder: str | Path | None = None,
        exclude: Iterable[torch.Tensor] = (),
        host_bytes: int | None = None,
        model: Modules = (),
        optimizer: Optimizers = (),
        schedule: Name | Scheduler = "auto",
        link_bytes_per_s: float | None = None,
    ) -> None:
        self.device = _device(device)
        on_cpu, rate, folder = self.device.type == "cpu", link_bytes_per_s, swap_folder
        is_path = isinstance(folder, str | os.PathLike) and folder != ""
        for name, value, right, allowed in (
            ("budget_bytes", budget_bytes, is_whole(budget_bytes, 1), "whole bytes above 0"),
            ("window_bytes", window_bytes,
             window_bytes in (None, "auto") or is_whole(window_bytes, 0),
             'whole bytes, "auto" or None'),
            ("host_bytes", host_bytes, host_bytes is None or is_whole(host_bytes, 0),
             "whole bytes or None"),
            ("swap_folder", folder, folder is None or (on_cpu and is_path),
             "a folder, on a CPU, or None"),
            ("link_bytes_per_s", rate,
             rate is None or (on_cpu and isinstance(rate, int | float) and rate > 0),
             "bytes/s above 0, on a CPU, or None"),
        ):  # fmt: skip
            if not right:
                raise ValueError(f"{name} is {value!r} on {self.device}: give {allowed}")
        check_schedule(schedule)
        self.schedule, self.link_bytes_per_s = schedule, link_bytes_per_s
        self.budget_bytes, self.window_bytes = budget_bytes, window_bytes
        self.host_bytes = host_bytes or 0
        self.swap_folder = Path(folder) if folder is not None else None
        self._excluded = _all_of(torch.Tensor, exclude, "exclude")
        self._models = _all_of(nn.Module, model, "model")
        optimizers = _all_of(torch.optim.Optimizer, optimizer, "optimizer")
        self._optimizers = [ref(one) for one in optimizers]
        self._statistics = Statistics()
        self._iterations = Iterations(None, self._statistics)
        self._stack: ExitStack | None = None

    @property
    def trace(self) -> Trace | None:
        """The last recorded iteration, or None before the first has ended."""
        return self._iterations.recorded.trace if self._iterations.recorded else None

    @property
    def plan(self) -> SwapPlan | None:
        """The current plan, or None before the first."""
        return self._iterations.plan

    @property
    def statistics(self) -> Statistics:
        """Counts so far."""
        if self._stack is not None:
            self._count()
        return self._statistics

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise RuntimeError("this OutOfCore block is entered already: leave it first")
        self._check_no_other()
        try:
            excluded = [tensor.untyped_storage()._cdata for tensor in self._excluded]
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                "a tensor in exclude= has no storage of its own, such as a sparse or lazy one: it "
                "is not swapped; name there what it consists of, such as its values()"
            ) from error
        # On a CPU, copies on the host stay readable if torch (2.13) can exchange pointers.
        whole = self.device.type == "cpu" and hasattr(torch.UntypedStorage, "_swap_data_ptr_")
        self._store = store = HostStore(self.device, self.swap_folder, whole=whole)
        try:
            store.reserve(self.host_bytes)
        except accelerator.HostMemoryError:
            store.close()
            raise
        if self.swap_folder is not None:
            give_back_freed_memory()
        mover: Mover = ThreadMover(store, self.link_bytes_per_s)
        if accelerator.is_accelerator(self.device):
            mover = StreamMover(store, self.device)
        self._process, self._thread, self._mover = guards.process, get_ident(), mover
        residency = Residency(self.budget_bytes, self.device, store, mover, excluded)
        self._residency, self._lock = residency, residency.lock
        self._statistics = Statistics()
        planner = Planner(self.schedule, self.window_bytes, self.budget_bytes, mover.bandwidth)
        self._iterations = Iterations(planner, self._statistics, store.reserve)
        self._leader: Callable[[], object] = lambda: None  # what ends iterations, if it lives
        self._failed: BudgetTooSmall | None = None  # the last error, which TorchScript would hide
        self._guard = guard = Uninterrupted(OutOfCore.__exit__.__code__)
        running = Running(residency, self._iterations)
        self._follow, self._beside = running.follow, running.run_beside  # bound once, for speed
        residency.wait = lambda: guard.pending is None and running.wait()
        guard.install()
        try:
            with guard, ExitStack() as stack:
                self._take_in(*self._models, *(one() for one in self._optimizers))
                stack.callback(watch(self))
                stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
                self._first_call = register_module_forward_pre_hook(self._called)
                stack.callback(self._first_call.remove)
                stack.enter_context(uncompiled())
                stack.enter_context(RawAccess(self))
                stack.enter_context(Operations(self))
                self._stack = stack.pop_all()
        except BaseException:
            guard.remove()
            self._close()
            raise
        return self

    def _check_no_other(self) -> None:
        for mode in _get_current_dispatch_mode_stack():
            if not isinstance(mode, Operations) or mode.owner.device != self.device:
                continue
            if mode.owner is self:  # the block has ended, but this thread still sees it
                raise RuntimeError("this thread was started within this block: make another one")
            if mode.owner.entered:
                raise RuntimeError(
                    f"another OutOfCore block of {self.device} is entered here or in the thread "
                    "that started this one: leave it first, or train without a block of its own"
                )

    def __exit__(self, *exception: object) -> None:
        """Bring everything back; raise a `BudgetTooSmall` that a scripted module has hidden."""
        guard = self._guard
        guard.depth += 1
        try:
            with self._lock:
                assert self._stack is not None
                stack, self._stack = self._stack, None
                stack.close()
                self._close()
        finally:
            guard.depth -= 1
            guard.remove()
            guard.deliver()
        error = exception[1] if exception else None
        if isinstance(error, RuntimeError) and "data is not allocated yet" in str(error):
            error.add_note(
                "within OutOfCore: native code asks for the address of a tensor that is swapped "
                "out: call its data_ptr() before, or name it in exclude="
            )
        if self._failed is not None and "TorchScript interpreter" in str(error):
            raise self._failed

    def _close(self) -> None:
        self._count()
        try:
            if guards.process == self._process:  # a forked one has no threads that copy
                self._residency.restore()
        finally:
            self._residency.budget_bytes = 1 << 62  # threads that still run move nothing more
            self._mover.close()
            self._store.close(keep=any(not v.resident for v in self._residency.variables()))
            self._residency.kept.clear()
            self._say_what_is_uncounted()
            self._iterations.log = self._iterations.follower = None

    @property
    def entered(self) -> bool:
        """Whether the block is entered."""
        return self._stack is not None

    def _count(self) -> None:
        residency, statistics = self._residency, self._statistics
        residency.peak_bytes = max(residency.peak_bytes, residency.used_bytes)
        for name in ("bytes_in", "bytes_out", "on_demand", "peak_bytes"):
            setattr(statistics, name, getattr(residency, name))
        statistics.host_bytes = self._store.peak_bytes
        statistics.locked_bytes = sum(v.nbytes for v in residency.variables() if v.locked)

    # ---- tensors from before the block

    def _take_in(self, *holders: object) -> None:
        """Count the tensors of modules and optimizers, within the budget."""
        residency = self._residency
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            for holder in holders:
                if holder is not None:  # it has not ended
                    meet(residency, holder)
            residency.make_room(0, (), lambda: "what was there before", strict=False)
        self._say_what_is_fixed()

    def _say_what_is_fixed(self) -> None:
        fixed = sum(v.nbytes for v in self._residency.variables() if v.fixed and v.kind)
        if fixed:
            say_once(
                "fixed",
                f"{fixed} bytes of the model or its optimizer lie in memory that torch does not "
                "own alone (safetensors, torch.load on a CPU, mmap, numpy, other processes): they "
                "count and stay on the device. To have them swapped, copy them before: p.data = "
                "p.data.clone(), optimizer.load_state_dict(copy.deepcopy(loaded))",
            )

    def _called(self, module: nn.Module, _: object) -> None:
        """Count the tensors of the first module that is called, before its first operation."""
        self._first_call.remove()
        with self._guard, self._lock:
            self._take_in(module)

    # ---- iterations

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        with self._guard:
            with self._lock, torch._C.DisableTorchFunction():
                parameters = parameters_of(optimizer)
                here = get_ident() == self._thread
                ours = here and any(p.device == self.device for p in parameters)
                if not ours and not any(map(self._residency.look_up, parameters)):
                    return  # none of its parameters is managed
                if self._iterations.log is not None:
                    for kind, value in held_by(optimizer):
                        if (variable := self._residency.look_up(value)) is not None:
                            variable.kind = kind
                    self._say_what_is_fixed()
            if self._leader() is None:
                self._leader = ref(optimizer)
            if self._leader() is optimizer:
                self._end_iteration()

    def step(self) -> None:
        """End an iteration here; from now on optimizers no longer do."""
        if self._stack is None:
            raise RuntimeError("step() belongs inside the block: with OutOfCore(...) as block")
        self._leader = ref(self)
        with self._guard:
            self._end_iteration()

    def _end_iteration(self) -> None:
        with self._lock, _disable_current_modes(), torch._C.DisableTorchFunction():
            self._residency.kept.clear()
            for entry in self._iterations.log or ():
                for variable in entry.written:
                    variable.raw = False
            self._iterations.end(self._residency.clock)
            self._say_what_is_uncounted()

    def _say_what_is_uncounted(self) -> None:
        nbytes = self._statistics.uncounted_bytes = sum(self._residency.uncounted.values())
        if 100 * nbytes > self.budget_bytes:
            say_once(
                "uncounted",
                f"tensors of {nbytes} bytes are used by slices alone, such as a data set: they are "
                "neither counted nor swapped. Name them in exclude= if that is meant; else use "
                "each whole first within the block, such as tensor.sum(), or clone its parts",
            )

    # ---- operations

    def run(self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation with its inputs on the device and room for its results."""
        keep_conjugates(args)
        if guards.process != self._process:  # a forked process, such as a loader's worker
            with self._reading([*args, *kwargs.values()]):
                return operation(*args, **kwargs)
        beside = get_ident() != self._thread and torch._C._current_graph_task_id() < 0
        if beside and self._stack is None:
            return operation(*args, **kwargs)
        guard = self._guard
        guard.depth += not beside
        try:
            if beside or not isinstance(operation, OpOverload):
                return self._beside(operation, args, kwargs)  # of torch.jit.fork; of higher order
            return self._follow(operation, args, kwargs)
        except BudgetTooSmall as error:
            self._failed = error
            raise
        finally:
            guard.depth -= not beside
            if guard.pending is not None and not beside:
                guard.deliver()

    # ---- addresses

    @contextmanager
    def _reading(self, values: list[Any]) -> Iterator[bool]:
        """Let tensors be read by their address inside; yield whether the process is forked."""
        if guards.process != self._process:
            guards.check_readable(self._residency, values, self.swap_folder is not None)
            yield True
            return
        guard = self._guard if get_ident() == self._thread else nullcontext()
        with guard, self._lock, _disable_current_modes():
            yield False

    def bring(self, tensor: torch.Tensor, lock: bool) -> None:
        """Bring a tensor's bytes to the device for readers of its address."""
        if self._stack is None:
            return
        with self._reading([tensor]) as forked:
            if not forked:
                self._residency.bring(tensor, lock)

    def hold_sizes(self, values: Iterable[object]) -> None:
        """Lock integer tensors in place, for C++ code that reads them as sizes."""
        for value in values if self._stack is not None and self.device.type == "cpu" else ():
            if not isinstance(value, torch.Tensor) or value.device != self.device:
                continue
            if not value.dtype.is_floating_point:
                self.bring(value, lock=True)

    def snapshot(self, tensor: torch.Tensor, keep: bool = True) -> torch.UntypedStorage:
        """Return a copy of a tensor's storage on the host, for serialisers.

        It lives until the iteration ends or an operation writes to any tensor.
        """
        with self._reading([tensor]) if self._stack is not None else nullcontext(True) as outside:
            return tensor.untyped_storage() if outside else self._residency.snapshot(tensor, keep)


# ---- recording


def record(
    step: Callable[[], object],
    warmup: int = 0,
    device: str | torch.device | None = None,
    model: Modules = (),
    optimizer: Optimizers = (),
    in_parts: bool = True,
) -> Trace:
    """Run one iteration and return it as a trace, at storage granularity.

    With ``device="meta"`` nothing is computed and no memory is needed: make the model, its
    optimizer and the inputs, and call this function, under torch's `FakeTensorMode`. The trace is
    that of the same iteration on a CPU, provided that no step depends on values; gradients of views
    that were changed in place may go through other copies.

    Tensors that no operation uses are in the trace if a called module or a stepping optimizer has
    them. Others, such as an average of the weights that is updated elsewhere, must be given by
    `model` and `optimizer`.

    Args:
        step: One training iteration: forward, backward, optimizer.
        warmup: Iterations to run before, so that an optimizer has its state, and the ends of
            variables that an iteration leaves behind are known.
        device: See `OutOfCore`, or ``"meta"``.
        model: One or more modules held on the device, whether the step uses them or not.
        optimizer: Likewise.
        in_parts: Record operations on lists of tensors (`foreach` and fused optimizers) element by
            element, as they run in a block with the smallest budget; otherwise whole.
    """
    if not callable(step):
        raise ValueError(f"step is {step!r:.200}: give a function that runs one iteration")
    if not is_whole(warmup, 0):
        raise ValueError(f"warmup is {warmup!r}: give whole iterations, 0 or more")
    meta = str(device).partition(":")[0] == "meta"
    budget = UNLIMITED if in_parts else UNLIMITED - 1
    block = OutOfCore(budget, device="cpu" if meta else device, model=model, optimizer=optimizer)
    block.device = torch.device("meta") if meta else block.device
    holders: WeakKeyDictionary[object, None] = WeakKeyDictionary()
    trace: Trace | None = None
    with ExitStack() as stack:
        called = register_module_forward_pre_hook(lambda module, _: holders.setdefault(module))
        stepped = register_optimizer_step_post_hook(lambda used, *_: holders.setdefault(used))
        stack.callback(called.remove)
        stack.callback(stepped.remove)
        stack.enter_context(block)
        block._iterations.planner = None  # it only records
        block._leader = ref(block)
        for _ in range(warmup + 1):
            step()
            block.step()
        if recorded := block._iterations.recorded:
            residency = block._residency
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                for holder in list(holders):
                    meet(residency, holder)
            used, trace = set(recorded.order), recorded.trace
            # Modules' and optimizers' tensors that no operation uses.
            held = [v for v in residency.variables() if v.kind and v not in used]
            sizes = {f"held{n}": variable.nbytes for n, variable in enumerate(held)}
            kinds = {f"held{n}": variable.kind for n, variable in enumerate(held)}
            trace = replace(trace, sizes={**trace.sizes, **sizes}, kinds={**trace.kinds, **kinds})
    if trace is None:  # no operation ran on this device
        raise ValueError(
            f"no operation ran in the step on the device {block.device}: it needs at least one; "
            'under FakeTensorMode make all tensors, and give device="meta"'
        )
    return trace
