"""Dual-batch learning and cyclic progressive learning on a parameter server.

Two batch sizes train one model at once, in shares of the data that take the same time, and the
resolution of the images is cycled from low to high within each stage of the learning rate.

Example:
    >>> from repro.dualbatch import CyclicProgressiveSchedule, DualBatchPlan, Stage
    >>> from repro.dualbatch import train_dual_batch
    >>> from repro.measure import TimeModel
    >>> times = TimeModel(a=5.6607e-4, b=0.0140412)  # or TimeModel.fit, or repro.measure.probe
    >>> plan = DualBatchPlan.solve(times, 1.1, 3, 1, large_batch=500, samples=50_000)
    >>> plan.small_batch, plan.small_samples, round(plan.update_factor, 3)
    (127, 12083, 0.879)
    >>> schedule = CyclicProgressiveSchedule([Stage(80, 0.1), Stage(40, 0.02), Stage(20, 0.004)])
    >>> result = train_dual_batch(make_model, (images, labels), plan, schedule)  # doctest: +SKIP

Modules, in the order of the paper: `plan` (equations 4 to 8), `server` (pull, push, merge rules),
`progressive` (the schedule), `shares` and `worker` (one share, step by step), `engines` (the
training loop in one process), `cluster` (the same on Ray). `checks` and `functions` refuse
arguments and functions that would train wrongly.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning for Efficient
Distributed Training".
"""

from repro.dualbatch.checks import NonFiniteError
from repro.dualbatch.engines import EpochResult
from repro.dualbatch.plan import FACTORS, DualBatchPlan, InfeasiblePlan, largest_k
from repro.dualbatch.progressive import (
    CyclicProgressiveSchedule,
    EpochSetting,
    Stage,
    SubStage,
    set_dropout,
)
from repro.dualbatch.server import Commit, ParameterServer, Pull, ServerError
from repro.dualbatch.shares import Share
from repro.dualbatch.training import DualBatchResult, train_dual_batch
from repro.dualbatch.worker import Recipe, Worker
from repro.measure import CheckpointError

__all__ = [
    "FACTORS",
    "CheckpointError",
    "Commit",
    "CyclicProgressiveSchedule",
    "DualBatchPlan",
    "DualBatchResult",
    "EpochResult",
    "EpochSetting",
    "InfeasiblePlan",
    "NonFiniteError",
    "ParameterServer",
    "Pull",
    "Recipe",
    "ServerError",
    "Share",
    "Stage",
    "SubStage",
    "Worker",
    "largest_k",
    "set_dropout",
    "train_dual_batch",
]
