"""The first steps of a training: kept with its record, and run again to see whether it still holds.

A training marks where it begins by `watched`; while somebody is `recording`, its optimizer's first
steps are noted there. Nothing is noted, and nothing costs time, where nobody records.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS = 8


class Enough(BaseException):
    """All steps that were asked for were made; not an error, and nobody's to catch."""


@dataclass
class FirstSteps:
    """What the first steps came to.

    Attributes:
        count: How many are noted.
        stop: Whether the training ends with them, by `Enough`.
        losses: Of each step, what was differentiated for it: one number, or one a micro-batch.
        digest: Of the optimizer's parameters after the last one; None before.
        norm: Of those parameters.
    """

    count: int = STEPS
    stop: bool = False
    losses: list[list[float]] = field(default_factory=lambda: [[]])
    digest: str | None = None
    norm: float | None = None

    @property
    def complete(self) -> bool:
        """Whether all steps were noted."""
        return self.digest is not None

    def fingerprint(self) -> dict[str, Any] | None:
        """Return what a record keeps; None where the training was shorter."""
        if not self.complete:
            return None
        return {
            "losses": self.losses[: self.count],
            "digest": self.digest,
            "norm": self.norm,
            "instructions": torch.backends.cpu.get_cpu_capability(),
        }

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.complete:
            return
        if len(self.losses) < self.count:
            self.losses.append([])
            return
        digest, squares = hashlib.sha256(), 0.0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                values = parameter.detach().cpu().contiguous()
                squares += float(values.double().square().sum())
                digest.update(values.view(torch.uint8).numpy().tobytes())
        self.digest, self.norm = digest.hexdigest(), squares**0.5
        if self.stop:
            raise Enough


_recording: FirstSteps | None = None


@contextmanager
def recording(stop: bool = False) -> Iterator[FirstSteps]:
    """Note the first steps of the training inside; with `stop` it ends with them."""
    global _recording
    before, _recording = _recording, FirstSteps(stop=stop)
    try:
        yield _recording
    except Enough:
        pass
    finally:
        first, _recording = _recording, before
    assert first is not None


@contextmanager
def watched() -> Iterator[None]:
    """Mark a training: its steps count, those of probes and warm-ups before it do not."""
    first = _recording
    if first is None or first.complete:
        yield
        return
    backward = torch.Tensor.backward

    def noting(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        if not first.complete and loss.numel() == 1:
            first.losses[-1].append(float(loss.detach()))
        backward(loss, *arguments, **options)

    handle = register_optimizer_step_post_hook(first._stepped)
    torch.Tensor.backward = noting  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        handle.remove()
