"""The cost of strong scaling: a model of a training step on many nodes (sections III-B, VI-B).

A step on P nodes, each of at most b = ⌈B / min(B, P)⌉ samples of a mini-batch of B:

    computation    c b + o             o: fixed cost of a step
    communication  2 (P - 1) (m α + β G / P)    pairwise all-to-all and ring allgather, m messages
    blocked        max(0, communication - ω computation)
    step           computation + blocked

Sums of gradients take the same time on any number of nodes (section VI-B), which speed-ups cannot
tell from computation.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
from scipy.optimize import least_squares, nnls

Schedule = Sequence[tuple[int, int]]  # (batch size, epochs), in order


@dataclass(frozen=True)
class MeasuredStep:
    """The mean training step of a measured run."""

    batch_size: int  # samples of the mini-batch, over all processes
    processes: int
    computation_s: float  # forward pass, backward pass and update in each process
    communication_s: float = 0.0  # in which gradients were communicated or summed
    blocked_s: float = 0.0  # in which computation waited


@dataclass(frozen=True)
class StepCost:
    """Modelled seconds of one step; `total_s` is its duration."""

    computation_s: float
    communication_s: float
    blocked_s: float

    @property
    def total_s(self) -> float:
        """Computation, and communication that is not hidden."""
        return self.computation_s + self.blocked_s


@dataclass(frozen=True)
class ScalingModel:
    """Costs of a training step on the nodes of a cluster."""

    sample_s: float  # c, seconds of computation per sample
    overhead_s: float = 0.0  # o, of each step: the small-batch inefficiency of section VI-B
    latency_s: float = 0.0  # m α, of one round of all messages
    transfer_s: float = 0.0  # β G, in which a node sends all its gradients once
    overlap: float = 1.0  # ω, the share of the computation under which communication can hide

    def __post_init__(self) -> None:
        costs = (self.overhead_s, self.latency_s, self.transfer_s, self.overlap)
        finite = all(math.isfinite(cost) for cost in (self.sample_s, *costs))
        if not finite or self.sample_s <= 0 or min(costs) < 0 or self.overlap > 1:
            raise ValueError(
                f"{self}: every cost must be finite and at least 0, sample_s above 0 and overlap "
                "at most 1"
            )

    @classmethod
    def fit(
        cls,
        steps: Sequence[MeasuredStep],
        messages: Sequence[tuple[int, int, float]] = (),
        gradient_bytes: int = 0,
        rounds: int = 1,
    ) -> "ScalingModel":
        """Fit the costs to measured steps and communications by non-negative least squares.

        Computation is fitted to all steps, ω to steps of several processes. Messages give the ratio
        of latency and bandwidth; steps of several processes, if any, give the level, since their
        communication shares the processors with the training.

        Args:
            steps: Measured steps with at least two different shares per process.
            messages: Measured averagings: bytes, processes, seconds.
            gradient_bytes: Bytes of the network's gradients.
            rounds: m, communications of a step: buckets of gradients.

        Raises:
            ValueError: The points do not determine all costs.
        """
        samples = [_local(step.batch_size, step.processes) for step in steps]
        seconds = [step.computation_s for step in steps]
        sample, overhead = _fitted([[n, 1.0] for n in samples], seconds)
        # With equal times the slope is a rounding error of either sign.
        if sample * (max(samples) - min(samples)) <= 1e-9 * max(seconds):
            raise ValueError(
                f"computation of {samples} samples took {seconds} s, which does not grow with "
                "their number; give larger batches, or repeat the measurement"
            )
        several = [step for step in steps if step.processes > 1]
        # Averagings of some bytes by P processes: seconds = 2 (P - 1) (α + β bytes / P).
        rows = [[2 * (p - 1), 2 * (p - 1) * size / p] for size, p, _ in messages]
        latency, per_byte = _fitted(rows, [m[2] for m in messages]) if messages else (0.0, 0.0)
        model = cls(sample, overhead, latency * rounds, per_byte * gradient_bytes)
        alone = [model.step(step.batch_size, step.processes).communication_s for step in several]
        if any(alone):
            level = float(np.mean([step.communication_s for step in several]) / np.mean(alone))
            latency, transfer = level * model.latency_s, level * model.transfer_s
            model = replace(model, latency_s=latency, transfer_s=transfer)
        hidden = [
            (step.communication_s - step.blocked_s) / step.computation_s
            for step in several
            if step.blocked_s > 0.02 * step.computation_s  # else communication is hidden
        ]
        return replace(model, overlap=float(np.clip(np.mean(hidden), 0, 1))) if hidden else model

    def step(self, batch_size: int, processes: int) -> StepCost:
        """Return the cost of one step of `batch_size` samples on `processes` nodes.

        If there are more nodes than samples, the rest are idle or duplicate work (section VI-B).
        """
        busy = min(batch_size, processes)
        computation = self.sample_s * _local(batch_size, processes) + self.overhead_s
        communication = 2 * (busy - 1) * (self.latency_s + self.transfer_s / busy)
        blocked = max(0.0, communication - self.overlap * computation)
        return StepCost(computation, communication, blocked)

    def training_time(self, schedule: Schedule, samples: int, processes: int) -> float:
        """Return the seconds of a training run of ⌈N / B⌉ steps in each epoch of N `samples`."""
        return sum(
            epochs * math.ceil(samples / batch) * self.step(batch, processes).total_s
            for batch, epochs in schedule
        )

    def breakdown(self, schedule: Schedule, samples: int, processes: int) -> StepCost:
        """Return the costs of a whole training run by kind (Figure 9)."""
        counts = [epochs * math.ceil(samples / batch) for batch, epochs in schedule]
        costs = [astuple(self.step(batch, processes)) for batch, _ in schedule]
        return StepCost(*np.dot(counts, costs).tolist())

    def speedup(self, schedule: Schedule, samples: int, processes: int) -> float:
        """Return the speed-up of a training run of this schedule over one node."""
        alone = self.training_time(schedule, samples, 1)
        return alone / self.training_time(schedule, samples, processes)

    @classmethod
    def fit_speedups(
        cls,
        points: Sequence[tuple[Schedule, Sequence[int], float]],
        samples: int,
        overhead: tuple[float, float],
    ) -> "ScalingModel":
        """Fit latency and transfer, in units of a sample's computation, to known speed-ups.

        Args:
            points: A schedule, numbers of nodes, and the largest speed-up on any of them.
            samples: N.
            overhead: Bounds of the fit of o / c, in samples; equal bounds fix it. Section VI-B's
                example gives 7 / 6.
        """
        least, most = overhead

        def model(x: np.ndarray) -> "ScalingModel":
            latency, transfer = np.exp(x[:2])
            share = float(x[2]) if len(x) > 2 else 0.0
            return cls(1.0, least + share * (most - least), float(latency), float(transfer))

        def errors(x: np.ndarray) -> list[float]:
            candidate, misses = model(x), []
            for schedule, nodes, value in points:
                fastest = min(candidate.training_time(schedule, samples, p) for p in nodes)
                alone = candidate.training_time(schedule, samples, 1)
                misses.append(math.log(alone / fastest / value))
            # Latency and transfer are as small as possible if the points do not determine them.
            return misses + [1e-4 * (value + 14) for value in x[:2]]

        free = (0.5,) if most > least else ()
        # Latency alone, transfer alone, both, and between: one start may miss the best fit.
        starts = [(a, b, *free) for a, b in ((-3.0, -6.0), (-9.0, 4.0), (0.0, 4.0), (-3.0, 1.0))]
        low, high = ([-14.0, -14.0, 0.0], [8.0, 8.0, 1.0])
        bounds = (low[: 2 + len(free)], high[: 2 + len(free)])
        fits = [least_squares(errors, start, bounds=bounds) for start in starts]
        return model(min(fits, key=lambda fit: float(fit.cost)).x)


def _fitted(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Solve rows · costs = seconds by non-negative least squares of relative errors."""
    scaled = np.array(rows) / np.array(seconds)[:, None]
    if np.linalg.matrix_rank(scaled) < len(rows[0]):
        raise ValueError(
            f"the {len(rows)} points {rows} do not determine the costs; give at least two sizes"
        )
    costs: list[float] = nnls(scaled, np.ones(len(rows)))[0].tolist()
    return costs


def updates(schedule: Iterable[tuple[int, int]], samples: int) -> int:
    """Return the number of parameter updates of a training run, each with one averaging."""
    return sum(epochs * math.ceil(samples / batch) for batch, epochs in schedule)


def _local(batch_size: int, processes: int) -> int:
    if batch_size < 1 or processes < 1:
        raise ValueError(
            f"batch size {batch_size} on {processes} processes; give at least 1 of each"
        )
    return -(-batch_size // min(batch_size, processes))
