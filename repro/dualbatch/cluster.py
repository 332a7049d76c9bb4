"""The engine with real processes: a parameter server and workers as Ray actors.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", section 2.3.

Workers run the same code as on the local engine, on any number of machines, and commit in the order
in which they end. A worker that dies is replaced and its unfinished share done again: the server
has its optimizer's state, which goes over the network with the weights. The server writes a
checkpoint after each epoch's worth of commits; Ray starts it again when it dies, and it resumes
from there. A commit is identified by worker and share, so that a repeated one changes nothing.
"""

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repro.dualbatch import own_cluster
from repro.dualbatch.actors import ServerActor, WorkerActor, checkpoint, to_tensors
from repro.dualbatch.checks import ClusterError as ClusterError
from repro.dualbatch.checks import is_number, whole
from repro.dualbatch.engines import (
    EpochResult,
    Fingerprint,
    Job,
    first_line,
    load_own_checkpoint,
)
from repro.dualbatch.functions import Parts, differing
from repro.dualbatch.guards import UnsavedBuffers
from repro.dualbatch.server import Commit
from repro.dualbatch.shares import Batches, Share
from repro.measure import CheckpointError, accelerator, save_checkpoint

SERVER_NAME = "repro-dualbatch-server"
CHECK_S = 5.0  # seconds without news after which the driver asks whether the cluster is there
CHECKS = 3  # how many times in turn it may stay without an answer
PLACE_S = 120.0  # seconds that a worker may wait for room on the cluster
_GO_ON = "run again with the same checkpoint=... to go on from the last epoch"


