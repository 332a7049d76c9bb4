"""The engine with real processes: a parameter server and workers as Ray actors.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", section 2.3.

Workers run the same code as on the local engine, on any number of machines, and commit in whatever
order they end. A worker has no memory, so that one that dies is replaced and its unfinished share
done again. The server writes a checkpoint after each epoch's worth of commits; Ray starts it again
when it dies, it resumes from there, and tells workers whose pull it no longer knows to pull again.
A commit is identified by worker and share, so that a repeated one changes nothing.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repro.dualbatch.engines import EpochResult, Job, load_checkpoint, save_atomically
from repro.dualbatch.server import Commit, ParameterServer
from repro.dualbatch.worker import Batches, Share, Worker

Arrays = dict[str, np.ndarray]
SERVER_NAME = "repro-dualbatch-server"
CHECK_S = 5.0  # seconds without news after which the driver asks whether the cluster is there
CHECKS = 3  # how many times in turn it may stay without an answer
_GO_ON = "run again with the same checkpoint=... to go on from the last epoch"


class ClusterError(RuntimeError):
    """A cluster cannot be reached, is too small, or died."""


def to_arrays(state: Mapping[str, Tensor]) -> Arrays:
    """Return a state as arrays on the host, which Ray shares without a copy."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in state.items()}


def to_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Return arrays as tensors of their own: what Ray delivers is read-only."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


class ServerActor:
    """The parameter server as an actor; Ray makes its methods coroutines of one process.

    Args:
        job: With the plan, the schedule and how to make the server.
        path: The checkpoint that it starts from and keeps writing. Ray would not keep a large
            argument for a restart.
        fingerprint: The checkpoint's.
    """

    def __init__(self, job: Job, path: str, fingerprint: str) -> None:
        self._job, self._path, self._fingerprint = job, Path(path), fingerprint
        content = load_checkpoint(self._path, fingerprint)
        self._server = job.make_server(content["server"]["state"])
        self._server.load_state_dict(content["server"])
        self._history: list[dict[str, Any]] = content["history"]
        self._ends: dict[int, Arrays] = {}  # states at the ends of epochs, until they are fetched
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
        there = all(number in self._pids or done[number] for number in range(self._job.plan.n))
        if there and self._start_s is None:
            self._start_s = time.perf_counter()
        return there and self._server.may_start(worker)

    async def pull(self, worker: int, pid: int) -> tuple[int, int, Arrays] | None:
        """Return share, version and state once the worker may start; None after its last share."""
        async with self._changed:
            self._pids[worker] = pid
            self._changed.notify_all()
            if self._server.iterations[worker] >= len(self._job.schedule):
                return None
            await self._changed.wait_for(lambda: self._may_start(worker))
        pull = self._server.pull(worker)
        return pull.iteration, pull.version, to_arrays(pull.state)

    async def push(
        self,
        worker: int,
        iteration: int,
        version: int,
        state: Arrays,
        factor: float,
        loss: float,
    ) -> bool:
        """Merge a trained state; False where it changed nothing and the worker is to pull again."""
        own = to_tensors(state)
        commit = self._server.push(
            worker, iteration, own, factor, version=version, time_s=self._now_s, loss=loss
        )
        if commit is None:
            return False
        epoch, rest = divmod(self._server.version, self._job.plan.n)
        if not rest:
            now = to_arrays(self._server.state)
            self._ends[epoch] = {name: array.copy() for name, array in now.items()}
            self._save()
        async with self._changed:
            self._changed.notify_all()
        return True

    async def wait_epoch(self, epoch: int) -> tuple[Arrays, list[dict[str, Any]], float]:
        """Return the state at an epoch's end, the log so far, and seconds from the start.

        Where a restart lost the state of just then, it is the present one.
        """
        due = epoch * self._job.plan.n
        async with self._changed:
            await self._changed.wait_for(lambda: self._server.version >= due)
        state = self._ends.pop(epoch, None) or to_arrays(self._server.state)
        log = [asdict(commit) for commit in self._server.log]
        return state, log, log[due - 1]["time_s"]

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

    def _save(self) -> None:
        content = checkpoint(self._server, self._fingerprint, self._now_s, self._history)
        save_atomically(content, self._path)


