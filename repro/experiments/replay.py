"""The first steps of a training: kept with its record, and compared when it is computed again.

Nothing in a training knows of it: while somebody is `recording`, every optimizer tells of its
steps. The training is the model that first makes enough of them; probes of memory and warm-ups
before it make two or three. Then nothing is noted any more. Steps inside a captured graph are not
seen: such a training keeps no first steps.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 8


class Enough(BaseException):
    """All steps that were asked for were made; not an error, and nobody's to catch."""


class FirstSteps:
    """The losses and weights of the first steps of a training.

    Args:
        stop: Whether the training ends with them, by `Enough`.

    Attributes:
        losses: Of each step, the losses that were differentiated: one number, or one a micro-batch.
        digest: Of the parameters after the last one; None where no model made so many.
        norm: Of those parameters.
    """

    def __init__(self, stop: bool = False) -> None:
        self.losses: list[list[float]] = []
        self.digest: str | None = None
        self.norm: float | None = None
        self._stop = stop
        self._pending: list[float] = []
        # By model: itself, so that its address is not used again, and its steps' losses.
        self._seen: dict[int, tuple[torch.Tensor, list[list[float]]]] = {}

    def fingerprint(self) -> dict[str, Any] | None:
        """Return the record's entry; None where no model made enough steps."""
        if self.digest is None:
            return None
        return {
            "losses": self.losses,
            "digest": self.digest,
            "norm": self.norm,
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }

    def differentiated(self, loss: torch.Tensor) -> None:
        """Note a loss of the step under way."""
        if self.digest is None and loss.numel() == 1 and not loss.is_meta and not _capturing():
            self._pending.append(float(loss.detach()))

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the end of a step, and with the last one the parameters."""
        if self.digest is not None or _capturing():
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not parameters:
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
        self.losses, self.digest, self.norm = steps, digest.hexdigest(), squares**0.5
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
    torch.Tensor.backward = noting  # type: ignore[assignment, method-assign]
    try:
        yield first
    except Enough:
        pass
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        handle.remove()
