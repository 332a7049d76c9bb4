"""The training loop, and the engine in one process: workers in turn, ordered by a virtual clock.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", sections 2.3, 2.4.
On the virtual clock each worker's share takes the time that the time model predicts, and the worker
that ends first commits first, ties by number. So a run repeats bit for bit, and serves as reference
for the engine with real processes (`cluster`). Plans balance the workers, so that without jitter
only rounding determines the first worker to commit, equally in every epoch and for every seed.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from repro.dualbatch.functions import Parts, Seen, differing
from repro.dualbatch.plan import DualBatchPlan
from repro.dualbatch.progressive import CyclicProgressiveSchedule, EpochSetting
from repro.dualbatch.server import Commit, ParameterServer, Pull
from repro.dualbatch.worker import Recipe, Trained, UnsavedBuffers, Worker
from repro.measure import CheckpointError, TimeModel, load_checkpoint, save_checkpoint, synchronize
from repro.measure.checks import is_number

TimeModels = Mapping[int | None, TimeModel]  # by resolution
# Of the recipe, with a checkpoint's.
_COMPARED = ("autocast", "channels_last", "factor", "seed", "optimizer_state")
# Checkpoints of earlier versions lack these, those of a cluster or a followed log the clock's.
_MAY_LACK = ("channels_last", "jitter", "slowdowns")
_MEASURED = ("time_model", "k")
_OWN = ("small_samples", "large_samples", "update_factor")  # of a plan, by the epoch of a share


@dataclass(frozen=True)
class EpochResult:
    """The state of the training after an epoch's worth of merged commits."""

    epoch: int  # from 1: n commits for each of n workers
    lr: float  # of the epoch's setting
    resolution: int | None  # side of its images, None for their own
    train_loss: float  # mean over the epoch's commits
    virtual_time_s: float  # since the start by the time model; NaN on a cluster
    # Measured since the start, without evaluations, on a cluster with them: workers continue.
    wall_time_s: float
    metrics: dict[str, float] = field(default_factory=dict)  # result of `evaluate`


@dataclass(frozen=True)
class Job:
    """The work of an engine: a recipe, a plan and a schedule, and the callbacks of a training."""

    recipe: Recipe
    plan: DualBatchPlan  # for epochs without a plan in the schedule
    schedule: CyclicProgressiveSchedule
    make_server: Callable[[Mapping[str, torch.Tensor]], ParameterServer]  # from an initial state
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    on_epoch: Callable[[EpochResult], None] | None = None
    checkpoint: Path | None = None


