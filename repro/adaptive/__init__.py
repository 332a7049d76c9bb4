"""θ-adaptive batch size and learning rate, and the data-parallel training behind it.

Example:
    >>> import torch
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
    from repro.adaptive.averaging import (
        METHODS,
        StepTiming,
        make_buckets,
        measure_messages,
    )
    from repro.adaptive.controller import (
        BatchController,
        DivergedError,
        DivergenceWarning,
        Saturation,
        SchedulerError,
        Step,
        ThetaController,
        set_lr,
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
    from repro.adaptive.optimizers import WholeStepError
    from repro.adaptive.processes import (
        NoLoopbackError,
        PeerError,
        join_processes,
        leave_processes,
        meeting_place,
        share,
    )
    from repro.adaptive.scaling import (
        MeasuredStep,
        ScalingModel,
        StepCost,
        fit_messages,
        updates,
    )
    from repro.adaptive.schedules import FixedBatch, LinearScaling, NoiseScaleBatch, ScheduledBatch
    from repro.adaptive.stopping import NoImprovement
    from repro.measure import CheckpointError, load_checkpoint, save_checkpoint
    from repro.measure.loss_parts import LossCheckError

# Imported when they are first used: `repro.adaptive.scaling` needs no torch.
_HOMES = {
    "repro.adaptive.averaging": (
        "METHODS",
        "StepTiming",
        "make_buckets",
        "measure_messages",
    ),
    "repro.adaptive.controller": (
        "BatchController",
        "DivergedError",
        "DivergenceWarning",
        "Saturation",
        "SchedulerError",
        "Step",
        "ThetaController",
        "set_lr",
    ),
    "repro.adaptive.dataparallel": ("DataParallel",),
    "repro.adaptive.distance": ("StartingPoint",),
    "repro.adaptive.gradients": (
        "GradientNorm",
        "full_cost",
        "gradient_norms",
        "max_stable_batch",
        "noise_scale",
        "stable_batch",
    ),
    "repro.adaptive.optimizers": ("WholeStepError",),
    "repro.adaptive.processes": (
        "NoLoopbackError",
        "PeerError",
        "join_processes",
        "leave_processes",
        "meeting_place",
        "share",
    ),
    "repro.adaptive.scaling": (
        "MeasuredStep",
        "ScalingModel",
        "StepCost",
        "fit_messages",
        "updates",
    ),
    "repro.adaptive.schedules": (
        "FixedBatch",
        "LinearScaling",
        "NoiseScaleBatch",
        "ScheduledBatch",
    ),
    "repro.adaptive.stopping": ("NoImprovement",),
    "repro.measure": ("CheckpointError", "load_checkpoint", "save_checkpoint"),
    "repro.measure.loss_parts": ("LossCheckError",),
}

__all__ = [
    "METHODS",
    "BatchController",
    "CheckpointError",
    "DataParallel",
    "DivergedError",
    "DivergenceWarning",
    "FixedBatch",
    "GradientNorm",
    "LinearScaling",
    "LossCheckError",
    "MeasuredStep",
    "NoImprovement",
    "NoLoopbackError",
    "NoiseScaleBatch",
    "PeerError",
    "Saturation",
    "ScalingModel",
    "ScheduledBatch",
    "SchedulerError",
    "StartingPoint",
    "Step",
    "StepCost",
    "StepTiming",
    "ThetaController",
    "WholeStepError",
    "fit_messages",
    "full_cost",
    "gradient_norms",
    "join_processes",
    "leave_processes",
    "load_checkpoint",
    "make_buckets",
    "max_stable_batch",
    "measure_messages",
    "meeting_place",
    "noise_scale",
    "save_checkpoint",
    "set_lr",
    "share",
    "stable_batch",
    "updates",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            # Kept here, so that it is looked for once.
            value = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
