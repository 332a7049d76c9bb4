"""Dual-batch learning and cyclic progressive learning on a parameter server.

Two batch sizes train one model at once, in shares of the data that take the same time, and the
resolution of the images is cycled from low to high within each stage of the learning rate.

Modules, in the order of the paper: `plan` (equations 4 to 8), `server` (pull, push, merge rules),
`progressive` (the schedule), `shares` and `worker` (one share, step by step), `engines` (the
training loop in one process), `cluster` (the same on Ray), `checks` and `functions` (of arguments).

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning for Efficient
Distributed Training".
"""

from repro.dualbatch.checks import ClusterError, NonFiniteError
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
    "FACTORS", "CheckpointError", "ClusterError", "Commit", "CyclicProgressiveSchedule",
    "DualBatchPlan", "DualBatchResult", "EpochResult", "EpochSetting", "InfeasiblePlan",
    "NonFiniteError", "ParameterServer", "Pull", "Recipe", "ServerError", "Share", "Stage",
    "SubStage", "Worker", "largest_k", "set_dropout", "train_dual_batch",
]  # fmt: skip
