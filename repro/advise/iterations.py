"""One training step, recorded on tensors without content, at any batch size."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from repro.measure.fake_tensors import imagined
from repro.outofcore import Function, Trace, record
from repro.outofcore.operations import by_values

FORWARD, RECOMPUTE, BACKWARD, UPDATE = "forward", "recompute", "backward", "update"
PHASES = (FORWARD, RECOMPUTE, BACKWARD, UPDATE)
_RECORDED = (2, 4)  # batch sizes; one of 1 may take other paths
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Cost:
    """What an operation computes, and when.

    Attributes:
        name: Of the operation.
        flops: Floating-point operations of matrix products and convolutions.
        low: It works in 16 bits.
        phase: One of `PHASES`.
    """

    name: str
    flops: int
    low: bool
    phase: str


class _Costs(TorchDispatchMode):
    """Notes every operation of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Cost] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and by_values(func, args):
            raise ValueError(f"the size of what {func} returns depends on values")
        # The engine computes gradients without making a graph; a recomputed block makes one.
        phase = FORWARD
        if torch._C._current_graph_task_id() >= 0:
            phase = RECOMPUTE if torch.is_grad_enabled() else BACKWARD
        result = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", func)
        flops = 0
        if packet in flop_registry:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
        low = any(
            isinstance(one, torch.Tensor) and one.is_floating_point() and one.element_size() == 2
            for one in args
        )
        self.noted.append(Cost(f"{func.namespace}.{func._opname}", flops, low, phase))
        return result


