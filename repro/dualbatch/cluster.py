"""The engine with real processes: this one is the parameter server, the workers are Ray actors.

Source: Lu, Liu, Hong, Wu, "Hybrid Dual-Batch and Cyclic Progressive Learning", section 2.3.

Workers run the same code as on the local engine, on any number of machines, and commit in the order
in which they end. A worker that dies is started again and its unfinished share repeated: all that
the share depends on, the worker's optimizer state too, is sent with it. The server writes a
checkpoint after each epoch's worth of commits; the local engine can continue from it, too.
"""

import contextlib
import math
import os
import secrets
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from repro.dualbatch.checks import ClusterError, positive
from repro.dualbatch.engines import Engine, Job, first_line
from repro.dualbatch.functions import differing
from repro.dualbatch.server import Pull
from repro.dualbatch.worker import Trained, Worker
from repro.measure import CheckpointError, accelerator

CHECK_S = 5.0  # seconds without news after which the driver checks that the cluster answers
PLACE_S = 120.0  # seconds that a worker may wait for room on the cluster
_STARTING_S = 60.0  # in which a new cluster's node has to answer
RESTARTS = 3  # of each worker before the run ends
_GO_ON = "run again with the same checkpoint=... to go on from the last epoch"


class WorkerActor:
    """A worker as an actor: it trains the shares that the driver sends it."""

    worker: Worker | None = None

    def prepare(self, sent: Sequence[Any]) -> None:
        """Make the worker from references to a recipe and a plan, if this process has none yet."""
        import ray

        if self.worker is None:
            with _portable("a worker"):
                self.worker = Worker(*ray.get(list(sent)))

    def train(self, sent: Sequence[Any], number: int, *share: Any) -> Trained:
        """Train a share by `Worker.train`; all tensors that cross are on the host."""
        self.prepare(sent)  # in a process that has taken another's place
        assert self.worker is not None
        with _portable(f"worker {number}"):
            done = self.worker.train(number, *share)
            if (changed := self.worker.changed()) is not None:
                raise CheckpointError(f"workers on a cluster are replaced, and {changed}")
        left = {"state": _on_host(done.state), "optimizer": _on_host(done.optimizer)}
        return replace(done, loss=float(done.loss), **left)


def _on_host(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _on_host(value) for name, value in tree.items()}
    if not isinstance(tree, Tensor):
        return tree
    tensor = tree.detach().cpu().resolve_conj().resolve_neg()
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return _Sent(tensor if dense else tensor.clone())


class _Sent:
    """A tensor that crosses as an array, which Ray shares without a copy, and arrives as itself."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor  # without gaps, in any order of its dimensions

    def __reduce__(self) -> tuple[Any, ...]:
        like = self._tensor.shape, self._tensor.stride(), self._tensor.dtype
        flat = self._tensor.as_strided((self._tensor.numel(),), (1,))
        return _arrived, (flat.view(torch.uint8).numpy(), *like)


def _arrived(sent: np.ndarray, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    if sent.size == 0:
        return torch.empty_strided(shape, stride, dtype=dtype)
    # Copied, since what Ray shares is read-only; by numpy, which asks for large pages.
    return torch.from_numpy(sent.copy()).view(dtype).as_strided(shape, stride)


@contextlib.contextmanager
def _portable(who: str) -> Iterator[None]:
    """Replace an exception of a user's function that another process could not rebuild."""
    try:
        yield
    except KeyboardInterrupt as error:  # which Ray takes for a task that was cancelled
        raise ClusterError(f"{who} was interrupted; {_GO_ON}") from error
    except Exception as error:
        if _crosses(error):
            raise
        text = "".join(traceback.format_exception_only(error)).strip()
        raise ClusterError(
            f"{who}: {text} (this exception cannot be sent from process to process itself; for "
            "that it has to be made again by its class and args)"
        ) from error


def _crosses(error: Exception) -> bool:
    import ray

    try:
        again = ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
        return type(again).__name__ == type(error).__name__ and str(again) == str(error)
    except Exception:
        return False


