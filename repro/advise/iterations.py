"""One training step, recorded on tensors without content, at any batch size."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from repro.measure.fake_tensors import flops_of
from repro.measure.memory import tensors_in
from repro.measure.precision import HALF
from repro.outofcore import Function, Trace, record
from repro.outofcore.operations import by_values

FORWARD, RECOMPUTE, BACKWARD, UPDATE = "forward", "recompute", "backward", "update"
FEW, MORE = 2, 4  # samples of the recorded steps; one alone may take other paths
FURTHER = (6, 8)  # recorded too where a size is neither constant nor proportional
_CLOSE = 1e-3  # relative difference below which two peaks count as equal
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Cost:
    """Work of an operation: its name, floating-point operations, whether in 16 bits, its phase."""

    name: str
    flops: int
    low: bool
    phase: str


class _Costs(TorchDispatchMode):
    """Notes every operation of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Cost] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and by_values(func, args):
            raise ValueError(f"the size of what {func} returns depends on values")
        # The engine computes gradients without making a graph; a recomputed block makes one.
        phase = FORWARD
        if torch._C._current_graph_task_id() >= 0:
            phase = RECOMPUTE if torch.is_grad_enabled() else BACKWARD
        result = func(*args, **kwargs)
        tensors = tensors_in((args, kwargs, result))
        if any(tensor.layout is not torch.strided for tensor in tensors):
            raise ValueError(f"{func} has a sparse tensor, whose size depends on values")
        low = any(getattr(x, "dtype", None) in HALF for x in args)
        name, flops = f"{func.namespace}.{func._opname}", flops_of(func, args, kwargs, result)
        self.noted.append(Cost(name, flops, low, phase))
        return result


