"""Divide a mini-batch under a workspace limit: WR and the desirable set of μ-cuDNN.

Pure functions over measured times; no backend is involved. Sources: Oyama et al., section III-B
(WR) and section III-C1 (desirable configurations).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro.measure.checks import is_whole

POLICIES = ("all", "powerOfTwo", "undivided")


@dataclass(frozen=True)
class Candidate:
    """One way to run a micro-batch: a micro-configuration's algorithm, time and workspace.

    Attributes:
        algorithm: Its name.
        time_s: Measured seconds of one micro-batch.
        workspace_bytes: Bytes of workspace that it needs.

    Raises:
        ValueError: A negative or non-finite time, or a workspace that is no whole number >= 0.
    """

    algorithm: str
    time_s: float
    workspace_bytes: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.time_s) and self.time_s >= 0):
            raise ValueError(
                f"candidate {self.algorithm!r} has time_s={self.time_s}; give finite seconds >= 0"
            )
        if not is_whole(self.workspace_bytes, 0):
            raise ValueError(
                f"candidate {self.algorithm!r} has workspace_bytes={self.workspace_bytes!r}; "
                f"give a whole number of bytes >= 0"
            )
        object.__setattr__(self, "workspace_bytes", int(self.workspace_bytes))  # of any width


@dataclass(frozen=True)
class Division:
    """A configuration: how a mini-batch is cut, and what runs each part.

    Attributes:
        time_s: Sum over the parts, seconds.
        workspace_bytes: Maximum over the parts, which share one workspace.
        parts: (micro-batch size, algorithm) in the order of execution, largest first.

    Raises:
        ValueError: The workspace is no whole number >= 0.
    """

    time_s: float
    workspace_bytes: int
    parts: list[tuple[int, str]]

    def __post_init__(self) -> None:
        count = limit_of(self.workspace_bytes, "workspace_bytes of a division")
        object.__setattr__(self, "workspace_bytes", count)

    def __str__(self) -> str:
        runs: list[list[Any]] = []
        for size, algorithm in self.parts:
            if runs and runs[-1][1:] == [size, algorithm]:
                runs[-1][0] += 1
            else:
                runs.append([1, size, algorithm])
        return " + ".join(f"{f'{n}×' if n > 1 else ''}{size} {name}" for n, size, name in runs)


Candidates = Mapping[int, Sequence[Candidate]]


def micro_batch_sizes(batch: int, policy: str) -> list[int]:
    """Return the micro-batch sizes that a policy considers (section III-B), ascending.

    Args:
        batch: The mini-batch size B.
        policy: ``all`` for 1 to B, ``powerOfTwo`` for the powers of two and B itself,
            ``undivided`` for B alone.

    Raises:
        ValueError: `batch` is below 1 or the policy unknown.
    """
    batch = batch_of(batch)
    if policy == "all":
        return list(range(1, batch + 1))
    if policy == "powerOfTwo":
        return sorted({2**k for k in range(batch.bit_length())} | {batch})
    if policy == "undivided":
        return [batch]
    raise ValueError(f"unknown policy {policy!r}; choose {', '.join(POLICIES)}")


def best_division(
    batch: int,
    candidates: Candidates,
    limit_bytes: int | None = None,
    *,
    kernel: str = "the kernel",
) -> Division:
    """Return the fastest division of a mini-batch within a workspace limit (WR, section III-B).

    The dynamic programme T(b) = min over b' of T_μ(b') + T(b - b'). Among divisions of the same
    time the one with the smallest workspace is returned: the last point of `pareto_front`.

    Args:
        batch: The mini-batch size B.
        candidates: By micro-batch size, the ways to run one; sizes above B are not used.
        limit_bytes: Workspace that every part must fit into; None for no limit.
        kernel: Named in errors.

    Raises:
        ValueError: There are no candidates, their sizes cannot sum to the mini-batch, or nothing
            fits: then the message has the smallest limit that would do.
    """
    return pareto_front(batch, candidates, limit_bytes, kernel=kernel)[-1]


def pareto_front(
    batch: int,
    candidates: Candidates,
    limit_bytes: int | None = None,
    *,
    kernel: str = "the kernel",
) -> list[Division]:
    """Return the desirable divisions, ascending in workspace and falling in time.

    This is the exact set D(C(B)) of section III-C1: every division that no other one equals or
    beats in both time and workspace, one for each pair of values.

    Differs from the paper: it carries sets of configurations through the dynamic programme. Since
    the workspace of a division is the maximum over its parts, one WR programme for each distinct
    workspace size gives the same set, and all of them run at once on arrays.

    Args:
        batch: The mini-batch size B.
        candidates: By micro-batch size, the ways to run one.
        limit_bytes: Largest workspace of interest; None for no limit.
        kernel: Named in errors.

    Raises:
        ValueError: As `best_division`.
    """
    table = _Table(batch, candidates, limit_bytes, kernel)
    times = table.times()
    front: list[Division] = []
    reached = math.inf
    for column, time in enumerate(times[batch]):
        if time < reached:
            reached = time
            division = table.division(column, times[:, column])
            # Sums of the same times in another order may differ in the last digit.
            if not front or division.time_s < front[-1].time_s:
                front.append(division)
    return front


def least_workspace(batch: int, candidates: Candidates) -> int:
    """Return the smallest workspace into which a division of the mini-batch fits.

    Raises:
        ValueError: There are no candidates, or their sizes cannot sum to the mini-batch.
    """
    return _Table(batch, candidates, None, "the kernel").least


class _Table:
    """T_μ of every usable micro-batch size (rows) at every workspace threshold (columns)."""

    def __init__(
        self, batch: int, candidates: Candidates, limit_bytes: int | None, kernel: str
    ) -> None:
        batch = batch_of(batch)
        if limit_bytes is not None:
            limit_bytes = limit_of(limit_bytes, "limit_bytes", ", or None")
        usable: dict[int, list[Candidate]] = {}
        for size, ways in candidates.items():
            if not is_whole(size, 1):
                raise ValueError(
                    f"candidates of {kernel} have a micro-batch size {size}; it must be a whole "
                    f"number from 1"
                )
            if size <= batch and ways:
                usable[int(size)] = _undominated(ways)
        if not usable:
            raise ValueError(
                f"{kernel} has no candidate for a micro-batch of at most {batch}; measure at "
                f"least one algorithm"
            )
        least = _least_workspace(batch, usable)
        if least is None:
            raise ValueError(
                f"no sum of the micro-batch sizes {sorted(usable)} of {kernel} gives the "
                f"mini-batch {batch}; add candidates of other sizes"
            )
        if limit_bytes is not None and least > limit_bytes:
            raise ValueError(
                f"{kernel} fits no division of its mini-batch of {batch} into {limit_bytes} bytes "
                f"of workspace; the smallest limit that would work is {least} bytes"
            )
        self.batch, self.least = batch, least
        self.sizes = np.array(sorted(usable))
        self.ways = [usable[size] for size in self.sizes]
        needs = {way.workspace_bytes for ways in self.ways for way in ways}
        self.thresholds = sorted(
            need for need in needs if need >= least and (limit_bytes is None or need <= limit_bytes)
        )
        # (sizes, thresholds): the fastest within the threshold, infinite where none fits.
        self.single = np.full((len(self.sizes), len(self.thresholds)), np.inf)
        for row, ways in zip(self.single, self.ways, strict=True):
            for way in ways:  # ascending in workspace, falling in time
                row[np.searchsorted(self.thresholds, way.workspace_bytes) :] = way.time_s

    def times(self) -> np.ndarray:
        """Return T(0..B) at every threshold, shape (B + 1, thresholds)."""
        single = self.single
        total = np.full((self.batch + 1, single.shape[1]), np.inf)
        total[0] = 0.0
        scratch = np.empty_like(single)
        contiguous = len(self.sizes) == self.sizes[-1]
        for b in range(1, self.batch + 1):
            count = int(np.searchsorted(self.sizes, b, side="right"))
            if not count:
                continue
            rest = total[b - count : b][::-1] if contiguous else total[b - self.sizes[:count]]
            np.add(single[:count], rest, out=scratch[:count])
            scratch[:count].min(axis=0, out=total[b])
        return total

    def division(self, column: int, total: np.ndarray) -> Division:
        """Return a division that attains ``total[B]`` at a threshold."""
        parts: list[tuple[int, Candidate]] = []
        left = self.batch
        while left:
            count = int(np.searchsorted(self.sizes, left, side="right"))
            sums = self.single[:count, column] + total[left - self.sizes[:count]]
            # The very sum that the minimum was taken of; of several, the largest micro-batch.
            index = int(np.flatnonzero(sums == total[left])[-1])
            fitting = [w for w in self.ways[index] if w.workspace_bytes <= self.thresholds[column]]
            parts.append((int(self.sizes[index]), fitting[-1]))
            left -= int(self.sizes[index])
        parts.sort(key=lambda part: (-part[0], part[1].algorithm))
        return Division(
            time_s=math.fsum(way.time_s for _, way in parts),
            workspace_bytes=max(way.workspace_bytes for _, way in parts),
            parts=[(size, way.algorithm) for size, way in parts],
        )


def batch_of(batch: int) -> int:
    """Return a mini-batch size as Python's own number: numpy's have no room for a bit a sample."""
    if not is_whole(batch, 1):
        raise ValueError(f"batch is {batch!r}; it must be a whole number from 1")
    return int(batch)


def limit_of(count: int, name: str, other: str = "") -> int:
    """Return a number of bytes as Python's own, whose sums do not overflow."""
    if not is_whole(count, 0):
        raise ValueError(f"{name} is {count!r}; it must be at least 0{other}, in whole bytes")
    return int(count)


def _undominated(ways: Iterable[Candidate]) -> list[Candidate]:
    kept: list[Candidate] = []
    for way in sorted(ways, key=lambda way: (way.workspace_bytes, way.time_s, way.algorithm)):
        if not kept or way.time_s < kept[-1].time_s:
            kept.append(way)
    return kept


def _least_workspace(batch: int, usable: Mapping[int, Sequence[Candidate]]) -> int | None:
    """Return the smallest workspace that admits a division; None where no sizes sum to B."""
    for need in sorted({ways[0].workspace_bytes for ways in usable.values()}):
        sizes = [size for size, ways in usable.items() if ways[0].workspace_bytes <= need]
        sums = 1  # bit b: b is a sum of sizes
        for size in sizes:
            shift = size
            while shift <= batch:
                sums |= sums << shift
                shift *= 2
            sums &= (1 << (batch + 1)) - 1
        if sums >> batch & 1:
            return need
    return None
