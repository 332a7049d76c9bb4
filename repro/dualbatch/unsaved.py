"""Buffers that a model's state leaves out: what a forward changes in them ends with the share."""

import math

import torch
from torch import Tensor, nn

from repro.dualbatch.checks import largest


class UnsavedBuffers:
    """The buffers of a model that are registered with ``persistent=False``, as they were at first.

    A state does not carry them, so that a worker who kept what a forward changes in them would
    train otherwise than one that takes its place. What a forward keeps in attributes that are no
    buffers nobody sees.

    Args:
        model: With the initial buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._initial: list[tuple[str, nn.Module, str, Tensor, Tensor]] = []
        for prefix, module in model.named_modules():
            for name in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers.get(name)
                if buffer is None:  # made by the forward
                    continue
                sizes = zip(buffer.shape, buffer.stride(), strict=True)
                if any(size > 1 and not stride for size, stride in sizes):
                    buffer = module._buffers[name] = buffer.clone()  # expanded: cannot be written
                full = f"{prefix}.{name}" if prefix else name
                self._initial.append((full, module, name, buffer, buffer.detach().clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """Put the initial values back."""
        for _, module, name, buffer, initial in self._initial:
            if buffer.shape != initial.shape:
                buffer.resize_(initial.shape)
            buffer.copy_(initial)
            module._buffers[name] = buffer

    def not_a_number(self) -> str | None:
        """Return the name of the first one that became NaN; infinities are common in masks."""
        now = {
            full: (buffer, initial)
            for full, module, name, _, initial in self._initial
            if (buffer := module._buffers.get(name)) is not None and buffer.is_floating_point()
        }
        if math.isfinite(largest({full: buffer for full, (buffer, _) in now.items()})):
            return None
        bad = (
            n for n, (buffer, first) in now.items() if buffer.isnan().any() > first.isnan().any()
        )
        return next(bad, None)
