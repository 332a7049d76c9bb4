"""Batch sizes and shares of data with equal times for both kinds of worker.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", sections 3.3
(equations 4 to 8, in `DualBatchPlan.solve`) and 3.4 (model-update factor).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Literal

from repro.dualbatch.checks import positive
from repro.measure import TimeModel
from repro.measure.checks import choice, is_number, whole

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
        super().__init__(k, k_max, n_small, n_large, why)  # by which it is pickled
        self.k, self.k_max = k, k_max

    def __str__(self) -> str:
        k, k_max, n_small, n_large, why = self.args
        return (
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
        """Refuse counts, batches and shares with which nothing can be trained."""
        least = {"n_small": 0, "n_large": 0, "large_batch": 1, "samples": 1}
        least |= {"small_samples": int(self.n_small > 0), "large_samples": int(self.n_large > 0)}
        least |= {"small_batch": 1} if self.n_small else {}
        for name, number in least.items():
            whole(name, getattr(self, name), number)
        for name in ("k", "update_factor"):
            positive(name, getattr(self, name))

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
        # Python's numbers: products of numpy's narrow integers would overflow.
        n_small, n_large = whole("n_small", n_small, 0), whole("n_large", n_large, 0)
        large_batch = whole("large_batch", large_batch, 2 if n_small else 1)
        n, a, b = n_small + n_large, time_model.a, time_model.b
        if not n:
            raise ValueError("n_small and n_large are 0; give at least one worker")
        samples = whole("samples", samples, n)  # one for each worker
        choice("rounding", rounding, ("nearest", "floor"))
        down = partial(_rounded, rounding)
        if n_small == 0:
            share = down(Fraction(samples, n))
            return cls(time_model, 1.0, 0, n, samples, None, large_batch, 0, share, 1.0)
        if b <= 0:
            raise ValueError(
                f"the time model has b = {b:g} s per step: without a fixed cost per step (b > 0) a "
                "small batch is as fast as a large one; probe smaller batch sizes, more often"
            )
        k_max = largest_k(time_model, n_small, n_large, large_batch)
        if not is_number(k):
            raise ValueError(f"k is {k!r}; feasible k are above 1 and at most {k_max:.6g}")
        k = float(k)
        infeasible = partial(InfeasiblePlan, k, k_max, n_small, n_large)
        if k <= 1:
            raise infeasible("a smaller batch has no extra time to take")
        if k > k_max * (1 + 5e-6):  # of the error's own k_max, rounded, B_S is one sample
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
        # Equation 8. Equations 4 and 5 give equation 7, (a + b/B_L) d_L = (a + b/B_S) d_S, here
        # solved for B_S.
        small_batch = max(1, down(b / ((a + b / large_batch) * d_large / d_small - a)))
        if small_batch >= large_batch:
            raise infeasible(f"B_S would be {small_batch}, no smaller than B_L")
        # Section 3.4.
        factor, d_large = (d_small / d_large, d_large) if n_large else (1.0, 0)
        counts = (n_small, n_large, samples, small_batch, large_batch)
        return cls(time_model, k, *counts, d_small, d_large, factor)

    @property
    def n(self) -> int:
        """The number of workers."""
        return self.n_small + self.n_large

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of every worker: the small-batch workers come first."""
        return (*["small"] * self.n_small, *["large"] * self.n_large)  # type: ignore[arg-type]

    def batch_of(self, kind: Kind) -> int:
        """Batch size of a kind of worker; a ValueError if there is no worker of that kind."""
        choice("kind", kind, sorted(set(self.kinds)))
        batch = self.small_batch if kind == "small" else self.large_batch
        assert batch is not None
        return batch

    def share_of(self, kind: Kind) -> int:
        """Samples of an epoch for a worker of a kind; 0 without such workers."""
        return self.small_samples if kind == "small" else self.large_samples

    def factor_of(self, kind: Kind, scheme: str = "linear") -> float:
        """Model-update factor of a worker by a scheme of `FACTORS` (section 3.4).

        1 for a large-batch worker, d_S / d_L for a small-batch one by ``linear``, its root by
        ``sqrt``, 1 by ``none``.
        """
        choice("factor", scheme, FACTORS)
        return FACTORS[scheme](self.update_factor) if kind == "small" else 1.0

    def time_of(self, kind: Kind, time_model: TimeModel | None = None) -> float:
        """Predicted seconds of a worker's share, with its last batch at its true size."""
        model = time_model or self.time_model
        return model.pass_time(self.batch_of(kind), self.share_of(kind))


def _rounded(rounding: Rounding, value: float | Fraction) -> int:
    return math.floor(value + (0 if rounding == "floor" else Fraction(1, 2)))


def largest_k(time_model: TimeModel, n_small: int, n_large: int, large_batch: int) -> float:
    """The k for which B_S is one sample, from equations 4 to 7.

    B_S = 1 requires d_L / d_S = (a + b) / (a + b / B_L), and equations 4 and 6 give d_L / d_S as
    k n_S / (n - n_L k).
    """
    n_small, n_large = whole("n_small", n_small, 0), whole("n_large", n_large, 0)
    a, b = time_model.a, time_model.b
    ratio = (a + b) / (a + b / whole("large_batch", large_batch, 1))
    return ratio * (n_small + n_large) / (n_small + n_large * ratio)
