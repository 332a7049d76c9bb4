"""Training within a byte budget: `OutOfCore`, a context around anyone's own training steps."""

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from weakref import WeakValueDictionary

import torch
from torch._ops import OpOverload
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from repro.outofcore.host import CudaMover, HostStore, Mover, ThreadMover
from repro.outofcore.plan import Kind, SwapPlan
from repro.outofcore.recording import Entry, Recording, Signature, build, signature, tensors_in
from repro.outofcore.residency import Residency, Variable
from repro.outofcore.schedule import plan_swaps, tune_window
from repro.outofcore.trace import Trace

_COPY_LATENCY_S = 3e-5  # what starting a copy costs, for the simulation that chooses the window
_GROUP_SHARE = 16  # an operation on lists is run in groups of at most budget / 16
_UNLIMITED = 1 << 62


@dataclass
class Statistics:
    """What happened within a block.

    Attributes:
        iterations: Iterations that ended.
        replayed: Of these, the ones that ran wholly by a plan.
        plans: Plans made.
        off_order: Operations that ran otherwise than the plan at hand says.
        on_demand: Swap-ins that an operation had to wait for, since no plan had asked for them.
        bytes_in: Bytes copied to the device; bytes_out: to the host.
        peak_bytes: The most bytes of storages on the device at once.
        host_bytes: The most bytes swapped out at once.
        locked_bytes: Bytes that stay on the device, since their address is in use elsewhere.
    """

    iterations: int = 0
    replayed: int = 0
    plans: int = 0
    off_order: int = 0
    on_demand: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0
    locked_bytes: int = 0


