"""Share one workspace out among kernels: WD of μ-cuDNN (section III-C), exactly."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from scipy import optimize, sparse

from repro.microconv.optimize import Division, limit_of

K = TypeVar("K", bound=Hashable)


def assign_workspaces(
    fronts: Mapping[K, Sequence[Division]], total_bytes: int
) -> dict[K, Division]:
    """Choose one division for each kernel, the fastest in sum within a common workspace (WD).

    The 0-1 programme of equations 1 to 4, solved to optimality by HiGHS. Sums of bytes are checked
    in integers: a choice that only floating point admits is excluded, and the rest solved again.

    Args:
        fronts: By kernel, its divisions, as from `pareto_front`.
        total_bytes: Workspace M that all kernels share out.

    Raises:
        ValueError: The total is no number of bytes, a kernel has no division, or even the smallest
            ones need more than the total: the message has the smallest total that would do and the
            kernel that needs most of it.
        RuntimeError: The solver stopped without an optimum.
    """
    total_bytes = limit_of(total_bytes, "total_bytes")
    if not fronts:
        return {}
    kernels = list(fronts)
    for kernel in kernels:
        if not fronts[kernel]:
            raise ValueError(f"kernel {kernel!r} has no division; give its pareto_front")
    least = {kernel: min(d.workspace_bytes for d in fronts[kernel]) for kernel in kernels}
    if sum(least.values()) > total_bytes:
        largest = max(kernels, key=lambda kernel: least[kernel])
        raise ValueError(
            f"{len(kernels)} kernels do not fit into {total_bytes} bytes of workspace together; "
            f"the smallest limit that would work is {sum(least.values())} bytes, of which kernel "
            f"{largest!r} needs {least[largest]}"
        )
    open_choices = _core({k: _desirable(fronts[k]) for k in kernels}, total_bytes)
    chosen = {k: divisions[0] for k, divisions in open_choices.items() if len(divisions) == 1}
    left = total_bytes - sum(division.workspace_bytes for division in chosen.values())
    chosen |= _solve({k: d for k, d in open_choices.items() if len(d) > 1}, left)
    return {kernel: chosen[kernel] for kernel in kernels}


def _core(fronts: Mapping[K, list[Division]], total_bytes: int) -> dict[K, list[Division]]:
    """Drop the divisions that no optimal assignment holds, by Lagrangian bounds.

    The solver alone finds the same optimum, in some ten times the time (562 variables: 0.2 to 0.3 s
    for 0.02 to 0.06).

    Let a byte cost λ >= 0. An assignment within the total M has Σ_k (T_k + λ M_k) - λ M <= Σ_k T_k,
    since its bytes are no more than M; and each priced term is at least its kernel's cheapest one,
    p_k = min over c of T_k(c) + λ M_k(c). So no assignment takes less than L = Σ_k p_k - λ M. One
    that holds a division c of kernel j takes at least L plus what c costs beyond p_j. Where that
    is more than the time of an assignment that is known, c is in no better one. Any λ is valid;
    that at which the greedy choice along the convex hulls runs out of bytes makes L highest, and
    the greedy choice is the known assignment.
    """
    least = {kernel: divisions[0] for kernel, divisions in fronts.items()}
    capacity = total_bytes - sum(division.workspace_bytes for division in least.values())
    # Steps along each kernel's convex hull, by the time that a byte saves.
    steps = []
    for kernel, divisions in fronts.items():
        hull: list[Division] = []
        for division in divisions:
            while len(hull) > 1 and _saving(hull[-2], hull[-1]) <= _saving(hull[-1], division):
                hull.pop()
            hull.append(division)
        steps += [(_saving(a, b), kernel, a, b) for a, b in pairwise(hull)]
    steps.sort(key=lambda step: -step[0])
    known, price, unmet = dict(least), 0.0, False
    for saving, kernel, before, after in steps:
        extra = after.workspace_bytes - before.workspace_bytes
        if known[kernel] is before and extra <= capacity:
            known[kernel] = after
            capacity -= extra
        elif not unmet:
            unmet, price = True, saving
    # What is left of the workspace goes to the largest savings that fit.
    improved = True
    while improved:
        improved = False
        for kernel, divisions in fronts.items():
            for division in divisions:
                extra = division.workspace_bytes - known[kernel].workspace_bytes
                if extra <= capacity and division.time_s < known[kernel].time_s:
                    known[kernel], capacity, improved = division, capacity - extra, True

    def cost(kernel: K, division: Division) -> float:
        # Of the bytes beyond the kernel's least: differences of large numbers lose digits.
        extra = division.workspace_bytes - least[kernel].workspace_bytes
        return division.time_s + price * extra

    priced = {
        kernel: min(cost(kernel, d) for d in divisions) for kernel, divisions in fronts.items()
    }
    spare = total_bytes - sum(division.workspace_bytes for division in least.values())
    bound = math.fsum(priced.values()) - price * spare
    time = math.fsum(division.time_s for division in known.values())
    gap = max(0.0, time - bound) + 1e-9 * time
    return {
        kernel: [
            d for d in divisions if d is known[kernel] or cost(kernel, d) <= priced[kernel] + gap
        ]
        for kernel, divisions in fronts.items()
    }


def _saving(before: Division, after: Division) -> float:
    extra = after.workspace_bytes - before.workspace_bytes
    return (before.time_s - after.time_s) / extra


def _solve(fronts: Mapping[K, list[Division]], total_bytes: int) -> dict[K, Division]:
    """Solve equations 1 to 4 with HiGHS."""
    if not fronts:
        return {}
    choices = [(kernel, division) for kernel in fronts for division in fronts[kernel]]
    order = {kernel: row for row, kernel in enumerate(fronts)}
    rows = np.array([order[kernel] for kernel, _ in choices])
    # Beyond each kernel's least, so that the numbers that decide are not small differences.
    needs = [d.workspace_bytes - fronts[kernel][0].workspace_bytes for kernel, d in choices]
    total_bytes -= sum(divisions[0].workspace_bytes for divisions in fronts.values())
    # In the largest unit that divides them all, a byte too much is far above the tolerance.
    unit = math.gcd(*needs) or 1
    needs, total_bytes = [need // unit for need in needs], total_bytes // unit
    times = np.array([d.time_s - fronts[kernel][-1].time_s for kernel, d in choices])
    # The solver stops within an absolute gap of 1e-6, which in seconds is a whole kernel.
    costs = times / (float(times.max()) or 1.0) * 1e4
    one_each = sparse.csr_array((np.ones(len(rows)), (rows, np.arange(len(rows)))))
    constraints = [
        optimize.LinearConstraint(one_each, 1, 1),
        optimize.LinearConstraint(np.array([needs], dtype=float), -np.inf, float(total_bytes)),
    ]
    while True:
        result = optimize.milp(
            costs,
            constraints=constraints,
            integrality=np.ones(len(costs)),
            bounds=optimize.Bounds(0, 1),
            options={"mip_rel_gap": 0, "presolve": False},
        )
        if result.x is None:
            raise RuntimeError(f"the solver found no assignment: {result.message}")
        picked = np.flatnonzero(result.x > 0.5)
        if sum(needs[index] for index in picked) <= total_bytes:
            return {choices[index][0]: choices[index][1] for index in picked}
        excluded = np.zeros((1, len(costs)))
        excluded[0, picked] = 1
        constraints.append(optimize.LinearConstraint(excluded, -np.inf, len(fronts) - 1))


def _desirable(divisions: Iterable[Division]) -> list[Division]:
    kept: list[Division] = []
    for division in sorted(divisions, key=lambda d: (d.workspace_bytes, d.time_s)):
        if not kept or division.time_s < kept[-1].time_s:
            kept.append(division)
    return kept