@dataclass(frozen=True)
class Iteration:
    """A training step as a trace, its sizes and work linear in the batch size, or quadratic."""

    small: Trace  # of `FEW` samples
    large: Trace  # of `more`
    bend: Trace  # second differences of sizes
    costs: tuple[Cost, ...]  # of each function with `FEW` samples
    larger: tuple[Cost, ...]  # with `more`
    bends: tuple[int, ...]  # second differences of floating-point operations
    more: int = MORE

    def trace(self, batch: int) -> Trace:
        """The trace of a step at a batch size."""
        sizes = {name: self.bytes_of([name], batch) for name in self.small.sizes}
        return replace(self.small, sizes=sizes)

    def _at(self, batch: int, of: Callable[[Trace], Any]) -> Vector:
        """A quantity of a trace that is linear in its sizes, at a batch size."""
        return self._on_curve(batch, *map(of, (self.small, self.large, self.bend)))

    def _on_curve(self, batch: int, small: Any, large: Any, bend: Any) -> Vector:
        """Values at a batch size, of both traces' and second differences, at least 0."""
        low, high, second = (np.asarray(values, float) for values in (small, large, bend))
        line = low + (high - low) * (batch - FEW) / (self.more - FEW)
        return np.maximum(0.0, line + second * (batch - FEW) * (batch - self.more) / (2 * FEW**2))

    def bytes_of(self, names: Iterable[str], batch: int) -> int:
        """Bytes of some variables together."""
        chosen = list(names)
        return int(self._at(batch, lambda trace: sum(trace.sizes[name] for name in chosen)))

    def without(self, names: frozenset[str]) -> "Iteration":
        """The step with some variables that take no memory."""
        small, large, bend = (
            replace(trace, sizes={n: 0 if n in names else s for n, s in trace.sizes.items()})
            for trace in (self.small, self.large, self.bend)
        )
        return replace(self, small=small, large=large, bend=bend)

    @cached_property
    def without_inputs(self) -> "Iteration":
        """The step with a batch that takes no memory."""
        return self.without(self.inputs)

    def flops(self, batch: int) -> Vector:
        """Floating-point operations of each function, (n,)."""
        small, large = ([cost.flops for cost in own] for own in (self.costs, self.larger))
        return self._on_curve(batch, small, large, self.bends)

    def touched(self, batch: int) -> Vector:
        """Bytes that each function reads and writes, (n,)."""
        return self._at(batch, lambda trace: trace.needs_bytes)

    def alive(self, batch: int) -> Vector:
        """Bytes alive while each function runs, (n,)."""
        return self._at(batch, lambda trace: trace.live_bytes)

    def kept_on_host(self, batch: int) -> tuple[Vector, int]:
        """Memory where saved tensors leave the device until the backward pass.

        Returns (n,) bytes alive while each function runs, and the most bytes that go to the host: a
        tensor counts for each of its uses in the backward pass, of which some may share a copy.
        """
        backward = self.phases == BACKWARD
        both = self._at(batch, lambda trace: _saved_away(trace, backward, self.inputs))
        return both[:-1], int(both[-1])

    @cached_property
    def phases(self) -> NDArray[np.str_]:
        """The phase of each function, (n,)."""
        return np.array([cost.phase for cost in self.costs])

    @cached_property
    def blocks(self) -> int:
        """Number of recomputed blocks."""
        again = self.phases == RECOMPUTE
        return int((np.diff(again, prepend=False) & again).sum())

    @cached_property
    def inputs(self) -> frozenset[str]:
        """Variables of the batch: given to the step, and as large as it has samples."""
        small, functions = self.small, self.small.functions
        given = {n for n, used in small.accesses.items() if n in functions[used[0]].inputs}
        given |= {*small.held}  # of which no operation reads any
        return frozenset(n for n in given if small.sizes[n] != self.large.sizes[n])

    @cached_property
    def gradients(self) -> frozenset[str]:
        """Gradients of parameters that a step makes."""
        small = self.small
        return frozenset(n for n in small.accesses if small.kinds.get(n) == "gradient")

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers, whatever the batch size."""
        trace = self.small
        kept = {*trace.persistent, *trace.held} - self.inputs
        return sum(trace.sizes[n] for n in kept if trace.kinds.get(n) == "buffer")

    def alive_again(self, batch: int) -> Vector:
        """Bytes alive in a pass after the first, (n,), sums of gradients among them, no batch."""
        made = np.zeros(len(self.costs))
        for name in self.gradients:  # each lies beside the sum until it is added
            made[self.small.accesses[name][0]] += self.small.sizes[name]
        return made + self._without_gradients.alive(batch) + self.bytes_of(self.gradients, FEW)

    @cached_property
    def _without_gradients(self) -> "Iteration":
        return self.without(self.gradients | self.inputs)


def repeated(trace: Trace, iteration: Iteration, times: int) -> tuple[Trace, list[int]]:
    """The trace of a step in several micro-batches: all passes, and then the update.

    The first pass makes the gradients; each further one makes them anew and adds them. `trace` is
    that of `iteration` at the micro-batch's size. Also returned is, for each function, the index of
    one of `trace` that takes as long; a sum takes as long as the last function.
    """
    lasting, last = trace.persistent, len(trace.functions) - 1
    gradients = iteration.gradients.difference(lasting)
    updates = iteration.phases == UPDATE
    functions: list[Function] = []
    order: list[int] = []

    def own(name: str, time: int) -> str:
        """A variable's name in a pass: gradients keep the first's, others the last's (updates)."""
        kept = name in lasting or time == (0 if name in gradients else times - 1)
        return name if kept else f"{name}.{time}"

    for time, number in product(range(times), np.flatnonzero(~updates).tolist()):
        given = trace.functions[number]
        inputs, outputs = (tuple(own(n, time) for n in ns) for ns in (given.inputs, given.outputs))
        functions.append(Function(given.name, inputs, outputs))
        made = [n for n in given.outputs if n in gradients and trace.accesses[n][0] == number]
        sums = [Function("aten.add_", (n, own(n, time)), (n,)) for n in made if time]
        functions += sums
        order += [number, *[last] * len(sums)]
    order += np.flatnonzero(updates).tolist()
    functions += [trace.functions[number] for number in np.flatnonzero(updates)]
    ends = {name: number for number, f in enumerate(functions) for name in f.variables}
    first = {name: name.partition(".")[0] for name in (*ends, *trace.held)}
    sizes = {name: trace.sizes[of] for name, of in first.items()}
    kinds = {name: trace.kinds[of] for name, of in first.items() if of in trace.kinds}
    deaths = {name: end + 1 for name, end in ends.items() if first[name] not in lasting}
    return Trace(tuple(functions), sizes, kinds, deaths), order


