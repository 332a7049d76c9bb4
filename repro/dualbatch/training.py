"""Train by dual-batch learning, cyclic progressive learning, both, or neither.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", sections 3 to 5.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from repro.dualbatch.engines import Engine, EpochResult, Job, LocalEngine, TimeModels
from repro.dualbatch.plan import DualBatchPlan
from repro.dualbatch.progressive import CyclicProgressiveSchedule
from repro.dualbatch.server import Commit, ParameterServer
from repro.dualbatch.shares import Data, resized
from repro.dualbatch.worker import Recipe
from repro.measure.checks import choice


@dataclass(frozen=True)
class DualBatchResult:
    """Weights, history and log of a training."""

    state: dict[str, Tensor]  # the server's weights and buffers, as `load_state_dict` takes them
    history: list[EpochResult]  # of each epoch's worth of commits
    log: list[Commit]  # every commit, in order


def train_dual_batch(
    model_fn: Callable[[], nn.Module],
    data: Data,
    plan: DualBatchPlan,
    schedule: CyclicProgressiveSchedule,
    *,
    sync: str = "asp",
    staleness: float | None = None,
    merge: str | None = None,
    engine: str = "local",
    time_models: TimeModels | None = None,
    jitter: float = 0.0,
    slowdowns: Sequence[float] | None = None,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    on_epoch: Callable[[EpochResult], None] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    follow: Sequence[Commit] | None = None,
    address: str | None = None,
    cpus_per_worker: float | None = None,
    **recipe: Any,
) -> DualBatchResult:
    """Train with small-batch and large-batch workers on a parameter server.

    In each epoch every worker pulls the global weights, trains its share of the data in batches of
    its own size, and pushes the result. A plan with n_small = 0 is the baseline; a schedule with
    several sub-stages is cyclic progressive learning, and with plans of both kinds of worker in
    them the hybrid scheme. A worker takes the setting of the epoch that the training as a whole is
    in when it pulls; its samples and its model-update factor are those that the plan of its own
    epoch gives it. Under ``asp`` a worker faster than the plan assumes ends early.

    Differs from the paper: the text leaves open whether a worker keeps its momentum when it pulls
    new weights. By default each worker keeps it: restarting it with each share would shorten the
    steps of large-batch workers most, since they make the fewest. The shares of an epoch together
    have each sample once, except for rounding, however far apart the workers are.

    Args:
        model_fn: Makes the model, a new one each time; called in every process.
        data: Inputs and targets, or a function from a `Share` to its mini-batches; see `Recipe`.
        plan: Plan for epochs without one in the schedule.
        schedule: Setting of every epoch.
        sync: ``bsp``, ``asp`` or ``ssp`` with `staleness`; see `ParameterServer`.
        staleness: Bound of SSP.
        merge: ``average``, ``journal``, ``conference`` or ``delta``; see `ParameterServer`.
        engine: ``local``, all workers in turn on one device, which repeats bit for bit by the seed
            on a CPU with the same number of threads; or ``ray``, processes on any number of
            machines (the `cluster` extra).
        time_models: Time models by resolution, for the virtual clock of the local engine; by
            default the plans' own.
        jitter: Largest relative variation, from 0 to below 1, of the virtual time of each share,
            drawn by the seed, so that each seed has its own order of commits.
        slowdowns: Factor on the virtual time of each worker's shares, such as 2.0 for a straggler,
            of which plans know nothing. None: all 1.
        evaluate: Called after each epoch with a separate model of the global weights.
        on_epoch: Called with each epoch's result, after its checkpoint was written.
        checkpoint: File written after each epoch; if it exists, the training resumes from it.
        follow: Commit log of another run; the local engine then trains in its order, for the same
            weights (with as many threads: a worker on Ray has `cpus_per_worker`).
        address: Address of a running Ray cluster; see `repro.dualbatch.cluster.RayEngine`.
        cpus_per_worker: Cores for each worker on Ray, and its threads; None is 1.
        **recipe: The other options of `Recipe`, such as `loss_fn`, `optimizer_fn` and `device`.

    Raises:
        ValueError: An argument is out of range, the data function does not give the samples of its
            shares, or images would be resized without targets of their size, such as masks.
        NonFiniteError: A worker's loss or weights became infinite or NaN.
        CheckpointError: The checkpoint cannot be read, or is of another training or a diverged one;
            or a function keeps a state that no checkpoint holds.
        ClusterError: A cluster cannot be reached, or died, or an exception cannot cross it.
    """
    choice("engine", engine, ("local", "ray"))
    if isinstance(model_fn, nn.Module):
        raise ValueError(
            "model_fn is a model; give a function that makes a new one each time, such as "
            "lambda: copy.deepcopy(model)"
        )
    _check_samples(data, plan, schedule)
    clock = {"time_models": time_models, "jitter": jitter or None, "slowdowns": slowdowns}
    of_ray = {"address": address, "cpus_per_worker": cpus_per_worker}
    _check_unused(of_ray if engine == "local" else clock | {"follow": follow}, f"engine={engine!r}")
    if follow is not None:
        _check_unused(clock, "follow=")
        if len(follow) != plan.n * len(schedule):
            raise ValueError(
                f"follow has {len(follow)} commits, {plan.n} workers and {len(schedule)} epochs "
                f"make {plan.n * len(schedule)}; give the whole log of a run"
            )

    server = partial(ParameterServer, workers=plan.n, sync=sync, staleness=staleness, merge=merge)
    path = Path(checkpoint) if checkpoint is not None else None
    training = Recipe(model_fn, data, **recipe)
    job = Job(training, plan, schedule, server, evaluate, on_epoch, path)
    carried: Engine
    if engine == "ray":
        from repro.dualbatch.cluster import RayEngine

        carried = RayEngine(job, address, cpus_per_worker)
    else:
        carried = LocalEngine(job, time_models or {}, jitter, slowdowns, follow)
    carried.run()
    return DualBatchResult(carried.server.state, carried.history, carried.server.log)


def _check_samples(data: Any, plan: DualBatchPlan, schedule: CyclicProgressiveSchedule) -> None:
    for setting in schedule:
        own = setting.plan or plan
        if own.kinds != plan.kinds or own.samples != plan.samples:
            raise ValueError(
                f"the plan of epoch {setting.epoch} has {own.n_small} small-batch and "
                f"{own.n_large} large-batch workers for {own.samples} samples, the training's "
                f"{plan.n_small} and {plan.n_large} for {plan.samples}; give plans of the same"
            )
    if callable(data):
        return
    if not isinstance(data, Sequence) or [isinstance(t, Tensor) for t in data] != [True, True]:
        raise ValueError(
            "data is no pair of tensors (inputs, targets), and no function from a Share to its "
            "mini-batches; give one of them"
        )
    if not len(data[0]) == len(data[1]) == plan.samples:
        raise ValueError(
            f"the data has {len(data[0])} inputs and {len(data[1])} targets, the plan is for "
            f"{plan.samples} samples; solve the plan with samples={len(data[0])}"
        )
    images, targets = data[0].shape, data[1].shape
    for setting in schedule:
        side = resized(images, setting.resolution)
        # Masks, with channels first or last.
        if side is not None and side < images[2] and targets[1:].count(images[2]) > 1:
            raise ValueError(
                f"the targets are {tuple(targets)}, of the size of the images, {tuple(images)}, "
                f"and the schedule has resolution {side}, to which only images are resized; give "
                "as data a function that resizes both, or resolution=None"
            )


def _check_unused(options: Mapping[str, Any], mode: str) -> None:
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"{', '.join(given)} cannot be used with {mode}; leave it out")
