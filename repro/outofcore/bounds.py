"""A lower bound on the time of every schedule, with one compute and two copy streams.

While function p runs, its own variables are on the device; others have at most the rest of the
budget. Further bytes that are read up to function r must be copied in after p has ended and before
r starts; further bytes last written by function a or later, and still needed after p, must be
copied out after a has ended and before p starts. Each such pair is an edge from the end of one
function to the start of another, with the time of its copies as length. The longest path through an
iteration, including the functions' own times, is a lower bound for every plan.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from repro.measure.checks import is_whole
from repro.outofcore.sequence import Trace
from repro.outofcore.simulation import checked_rates, checked_times

Vector = NDArray[np.float64]
_NEVER = -1


class BudgetTooSmall(ValueError):
    """No schedule exists within a budget, since one function alone needs more.

    `function` names it: in a trace the largest, in training the first not to fit. `needed_bytes`
    are those of its variables; in training, later functions may need more than these.
    """

    def __init__(
        self, function: str, needed_bytes: int, budget_bytes: int, where: str, final: bool = True
    ) -> None:
        self.function, self.needed_bytes, self.budget_bytes = function, needed_bytes, budget_bytes
        advice = f"the smallest feasible budget is {needed_bytes} bytes"
        if not final:
            advice = (
                f"give {needed_bytes} bytes at least; what comes after may need more, and "
                "record(step).smallest_budget is the smallest feasible budget"
            )
        super().__init__(
            f"{where} needs {needed_bytes} bytes for its inputs and outputs alone, but the budget "
            f"is {budget_bytes}: {advice}"
        )


def check_budget(trace: Trace, budget_bytes: int) -> None:
    """Raise `BudgetTooSmall` if a function of the trace alone does not fit the budget."""
    if not is_whole(budget_bytes):
        raise ValueError(f"budget_bytes is {budget_bytes!r}: give whole bytes")
    needed = trace.smallest_budget
    if needed > budget_bytes:
        number = trace.needs_bytes.index(needed)
        name = trace.functions[number].name
        raise BudgetTooSmall(name, needed, budget_bytes, f"function {number} ({name})")


def bound(
    trace: Trace,
    budget_bytes: int,
    compute_times: Sequence[float] | Vector,
    bandwidth: float | tuple[float, float],
    latency_s: float = 0.0,
) -> float:
    """Return a lower bound on the seconds of an iteration, for every schedule.

    It is valid for every plan that `SwapPlan.verify` accepts and `SwapPlan.simulate` repeats: for
    any order of copies of whole variables, and any choice of resident variables. The best schedule
    may take longer, since the bound treats the choices of two functions as independent. Arguments
    and errors are those of `plan_packed`.
    """
    check_budget(trace, budget_bytes)
    times, rates = checked_times(trace, compute_times, latency_s), checked_rates(bandwidth)
    if trace.peak_bytes - trace.held_bytes <= budget_bytes:
        return float(times.sum())
    uses = _Uses(trace)
    peak = int(np.argmax(trace.live_bytes))
    # Any function will do: the path leads from its end to its end in the next iteration.
    starts = {peak, len(times) - 1}
    return max(_longest(uses, budget_bytes, times, rates, latency_s, at) for at in starts)


class _Uses:
    """The uses of a trace.

    Attributes:
        uses: For each function its variables, and for each variable: the number of functions until
            its next use, if that reads it (`_NEVER` if no use needs its value), whether it has a
            new value after the function, and for how many functions the value must be kept.
    """

    def __init__(self, trace: Trace) -> None:
        number = {name: v for v, name in enumerate(trace.accesses)}
        self.size = np.array([trace.sizes[name] for name in number], dtype=np.float64)
        self.needs = np.array(trace.needs_bytes, dtype=np.float64)  # of each function's variables
        self.uses: list[list[tuple[int, int, bool, int]]] = [[] for _ in trace.functions]
        for name, f, then, ends, needed in trace.gaps:
            written = name in trace.functions[f].outputs or trace.lifetimes.get(name, [-1])[0] == f
            following = then - f if needed and not ends else _NEVER
            self.uses[f].append((number[name], following, written, then - f if needed else 0))


def _longest(
    uses: _Uses, budget: int, times: Vector, rates: tuple[float, float], latency_s: float, at: int
) -> float:
    """Return the longest path from the end of function `at` to its end one iteration later."""
    n, count = len(times), len(uses.size)
    size, largest = uses.size, float(uses.size.max())
    ends = np.full(n + 1, -np.inf)  # of function at + i
    ends[0] = 0.0
    starts = np.full(n + 1, -np.inf)
    # Per variable, counted from `at`: the next use that reads it, the last function that wrote it,
    # and the first function from which its value is no longer needed.
    read = np.full(count, _NEVER)
    wrote = np.full(count, -n - 1)
    until = np.full(count, -n - 1)
    for step in range(-n, n + 1):
        f = (at + step) % n
        room = budget - uses.needs[f]
        others = np.ones(count, dtype=bool)
        others[[v for v, *_ in uses.uses[f]]] = False
        if step > 0:
            away = np.flatnonzero(others & (until > step) & (wrote >= 0))
            start = ends[step - 1]
            if away.size:
                # demand[a]: bytes of variables written last by function a or later.
                demand = _beyond(wrote[away], size[away], room, step)
                copies = _copies(demand, rates[1], latency_s, largest)
                start = max(start, float(np.where(demand > 0, ends[:step] + copies, start).max()))
            starts[step] = max(starts[step], start)
            ends[step] = starts[step] + times[f]
        for v, then, new, kept in uses.uses[f]:
            read[v] = step + then if then != _NEVER else _NEVER
            until[v] = step + kept
            if new:
                wrote[v] = step
        if 0 <= step < n:
            coming = np.flatnonzero(others & (read > step) & (read <= n))
            if coming.size:
                demand = _beyond(n - read[coming], size[coming], room, n - step)[::-1]
                copies = _copies(demand, rates[0], latency_s, largest)
                reached = ends[step] + np.where(demand > 0, copies, -np.inf)
                # demand[i]: bytes read up to function step + 1 + i.
                starts[step + 1 :] = np.maximum(starts[step + 1 :], reached)
    return float(ends[n])


def _beyond(position: NDArray[np.int64], size: Vector, room: float, length: int) -> Vector:
    """Return for i < length the bytes at positions from i on that do not fit into the room.

    Variables larger than the room do not fit at all.
    """
    summed = np.bincount(position, size, length)[::-1].cumsum()[::-1]
    small = size <= room
    fitting = np.bincount(position[small], size[small], length)[::-1].cumsum()[::-1]
    beyond: Vector = np.maximum(0.0, summed - np.minimum(fitting, room))
    return beyond


def _copies(demand: Vector, rate: float, latency_s: float, largest: float) -> Vector:
    seconds = demand / rate
    return seconds + latency_s * np.ceil(demand / largest) if latency_s else seconds
