"""θ-adaptive batch size and learning rate, and the data-parallel training behind it.

Example:
    >>> from repro.adaptive import ThetaController, full_cost, set_lr
    >>> controller = ThetaController(256, 2048, 0.2, decay_at=(80, 120))
    >>> step = controller.observe(2.3, model.parameters())  # before training  # doctest: +SKIP
    >>> while step.epoch <= 140:  # doctest: +SKIP
    ...     loader.set_batch_size(step.batch_size)
    ...     set_lr(optimizer, step.lr)
    ...     cost = train_one_epoch()  # the mean of its mini-batches' losses
    ...     step = controller.observe(cost, model.parameters())

Source: Lee, Kang, Madireddy, Balaprakash, Agrawal, Choudhary, Archibald, Liao, "Improving
Scalability of Parallel CNN Training by Adjusting Mini-Batch Size at Run-Time".
"""

from repro.adaptive.averaging import METHODS, StepTiming
from repro.adaptive.controller import (
    BatchController,
    DivergedError,
    DivergenceWarning,
    Saturation,
    Step,
    ThetaController,
)
from repro.adaptive.dataparallel import DataParallel
from repro.adaptive.distance import StartingPoint
from repro.adaptive.gradients import (
    GradientNorm,
    full_cost,
    gradient_norms,
    max_stable_batch,
    noise_scale,
    stable_batch,
)
from repro.adaptive.optimizers import SchedulerError, WholeStepError, set_lr
from repro.adaptive.processes import PeerError, join_processes, leave_processes, share
from repro.adaptive.scaling import MeasuredStep, ScalingModel, updates
from repro.adaptive.schedules import (
    FixedBatch,
    LinearScaling,
    NoImprovement,
    NoiseScaleBatch,
    ScheduledBatch,
)
from repro.measure import CheckpointError, load_checkpoint, save_checkpoint
from repro.measure.batches import InputGradientError
from repro.measure.loss_parts import LossCheckError

__all__ = [
    "METHODS", "BatchController", "CheckpointError", "DataParallel", "DivergedError",
    "DivergenceWarning", "FixedBatch", "GradientNorm", "InputGradientError", "LinearScaling",
    "LossCheckError", "MeasuredStep", "NoImprovement", "NoiseScaleBatch", "PeerError", "Saturation",
    "ScalingModel", "ScheduledBatch", "SchedulerError", "StartingPoint", "Step", "StepTiming",
    "ThetaController", "WholeStepError", "full_cost", "gradient_norms", "join_processes",
    "leave_processes", "load_checkpoint", "max_stable_batch", "noise_scale", "save_checkpoint",
    "set_lr", "share", "stable_batch", "updates",
]  # fmt: skip
