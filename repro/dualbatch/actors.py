"""Workers as Ray actors, and the conversion of states between processes."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repro.dualbatch.checks import ClusterError
from repro.dualbatch.plan import DualBatchPlan
from repro.dualbatch.progressive import EpochSetting
from repro.dualbatch.worker import Recipe, Trained, Worker
from repro.measure import CheckpointError


def to_arrays(tree: Any) -> Any:
    """A state with its tensors as arrays on the host, which Ray shares without a copy."""
    return _mapped(tree, Tensor, lambda tensor: tensor.detach().cpu().numpy())


def to_tensors(tree: Any) -> Any:
    """A state with its arrays copied to tensors: Ray delivers read-only arrays."""
    return _mapped(tree, np.ndarray, lambda array: torch.from_numpy(np.array(array)))


def _mapped(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, Mapping):
        return {name: _mapped(value, kind, change) for name, value in tree.items()}
    return change(tree) if isinstance(tree, kind) else tree


class WorkerActor:
    """A worker as an actor: it trains the shares that the driver sends it."""

    worker: Worker | None = None

    def prepare(self, recipe: Recipe, plan: DualBatchPlan) -> None:
        """Make the model, so that the clock starts when all workers are ready."""
        with _portable("a worker"):
            self.worker = Worker(recipe, plan)

    def train(
        self, number: int, iteration: int, state: Any, setting: EpochSetting, before: Any
    ) -> Trained:
        """Train a share by `Worker.train`; states hold arrays."""
        assert self.worker is not None
        with _portable(f"worker {number}"):
            args = (number, iteration, to_tensors(state), setting, to_tensors(before))
            done = self.worker.train(*args)
            if (changed := self.worker.changed()) is not None:
                raise CheckpointError(f"workers on a cluster are replaced, and {changed}")
        return replace(
            done,
            state=to_arrays(done.state),
            loss=float(done.loss),
            optimizer=to_arrays(done.optimizer),
        )


@contextmanager
def _portable(who: str) -> Iterator[None]:
    """Replace an exception of a user's function that another process could not rebuild."""
    try:
        yield
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
