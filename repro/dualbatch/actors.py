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
Optimizer = dict[int, dict[str, Any]] | None  # as `Trained` has it, with arrays for tensors


def to_arrays(state: Mapping[str, Tensor]) -> Arrays:
    """Return a state as arrays on the host, which Ray shares without a copy."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in state.items()}


def to_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Return arrays as tensors of their own: what Ray delivers is read-only."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def on_host(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer's state with arrays on the host for its tensors."""
    return _each(optimizer, Tensor, lambda tensor: tensor.detach().cpu().numpy())


def of_host(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer's state with tensors of its own for its arrays."""
    return _each(optimizer, np.ndarray, lambda array: torch.from_numpy(np.array(array)))


def _each(optimizer: Optimizer, kind: type, change: Callable[[Any], Any]) -> Optimizer:
    if optimizer is None:
        return None
    return {
        number: {name: change(v) if isinstance(v, kind) else v for name, v in entry.items()}
        for number, entry in optimizer.items()
    }


class ServerActor:
    """The parameter server as an actor; Ray makes its methods coroutines of one process.

    Args:
        job: With the plan, the schedule and how to make the server.
        path: The checkpoint that it starts from and keeps writing. Ray would not keep a large
            argument for a restart.
        fingerprint: The checkpoint's.
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

    def _may_start(self, worker: int) -> bool:
        # The clock starts when all are there: processes take seconds to come up.
        done = [count >= len(self._job.schedule) for count in self._server.iterations]
        complete = all(number in self._pids or done[number] for number in range(self._job.plan.n))
        if complete and self._start_s is None:
            self._start_s = time.perf_counter()
        return complete and self._server.may_start(worker)

    async def pull(self, worker: int, pid: int) -> tuple[int, int, Arrays, Optimizer] | None:
        """Return share, version, state and the optimizer's once the worker may start.

        None after its last share.
        """
        async with self._changed:
            self._pids[worker] = pid
            self._changed.notify_all()
            if self._server.iterations[worker] >= len(self._job.schedule):
                return None
            await self._changed.wait_for(lambda: self._may_start(worker))
        pull = self._server.pull(worker)
        optimizer = on_host(self._server.optimizers.get(worker))
        return pull.iteration, pull.version, to_arrays(pull.state), optimizer

    async def push(
        self,
        worker: int,
        iteration: int,
        version: int,
        state: Arrays,
        factor: float,
        loss: float,
        optimizer: Optimizer,
    ) -> bool:
        """Merge a trained state; False where it changed nothing and the worker is to pull again."""
        trained, before = to_tensors(state), self._server.version
        commit = self._server.push(
            worker,
            iteration,
            trained,
            factor,
            version=version,
            time_s=self._now_s,
            loss=loss,
            optimizer=of_host(optimizer),
        )
        if commit is None:
            return False
        epoch, rest = divmod(self._server.version, self._job.plan.n)
        if self._server.version > before and not rest:  # BSP merges once in n commits
            self._ends[epoch] = self._now()
            self._save()
        async with self._changed:
            self._changed.notify_all()
        return True

    async def wait_epoch(self, epoch: int) -> tuple[Arrays, bool, list[dict[str, Any]], float]:
        """Return the state at an epoch's end, the log so far, and seconds from the start.

        The second value is whether it is the state of just then: a restart may have lost it, and
        then it is the present one.
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
        """Return where the training stands, and the processes that work on it."""
        return {
            "pid": os.getpid(),
            "workers": dict(self._pids),
            "version": self._server.version,
            "iterations": list(self._server.iterations),
            "history": self._history,
        }

    def _now(self) -> Arrays:
        state = to_arrays(self._server.state)
        return {name: array.copy() for name, array in state.items()}

    def _save(self) -> None:
        content = checkpoint(self._server, self._fingerprint, self._now_s, self._history)
        save_checkpoint(self._path, content)


def checkpoint(
    server: ParameterServer,
    fingerprint: Fingerprint,
    wall_s: float,
    history: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return what a server starts from, in the form of the local engine's checkpoints."""
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
        """Return, once the cluster has room for this worker."""
        return True

    def run(self, number: int, job: Job, server: Any) -> list[str]:
        """Train every share that the server has for worker `number`; return what it warned of."""
        import ray

        with _portable(number):
            worker = Worker(job.recipe, job.plan)
        while True:
            work = ray.get(server.pull.remote(number, os.getpid()))
            if work is None:
                return worker.warned
            iteration, version, arrays, before = work
            setting, state = job.setting_at(version), to_tensors(arrays)
            with _portable(number):
                done = worker.train(number, iteration, state, setting, of_host(before))
                if (changed := worker.changed()) is not None:
                    raise CheckpointError(f"workers on a cluster are replaced, and {changed}")
            arrays, loss, after = to_arrays(done.state), float(done.loss), on_host(done.optimizer)
            push = (number, iteration, version, arrays, done.factor, loss, after)
            ray.get(server.push.remote(*push))


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