def _saved_away(trace: Trace, backward: Any, inputs: frozenset[str]) -> Vector:
    """Bytes alive while each function runs, and those moved to the host, (n + 1,)."""
    n, moved = len(backward), 0
    change = np.zeros(n + 1)
    for name, used in trace.accesses.items():
        size = trace.sizes[name]
        later = [use for use in used if backward[use]]
        own = trace.kinds.get(name) in ("gradient", "optimizer state")
        if not later or backward[used[0]] or own:
            continue
        moved += size * len(later)
        for use in later:  # a copy comes back
            change[use] += size
            change[use + 1] -= size
        if name not in trace.persistent and name not in inputs:  # and the original has gone
            last = max(use for use in used if not backward[use] and use < later[0])
            change[last + 1] -= size
            change[min(trace.lifetimes[name][1], n)] += size
    return np.append(trace.live_bytes + np.cumsum(change[:n]), moved)


Step = tuple[Callable[[], object], Sequence[Tensor]]  # a step, and the tensors of its batch


def recorded(step_of: Callable[[int], Step], batch: int | None, in_place: bool) -> Iteration:
    """Record a step of two batch sizes, or of up to five, without computing anything.

    `step_of` returns a step of one model, which leaves nothing behind and whose optimizer has its
    state. A ValueError where steps of two batch sizes differ in more than sizes, or a size grows
    faster than the square. Where a step of `batch` has another peak than small ones foretell, as of
    a batch that the model pads, sizes are on the line through that step. Autograd sums gradients
    `in_place`, but not under a `MemoryMeter` on a CPU.
    """
    small, costs = _record(*step_of(FEW), in_place)

    def another(batch: int) -> tuple[Trace, tuple[Cost, ...]]:
        trace, costs = _record(*step_of(batch), in_place)
        if trace.functions != small.functions:
            raise ValueError(f"steps of {FEW} and {batch} samples run different operations")
        return trace, costs

    large, larger = another(MORE)
    sizes = {name: (size, large.sizes[name]) for name, size in small.sizes.items()}
    if any(more > 7 * few > 0 for few, more in sizes.values()):
        raise ValueError("memory grows faster than the square of the batch size")
    further: list[tuple[Trace, tuple[Cost, ...]]] = []
    if any(more not in (few, 2 * few) for few, more in sizes.values()):  # not a line through 0
        with suppress(Exception):  # some models take no other number of samples
            further = [another(batch) for batch in FURTHER]
    traces, every = zip((small, costs), (large, larger), *further, strict=True)
    curved = {name: _bend([trace.sizes[name] for trace in traces]) for name in sizes}
    bends = tuple(_bend([cost.flops for cost in row]) for row in zip(*every, strict=True))
    found = Iteration(small, large, replace(small, sizes=curved), costs, larger, bends)
    if batch is None or batch <= MORE:
        return found
    large, larger = another(batch)
    if abs(large.peak_bytes - found.alive(batch).max()) <= _CLOSE * large.peak_bytes:
        return found
    straight = replace(small, sizes=dict.fromkeys(sizes, 0))
    return Iteration(small, large, straight, costs, larger, (0,) * len(costs), batch)


def _bend(values: Sequence[int]) -> int:
    """The second difference of values at 2, 4, ... samples that grow with the square; else 0.

    Four values do so if their second differences are equal: those that grow in steps, such as a
    share of the samples, have others. These, and two values, are judged by the ratio of the first.
    """
    seconds = {*np.diff(values, 2).tolist()}
    if len(seconds) == 1:
        return max(0, *seconds)
    few, more = values[:2]
    return more - 2 * few if more > 3 * few > 0 else 0


def _record(
    step: Callable[[], object], given: Sequence[Tensor], in_place: bool
) -> tuple[Trace, tuple[Cost, ...]]:
    costs, whole = _Costs(), nn.Module()
    for number, tensor in enumerate(given):  # else one that is read in slices would not count
        whole.register_buffer(str(number), tensor)

    def noting() -> None:
        with costs:  # which holds operands, as a meter does, so that no sum is in place
            step()

    with costs if in_place else nullcontext():
        trace = record(step if in_place else noting, warmup=0, device="meta", model=whole)
    return trace, _aligned(trace, costs.noted)


def _aligned(trace: Trace, noted: list[Cost]) -> tuple[Cost, ...]:
    """The costs of a trace's functions, which are the operations that touch data."""
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
