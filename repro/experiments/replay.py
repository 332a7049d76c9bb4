"""The first steps of a training: kept with its record, and compared when it is computed again.

Nothing in a training knows of it: while somebody is `recording`, every optimizer tells of its
steps. The training is the model that first makes enough of them; probes of memory and warm-ups
before it make two or three. Then nothing is noted any more. Steps inside a captured graph are not
seen: such a training keeps no first steps.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 8


class Enough(BaseException):
    """All steps that were asked for were made; not an error, and nobody's to catch."""


class FirstSteps:
    """The first steps of a training.

    Args:
        stop: Whether the training ends with them, by `Enough`.

    Attributes:
        entry: The record's: the losses that were differentiated in each step (one, or one a
            micro-batch), digest and norm of the parameters after the last one; None where no model
            made enough steps.
    """

    def __init__(self, stop: bool = False) -> None:
        self.entry: dict[str, Any] | None = None
        self._stop = stop
        self._pending: list[float] = []
        # By model: itself, so that its address is not used again, and its steps' losses.
        self._seen: dict[int, tuple[torch.Tensor, list[list[float]]]] = {}

    def differentiated(self, loss: torch.Tensor) -> None:
        """Note a loss of the step under way."""
        if self.entry is None and loss.numel() == 1 and not loss.is_meta and not _capturing():
            self._pending.append(float(loss.detach()))

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the end of a step, and with the last one the parameters."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.entry is not None or _capturing() or not parameters:
            return
        losses, self._pending = self._pending, []
        _, steps = self._seen.setdefault(id(parameters[0]), (parameters[0], []))
        steps.append(losses)
        if len(steps) < STEPS:
            return
        digest, squares = hashlib.sha256(), 0.0
        for parameter in parameters:
            values = parameter.detach().cpu().contiguous()
            squares += float(values.double().square().sum())
            digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
        self.entry = {
            "losses": steps,
            "digest": digest.hexdigest(),
            "norm": squares**0.5,
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }
        self._seen.clear()
        if self._stop:
            raise Enough


def _capturing() -> bool:
    # CUDA graphs are CUDA's alone.
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def recording(stop: bool = False) -> Iterator[FirstSteps]:
    """Note the first steps of the training inside; with `stop` it ends with them."""
    first = FirstSteps(stop)
    backward = torch.Tensor.backward

    def noting(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        first.differentiated(loss)
        backward(loss, *arguments, **options)

    handle = register_optimizer_step_post_hook(lambda optimizer, *_: first.stepped(optimizer))
    try:
        with mock.patch.object(torch.Tensor, "backward", noting), suppress(Enough):
            yield first
    finally:
        handle.remove()
