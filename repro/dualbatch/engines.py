"""The engine in one process: workers take turns on one device, ordered by a virtual clock.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", sections 2.3, 2.4.
Each worker's share takes the time that the time model predicts, and the worker that ends first
commits first, ties by number. So a run repeats bit for bit, and the engine with real processes is
compared with it. Plans balance the workers, so that without jitter rounding alone decides who
commits first, the same way in every epoch and for every seed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from repro.dualbatch.checks import is_number, not_finite
from repro.dualbatch.functions import Seen, differing
from repro.dualbatch.guards import UnsavedBuffers
from repro.dualbatch.plan import DualBatchPlan
from repro.dualbatch.progressive import CyclicProgressiveSchedule, EpochSetting
from repro.dualbatch.server import Commit, ParameterServer, Pull, states_of
from repro.dualbatch.shares import Data
from repro.dualbatch.worker import Recipe, Worker
from repro.measure import (
    CheckpointError,
    TimeModel,
    load_checkpoint,
    save_checkpoint,
    synchronize,
)

TimeModels = Mapping[int | None, TimeModel]  # by resolution
Fingerprint = dict[str, Any]  # texts, and under "functions" their parts


@dataclass(frozen=True)
class EpochResult:
    """The training as it was when an epoch's worth of commits had been merged.

    Attributes:
        epoch: From 1: n commits for each of n workers.
        lr: Learning rate of the epoch's setting.
        resolution: Side of its images, None for their own.
        train_loss: Mean over the epoch's commits.
        virtual_time_s: By the time model, from the start; NaN on a cluster.
        wall_time_s: Measured, from the start, without the evaluations; on a cluster, where they
            run during the training, until the epoch's last commit.
        metrics: Result of `evaluate`.
    """

    epoch: int
    lr: float
    resolution: int | None
    train_loss: float
    virtual_time_s: float
    wall_time_s: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """The work of an engine: a recipe, a plan and a schedule, and the callbacks of a training."""

    recipe: Recipe
    plan: DualBatchPlan  # where the schedule has none
    schedule: CyclicProgressiveSchedule
    make_server: Callable[[Mapping[str, torch.Tensor]], ParameterServer]  # from an initial state
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    on_epoch: Callable[[EpochResult], None] | None = None
    checkpoint: Path | None = None

    def setting_at(self, version: int) -> EpochSetting:
        """Setting of work that starts with so many commits merged."""
        return self.schedule.at_progress(version / self.plan.n)

    def do_share(self, worker: Worker, server: ParameterServer, number: int, time_s: float) -> None:
        """Train the share that worker `number` pulled, and push the result."""
        pull, before = server.pulls[number], server.optimizers.get(number)
        setting = self.setting_at(pull.version)
        done = worker.train(number, pull.iteration, pull.state, setting, before)
        server.push(
            number,
            pull.iteration,
            done.state,
            done.factor,
            time_s=time_s,
            loss=float(done.loss),
            optimizer=done.optimizer,
        )

    def end_epoch(
        self, model: nn.Module, log: Sequence[Commit], epoch: int, virtual_s: float, wall_s: float
    ) -> EpochResult:
        """Evaluate the global model in `model`, and sum the epoch up."""
        metrics: dict[str, float] = {}
        if self.evaluate is not None:
            model.eval()
            metrics = _plain_metrics(self.evaluate(model))
        n = self.plan.n
        commits = log[(epoch - 1) * n : epoch * n]
        setting = self.schedule[epoch - 1]
        loss = sum(commit.loss for commit in commits) / len(commits)
        return EpochResult(epoch, setting.lr, setting.resolution, loss, virtual_s, wall_s, metrics)

    def fingerprint(self, server: ParameterServer, model: nn.Module) -> Fingerprint:
        """Parts that a checkpoint and the training that resumes from it must have in common."""
        recipe = self.recipe
        settings = [
            (s.lr, s.resolution, s.dropout, _numbers(s.plan) if s.plan else None)
            for s in self.schedule
        ]
        names = [
            getattr(f, "__qualname__", type(f).__name__)
            for f in (recipe.loss_fn, recipe.optimizer_fn)
        ]
        shapes = [(n, tuple(t.shape), str(t.dtype)) for n, t in server.state.items()]
        parts = {
            "model": shapes,
            "data": _some_of(recipe.data),
            "plan": _numbers(self.plan),
            "schedule": settings,
            "loss and optimizer": names,
            "autocast": recipe.autocast,
            "factor": recipe.factor,
            "seed": recipe.seed,
            "sync": (server.sync, server.staleness),
            "merge": server.merge,
            "optimizer_state": recipe.optimizer_state,
        }
        if recipe.aspect is not None:  # else images are squares, or stay as they are
            parts["aspect"] = recipe.aspect
        seen = recipe.parts() | Seen("model", model, tensors=False).parts
        return {name: repr(part) for name, part in parts.items()} | {"functions": seen}


def _plain_metrics(metrics: Any) -> dict[str, Any]:
    """The result of `evaluate`, with Python's numbers for numpy's and tensors."""
    if not isinstance(metrics, Mapping | None):
        raise ValueError(f"evaluate returns {type(metrics)}; give a dict of numbers by name")
    return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in (metrics or {}).items()}


def _numbers(plan: DualBatchPlan) -> tuple[float | None, ...]:
    # Without the fitted times, which differ whenever they are measured anew.
    kinds = (plan.n_small, plan.n_large, plan.samples, plan.small_batch, plan.large_batch)
    return (*kinds, plan.small_samples, plan.large_samples, plan.update_factor)


def _some_of(data: Data) -> object:
    if callable(data):
        return getattr(data, "__qualname__", type(data).__name__)
    chosen = torch.linspace(0, len(data[0]) - 1, min(16, len(data[0]))).long()
    return [
        (tuple(t.shape), str(t.dtype), t[chosen.to(t.device)].double().sum().item()) for t in data
    ]


class LocalEngine:
    """Carries a job out in this process.

    Args:
        job: The training.
        time_models: Seconds of a step by resolution, for the virtual clock.
        jitter: See `train_dual_batch`, as for `slowdowns`.
        slowdowns: One number for each worker.

    Raises:
        ValueError: Jitter or slowdowns are out of range.
        CheckpointError: The job's checkpoint cannot be read or is of another training.
    """

    def __init__(
        self,
        job: Job,
        time_models: TimeModels,
        jitter: float = 0.0,
        slowdowns: Sequence[float] | None = None,
    ) -> None:
        if not is_number(jitter) or not 0 <= jitter < 1:
            raise ValueError(f"jitter is {jitter!r}; give a share from 0 up to below 1")
        self.slowdowns = [1.0] * job.plan.n if slowdowns is None else list(slowdowns)
        if len(self.slowdowns) != job.plan.n or not all(
            is_number(factor) and factor > 0 for factor in self.slowdowns
        ):
            raise ValueError(
                f"slowdowns is {slowdowns!r}; give {job.plan.n} numbers above 0, one for each "
                "worker, or None"
            )
        self.job, self.time_models, self.jitter = job, time_models, jitter
        self.worker = Worker(job.recipe, job.plan)
        # A second model, for `evaluate` may change it. Made in any case: by it make_model sees
        # whether models share tensors.
        self._evaluated = job.recipe.make_model()
        if job.evaluate is None:
            self._evaluated = self.worker.model
        self._unsaved = UnsavedBuffers(self._evaluated)
        self.server = job.make_server(self.worker.model.state_dict())
        self._fingerprint = job.fingerprint(self.server, self.worker.model)
        self.history: list[EpochResult] = []
        self.now_s = 0.0
        self.wall_s = 0.0
        self._ends: dict[int, float] = {}  # by busy worker, in virtual seconds
        if job.checkpoint is not None and job.checkpoint.exists():
            self._resume(job.checkpoint)

    def run(self) -> None:
        """Train to the end of the schedule (section 2.3): workers pull, train and push.

        Raises:
            NonFiniteError: A worker's loss or weights became infinite or NaN.
            ValueError: The data function does not give the samples of its shares.
        """
        job, server, n = self.job, self.server, self.job.plan.n
        start = time.perf_counter() - self.wall_s
        while len(self.history) < len(job.schedule):
            # 1. Every worker pulls the global weights as soon as it may start (section 2.4).
            for number in range(n):
                left = server.iterations[number] < len(job.schedule)
                if number not in self._ends and left and server.may_start(number):
                    pull = server.pull(number)
                    self._ends[number] = self.now_s + self._duration(number, pull)
            # 2. The worker that ends first trains its share and pushes it; the server merges.
            self.now_s, number = min((end, number) for number, end in self._ends.items())
            del self._ends[number]
            job.do_share(self.worker, server, number, self.now_s)
            # 3. n commits are an epoch.
            if server.version >= (len(self.history) + 1) * n:
                synchronize(job.recipe.device)
                self.wall_s = time.perf_counter() - start
                self._end_epoch()
                start = time.perf_counter() - self.wall_s

    def _end_epoch(self) -> None:
        job, epoch, model = self.job, len(self.history) + 1, self._evaluated
        model.load_state_dict(self.server.state)
        self._unsaved.restore()
        result = job.end_epoch(model, self.server.log, epoch, self.now_s, self.wall_s)
        self.history.append(result)
        if (changed := self.worker.changed()) is not None:
            if job.checkpoint is not None:
                raise CheckpointError(f"no checkpoint is written of epoch {epoch}: {changed}")
            self.worker.warn(changed)
        if job.checkpoint is not None:
            self._save(job.checkpoint)
        if job.on_epoch is not None:
            job.on_epoch(result)

    def _duration(self, number: int, pull: Pull) -> float:
        setting = self.job.setting_at(pull.version)
        plan = setting.plan or self.job.plan
        seconds = plan.time_of(plan.kinds[number], self.time_models.get(setting.resolution))
        seconds *= self.slowdowns[number]
        if not self.jitter:
            return seconds
        # Of the share alone, so that a resumed training draws the same.
        drawn = np.random.default_rng([self.job.recipe.seed, pull.iteration, number])
        return seconds * (1 + self.jitter * drawn.uniform(-1, 1))

    def _save(self, path: Path) -> None:
        content = {
            "fingerprint": self._fingerprint,
            "server": self.server.state_dict(),
            "busy": [[number, end] for number, end in self._ends.items()],
            "now_s": self.now_s,
            "wall_s": self.wall_s,
            "history": [asdict(result) for result in self.history],
        }
        save_checkpoint(path, content)

    def _resume(self, path: Path) -> None:
        content = load_own_checkpoint(path, self._fingerprint, self.job.recipe.device)
        self.server.load_state_dict(content["server"])
        # Older checkpoints have the epoch, too.
        self._ends = {number: end for number, end, *_ in content["busy"]}
        self.now_s, self.wall_s = content["now_s"], content["wall_s"]
        self.history = [EpochResult(**entry) for entry in content["history"]]


def replay(job: Job, log: Sequence[Commit]) -> ParameterServer:
    """Train in the order of another run's commit log, such as a cluster's, and give the server.

    Each share starts from the version that it was pulled at there, so that the weights are the
    same to the bit where the device's arithmetic is.

    Raises:
        ValueError: The log is not one of a training with this plan.
    """
    worker = Worker(job.recipe, job.plan)
    job.recipe.make_model()  # by the second one it sees whether models share tensors
    server = job.make_server(worker.model.state_dict())
    for number, commit in enumerate(log):
        for later in log[number:]:  # those that pulled at the version of now
            if not 0 <= later.worker < server.workers or later.worker in server.pulls:
                continue
            now = server.version, server.iterations[later.worker]
            if (later.pulled, later.iteration) == now and server.may_start(later.worker):
                server.pull(later.worker)
        pull = server.pulls.get(commit.worker)
        if pull is None or (pull.version, pull.iteration) != (commit.pulled, commit.iteration):
            raise ValueError(
                f"commit {number} of the log, share {commit.iteration} of worker {commit.worker} "
                f"pulled at version {commit.pulled}, does not follow from those before it"
            )
        job.do_share(worker, server, commit.worker, commit.time_s)
    return server


def load_own_checkpoint(
    path: Path, fingerprint: Fingerprint, device: str = "cpu"
) -> dict[str, Any]:
    """Read a checkpoint of this training.

    Raises:
        CheckpointError: It cannot be read, is of another training, or of one that diverged.
    """
    try:
        content = load_checkpoint(path, device)
        stored = content["fingerprint"]
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read ({first_line(error)}); give another file, or move "
            "this one away to start anew"
        ) from error
    texts = fingerprint.keys() - {"functions"}
    other = [
        name for name in fingerprint if name in texts and stored.get(name) != fingerprint[name]
    ]
    if not other and "functions" in stored:  # older ones have their names alone
        other = differing(stored["functions"], fingerprint["functions"])[:5]
    if other:
        raise CheckpointError(
            f"checkpoint {path} is of another training: {', '.join(other)} differ; give the same, "
            "another file, or move this one away to start anew"
        )
    for state in states_of(content["server"]):
        if (name := not_finite(state)) is not None:
            raise CheckpointError(
                f"checkpoint {path} has a {name!r} that is not finite: its training had diverged; "
                "move it away to start anew, with a lower learning rate"
            )
    return content


def first_line(error: BaseException) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
