"""Batch sizes and shares of data with equal times for both kinds of worker.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", sections 3.3
(equations 4 to 8) and 3.4 (model-update factor).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from repro.dualbatch.checks import choice, instance, is_number, positive, whole
from repro.measure import TimeModel
from repro.measure.checks import is_whole

Rounding = Literal["nearest", "floor"]
Kind = Literal["small", "large"]
FACTORS: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
    "none": lambda ratio: 1.0,
}


class InfeasiblePlan(ValueError):
    """No small batch exists for an extra training time ratio.

    Attributes:
        k: The given ratio.
        k_max: The largest k with a small batch of at least one sample; k must exceed 1.
    """

    def __init__(self, k: float, k_max: float, n_small: int, n_large: int, why: str) -> None:
        self.k, self.k_max = k, k_max
        super().__init__(
            f"k is {k:g}, for which {why}; with {n_small} small-batch and {n_large} large-batch "
            f"workers feasible k are above 1 and at most {k_max:.6g}"
        )


@dataclass(frozen=True)
class DualBatchPlan:
    """Batch sizes and shares of data of the two kinds of worker.

    Attributes:
        time_model: Time model of the machine.
        k: Extra training time ratio: time of an epoch over that of n workers with large batches.
        n_small: Workers with small batches, n_S.
        n_large: Workers with large batches, n_L.
        samples: Samples of an epoch, d.
        small_batch: B_S; None if n_small is 0.
        large_batch: B_L.
        small_samples: d_S, samples of an epoch for each small-batch worker; 0 without such workers.
        large_samples: d_L, the same for each large-batch worker; 0 without such workers.
        update_factor: d_S / d_L, the model-update factor of small-batch workers (section 3.4); 1 if
            there is only one kind of worker. Large-batch workers have the factor 1.

    Raises:
        ValueError: A count is no integer, or too small for the number of workers.
    """

    time_model: TimeModel
    k: float
    n_small: int
    n_large: int
    samples: int
    small_batch: int | None
    large_batch: int
    small_samples: int
    large_samples: int
    update_factor: float

    def __post_init__(self) -> None:
        instance("time_model", self.time_model, TimeModel)
        counts = _counts(self.n_small, self.n_large, self.large_batch, self.samples)
        names = ("n_small", "n_large", "large_batch", "samples")
        values: dict[str, Any] = dict(zip(names, counts, strict=True))
        if self.small_batch is not None or self.n_small:
            values["small_batch"] = whole("small_batch", self.small_batch, 1)
        values["small_samples"] = whole("small_samples", self.small_samples, bool(self.n_small))
        values["large_samples"] = whole("large_samples", self.large_samples, bool(self.n_large))
        for name in ("k", "update_factor"):
            values[name] = positive(name, getattr(self, name))
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the instance is frozen

    @classmethod
    def solve(
        cls,
        time_model: TimeModel,
        k: float,
        n_small: int,
        n_large: int,
        large_batch: int,
        samples: int,
        rounding: Rounding = "nearest",
    ) -> "DualBatchPlan":
        """Solve equations 4 to 8 for d_L, d_S and B_S.

        Each is rounded before the next is computed, so that the shares of an epoch may differ from
        d by less than one sample per worker. Without small-batch workers k has no effect: every
        share is d / n.

        Args:
            time_model: Seconds of a step against the batch size, with b above 0.
            k: Extra training time ratio, above 1.
            n_small: Workers with small batches, at least 0.
            n_large: Workers with large batches, at least 0; at least one worker in total.
            large_batch: B_L, the largest batch that fits the device.
            samples: d, samples of an epoch, at least one for each worker.
            rounding: ``nearest`` (halves up; the paper's Table 6) or ``floor`` (its Table 2).

        Raises:
            InfeasiblePlan: No small batch exists; the message states the feasible range of k.
            ValueError: An argument is out of range.
        """
        instance("time_model", time_model, TimeModel)
        n_small, n_large, large_batch, samples = _counts(n_small, n_large, large_batch, samples)
        n, a, b = n_small + n_large, time_model.a, time_model.b
        if n_small:
            whole("large_batch", large_batch, 2)
        if samples < n:
            raise ValueError(f"samples is {samples}; give one for each of {n} workers")
        choice("rounding", rounding, ("nearest", "floor"))
        down = math.floor if rounding == "floor" else _nearest
        if n_small == 0:
            share = down(Fraction(samples, n))
            return cls(time_model, 1.0, 0, n, samples, None, large_batch, 0, share, 1.0)
        if b <= 0:
            raise ValueError(
                f"the time model has b = {b:g} s per step: without a fixed cost per step (b > 0) a "
                "small batch is as fast as a large one; probe smaller batch sizes, with more "
                "repeats"
            )
        k_max = largest_k(time_model, n_small, n_large, large_batch)
        if not is_number(k):
            raise ValueError(f"k is {k!r}; feasible k are above 1 and at most {k_max:.6g}")
        k = float(k)

        def infeasible(why: str) -> InfeasiblePlan:
            return InfeasiblePlan(k, k_max, n_small, n_large, why)

        if k <= 1:
            raise infeasible("a smaller batch has no extra time to take")
        if k > k_max * (1 + 1e-12):
            raise infeasible("B_S would be below one sample")
        # Equation 4, k (a + b/B_L) d/n = (a + b/B_L) d_L. With fractions, since in floating point
        # 1.15 · 50,000 / 4 is below 14,375.
        d_large = down(Fraction(repr(k)) * samples / n)
        # Equation 6, d = n_L d_L + n_S d_S.
        d_small = down(Fraction(samples - n_large * d_large, n_small))
        if not 1 <= d_small < d_large:
            raise infeasible(
                f"rounding leaves d_S = {d_small} and d_L = {d_large} of {samples} samples"
            )
        # Equation 8, which is equation 7, (a + b/B_L) d_L = (a + b/B_S) d_S, solved for B_S.
        small_batch = max(1, down(b / ((a + b / large_batch) * d_large / d_small - a)))
        if small_batch >= large_batch:
            raise infeasible(f"B_S would be {small_batch}, no smaller than B_L")
        factor = 1.0  # section 3.4
        if n_large:
            factor = d_small / d_large
        else:
            d_large = 0
        counts = (n_small, n_large, samples, small_batch, large_batch)
        return cls(time_model, k, *counts, d_small, d_large, factor)

    @property
    def n(self) -> int:
        """The number of workers."""
        return self.n_small + self.n_large

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of every worker: the small-batch workers come first."""
        kinds: list[Kind] = ["small" if i < self.n_small else "large" for i in range(self.n)]
        return tuple(kinds)

    def batch_of(self, kind: Kind) -> int:
        """Batch size of a kind of worker.

        Raises:
            ValueError: There is no worker of that kind.
        """
        batch = {"small": self.small_batch, "large": self.large_batch if self.n_large else None}
        if (size := batch.get(kind)) is None:
            raise ValueError(f"there is no {kind!r} worker among {self.kinds}")
        return size

    def share_of(self, kind: Kind) -> int:
        """Samples of an epoch for a worker of a kind; 0 without such workers.

        Raises:
            ValueError: There is no such kind.
        """
        choice("kind", kind, ("small", "large"))
        return self.small_samples if kind == "small" else self.large_samples

    def factor_of(self, kind: Kind, scheme: str = "linear") -> float:
        """Model-update factor of a worker (section 3.4); 1 for a large-batch worker.

        Args:
            kind: Kind of the worker.
            scheme: ``linear``, d_S / d_L; ``sqrt``, its root; ``none``, 1.

        Raises:
            ValueError: There is no such scheme.
        """
        choice("factor", scheme, FACTORS)
        return FACTORS[scheme](self.update_factor) if kind == "small" else 1.0

    def time_of(self, kind: Kind, time_model: TimeModel | None = None) -> float:
        """Predicted seconds of a worker's share, with its last batch at its true size."""
        model = time_model or self.time_model
        return model.pass_time(self.batch_of(kind), self.share_of(kind))


def largest_k(time_model: TimeModel, n_small: int, n_large: int, large_batch: int) -> float:
    """The k for which B_S is one sample, from equations 4 to 7.

    B_S = 1 requires d_L / d_S = (a + b) / (a + b / B_L), and equations 4 and 6 give d_L / d_S as
    k n_S / (n - n_L k).

    Raises:
        ValueError: A count is no integer, or there is no worker.
    """
    instance("time_model", time_model, TimeModel)
    n_small, n_large, large_batch, _ = _counts(n_small, n_large, large_batch, 1)
    a, b = time_model.a, time_model.b
    ratio = (a + b) / (a + b / large_batch)
    return ratio * (n_small + n_large) / (n_small + n_large * ratio)


def _nearest(value: float | Fraction) -> int:
    return math.floor(value + Fraction(1, 2))


def _counts(n_small: Any, n_large: Any, large_batch: Any, samples: Any) -> tuple[int, ...]:
    """The counts as Python's ints: products of numpy's narrow integers would overflow."""
    if not (is_whole(n_small, 0) and is_whole(n_large, 0)) or not (n_small or n_large):
        raise ValueError(
            f"n_small is {n_small!r} and n_large {n_large!r}; give at least 0 each, in whole "
            "numbers, and one worker in all"
        )
    large_batch, samples = whole("large_batch", large_batch, 1), whole("samples", samples, 1)
    return int(n_small), int(n_large), large_batch, samples