class RayEngine(Engine):
    """Runs a job on a Ray cluster.

    Args:
        job: The training; its recipe must be picklable.
        address: Address of a running cluster (``auto`` finds this machine's), which must protect
            itself; None starts a cluster here for the run, which listens only on the loopback
            interface and requires a token that only the run knows.
        cpus_per_worker: Cores for each worker, above 0; None is 1. For a recipe on CUDA the workers
            share all GPUs, at most one each.
    """

    pauses = False
    now_s = float("nan")

    def __init__(
        self, job: Job, address: str | None = None, cpus_per_worker: float | None = None
    ) -> None:
        self._address = address or None
        self._cpus = positive("cpus_per_worker", 1 if cpus_per_worker is None else cpus_per_worker)
        self._sent = job.recipe
        if not accelerator.count(job.recipe.device):  # a head node without a device
            job = replace(job, recipe=replace(job.recipe, device="cpu"))
        self._known = job.recipe.parts()
        super().__init__(job, job.recipe.make_model())
        self._actors: list[Any] = []

    def run(self) -> None:
        """Train to the end of the schedule; whatever happens, all workers end."""
        n, device, data = self.job.plan.n, self._sent.device, self._sent.data
        state_bytes = sum(tensor.nbytes for tensor in self.server.state.values())
        if not callable(data):
            state_bytes += sum(tensor.nbytes for tensor in data) // 8
        gpus = float(accelerator.count(device)) if self._address is None else 0.0
        needed = {"CPU": n * self._cpus, "GPU": gpus}
        with connected(self._address, needed, state_bytes) as self._ray, self._errors_named():
            ray, gpus = self._ray, 0.0
            if accelerator.is_accelerator(device):
                gpus = min(1.0, ray.cluster_resources().get("GPU", 0.0) / n)
            needs = {"num_cpus": self._cpus, "num_gpus": gpus, "max_restarts": RESTARTS}
            kind = ray.remote(WorkerActor).options(**needs)
            try:
                self._puts = [ray.put(self._sent), ray.put(self.job.plan)]
            except Exception as error:  # pickling may raise any exception
                raise ClusterError(
                    f"functions and data cannot be sent to workers ({first_line(error)}); make "
                    "what cannot be pickled, such as locks, files and generators, within the "
                    "functions"
                ) from error
            self._actors = [kind.remote() for _ in range(n)]
            self._wait_for_room(range(n))
            super().run()

    def start(self, number: int, pull: Pull) -> None:
        """Send a worker its share."""
        state, before = _on_host(pull.state), _on_host(self.server.optimizers.get(number))
        share = (pull.iteration, state, self.setting_of(pull), before)
        self.running[number] = self._actors[number].train.remote(self._puts, number, *share)

    def next_end(self) -> tuple[int, Trained, float]:
        """Wait for the next share to end."""
        shares = {share: number for number, share in self.running.items()}
        while not (ready := self._ray.wait(list(shares), timeout=CHECK_S)[0]):
            # Ray itself would end this process after a minute, without an exception.
            _check_answer(self._ray)
        number = shares[ready[0]]
        del self.running[number]
        try:
            return number, self._ray.get(ready[0]), time.perf_counter() - self._begun
        except self._ray.exceptions.ActorUnavailableError:  # Ray starts it again
            self._wait_for_room([number])
            self.start(number, self.server.pulls[number])
            return self.next_end()

    def changed(self) -> str | None:
        """Name the functions that changed in this process, or None."""
        if changed := differing(self._known, self.job.recipe.parts()):
            return (
                f"{', '.join(changed[:5])} changed in this process as the training went on, and "
                "workers have their own, which did not; have functions depend on what they are "
                "given alone"
            )
        return None

    def _wait_for_room(self, numbers: Iterable[int]) -> None:
        """Wait until workers are ready: at the start, and where one has lost its machine."""
        ray, since = self._ray, time.monotonic()
        late = {self._actors[number].prepare.remote(self._puts): number for number in numbers}
        while late:
            for each in ray.wait([*late], num_returns=len(late), timeout=CHECK_S)[0]:
                number = late.pop(each)
                try:
                    ray.get(each)
                except ray.exceptions.ActorUnavailableError:  # called while it ended
                    time.sleep(0.1)
                    late[self._actors[number].prepare.remote(self._puts)] = number
            _check_answer(ray)
            if late and time.monotonic() - since > PLACE_S:
                workers = ", ".join(f"worker {number}" for number in late.values())
                raise ClusterError(
                    f"no machine has had {self._cpus:g} CPU, or a share of a GPU, within "
                    f"{PLACE_S:g} s for {workers}; add a machine, end what else runs there, or "
                    f"lower cpus_per_worker; then {_GO_ON}"
                )

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Raise workers' errors with their original types inside; at the end, end all workers."""
        exceptions = self._ray.exceptions
        try:
            yield
        except exceptions.RayTaskError as error:
            cause: Any = error.cause
            raise cause if isinstance(cause, Exception) else error from error
        except exceptions.RayError as error:
            raise ClusterError(
                f"a worker has died too often, or as it began, or the cluster is gone "
                f"({first_line(error)}); {_GO_ON}"
            ) from error
        finally:
            # On a dead cluster this would wait, and Ray would end the process.
            for actor in self._actors if _answers(self._ray) else ():
                with contextlib.suppress(Exception):
                    self._ray.kill(actor, no_restart=True)