class Engine:
    """The training loop; engines differ in the place and the order of training shares."""

    pauses = True  # all workers wait while the model is evaluated
    now_s = 0.0  # the virtual clock
    clock: Mapping[str, Any] = {}  # its options

    def __init__(self, job: Job, model: nn.Module) -> None:
        self.job = job
        # A separate model, since `evaluate` may change it. Always made: with a second model,
        # make_model detects models that share tensors.
        own = job.recipe.make_model()
        self._evaluated = model if job.evaluate is None else own
        self._unsaved = UnsavedBuffers(self._evaluated)
        self.server = job.make_server(model.state_dict())
        self._fingerprint = self._parts(model)
        self.history: list[EpochResult] = []
        self.running: dict[int, Any] = {}  # by busy worker, the engine's note of its share
        self.wall_s = self._begun = 0.0
        if job.checkpoint is not None and job.checkpoint.exists():
            self._resume(job.checkpoint)

    def start(self, number: int, pull: Pull) -> None:
        """Add a worker's pulled share to the running shares."""
        raise NotImplementedError

    def next_end(self) -> tuple[int, Trained, float]:
        """Remove the running share that ends next; return its worker, result and time of end."""
        raise NotImplementedError

    def changed(self) -> str | None:
        """Name the functions that changed since the start, or None."""
        raise NotImplementedError

    def run(self) -> None:
        """Train to the end of the schedule (section 2.3): workers pull, train and push."""
        job, server, n = self.job, self.server, self.job.plan.n
        self._begun = time.perf_counter() - self.wall_s
        while len(self.history) < len(job.schedule):
            # 1. Every worker that may start pulls the global weights (section 2.4).
            for number in range(n):
                left = server.iterations[number] < len(job.schedule)
                if number not in self.running and left and server.may_start(number):
                    # A share that was pulled before the checkpoint is repeated.
                    self.start(number, server.pulls.get(number) or server.pull(number))
            # 2. The worker that ends first pushes its share; the server merges.
            number, done, time_s = self.next_end()
            told = {"time_s": time_s, "loss": float(done.loss)}
            share = server.pulls[number].iteration
            server.push(number, share, done.state, done.factor, optimizer=done.optimizer, **told)
            # 3. n commits make an epoch.
            if server.version >= (len(self.history) + 1) * n:
                synchronize(job.recipe.device)
                self.wall_s = time.perf_counter() - self._begun
                self._end_epoch()
                if self.pauses:
                    self._begun = time.perf_counter() - self.wall_s

    def setting_of(self, pull: Pull) -> EpochSetting:
        """Setting of a share: that of the whole training's epoch at its pull.

        Its d_S, d_L and model-update factor are those that the plan of the share's own epoch gives:
        so the shares of an epoch have each sample once, however far apart the workers are.
        """
        job = self.job
        setting: EpochSetting = job.schedule.at_progress(pull.version / job.plan.n)
        plan, own = setting.plan or job.plan, job.schedule[pull.iteration].plan or job.plan
        return replace(setting, plan=replace(plan, **{name: getattr(own, name) for name in _OWN}))

    def _end_epoch(self) -> None:
        job, epoch, n = self.job, len(self.history) + 1, self.job.plan.n
        metrics: Any = {}
        if job.evaluate is not None:
            self._evaluated.load_state_dict(self.server.state)
            self._unsaved.restore()
            metrics = job.evaluate(self._evaluated.eval()) or {}
            if not isinstance(metrics, Mapping):
                raise ValueError(f"evaluate returns {type(metrics)}; give a dict of numbers")
            # Convert numpy's numbers and tensors to Python's, for the checkpoint.
            metrics = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in metrics.items()}
        setting = job.schedule[epoch - 1]
        loss = sum(commit.loss for commit in self.server.log[(epoch - 1) * n : epoch * n]) / n
        of_setting = (epoch, setting.lr, setting.resolution)
        result = EpochResult(*of_setting, loss, self.now_s, self.wall_s, metrics)
        self.history.append(result)
        if changed := self.changed():
            if job.checkpoint is not None or not self.pauses:
                raise CheckpointError(f"no checkpoint is written of epoch {epoch}: {changed}")
            warnings.warn(changed, stacklevel=4)  # the caller of `train_dual_batch`
        if job.checkpoint is not None:
            content = {
                "fingerprint": self._fingerprint,
                "server": self.server.state_dict(),
                # By the virtual clock; a cluster repeats its unfinished shares.
                "ends": self.running if self.pauses else {},
                "now_s": self.now_s if self.pauses else 0.0,
                "wall_s": self.wall_s,
                "history": [asdict(result) for result in self.history],
            }
            save_checkpoint(job.checkpoint, content)
        if job.on_epoch is not None:
            job.on_epoch(result)

    def _parts(self, model: nn.Module) -> Parts:
        """Parts that a checkpoint and a training that resumes from it must share."""
        recipe, server = self.job.recipe, self.server
        parts = {
            "model": [(n, tuple(t.shape), str(t.dtype)) for n, t in server.state.items()],
            "plan": _numbers(self.job.plan),
            "schedule": [
                (setting.lr, setting.resolution, setting.dropout, _numbers(setting.plan))
                for setting in self.job.schedule
            ],
            "sync": (server.sync, server.staleness),
            "merge": server.merge,
            **{name: getattr(recipe, name) for name in _COMPARED},
            **self.clock,
        }
        seen = recipe.parts()
        # A model's private attributes may be of a process, such as when it began.
        seen |= Seen("model", model, tensors=False, private=False).parts
        return seen | {name: repr(part) for name, part in parts.items()}

    def _resume(self, path: Path) -> None:
        try:
            content = load_checkpoint(path, self.job.recipe.device)
            both = content["fingerprint"], self._fingerprint
            lacking = {name for name in _MAY_LACK if any(name not in parts for parts in both)}
            other = differing(*({n: p for n, p in f.items() if n not in lacking} for f in both))
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {path} cannot be read ({first_line(error)}); give another file, or "
                "move this one away to start anew"
            ) from error
        if other:
            raise CheckpointError(
                f"checkpoint {path} is of another training: {', '.join(other[:5])} differ; give "
                "the same, another file, or move this one away to start anew"
            )
        self.server.load_state_dict(content["server"])
        self.wall_s = content["wall_s"]
        if self.pauses:  # a cluster has no virtual clock
            self.now_s, self.running = content["now_s"], dict(content["ends"])
        self.history = [EpochResult(**entry) for entry in content["history"]]