@dataclass(slots=True)
class _Step:
    """One function of a plan, by the numbers of its variables."""

    operation: OpOverload
    inputs: tuple[int, ...]
    written: tuple[int, ...]
    arrivals: frozenset[int]  # inputs that are given anew each iteration and come here first
    births: tuple[int, ...]
    birth_bytes: int
    before: tuple[tuple[Kind, int], ...]
    after: tuple[tuple[Kind, int], ...]


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
        device: The device whose tensors are managed; None for the current GPU, or else the CPU.
        swap_folder: On the CPU, a folder for the file that swapped-out tensors lie in; None keeps
            them in memory beside the budget.
        exclude: Tensors to leave alone and not to count, such as a whole dataset.

    Attributes:
        trace: The last recorded iteration, or None.
        plan: The plan that is followed, or None.
        statistics: What happened so far.

    Raises:
        BudgetTooSmall: An operation alone needs more than the budget.
        ValueError: The budget is not positive, or `swap_folder` is given for a GPU.
    """

    def __init__(
        self,
        budget_bytes: int,
        window_bytes: int | Literal["auto"] | None = "auto",
        device: str | torch.device | None = None,
        swap_folder: str | Path | None = None,
        exclude: Iterable[torch.Tensor] = (),
    ) -> None:
        if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < 1:
            raise ValueError(f"budget_bytes is {budget_bytes!r}: give whole bytes above 0")
        if isinstance(window_bytes, str) and window_bytes != "auto":
            raise ValueError(f'window_bytes is {window_bytes!r}: give bytes, None or "auto"')
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"the device {device} is not supported: choose cpu or cuda")
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if swap_folder is not None and self.device.type != "cpu":
            raise ValueError("swap_folder is for the CPU: a GPU swaps to pinned memory, give None")
        self.budget_bytes, self.window_bytes = budget_bytes, window_bytes
        self.swap_folder = Path(swap_folder) if swap_folder is not None else None
        self._excluded = tuple(exclude)
        self.trace: Trace | None = None
        self.plan: SwapPlan | None = None
        self._statistics = Statistics()
        self._stack: ExitStack | None = None

    @property
    def statistics(self) -> Statistics:
        """What happened so far."""
        if self._stack is not None:
            self._count()
        return self._statistics

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise RuntimeError("this OutOfCore block is entered already: leave it first")
        self._store = HostStore(pinned=self.device.type == "cuda", path=self.swap_folder)
        mover: Mover
        if self.device.type == "cuda":
            mover = CudaMover(self._store, self.device)
        else:
            mover = ThreadMover(self._store)
        excluded = [tensor.untyped_storage()._cdata for tensor in self._excluded]
        self._mover = mover
        self._residency = Residency(self.budget_bytes, self.device, self._store, mover, excluded)
        self._statistics = Statistics()
        self._steps: list[_Step] = []
        self._bound: list[Variable | None] = []
        self._sizes: list[int] = []
        self._persistent: set[int] = set()
        self._cursor = -1  # the next step of the plan; -1: off the plan
        self._origin = 0  # the clock at the start of the iteration
        self._log: list[Entry] | None = []
        self._recorded: Recording | None = None
        self._planned: Trace | None = None
        self._proved = False  # the plan has run through once
        self._strayed = False  # the iteration before did not run by the plan
        self._leader: object = None  # the optimizer whose steps end the iterations
        self._saved: WeakValueDictionary[tuple[int, int], torch.UntypedStorage] = (
            WeakValueDictionary()
        )
        self._stack = ExitStack()
        hook = register_optimizer_step_post_hook(self._stepped)
        self._stack.callback(hook.remove)
        self._stack.enter_context(_RawAccess(self))
        self._stack.enter_context(_Operations(self))
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
            self._bound, self._log, self._steps = [], None, []

    def _count(self) -> None:
        residency, statistics = self._residency, self._statistics
        statistics.bytes_in, statistics.bytes_out = residency.bytes_in, residency.bytes_out
        residency.note_peak()
        statistics.peak_bytes = residency.peak_bytes
        statistics.host_bytes = self._store.peak_bytes
        statistics.locked_bytes = sum(v.nbytes for v in residency.variables() if v.locked)

    # ---- iterations

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._classify("parameter", [parameter])
                self._classify("gradient", [parameter.grad])
                state = optimizer.state.get(parameter, {})
                self._classify("optimizer state", state.values())
        if self._leader is None:
            self._leader = optimizer
        if self._leader is optimizer:
            self._end_iteration()

    def _classify(self, kind: str, values: Iterable[object]) -> None:
        with torch._C.DisableTorchFunction():
            for value in values:
                if isinstance(value, torch.Tensor):
                    known = self._residency.known.get(value.untyped_storage()._cdata)
                    if known is not None:
                        known.kind = kind

    def step(self) -> None:
        """End an iteration here; from now on optimizers no longer do."""
        if self._stack is None:
            raise RuntimeError("step() belongs inside the block: with OutOfCore(...) as ooc")
        self._leader = self
        self._end_iteration()

    def _end_iteration(self) -> None:
        residency = self._residency
        if residency.clock == self._origin:
            return  # nothing ran since the last one ended
        self._statistics.iterations += 1
        done = bool(self._steps) and self._cursor == len(self._steps)
        if done:
            self._statistics.replayed += 1
            self._proved = True
        if self._log is not None:
            recorded = build(self._log, self._origin, self._recorded)
            known = done and recorded.trace == self._planned
            # One strange iteration, such as with an evaluation before it, does not end a good plan.
            if not known and (done or self._strayed or not self._proved):
                self._make_plan(recorded)
            self._recorded = recorded
            self._log = None if known else []
        self._strayed = not done
        if self.device.type == "cpu":  # copies that nobody waits for hold their storages
            for variable in residency.variables():
                if variable.outgoing is not None and variable.bound < 0:
                    residency.settle(variable)
        self._origin = residency.clock
        self._cursor = 0 if self._steps else -1

    def _make_plan(self, recorded: Recording) -> None:
        trace = recorded.trace
        if self.window_bytes == "auto":
            plan = tune_window(
                trace, self.budget_bytes, recorded.times, self._mover.bandwidth(), _COPY_LATENCY_S
            )
        else:
            plan = plan_swaps(trace, self.budget_bytes, self.window_bytes)
        number = {name: v for v, name in enumerate(trace.accesses)}
        self.trace = self._planned = trace
        self.plan, self._proved = plan, False
        self._statistics.plans += 1
        self._steps = []
        for f, function in enumerate(trace.functions):
            births = tuple(
                number[name]
                for name in function.outputs
                if name not in function.inputs and trace.accesses[name][0] == f
            )
            self._steps.append(
                _Step(
                    recorded.operations[f],
                    tuple(number[name] for name in function.inputs),
                    tuple(number[name] for name in function.outputs if name in function.inputs),
                    frozenset(
                        number[name]
                        for name in function.inputs
                        if name not in trace.persistent and trace.accesses[name][0] == f
                    ),
                    births,
                    sum(recorded.order[v].nbytes for v in births),
                    tuple((kind, number[name]) for kind, name in plan.before[f]),
                    tuple((kind, number[name]) for kind, name in plan.after[f]),
                )
            )
        for variable in self._residency.variables():
            variable.bound = -1
        self._sizes = [variable.nbytes for variable in recorded.order]
        self._persistent = {number[name] for name in trace.persistent}
        self._bound = list(recorded.order)
        for v, variable in enumerate(recorded.order):
            variable.bound = v

    # ---- operations

    def _run(self, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = signature(operation)
        if known.ignored:
            return operation(*args, **kwargs)
        if known.grouped:
            groups = self._groups(args)
            if len(groups) > 1:
                return self._run_groups(operation, groups, args, kwargs)
        residency = self._residency
        inputs, written = self._variables(known, args, kwargs)
        step = self._expected(operation, inputs) if self._steps else None

        def what() -> str:
            return f"function {residency.clock - self._origin} ({known.name})"

        if step is not None:
            self._act(step.before, inputs, what)
            residency.make_room(step.birth_bytes, inputs, what)
        for variable in inputs:
            variable.used = residency.clock
            if not variable.resident:
                self._statistics.on_demand += 1
                residency.make_room(variable.nbytes, inputs, what)
                residency.swap_in(variable)
        if step is None and not known.in_place:
            residency.make_room(_result_bytes(operation, args, kwargs), inputs, what)
        for variable in inputs:
            residency.arrive(variable)
        for variable in written:
            residency.written(variable)
        timed = _Timer(self.device) if self._log is not None else None
        result = operation(*args, **kwargs)
        if timed:
            timed.stop()
        made: list[Variable] = []
        if not known.in_place:
            for tensor in tensors_in(result):
                variable_made = residency.find(tensor)
                if variable_made is None or variable_made in inputs or variable_made in made:
                    continue
                variable_made.used = residency.clock
                if variable_made.since == residency.clock and variable_made.bound < 0:
                    made.append(variable_made)
        residency.note_peak()
        if residency.used_bytes > residency.budget_bytes:  # a result was larger than foretold
            residency.make_room(0, (*inputs, *made), what)
        if not inputs and not made:
            return result
        if step is not None and not self._bind(step, made):
            self._leave_plan()
            step = None
        residency.clock += 1
        if self._log is not None:
            entry = Entry(operation, inputs, written, made)
            if timed:
                entry.seconds, entry.events = timed.seconds, timed.events
            self._log.append(entry)
        if step is not None:
            self._cursor += 1
            self._act(step.after, (), what)
        return result

    def _variables(
        self, known: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Variable], list[Variable]]:
        find, writes = self._residency.find, known.writes
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

    def _expected(self, operation: OpOverload, inputs: list[Variable]) -> _Step | None:
        """Return the plan's next step where this operation is it; else leave the plan."""
        if self._cursor < 0:
            if operation is self._steps[0].operation and self._fits(self._steps[0], inputs):
                self._cursor = 0  # the iteration of the plan may begin here
                return self._steps[0]
            self._statistics.off_order += bool(inputs)
            return None
        if self._cursor < len(self._steps):
            step = self._steps[self._cursor]
            if operation is step.operation and self._fits(step, inputs):
                return step
        if inputs:
            self._statistics.off_order += 1
            self._leave_plan()
        return None

    def _fits(self, step: _Step, inputs: list[Variable]) -> bool:
        if len(inputs) != len(step.inputs):
            return False
        bound = self._bound
        fresh = []
        for variable, v in zip(inputs, step.inputs, strict=True):
            if bound[v] is variable:
                continue
            taken = variable.bound >= 0 and bound[variable.bound] is variable
            if taken and variable.since < self._origin and variable.bound not in self._persistent:
                taken = False  # the iteration before left it; in this one it is given from outside
            if v not in step.arrivals or taken or self._sizes[v] != variable.nbytes:
                return False
            fresh.append((variable, v))
        for variable, v in fresh:
            self._rebind(variable, v)
        return True

    def _rebind(self, variable: Variable, v: int) -> None:
        old = self._bound[v]
        if old is not None:
            old.bound = -1
        if variable.bound >= 0:
            self._bound[variable.bound] = None
        self._bound[v] = variable
        variable.bound = v

    def _bind(self, step: _Step, made: list[Variable]) -> bool:
        if len(made) != len(step.births):
            return False
        for variable, v in zip(made, step.births, strict=True):
            if self._sizes[v] != variable.nbytes:
                return False
        for variable, v in zip(made, step.births, strict=True):
            self._rebind(variable, v)
        return True

    def _leave_plan(self) -> None:
        """Go on by demand; what ran by the plan so far is written into the log."""
        if self._log is None:
            self._log = []
            for step in self._steps[: self._cursor]:
                inputs, written, made = (
                    [variable for v in numbers if (variable := self._bound[v]) is not None]
                    for numbers in (step.inputs, step.written, step.births)
                )
                self._log.append(Entry(step.operation, inputs, written, made))
        self._cursor = -1

    def _act(
        self,
        actions: tuple[tuple[Kind, int], ...],
        keep: Iterable[Variable],
        what: Callable[[], str],
    ) -> None:
        residency = self._residency
        for kind, v in actions:
            variable = self._bound[v]
            if variable is None or variable.died is not None:
                continue
            if kind is Kind.SWAP_OUT:
                residency.swap_out(variable)
            elif kind is Kind.RELEASE:
                residency.release(variable)
            elif not variable.resident:
                residency.make_room(variable.nbytes, keep, what)
                residency.swap_in(variable)
                variable.used = residency.clock

    def _groups(self, args: tuple[Any, ...]) -> list[slice]:
        """Return how to divide an operation on lists, so that no part needs much of the budget."""
        lists = [value for value in args if isinstance(value, list | tuple) and value]
        count = max(map(len, lists), default=0)
        nbytes = [
            sum(v[i].nbytes for v in lists if len(v) == count and isinstance(v[i], torch.Tensor))
            for i in range(count)
        ]
        groups, start, held = [], 0, 0
        for i, size in enumerate(nbytes):
            if i > start and (held + size) * _GROUP_SHARE > self.budget_bytes:
                groups.append(slice(start, i))
                start, held = i, 0
            held += size
        return [*groups, slice(start, count)]

    def _run_groups(
        self,
        operation: OpOverload,
        groups: list[slice],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        count = groups[-1].stop

        def part(value: Any, group: slice) -> Any:
            whole = isinstance(value, list | tuple) and len(value) == count
            return value[group] if whole else value

        results = [
            self._run(
                operation,
                tuple(part(value, group) for value in args),
                {name: part(value, group) for name, value in kwargs.items()},
            )
            for group in groups
        ]
        if results[0] is None:
            return None
        return [item for result in results for item in result]

    # ---- addresses

    def _bring(self, tensor: torch.Tensor, lock: bool) -> None:
        """Have a tensor's bytes on the device for who reads its address."""
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

    def _snapshot(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        """Return a copy of a tensor's storage on the host, for whoever pickles it."""
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


class _Operations(TorchDispatchMode):
    """Sees every operation, those of backward passes and of optimizers included."""

    def __init__(self, owner: OutOfCore) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.owner._run(func, args, kwargs or {})


class _RawAccess(TorchFunctionMode):
    """Sees what asks for a tensor's address, of which no operation tells."""

    LOCKS = frozenset(
        {
            "numpy",
            "__array__",
            "__dlpack__",
            "data_ptr",
            "const_data_ptr",
            "mutable_data_ptr",
            "untyped_storage",
            "storage",
            "share_memory_",
        }
    )
    READS = frozenset({"tolist", "__repr__", "__format__", "pin_memory"})

    def __init__(self, owner: OutOfCore) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        locks = name in self.LOCKS
        if (locks or name in self.READS) and args and isinstance(args[0], torch.Tensor):
            if name == "untyped_storage" and _is_pickling():
                return self.owner._snapshot(args[0])
            self.owner._bring(args[0], lock=locks)
        return func(*args, **(kwargs or {}))


def _is_pickling() -> bool:
    frame = sys._getframe(2)
    for _ in range(4):
        if frame.f_code.co_name == "_reduce_ex_internal":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


class _Timer:
    """Seconds of one operation: of the clock on a CPU, by events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.seconds = 0.0
        if device.type == "cuda":
            self.events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[assignment]
            self.events[0].record()
        self._start = time.perf_counter()

    def stop(self) -> None:
        if self.events:
            self.events[1].record()
        self.seconds = time.perf_counter() - self._start


def _result_bytes(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes of new storages that an operation makes, from a run without values."""

    def meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="meta"
            )
        if isinstance(value, list | tuple):
            return type(value)(map(meta, value))
        return torch.device("meta") if isinstance(value, torch.device) else value

    given = [meta(value) for value in args]
    named = {name: meta(value) for name, value in kwargs.items()}
    try:
        result = operation(*given, **named)
    except Exception:  # no such run for this operation: its inputs are as good a guess as any
        return sum(tensor.nbytes for tensor in tensors_in(args))
    old = {t.untyped_storage()._cdata for t in tensors_in([*given, *named.values()])}
    new = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(result)}
    return sum(nbytes for key, nbytes in new.items() if key not in old)


def record(
    step: Callable[[], object],
    budget_bytes: int | None = None,
    warmup: int = 0,
    device: str | torch.device | None = None,
) -> Trace:
    """Run one iteration and return it as a trace, at storage granularity.

    Args:
        step: One training iteration: forward, backward, optimizer.
        budget_bytes: Stay within it by swapping on demand; None for no limit.
        warmup: Iterations to run before, so that an optimizer has its state, and so that it is seen
            when what an iteration leaves behind dies in the next.
        device: As of `OutOfCore`.

    Raises:
        BudgetTooSmall: An operation alone needs more than the budget.
        ValueError: `warmup` is negative, or no operation ran.
    """
    if warmup < 0:
        raise ValueError(f"warmup is {warmup}: give 0 or more iterations")
    block = OutOfCore(budget_bytes or _UNLIMITED, window_bytes=None, device=device)
    with block:
        block._leader = block
        for _ in range(warmup + 1):
            step()
            block._log = block._log if block._log is not None else []
            block.step()
            block._steps = []  # record on; follow no plan
            recorded = block._recorded
    if recorded is None:
        raise ValueError("no operation ran in the step: it needs at least one")
    return recorded.trace