@dataclass(frozen=True)
class Iteration:
    """A training step as a trace whose sizes and work are linear in the batch size.

    Attributes:
        few: The smaller batch size that was recorded; `more` the larger.
        small: The trace at `few`; `large` at `more`.
        costs: Of each function at `few`; `larger` at `more`.
    """

    few: int
    more: int
    small: Trace
    large: Trace
    costs: tuple[Cost, ...]
    larger: tuple[Cost, ...]

    def trace(self, batch: int) -> Trace:
        """Return the trace of a step at a batch size."""
        few, more = self.few, self.more
        sizes = {
            name: max(0, size + (self.large.sizes[name] - size) * (batch - few) // (more - few))
            for name, size in self.small.sizes.items()
        }
        return replace(self.small, sizes=sizes)

    def _line(self, small: Iterable[float], large: Iterable[float], batch: int) -> Vector:
        low, high = np.asarray(list(small), float), np.asarray(list(large), float)
        return np.maximum(0.0, low + (high - low) * (batch - self.few) / (self.more - self.few))

    def flops(self, batch: int) -> Vector:
        """Return the floating-point operations of each function, (n,)."""
        return self._line((c.flops for c in self.costs), (c.flops for c in self.larger), batch)

    def touched(self, batch: int, without: frozenset[str] = frozenset()) -> Vector:
        """Return the bytes that each function reads and writes, some left out, (n,)."""
        if not without:
            return self._line(self.small.needs_bytes, self.large.needs_bytes, batch)
        low, high = (
            [sum(t.sizes[v] for v in f.variables if v not in without) for f in t.functions]
            for t in (self.small, self.large)
        )
        return self._line(low, high, batch)

    @cached_property
    def phases(self) -> NDArray[np.str_]:
        """The phase of each function, (n,)."""
        return np.array([cost.phase for cost in self.costs])

    @cached_property
    def blocks(self) -> int:
        """How many blocks are recomputed."""
        again = self.phases == RECOMPUTE
        return int(again[:1].sum() + (again[1:] & ~again[:-1]).sum())

    @cached_property
    def inputs(self) -> frozenset[str]:
        """Variables of the batch: given to the step, and as large as it has samples."""
        given = {
            name for name, used in self.small.accesses.items()
            if name in self.small.functions[used[0]].inputs
        }  # fmt: skip
        return frozenset(n for n in given if self.small.sizes[n] != self.large.sizes[n])

    @cached_property
    def gradients(self) -> frozenset[str]:
        """Gradients of parameters that a step makes."""
        kinds = self.small.kinds
        return frozenset(n for n in self.small.accesses if kinds.get(n) == "gradient")

    def bytes_of(self, names: Iterable[str], batch: int) -> int:
        """Return what some variables take."""
        chosen = list(names)
        small = sum(self.small.sizes[name] for name in chosen)
        large = sum(self.large.sizes[name] for name in chosen)
        return small + (large - small) * (batch - self.few) // (self.more - self.few)

    def kept_bytes(self, kind: str) -> int:
        """Return the bytes of what stays from step to step of a kind, whatever the batch size."""
        kept = *self.small.persistent, *self.small.held
        names = [n for n in kept if self.small.kinds.get(n) == kind]
        return self.bytes_of((n for n in names if n not in self.inputs), self.few)

    def alive(self, batch: int, without: frozenset[str] = frozenset()) -> Vector:
        """Return the bytes alive while each function runs, some variables left out, (n,)."""
        return self._line(_alive(self.small, without), _alive(self.large, without), batch)

    def born(self, names: frozenset[str]) -> Vector:
        """Return the bytes of those of some variables that each function makes, (n,)."""
        made = np.zeros(len(self.small.functions))
        for name in names:
            made[self.small.accesses[name][0]] += self.small.sizes[name]
        return made

    def kept_on_host(self, batch: int) -> tuple[Vector, int]:
        """Return what is alive where saved tensors leave the device until the backward pass.

        Returns:
            (n,) bytes alive while each function runs, and the bytes that go to the host: a tensor
            that several operations save goes as often.
        """
        low, few = _saved_away(self.small, self.phases, self.inputs)
        high, more = _saved_away(self.large, self.phases, self.inputs)
        moved = self._line([few], [more], batch)
        return self._line(low, high, batch), int(moved[0])


def repeated(trace: Trace, iteration: Iteration, times: int) -> tuple[Trace, list[int]]:
    """Return the trace of a step in several micro-batches: all passes, and then the update.

    The first pass makes the gradients; each further one makes them anew and adds them.

    Args:
        trace: Of `iteration`, at the micro-batch's size.
        iteration: The undivided step.
        times: Micro-batches, at least 1.

    Returns:
        It, and for each of its functions which one of `trace` takes as long; a sum takes as long
        as the last function does.
    """
    n = len(trace.functions)
    lasting = trace.persistent
    updating = [number for number in range(n) if iteration.phases[number] == UPDATE]
    passing = [number for number in range(n) if iteration.phases[number] != UPDATE]
    born = {name for name in iteration.gradients if name not in lasting}
    functions: list[Function] = []
    order: list[int] = []
    sizes, kinds = dict(trace.sizes), dict(trace.kinds)
    for time in range(times):
        last_pass = time == times - 1
        for number in passing:
            function = trace.functions[number]

            def name_of(name: str) -> str:
                # The last pass keeps the names, so that the update finds what it reads.
                keeps = name in lasting or (name in born and time == 0)  # noqa: B023
                keeps = keeps or (last_pass and name not in born)  # noqa: B023
                return name if keeps else f"{name}.{time}"  # noqa: B023

            for name in function.variables:
                renamed = name_of(name)
                sizes[renamed] = trace.sizes[name]
                if name in trace.kinds:
                    kinds[renamed] = trace.kinds[name]
            functions.append(
                Function(
                    function.name,
                    tuple(map(name_of, function.inputs)),
                    tuple(map(name_of, function.outputs)),
                )
            )
            order.append(number)
            if time:
                for name in function.outputs:
                    if name in born and trace.accesses[name][0] == number:
                        twin = f"{name}.{time}"
                        functions.append(Function("aten.add_", (name, twin), (name,)))
                        order.append(n - 1)
    for number in updating:
        functions.append(trace.functions[number])
        order.append(number)
    last = {name: number for number, f in enumerate(functions) for name in f.variables}
    deaths = {
        name: number + 1 for name, number in last.items() if name.partition(".")[0] not in lasting
    }
    there = {*last, *trace.held}
    return Trace(
        tuple(functions),
        {name: size for name, size in sizes.items() if name in there},
        {name: kind for name, kind in kinds.items() if name in there},
        deaths,
    ), order


def _alive(trace: Trace, without: frozenset[str]) -> Vector:
    n = len(trace.functions)
    change = np.zeros(n + 1)
    kept = *trace.persistent, *trace.held
    base = sum(trace.sizes[name] for name in kept if name not in without)
    for name, (birth, death) in trace.lifetimes.items():
        if name in without:
            continue
        size = trace.sizes[name]
        change[birth] += size
        if death > n:  # the one of the step before is still there at the start
            base += size
            death -= n
        change[death] -= size
    return base + np.cumsum(change[:n])


def _saved_away(
    trace: Trace, phases: NDArray[np.str_], inputs: frozenset[str]
) -> tuple[Vector, int]:
    backward = phases == BACKWARD
    n, moved = len(phases), 0
    alive = _alive(trace, frozenset())
    change = np.zeros(n + 1)
    for name, used in trace.accesses.items():
        size = trace.sizes[name]
        kept = trace.kinds.get(name) not in ("gradient", "optimizer state")
        first, later = used[0], [use for use in used if backward[use]]
        if not later or backward[first] or not kept:
            continue
        moved += size * len(later)
        if name in trace.persistent or name in inputs:
            for use in later:  # what comes back is a copy beside it
                change[use] += size
                change[use + 1] -= size
            continue
        last = max(use for use in used if not backward[use] and use < later[0])
        death = min(trace.lifetimes[name][1], n)
        change[last + 1] -= size
        change[death] += size
        for use in later:
            change[use] += size
            change[use + 1] -= size
    return alive + np.cumsum(change[:n]), moved


def recorded(make: Callable[[int], Callable[[], object]]) -> Iteration:
    """Record the step that `make` gives for a batch size, without computing anything.

    Raises:
        ValueError: Steps of two batch sizes differ in more than sizes.
    """
    recordings: list[tuple[Trace, tuple[Cost, ...]]] = []
    # When variables end shows in the third iteration; their sizes in the second already.
    for batch, warmup in zip(_RECORDED, (2, 1), strict=True):
        with imagined():
            recordings.append(_record(make(batch), warmup))
    return _joined(recordings)


def recorded_again(step_of: Callable[[int], Callable[[], object]]) -> Iteration:
    """Record steps of one model, whose optimizer has its state, and which leave nothing behind.

    One iteration of each batch size is enough then. The caller has chosen what tensors are.

    Raises:
        ValueError: Steps of two batch sizes differ in more than sizes.
    """
    return _joined([_record(step_of(batch), 0) for batch in _RECORDED])


def _record(step: Callable[[], object], warmup: int) -> tuple[Trace, tuple[Cost, ...]]:
    noting = _Noting(step, warmup)
    trace = record(noting, warmup=warmup, device="meta")
    return trace, _aligned(trace, noting.costs.noted)


def _joined(recordings: list[tuple[Trace, tuple[Cost, ...]]]) -> Iteration:
    (small, costs), (large, larger) = recordings
    if small.functions != large.functions:
        raise ValueError(
            f"steps of {_RECORDED[0]} and {_RECORDED[1]} samples run different operations"
        )
    return Iteration(*_RECORDED, small, large, costs, larger)


class _Noting:
    """Runs a step, and notes the costs of the last time."""

    def __init__(self, step: Callable[[], object], before: int) -> None:
        self.step, self.left, self.costs = step, before, _Costs()

    def __call__(self) -> None:
        if self.left:
            self.left -= 1
            self.step()
            return
        with self.costs:
            self.step()


def _aligned(trace: Trace, noted: list[Cost]) -> tuple[Cost, ...]:
    """Return the costs of a trace's functions: of all operations it has those that touch data."""
    costs: list[Cost] = []
    at = 0
    for function in trace.functions:
        # A sum that autograd makes in place is recorded as such, and noted as it is called.
        names = {function.name, "aten.add"} if function.name == "aten.add_" else {function.name}
        position = next((i for i in range(at, len(noted)) if noted[i].name in names), None)
        if position is None:
            raise ValueError(f"{function.name} is in the trace of the step, but was not seen")
        costs.append(noted[position])
        in_parts = function.name.startswith(("aten._foreach_", "aten._fused_"))
        at = position if in_parts else position + 1
    last = max((i for i, cost in enumerate(costs) if cost.phase == BACKWARD), default=-1)
    return tuple(
        replace(cost, phase=UPDATE) if i > last >= 0 else cost for i, cost in enumerate(costs)
    )