class LocalEngine(Engine):
    """Runs a job in this process, worker after worker; see `train_dual_batch` for the arguments."""

    def __init__(
        self,
        job: Job,
        time_models: TimeModels,
        jitter: float = 0.0,
        slowdowns: Sequence[float] | None = None,
        follow: Sequence[Commit] | None = None,
    ) -> None:
        if not is_number(jitter) or not 0 <= jitter < 1:
            raise ValueError(f"jitter is {jitter!r}; give a share from 0 up to below 1")
        n = job.plan.n
        self._slowdowns = [1.0] * n if slowdowns is None else list(slowdowns)
        if len(self._slowdowns) != n or not all(is_number(s) and s > 0 for s in self._slowdowns):
            raise ValueError(f"slowdowns is {slowdowns!r}; give {n} numbers above 0, or None")
        if unknown := time_models.keys() - {setting.resolution for setting in job.schedule}:
            raise ValueError(f"time_models has {unknown}, which the schedule's resolutions lack")
        self._time_models, self._jitter, self._follow = time_models, jitter, follow
        if follow is None:
            slow = [float(factor) for factor in self._slowdowns]
            self.clock = {"jitter": float(jitter), "slowdowns": slow}
        self._worker = Worker(job.recipe, job.plan)
        super().__init__(job, self._worker.model)

    def start(self, number: int, pull: Pull) -> None:
        """Note the share's end by the virtual clock."""
        setting = self.setting_of(pull)
        plan = setting.plan or self.job.plan
        seconds = plan.time_of(plan.kinds[number], self._time_models.get(setting.resolution))
        seconds *= self._slowdowns[number]
        if self._jitter:
            # Seeded by the share alone, so that a resumed training draws the same number.
            drawn = np.random.default_rng([self.job.recipe.seed, pull.iteration, number])
            seconds *= 1 + self._jitter * drawn.uniform(-1, 1)
        self.running[number] = self.now_s + seconds

    def next_end(self) -> tuple[int, Trained, float]:
        """Train the share that ends first, or the next share of the followed log."""
        if self._follow is None:
            self.now_s, number = min((end, number) for number, end in self.running.items())
        else:
            commit = self._follow[len(self.server.log)]
            number, self.now_s = commit.worker, commit.time_s
            held = self.server.pulls.get(number)
            if not held or (held.iteration, held.version) != (commit.iteration, commit.pulled):
                raise ValueError(
                    f"commit {len(self.server.log)} of the log, share {commit.iteration} of worker "
                    f"{number} pulled at version {commit.pulled}, does not follow from those "
                    "before it"
                )
        del self.running[number]
        pull, before = self.server.pulls[number], self.server.optimizers.get(number)
        setting = self.setting_of(pull)
        done = self._worker.train(number, pull.iteration, pull.state, setting, before)
        return number, done, self.now_s

    def changed(self) -> str | None:
        """Name the functions that changed in the worker's use, or None."""
        return self._worker.changed()


def _numbers(plan: DualBatchPlan | None) -> list[Any]:
    """A plan without k and the fitted times, which differ with each measurement."""
    return [] if plan is None else [v for k, v in asdict(plan).items() if k not in _MEASURED]


def first_line(error: BaseException) -> str:
    """An error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
