"""The actors of the engine on Ray: the parameter server and the workers."""

import asyncio
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repro.dualbatch.checks import ClusterError
from repro.dualbatch.engines import Fingerprint, Job, load_own_checkpoint
from repro.dualbatch.server import ParameterServer
from repro.dualbatch.worker import Worker
from repro.measure import CheckpointError, save_checkpoint

Arrays = dict[str, np.ndarray]
Optimizer = dict[int, dict[str, Any]] | None  # as in `Trained`, with arrays for tensors


def to_arrays(tree: Any) -> Any:
    """A state with arrays on the host for its tensors, which Ray shares without a copy."""
    return _mapped(tree, Tensor, lambda tensor: tensor.detach().cpu().numpy())


def to_tensors(tree: Any) -> Any:
    """A state with tensors of its own for its arrays: Ray delivers read-only ones."""
    return _mapped(tree, np.ndarray, lambda array: torch.from_numpy(np.array(array)))


def _mapped(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, Mapping):
        return {name: _mapped(value, kind, change) for name, value in tree.items()}
    return change(tree) if isinstance(tree, kind) else tree


class ServerActor:
    """The parameter server as an actor; Ray makes its methods coroutines of one process.

    It starts from the checkpoint at `path` and keeps writing it: Ray would not keep a large
    argument for a restart.
    """

    def __init__(self, job: Job, path: str, fingerprint: Fingerprint) -> None:
        self._job, self._path, self._fingerprint = job, Path(path), fingerprint
        content = load_own_checkpoint(self._path, fingerprint)
        self._server = job.make_server(content["server"]["state"])
        self._server.load_state_dict(content["server"])
        self._history: list[dict[str, Any]] = content["history"]
        # States at the ends of epochs, until they are fetched; checkpoints are of such moments.
        self._ends: dict[int, Arrays] = {self._server.version // job.plan.n: self._now()}
        self._pids: dict[int, int] = {}
        self._changed = asyncio.Condition()
        self._spent_s: float = content["wall_s"]
        self._start_s: float | None = None

    @property
    def _now_s(self) -> float:
        running = 0.0 if self._start_s is None else time.perf_counter() - self._start_s
        return self._spent_s + running

    def _has_ended(self, worker: int) -> bool:
        return self._server.iterations[worker] >= len(self._job.schedule)

    def _may_start(self, worker: int) -> bool:
        # The clock starts when all are there: processes take seconds to come up.
        there = (n in self._pids or self._has_ended(n) for n in range(self._job.plan.n))
        if not all(there):
            return False
        if self._start_s is None:
            self._start_s = time.perf_counter()
        return self._server.may_start(worker)

    async def pull(self, worker: int, pid: int) -> tuple[int, int, Arrays, Optimizer] | None:
        """Share, version, state and the optimizer's, once the worker may start.

        None after its last share.
        """
        async with self._changed:
            self._pids[worker] = pid
            self._changed.notify_all()
            if self._has_ended(worker):
                return None
            await self._changed.wait_for(lambda: self._may_start(worker))
        pull, optimizer = self._server.pull(worker), self._server.optimizers.get(worker)
        return pull.iteration, pull.version, to_arrays(pull.state), to_arrays(optimizer)

    async def push(
        self,
        worker: int,
        iteration: int,
        version: int,
        state: Arrays,
        factor: float,
        loss: float,
        optimizer: Optimizer,
    ) -> None:
        """Merge a trained state, unless it was pulled from a server that died, or merged before."""
        before = self._server.version
        self._server.push(
            worker,
            iteration,
            to_tensors(state),
            factor,
            version=version,
            time_s=self._now_s,
            loss=loss,
            optimizer=to_tensors(optimizer),
        )
        epoch, rest = divmod(self._server.version, self._job.plan.n)
        if self._server.version > before and not rest:  # BSP merges once in n commits
            self._ends[epoch] = self._now()
            self._save()
        async with self._changed:
            self._changed.notify_all()

    async def wait_epoch(self, epoch: int) -> tuple[Arrays, bool, list[dict[str, Any]], float]:
        """State at an epoch's end, the log so far, and seconds from the start.

        The second value is whether the state is of just then: a restart may have lost it, and then
        it is the present one.
        """
        due = epoch * self._job.plan.n
        async with self._changed:
            await self._changed.wait_for(lambda: self._server.version >= due)
        state = self._ends.pop(epoch, None)
        log = [asdict(commit) for commit in self._server.log]
        return state or self._now(), state is not None, log, log[due - 1]["time_s"]

    async def note(self, result: dict[str, Any]) -> None:
        """Keep an epoch's result for whoever resumes."""
        self._history = [r for r in self._history if r["epoch"] < result["epoch"]] + [result]
        if len(self._history) == len(self._job.schedule):
            self._save()

    async def status(self) -> dict[str, Any]:
        """Progress of the training, and the processes that work on it."""
        return {
            "pid": os.getpid(),
            "workers": dict(self._pids),
            "version": self._server.version,
            "iterations": list(self._server.iterations),
            "history": self._history,
        }

    def _now(self) -> Arrays:
        return {name: array.copy() for name, array in to_arrays(self._server.state).items()}

    def _save(self) -> None:
        content = checkpoint(self._server, self._fingerprint, self._now_s, self._history)
        save_checkpoint(self._path, content)


def checkpoint(
    server: ParameterServer,
    fingerprint: Fingerprint,
    wall_s: float,
    history: list[dict[str, Any]],
) -> dict[str, Any]:
    """The content that a server starts from, in the form of the local engine's checkpoints."""
    return {
        "fingerprint": fingerprint,
        "server": server.state_dict(with_pulls=False),
        "busy": [],
        "now_s": 0.0,
        "wall_s": wall_s,
        "history": history,
    }


class WorkerActor:
    """A worker as an actor: pulls, trains and pushes until the server has no more shares for it."""

    def is_up(self) -> bool:
        """Answer, once the cluster has room for this worker."""
        return True

    def run(self, number: int, job: Job, server: Any) -> list[str]:
        """Train every share that the server has for worker `number`; the result is its warnings."""
        import ray

        with _portable(number):
            worker = Worker(job.recipe, job.plan)
        while (work := ray.get(server.pull.remote(number, os.getpid()))) is not None:
            iteration, version, arrays, before = work
            setting, state = job.setting_at(version), to_tensors(arrays)
            with _portable(number):
                done = worker.train(number, iteration, state, setting, to_tensors(before))
                if (changed := worker.changed()) is not None:
                    raise CheckpointError(f"workers on a cluster are replaced, and {changed}")
            result = to_arrays(done.state), done.factor, float(done.loss), to_arrays(done.optimizer)
            ray.get(server.push.remote(number, iteration, version, *result))
        return worker.warned


@contextmanager
def _portable(number: int) -> Iterator[None]:
    """Name an exception of a user's function that would not be the same in another process."""
    try:
        yield
    except Exception as error:
        if _crosses(error):
            raise
        text = "".join(traceback.format_exception_only(error)).strip()
        raise ClusterError(
            f"worker {number}: {text} (this exception cannot be sent from process to process "
            "itself; for that it has to be made again by its class and args)"
        ) from error


def _crosses(error: Exception) -> bool:
    import ray

    try:
        again = ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
        return type(again).__name__ == type(error).__name__ and str(again) == str(error)
    except Exception:
        return False