def checkpoint(
    server: ParameterServer, fingerprint: str, wall_s: float, history: list[dict[str, Any]]
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

    def __init__(self, number: int, job: Job, server: Any) -> None:
        self._number, self._job, self._server = number, job, server
        self._worker = Worker(job.recipe, job.plan)

    def run(self) -> None:
        """Train every share that the server has for this worker."""
        import ray

        number, server = self._number, self._server
        while True:
            work = ray.get(server.pull.remote(number, os.getpid()))
            if work is None:
                return
            iteration, version, arrays = work
            setting = self._job.setting_at(version)
            done = self._worker.train(number, iteration, to_tensors(arrays), setting)
            state, loss = to_arrays(done.state), float(done.loss)
            ray.get(server.push.remote(number, iteration, version, state, done.factor, loss))


class RayEngine:
    """Carries a job out on a Ray cluster.

    Args:
        job: What to do; its recipe has to be picklable.
        address: Of a running cluster (``auto`` finds this machine's); None starts one here, for
            the time of the run.
        cpus_per_worker: Cores for each worker.
        gpus_per_worker: GPUs for each worker; workers may share one, such as with 0.25.
        worker_restarts: How many times each worker is replaced before the run ends.
        server_restarts: How many times the server is started again.

    Raises:
        ClusterError: Ray is not installed, the cluster cannot be reached or is too small.
    """

    def __init__(
        self,
        job: Job,
        address: str | None = None,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float = 0.0,
        worker_restarts: int = 3,
        server_restarts: int = 3,
    ) -> None:
        self.job, self.address = job, address
        self._resources = {"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker}
        self._worker_restarts, self._server_restarts = worker_restarts, server_restarts
        self.state: dict[str, Tensor] = {}
        self.history: list[EpochResult] = []
        self.log: list[Commit] = []

    def run(self) -> None:
        """Train to the end of the schedule.

        Raises:
            ClusterError: The server or a worker died too often, or the cluster is gone.
        """
        job = self.job
        model = job.recipe.make_model()
        server = job.make_server(model.state_dict())
        fingerprint = job.fingerprint(server)
        folder = Path(tempfile.mkdtemp(prefix="repro-dualbatch-"))
        path = (job.checkpoint or folder / "server.pt").resolve()
        if path.exists():
            load_checkpoint(path, fingerprint)
        else:
            save_atomically(checkpoint(server, fingerprint, 0.0, []), path)
        state_bytes = sum(tensor.nbytes for tensor in server.state.values())
        needed = {"CPU": job.plan.n * self._resources["num_cpus"]}
        needed["GPU"] = job.plan.n * self._resources["num_gpus"]
        try:
            with connected(self.address, needed, state_bytes) as ray:
                self._drive(ray, model, path, fingerprint)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _drive(self, ray: Any, model: torch.nn.Module, path: Path, fingerprint: str) -> None:
        from ray import exceptions
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        job = replace(self.job, evaluate=None, on_epoch=None)
        bare = replace(job.recipe, data=_no_data, model_fn=torch.nn.Module)
        # Beside its checkpoints: a restart elsewhere would not find them.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        server = (
            ray.remote(ServerActor)
            .options(
                name=SERVER_NAME,
                namespace=f"repro-{os.getpid()}",
                num_cpus=0,
                max_restarts=self._server_restarts,
                max_task_retries=-1,
                max_concurrency=4 * job.plan.n + 8,
                scheduling_strategy=here,
            )
            .remote(replace(job, recipe=bare), str(path), fingerprint)
        )
        shared = ray.put(job)
        kind = ray.remote(WorkerActor).options(**self._resources)
        deaths = [0] * job.plan.n
        running: dict[Any, int] = {}
        actors: dict[int, Any] = {}

        def start(number: int) -> None:
            actors[number] = kind.remote(number, shared, server)
            running[actors[number].run.remote()] = number

        unanswered = 0
        try:
            known = ray.get(server.status.remote())["history"]
            self.history = [EpochResult(**entry) for entry in known]
            for number in range(job.plan.n):
                start(number)
            epoch = len(self.history) + 1
            waited = server.wait_epoch.remote(min(epoch, len(job.schedule)))
            while True:
                ready, _ = ray.wait([waited, *running], num_returns=1, timeout=CHECK_S)
                if not ready:
                    # Ray itself would end this process after a minute, without an exception.
                    unanswered = 0 if _answers(ray) else unanswered + 1
                    if unanswered == CHECKS:
                        raise ClusterError(
                            f"the cluster does not answer for {CHECKS * CHECK_S:g} s at epoch "
                            f"{epoch} and no worker ends a share; {_GO_ON}"
                        )
                    continue
                unanswered = 0
                if ready[0] in running:
                    number = running.pop(ready[0])
                    try:
                        ray.get(ready[0])
                    except exceptions.RayActorError as death:
                        deaths[number] += 1
                        if deaths[number] > self._worker_restarts:
                            raise ClusterError(
                                f"worker {number} died {deaths[number]} times; the last time: "
                                f"{_first_line(death)}"
                            ) from death
                        start(number)
                    continue
                arrays, log, wall_s = ray.get(waited)
                self.log = [Commit(**entry) for entry in log]
                self.state = to_tensors(arrays)
                if epoch > len(job.schedule):
                    return
                model.load_state_dict(self.state)
                result = self.job.end_epoch(model, self.log, epoch, float("nan"), wall_s)
                self.history.append(result)
                noted = server.note.remote(asdict(result))
                if epoch == len(job.schedule):
                    ray.wait([noted], timeout=CHECKS * CHECK_S)
                    return
                epoch += 1
                waited = server.wait_epoch.remote(epoch)
        except exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from error
        except exceptions.RayError as error:
            raise ClusterError(
                f"the parameter server or its cluster is gone ({_first_line(error)}); {_GO_ON}"
            ) from error


@contextlib.contextmanager
def connected(address: str | None, needed: Mapping[str, float], state_bytes: int) -> Iterator[Any]:
    """Connect to a cluster, or start one on this machine; the value is the module `ray`.

    Args:
        address: As of `RayEngine`; a connection that is there already is used and left open.
        needed: Cores and GPUs that have to be there.
        state_bytes: Size of a state, by which the memory for messages is set.

    Raises:
        ClusterError: Ray is not installed, the cluster cannot be reached or is too small.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anyone
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ClusterError(
            "ray is not installed: pip install 'repro[cluster]', or take engine='local'"
        ) from error
    own = not ray.is_initialized()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if own and address is None:
            free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 2**31
            memory = int(min(0.8 * free, 2**28 + 32 * state_bytes))
            cpus, gpus = int(np.ceil(needed["CPU"])), int(np.ceil(needed["GPU"]))
            ray.init(
                address="local",
                num_cpus=max(1, cpus),
                num_gpus=gpus or None,
                include_dashboard=False,
                object_store_memory=max(memory, 80 * 2**20),
                **quiet,
            )
        elif own:
            ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise ClusterError(
            f"no Ray cluster at address {address!r} ({_first_line(error)}); start one with "
            "'ray start --head', or leave the address out"
        ) from error
    try:
        there = ray.cluster_resources()
        for kind, amount in needed.items():
            if there.get(kind, 0) < amount:
                raise ClusterError(
                    f"the workers need {amount:g} {kind}, the cluster has {there.get(kind, 0):g}; "
                    "add machines, or lower cpus_per_worker or gpus_per_worker"
                )
        yield ray
    finally:
        if own:
            ray.shutdown()


def _answers(ray: Any) -> bool:
    host, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def _no_data(share: Share) -> Batches:
    return ()


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
