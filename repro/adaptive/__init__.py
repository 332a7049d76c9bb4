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

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from repro.measure.loss_parts import LossCheckError

__all__ = [
    "METHODS", "BatchController", "CheckpointError", "DataParallel", "DivergedError",
    "DivergenceWarning", "FixedBatch", "GradientNorm", "LinearScaling", "LossCheckError",
    "MeasuredStep", "NoImprovement", "NoiseScaleBatch", "PeerError", "Saturation",
    "ScalingModel", "ScheduledBatch", "SchedulerError", "StartingPoint", "Step", "StepTiming",
    "ThetaController", "WholeStepError", "full_cost", "gradient_norms", "join_processes",
    "leave_processes", "load_checkpoint", "max_stable_batch", "noise_scale", "save_checkpoint",
    "set_lr", "share", "stable_batch", "updates",
]  # fmt: skip


# Modules searched in this order on a name's first use: `repro.adaptive.scaling` needs no torch.
_HOMES = (
    "adaptive.scaling", "adaptive.processes", "adaptive.controller", "adaptive.distance",
    "adaptive.schedules", "adaptive.gradients", "adaptive.optimizers", "adaptive.averaging",
    "adaptive.dataparallel", "measure", "measure.loss_parts",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        module = importlib.import_module(f"repro.{home}")
        if hasattr(module, name):
            globals()[name] = getattr(module, name)  # so that the search runs once
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
