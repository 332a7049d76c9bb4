"""Divide mini-batches under workspace limits by measured times: WR and WD of μ-cuDNN.

Source: Oyama et al., sections III-B (WR), III-C (WD, equations 1 to 4), III-C1 (desirable set).
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from scipy import optimize, sparse

from repro.measure.checks import choice, is_whole, whole

POLICIES = ("all", "powerOfTwo", "undivided")

K = TypeVar("K", bound=Hashable)
Array = np.ndarray[Any, Any]
W = TypeVar("W", "Candidate", "Division")


@dataclass(frozen=True)
class Candidate:
    """A micro-configuration: an algorithm for one micro-batch, with its seconds and workspace.

    Raises:
        ValueError: A negative or non-finite time, or a workspace that is no integer >= 0.
    """

    algorithm: str
    time_s: float
    workspace_bytes: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.time_s) and self.time_s >= 0):
            raise ValueError(
                f"candidate {self.algorithm!r} has time_s={self.time_s}; give finite seconds >= 0"
            )
        count = whole(f"workspace_bytes of candidate {self.algorithm!r}", self.workspace_bytes, 0)
        object.__setattr__(self, "workspace_bytes", count)


@dataclass(frozen=True)
class Division:
    """A configuration: the micro-batches of a mini-batch, each with its algorithm."""

    time_s: float  # sum over the parts, seconds
    workspace_bytes: int  # maximum over the parts, which share one workspace
    parts: list[tuple[int, str]]  # (micro-batch size, algorithm) as executed, largest first

    def __post_init__(self) -> None:
        count = whole("workspace_bytes of a division", self.workspace_bytes, 0)
        object.__setattr__(self, "workspace_bytes", count)

    def __str__(self) -> str:
        runs = [(len([*equal]), *part) for part, equal in groupby(self.parts)]
        return " + ".join(f"{f'{n}×' if n > 1 else ''}{size} {name}" for n, size, name in runs)


Candidates = Mapping[int, Sequence[Candidate]]


def micro_batch_sizes(batch: int, policy: str) -> list[int]:
    """Micro-batch sizes that a policy considers (section III-B), ascending.

    Of a mini-batch of B ``all`` takes 1 to B, ``powerOfTwo`` the powers of two and B itself,
    ``undivided`` B alone. ValueError for another policy or a `batch` below 1.
    """
    batch = whole("batch", batch, 1)  # numpy's are too short for one bit per sample
    sizes: dict[str, Iterable[int]] = {
        "all": range(1, batch + 1),
        "powerOfTwo": {2**k for k in range(batch.bit_length())} | {batch},
        "undivided": (batch,),
    }
    choice("policy", policy, POLICIES)
    return sorted(sizes[policy])


def best_division(batch: int, candidates: Candidates, limit_bytes: int | None = None) -> Division:
    """The fastest division of a mini-batch within a workspace limit: WR (section III-B).

    Among equally fast divisions, the one with the smallest workspace.

    Args:
        batch: The mini-batch size B.
        candidates: Micro-configurations by micro-batch size; sizes above B are not used.
        limit_bytes: Workspace M that every part must fit into; None for no limit.

    Raises:
        ValueError: The sizes cannot sum to the mini-batch, or nothing fits: then the message states
            the smallest sufficient limit.
    """
    return pareto_front(batch, candidates, limit_bytes)[-1]


def pareto_front(
    batch: int, candidates: Candidates, limit_bytes: int | None = None
) -> list[Division]:
    """The desirable divisions D(C(B)) (section III-C1), ascending in workspace, falling in time.

    No other division equals or beats one of them in both time and workspace.

    Differs from the paper: C(b) is not carried through the dynamic programme. The workspace of a
    division is the maximum over its parts, so that WR at each distinct workspace gives the same
    set; all of them run at once on arrays.

    Arguments and errors as in `best_division`.
    """
    batch = whole("batch", batch, 1)
    if limit_bytes is not None:
        limit_bytes = whole("limit_bytes", limit_bytes, 0)
    usable = _usable(batch, candidates)
    limits = sorted({way.workspace_bytes for ways in usable.values() for way in ways})
    if limit_bytes is not None:
        limits = [limit for limit in limits if limit <= limit_bytes]

    # WR, steps 1 and 2, for each of these limits M.
    single, total = _wr(batch, usable, limits)
    if not np.isfinite(total[batch]).any():
        if limit_bytes is None:
            raise ValueError(
                f"no sum of the micro-batch sizes {[*usable]} gives the mini-batch {batch}; add "
                f"candidates of other sizes"
            )
        least = pareto_front(batch, usable)[0].workspace_bytes
        raise ValueError(
            f"no division of the mini-batch of {batch} fits into {limit_bytes} bytes of workspace; "
            f"the smallest limit that would work is {least} bytes"
        )
    # WR, step 3: c(B) of each limit. D keeps those that no smaller workspace equals in time.
    front: list[Division] = []
    reached = math.inf
    for column, (limit, time) in enumerate(zip(limits, total[batch], strict=True)):
        if time < reached:
            reached = time
            division = _configuration(batch, usable, limit, single[:, column], total[:, column])
            # Sums of the same times in another order may differ in the last digit.
            if not front or division.time_s < front[-1].time_s:
                front.append(division)
    return front


def _wr(batch: int, usable: Candidates, limits: Sequence[int]) -> tuple[Array, Array]:
    """Steps 1 and 2 of WR (section III-B) at every workspace limit M at once.

    T_μ has shape (sizes, limits), T (B + 1, limits); infinite where nothing fits.
    """
    # Step 1: T_μ(b), the fastest micro-configuration of b samples within M.
    sizes = np.array([*usable])
    single = np.full((len(sizes), len(limits)), np.inf)
    for row, ways in zip(single, usable.values(), strict=True):
        for way in ways:  # ascending in workspace, falling in time
            row[np.searchsorted(limits, way.workspace_bytes) :] = way.time_s
    # Step 2: T(0) = 0; T(b) = min over b_μ of T_μ(b_μ) + T(b - b_μ).
    total = np.full((batch + 1, len(limits)), np.inf)
    total[0] = 0.0
    every = len(sizes) == sizes[-1]  # from 1 on: T(b - b_μ) is then a view, much faster
    sums = np.empty_like(single)
    for b in range(1, batch + 1):
        count = int(np.searchsorted(sizes, b, side="right"))
        if count:
            rest = total[b - count : b][::-1] if every else total[b - sizes[:count]]
            np.add(single[:count], rest, out=sums[:count]).min(axis=0, out=total[b])
    return single, total


def _configuration(
    batch: int, usable: Candidates, limit: int, single: Array, total: Array
) -> Division:
    """c(B) of WR at a workspace limit: c(b) = {c_μ(b_μ)} + c(b - b_μ), the argmin at each step."""
    sizes = np.array([*usable])
    parts: list[tuple[int, Candidate]] = []
    left = batch
    while left:
        count = int(np.searchsorted(sizes, left, side="right"))
        sums = single[:count] + total[left - sizes[:count]]
        # The sum that was the minimum; among equal sums, the largest micro-batch.
        size = int(sizes[np.flatnonzero(sums == total[left])[-1]])
        fitting = [way for way in usable[size] if way.workspace_bytes <= limit]
        parts.append((size, fitting[-1]))
        left -= size
    parts.sort(key=lambda part: (-part[0], part[1].algorithm))
    return Division(
        time_s=math.fsum(way.time_s for _, way in parts),
        workspace_bytes=max(way.workspace_bytes for _, way in parts),
        parts=[(size, way.algorithm) for size, way in parts],
    )


def desirable(ways: Iterable[W]) -> list[W]:
    """D(C) (section III-C1): the Pareto-optimal elements by time and workspace, ascending."""
    kept: list[W] = []
    for way in sorted(
        ways, key=lambda way: (way.workspace_bytes, way.time_s, getattr(way, "algorithm", ""))
    ):
        if not kept or way.time_s < kept[-1].time_s:
            kept.append(way)
    return kept


def _usable(batch: int, candidates: Candidates) -> dict[int, list[Candidate]]:
    """The desirable candidates of at most a mini-batch, by ascending size."""
    if wrong := [size for size in candidates if not is_whole(size, 1)]:
        told = "it must be a whole number from 1"
        raise ValueError(f"candidates have a micro-batch size {wrong[0]}; {told}")
    known = {int(size): ways for size, ways in candidates.items() if size <= batch and ways}
    if not known:
        raise ValueError(
            f"no candidate has a micro-batch of at most {batch}; measure at least one algorithm"
        )
    return {size: desirable(known[size]) for size in sorted(known)}


def assign_workspaces(
    fronts: Mapping[K, Sequence[Division]], total_bytes: int
) -> dict[K, Division]:
    """Choose one division per kernel with the least total time within a total workspace: WD.

    The 0-1 programme of equations 1 to 4 (section III-C), solved to optimality by HiGHS. Sums of
    bytes are checked in integers: a choice that only floating point admits is excluded, and the
    programme solved again.

    Args:
        fronts: By kernel k its divisions C_k, such as from `pareto_front`.
        total_bytes: Workspace M, divided among all kernels.

    Raises:
        ValueError: A kernel has no division, or even the smallest divisions exceed the total: the
            message states the smallest sufficient total.
        RuntimeError: The solver stopped without an optimum.
    """
    total_bytes = whole("total_bytes", total_bytes, 0)  # of numpy's, sums would overflow
    options = {kernel: desirable(divisions) for kernel, divisions in fronts.items()}
    if empty := [kernel for kernel, divisions in options.items() if not divisions]:
        raise ValueError(f"kernel {empty[0]!r} has no division; give its pareto_front")
    least = {kernel: divisions[0].workspace_bytes for kernel, divisions in options.items()}
    if (room := total_bytes - sum(least.values())) < 0:
        largest = max(least, key=lambda kernel: least[kernel])
        raise ValueError(
            f"{len(fronts)} kernels do not fit into {total_bytes} bytes of workspace together; "
            f"the smallest limit that would work is {sum(least.values())} bytes, of which kernel "
            f"{largest!r} needs {least[largest]}"
        )
    if not fronts:
        return {}
    # A variable for each division that fits with the other kernels at their least, by kernel.
    choices = [
        (kernel, division)
        for kernel, divisions in options.items()
        for division in divisions
        if division.workspace_bytes - least[kernel] <= room
    ]
    order = {kernel: row for row, kernel in enumerate(options)}
    rows = np.array([order[kernel] for kernel, _ in choices])
    # Bytes beyond each kernel's least, which avoids small differences of large numbers, in the
    # largest common unit: a single byte too much is far above the solver's tolerance.
    needs = [division.workspace_bytes - least[kernel] for kernel, division in choices]
    unit = math.gcd(*needs) or 1
    needs, room = [need // unit for need in needs], room // unit
    # The solver's absolute gap of 1e-6 would, in seconds, be the time of a whole kernel.
    times = np.array([division.time_s - options[kernel][-1].time_s for kernel, division in choices])
    costs = times / (float(times.max()) or 1.0) * 1e4

    chosen = _programme(costs, needs, rows, room)
    return dict(choices[i] for i in chosen)


def _programme(costs: Array, needs: Sequence[int], rows: Array, room: int) -> list[int]:
    """Solve equations 1 to 4 of section III-C; return the variables x_kc that are 1, ascending.

    By variable `costs` are T_k(c), `needs` M_k(c), and `rows` k, ascending; `room` is M.
    """
    index = _worth_considering(costs, np.array(needs, dtype=float), rows, room)
    only = np.bincount(rows[index])[rows[index]] == 1  # the only division of its kernel
    chosen: list[int] = index[only].tolist()
    index = index[~only]
    room -= sum(needs[i] for i in chosen)
    if not len(index):
        return chosen
    of_kernel = np.unique(rows[index], return_inverse=True)[1]
    each = sparse.csr_array((np.ones(len(index)), (of_kernel, np.arange(len(index)))))
    total = np.array([[needs[i] for i in index]], dtype=float)
    constraints = [
        optimize.LinearConstraint(total, -np.inf, float(room)),  # (2) Σ M_k(c) x_kc <= M
        optimize.LinearConstraint(each, 1, 1),  # (3) Σ_c x_kc = 1 for every kernel k
    ]
    while True:
        result = optimize.milp(
            costs[index],  # (1) min Σ T_k(c) x_kc
            constraints=constraints,
            integrality=np.ones(len(index)),  # (4) x_kc in {0, 1}
            bounds=optimize.Bounds(0, 1),
            options={"mip_rel_gap": 0, "presolve": False},  # presolve calls some infeasible
        )
        if result.x is None:
            raise RuntimeError(f"the solver found no assignment: {result.message}")
        taken = result.x > 0.5
        if sum(needs[i] for i in index[taken]) <= room:
            return sorted([*chosen, *index[taken].tolist()])
        excluded = optimize.LinearConstraint(taken[None].astype(float), -np.inf, of_kernel[-1])
        constraints.append(excluded)


def _worth_considering(costs: Array, needs: Array, rows: Array, room: int) -> Array:
    """Indices of the variables that an optimal assignment may contain, by a Lagrangian bound.

    Let a byte cost λ >= 0, such as in the linear programme without equation 4. An assignment
    within M bytes takes at least L = Σ_k p_k - λ M, with p_k the cheapest T + λ M_k of kernel k;
    with a division c it takes more by at least the excess of c over p_k. If this exceeds a known
    assignment's time, no better assignment contains c. Without this, solving takes ten times as
    long.
    """
    first = np.flatnonzero(np.diff(rows, prepend=-1))  # each kernel's smallest division
    each = sparse.csr_array((np.ones(len(rows)), (rows, np.arange(len(rows)))))
    relaxed = optimize.linprog(
        costs, A_ub=needs[None] / max(room, 1), b_ub=[1.0], A_eq=each, b_eq=np.ones(len(first))
    )
    price, known = 0.0, first.copy()
    if relaxed.x is not None:
        price = max(0.0, -float(relaxed.ineqlin.marginals[0])) / max(room, 1)
        # Each kernel's first division, ascending in bytes, with a nonzero share.
        held = np.flatnonzero(relaxed.x > 1e-6)
        rounded = held[np.unique(rows[held], return_index=True)[1]]
        known = rounded if needs[rounded].sum() <= room else known  # the solver has a tolerance
    while True:  # spend the rest of the workspace on the largest saving that fits
        extra, saved = needs - needs[known][rows], costs[known][rows] - costs
        saved[extra > room - needs[known].sum()] = 0.0
        if not (saved > 0).any():
            break
        known[rows[saved.argmax()]] = saved.argmax()
    priced = costs + price * needs
    cheapest = np.minimum.reduceat(priced, first)
    gap = max(0.0, costs[known].sum() - (cheapest.sum() - price * room))
    gap += 1e-9 * (costs[known].sum() + price * room)  # rounding
    keep = priced <= cheapest[rows] + gap
    keep[known] = True
    return np.flatnonzero(keep)