class RayEngine:
    """Carries a job out on a Ray cluster.

    Args:
        job: What to do; its recipe has to be picklable.
        address: Of a running cluster (``auto`` finds this machine's), which has to guard itself;
            None starts one here, for the time of the run, which listens on the loopback interface
            alone and asks for a token that only the run knows.
        cpus_per_worker: Cores for each worker, above 0.
        gpus_per_worker: GPUs for each worker; workers may share one, such as with 0.25; above 1 a
            whole number. None: for a recipe on CUDA all that there are, at most one each; else
            none.
        worker_restarts: How many times each worker is replaced before the run ends.
        server_restarts: How many times the server is started again.

    Raises:
        ValueError: An argument is out of range.
        ClusterError: Ray is not installed, the cluster cannot be reached or is too small.
    """

    def __init__(
        self,
        job: Job,
        address: str | None = None,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: float | None = None,
        worker_restarts: int = 3,
        server_restarts: int = 3,
    ) -> None:
        if address is not None and not (isinstance(address, str) and address):
            raise ValueError(f"address is {address!r}; give HOST:PORT, 'auto', or None")
        if not is_number(cpus_per_worker) or cpus_per_worker <= 0:
            raise ValueError(f"cpus_per_worker is {cpus_per_worker!r}; give a number above 0")
        gpus = 0.0 if gpus_per_worker is None else gpus_per_worker
        if not is_number(gpus) or gpus < 0 or (gpus > 1 and gpus % 1):
            raise ValueError(
                f"gpus_per_worker is {gpus_per_worker!r}; give 0 to 1, a whole number, or None"
            )
        self.job, self.address = job, address
        self._cpus, self._gpus = cpus_per_worker, gpus_per_worker
        if gpus_per_worker is None and not accelerator.is_accelerator(job.recipe.device):
            self._gpus = 0.0
        self._worker_restarts = whole("worker_restarts", worker_restarts, 0)
        self._server_restarts = whole("server_restarts", server_restarts, 0)
        self.state: dict[str, Tensor] = {}
        self.history: list[EpochResult] = []
        self.log: list[Commit] = []

    def run(self) -> None:
        """Train to the end of the schedule.

        Raises:
            ClusterError: The server or a worker died too often, or the cluster is gone.
            NonFiniteError: A worker's loss or weights became infinite or NaN; all others are ended.
            ValueError: The data function does not give the samples of its shares.
            CheckpointError: A function keeps a state that no checkpoint holds.
        """
        job, recipe = self.job, self.job.recipe
        if not accelerator.count(recipe.device):
            recipe = replace(recipe, device="cpu")  # a head node that has none
        model = recipe.make_model()
        recipe.make_model()  # by the second one it sees whether models share tensors
        server = job.make_server(model.state_dict())
        fingerprint = job.fingerprint(server, model)
        folder = Path(tempfile.mkdtemp(prefix="repro-dualbatch-"))
        path = (job.checkpoint or folder / "server.pt").resolve()
        if path.exists():
            load_own_checkpoint(path, fingerprint)
        else:
            save_checkpoint(path, checkpoint(server, fingerprint, 0.0, []))
        state_bytes = sum(tensor.nbytes for tensor in server.state.values())
        if not callable(recipe.data):
            state_bytes += sum(tensor.nbytes for tensor in recipe.data) // 8
        gpus = job.plan.n * (self._gpus or 0.0)
        if self.address is None and self._gpus is None:
            gpus = accelerator.count(recipe.device)
        try:
            needed = {"CPU": job.plan.n * self._cpus, "GPU": gpus}
            with connected(self.address, needed, state_bytes) as ray:
                if self._gpus is None:
                    self._gpus = min(1.0, ray.cluster_resources().get("GPU", 0.0) / job.plan.n)
                with self._actors(ray, path, fingerprint) as (server_actor, workers):
                    self._drive(ray, model, server_actor, workers)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _actors(
        self, ray: Any, path: Path, fingerprint: Fingerprint
    ) -> Iterator[tuple[Any, "_Workers"]]:
        """The server and the workers inside a ``with`` block; their errors get their own types."""
        from ray import exceptions
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        job = replace(self.job, evaluate=None, on_epoch=None)
        sent = _put(ray, job)
        bare = replace(job.recipe, data=_no_data, model_fn=torch.nn.Module)
        # Beside its checkpoints: a restart elsewhere would not find them.
        node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {
            "name": SERVER_NAME,
            "namespace": f"repro-{os.getpid()}",
            "num_cpus": 0,
            "max_restarts": self._server_restarts,
            "max_task_retries": -1,
            "max_concurrency": 4 * job.plan.n + 8,
            "scheduling_strategy": node,
        }
        server = ray.remote(ServerActor).options(**options)
        server = server.remote(replace(job, recipe=bare), str(path), fingerprint)
        kind = ray.remote(WorkerActor).options(num_cpus=self._cpus, num_gpus=self._gpus)
        workers = _Workers(kind, sent, server, self._worker_restarts)
        try:
            yield server, workers
        except exceptions.RayTaskError as error:
            cause: Any = error
            while isinstance(cause, exceptions.RayTaskError):  # of a worker that asks the server
                cause = cause.cause
            raise cause if isinstance(cause, Exception) else error from error
        except exceptions.UnserializableException as error:
            raise ClusterError(
                f"a worker ended by an exception that cannot be made again here: {error}"
            ) from error
        except exceptions.RayError as error:
            raise ClusterError(
                f"the parameter server or its cluster is gone ({first_line(error)}); {_GO_ON}"
            ) from error
        finally:
            # On a dead cluster this would wait, and Ray end the process.
            for actor in (server, *workers.actors.values()) if _answers(ray) else ():
                with contextlib.suppress(Exception):
                    ray.kill(actor, no_restart=True)

    def _drive(self, ray: Any, model: torch.nn.Module, server: Any, workers: "_Workers") -> None:
        """Follow the training to its end: epochs, dead workers, a cluster that does not answer."""
        schedule, unsaved, known = self.job.schedule, UnsavedBuffers(model), self.job.recipe.parts()
        earlier = ray.get(server.status.remote())["history"]
        self.history = [EpochResult(**entry) for entry in earlier]
        for number in range(self.job.plan.n):
            workers.start(number)
        unanswered, epoch = 0, len(self.history) + 1
        waited = server.wait_epoch.remote(min(epoch, len(schedule)))
        while True:
            ready, _ = ray.wait([waited, *workers.running], num_returns=1, timeout=CHECK_S)
            if not ready:
                # Ray itself would end this process after a minute, without an exception.
                unanswered = 0 if _answers(ray) else unanswered + 1
                if unanswered == CHECKS:
                    raise ClusterError(
                        f"the cluster does not answer for {CHECKS * CHECK_S:g} s at epoch {epoch} "
                        f"and no worker ends a share; {_GO_ON}"
                    )
                if not unanswered:
                    self._check_places(ray, workers.waiting)
                continue
            unanswered = 0
            if ready[0] in workers.running:
                workers.end(ray, ready[0])
                continue
            arrays, exact, log, wall_s = ray.get(waited)
            self.log, self.state = [Commit(**entry) for entry in log], to_tensors(arrays)
            if epoch > len(schedule):
                return
            model.load_state_dict(self.state)
            unsaved.restore()
            # The metrics of a later state would not be this epoch's.
            ending = self.job if exact else replace(self.job, evaluate=None)
            result = ending.end_epoch(model, self.log, epoch, float("nan"), wall_s)
            self.history.append(result)
            noted = server.note.remote(asdict(result))
            self._tell(result, known)
            if epoch == len(schedule):
                ray.wait([noted], timeout=CHECKS * CHECK_S)
                workers.hear(ray)
                return
            epoch += 1
            waited = server.wait_epoch.remote(epoch)

    def _tell(self, result: EpochResult, known: Parts) -> None:
        """Call `on_epoch`, whose changes in functions do not reach the workers."""
        if self.job.on_epoch is not None:
            self.job.on_epoch(result)
        if changed := differing(known, self.job.recipe.parts()):
            raise CheckpointError(
                f"{', '.join(changed[:5])} changed in this process as the training went on, and "
                "workers have their own, which did not; have functions depend on what they are "
                "given alone"
            )

    def _check_places(self, ray: Any, waiting: dict[int, tuple[Any, float]]) -> None:
        for number, (is_up, since) in list(waiting.items()):
            if ray.wait([is_up], timeout=0)[0]:
                del waiting[number]
            elif time.monotonic() - since > PLACE_S:
                free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
                raise ClusterError(
                    f"worker {number} has waited {PLACE_S:g} s for {self._cpus:g} CPU and "
                    f"{self._gpus:g} GPU; free are {free}; end what else runs there, or lower "
                    "cpus_per_worker or gpus_per_worker"
                )