@contextlib.contextmanager
def connected(address: str | None, needed: Mapping[str, float], state_bytes: int) -> Iterator[Any]:
    """Connect to a cluster, or start one on this machine; the value is the module `ray`.

    An existing connection is used and left open. `needed` are cores and GPUs; the size of a state
    determines the memory for messages. `ClusterError` where Ray is not installed, or the cluster
    cannot be reached or is too small.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no statistics
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ClusterError(
            "ray is not installed: pip install 'repro[cluster]', or take engine='local'"
        ) from error
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            if address is None:
                stack.enter_context(_guarded())
            stack.callback(ray.shutdown)
            try:
                _start(ray, needed, state_bytes) if address is None else _join(ray, address)
            except (Exception, SystemExit) as error:  # Ray raises a bare Exception at a timeout
                why = (
                    f"no Ray cluster at address {address!r}; start one with 'ray start --head', or "
                    "leave the address out; one that asks for a token needs RAY_AUTH_MODE=token in "
                    "the environment"
                )
                if address is None:
                    why = (
                        "Ray does not start here, tried twice; it needs the loopback interface and "
                        "a writable folder (RAY_TMPDIR, else /tmp); engine='local' needs neither"
                    )
                raise ClusterError(f"{why} ({first_line(error)})") from error
        held = ray.cluster_resources()
        for kind, amount in needed.items():
            if held.get(kind, 0) < amount:
                raise ClusterError(
                    f"the workers need {amount:g} {kind}, the cluster has {held.get(kind, 0):g}; "
                    "add machines, or lower cpus_per_worker"
                )
        yield ray


def _join(ray: Any, address: str) -> None:
    host, colon, port = address.rpartition(":")
    if colon and "://" not in address:  # Ray itself would retry for many minutes
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")


def _start(ray: Any, needed: Mapping[str, float], state_bytes: int) -> None:
    """Start a cluster on the loopback interface; by default Ray listens on all interfaces."""
    from ray._private import ray_constants, services

    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else 2**31
    memory = int(min(0.8 * free, 2**28 + 32 * state_bytes))
    options = {
        "address": "local",
        "include_dashboard": False,
        "num_cpus": max(1, math.ceil(needed["CPU"])),
        "num_gpus": math.ceil(needed["GPU"]) or None,
        "object_store_memory": max(memory, 80 * 2**20),
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    with (
        # Ray takes 127.0.0.1 where it has no clusters; `ray.init` would replace it as an argument.
        mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False, create=True),
        mock.patch.object(services, "get_node", _patient(services.get_node)),
    ):
        try:
            ray.init(**options)
        except (Exception, SystemExit):  # on a busy machine its agent may start too late
            ray.shutdown()
            ray.init(**options)


def _patient(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Ask for a new node until it answers: Ray waits 30 s, which a busy machine exceeds."""

    def patient(*given: Any, **named: Any) -> Any:
        end = time.monotonic() + _STARTING_S
        while True:
            try:
                return ask(*given, **named)
            except RuntimeError:  # not registered yet
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    return patient


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Make Ray require a token that only this run knows, and not one for all clusters of a user."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: value for name, value in os.environ.items() if name in token}
    os.environ.update(token)
    _read_environment()
    try:
        yield
    finally:
        for name in token:
            del os.environ[name]
        os.environ.update(before)
        _read_environment()


def _read_environment() -> None:
    # Ray reads mode and token once per process. The mode is reset first: while it requires a token,
    # Ray's ending threads look for one.
    import ray._raylet

    raylet: Any = ray._raylet
    with contextlib.suppress(AttributeError):
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _check_answer(ray: Any) -> None:
    if not _answers(ray):
        raise ClusterError(f"the cluster does not answer; {_GO_ON}")


def _answers(ray: Any) -> bool:
    host, port = ray.get_runtime_context().gcs_address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError:
        return False
    return True