class _Workers:
    """The workers as actors; one that dies is replaced.

    Args:
        kind: Of actor.
        job: The reference of what to do.
        server: The actor to pull from and to commit to.
        restarts: How many times each is replaced.

    Attributes:
        actors: By number.
        running: The number of each whose shares are not all done, by the reference of their end.
        waiting: By number the reference that one is up, and since when it waits for room.
    """

    def __init__(self, kind: Any, job: Any, server: Any, restarts: int) -> None:
        self._kind, self._job, self._server, self._restarts = kind, job, server, restarts
        self._deaths: Counter[int] = Counter()
        self._warned: set[str] = set()
        self.actors: dict[int, Any] = {}
        self.running: dict[Any, int] = {}
        self.waiting: dict[int, tuple[Any, float]] = {}

    def start(self, number: int) -> None:
        """Start a worker, the first time or again."""
        self.actors[number] = actor = self._kind.remote()
        self.waiting[number] = actor.is_up.remote(), time.monotonic()
        self.running[actor.run.remote(number, self._job, self._server)] = number

    def hear(self, ray: Any) -> None:
        """Pass on what workers warned of, once the last share is merged."""
        runs = list(self.running)
        for run in ray.wait(runs, num_returns=len(runs), timeout=CHECK_S)[0] if runs else ():
            with contextlib.suppress(ray.exceptions.RayError):
                self._warn(ray.get(run))

    def _warn(self, texts: list[str]) -> None:
        for text in set(texts) - self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=4)

    def end(self, ray: Any, run: Any) -> None:
        """Take note of a run that ended; where its worker died, start another.

        Raises:
            ClusterError: The worker died too often.
        """
        number = self.running.pop(run)
        try:
            self._warn(ray.get(run))
        except ray.exceptions.RayActorError as death:
            self._deaths[number] += 1
            if self._deaths[number] > self._restarts:
                raise ClusterError(
                    f"worker {number} died {self._deaths[number]} times; the last time: "
                    f"{first_line(death)}"
                ) from death
            self.start(number)


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
    if address is not None and "ray" not in sys.modules and _has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # as Ray does for "auto" alone
    try:
        import ray
    except ImportError as error:
        raise ClusterError(
            "ray is not installed: pip install 'repro[cluster]', or take engine='local'"
        ) from error
    connects = not ray.is_initialized()
    with contextlib.ExitStack() as stack:
        if connects:
            if address is None:
                stack.enter_context(own_cluster.guarded())
            stack.callback(ray.shutdown)
            _connect(ray, address, needed, state_bytes)
        resources = ray.cluster_resources()
        for kind, amount in needed.items():
            if resources.get(kind, 0) < amount:
                raise ClusterError(
                    f"the workers need {amount:g} {kind}, the cluster has "
                    f"{resources.get(kind, 0):g}; add machines, or lower cpus_per_worker or "
                    "gpus_per_worker"
                )
        yield ray


def _connect(ray: Any, address: str | None, needed: Mapping[str, float], state_bytes: int) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            own_cluster.check_loopback()
            free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 2**31
            memory = int(min(0.8 * free, 2**28 + 32 * state_bytes))
            cpus, gpus = int(np.ceil(needed["CPU"])), int(np.ceil(needed["GPU"]))
            own_cluster.start(
                ray,
                num_cpus=max(1, cpus),
                num_gpus=gpus or None,
                object_store_memory=max(memory, 80 * 2**20),
                **quiet,
            )
            return
        host, colon, port = address.rpartition(":")
        if colon and "://" not in address:  # Ray itself asks on for many minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address=address, **quiet)
    except (Exception, SystemExit) as error:  # a bare Exception where its time is up
        if address is None:
            raise ClusterError(
                f"Ray does not start on this machine ({first_line(error)}); it needs the loopback "
                "interface, a folder to write to (RAY_TMPDIR, else /tmp), and on a busy machine a "
                "second try; engine='local' needs none of them"
            ) from error
        raise ClusterError(
            f"no Ray cluster at address {address!r} ({first_line(error)}); start one with "
            "'ray start --head', or leave the address out; one that asks for a token needs "
            "RAY_AUTH_MODE=token in the environment"
        ) from error


def _put(ray: Any, job: Job) -> Any:
    try:
        return ray.put(job)
    except Exception as error:  # whatever pickling raises
        raise ClusterError(
            f"functions and data cannot be sent to workers ({first_line(error)}); make what cannot "
            "be pickled, such as locks, files and generators, within the functions"
        ) from error


def _has_token() -> bool:
    try:
        return (Path.home() / ".ray" / "auth_token").is_file()
    except (OSError, RuntimeError):  # a home that may not be read, or none
        return False


def _answers(ray: Any) -> bool:
    host, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def _no_data(share: Share) -> Batches:
    return ()
