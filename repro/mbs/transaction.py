"""All-or-nothing gradients: what lets a mini-batch be tried again after it ran out of memory."""

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import nn


class Transaction:
    """Run a backward pass so that it either happens whole or leaves no trace.

    On entry the gradients are set aside and new ones start from None, so that nothing is copied
    when they are None already. Leaving normally adds the new gradients to those set aside, in
    place. Leaving by an exception puts back the gradients (the very tensors), the buffers
    (BatchNorm's running statistics among them) and the random number generators.

    A `torch.amp.GradScaler` needs nothing put back: scaling a loss does not change its state.

    Args:
        parameters: Those whose gradients are accumulated.
        buffers: Those that a forward pass may change.
        device: The device whose random number generator is saved beside the CPU's.
        keep: Whether leaving normally keeps what was done; a probe puts everything back.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[torch.Tensor],
        device: torch.device,
        keep: bool = True,
    ) -> None:
        self._keep = keep
        self._parameters = parameters
        self._buffers = buffers
        self._device = device

    def __enter__(self) -> "Transaction":
        self._gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._saved_buffers = copy_tensors(self._buffers)
        self._rng = get_rng(self._device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None and self._keep:
            for parameter, before in zip(self._parameters, self._gradients, strict=True):
                if before is not None:
                    if parameter.grad is not None:
                        before.add_(parameter.grad)
                    parameter.grad = before
        else:
            for parameter, before in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = before
            write_tensors(self._buffers, self._saved_buffers)
            set_rng(self._device, self._rng)
        del self._gradients, self._saved_buffers


def copy_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies, made by a few kernels however many tensors there are."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    write_tensors(copies, tensors)
    return copies


@torch.no_grad()
def write_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy `sources` into `targets`."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def get_rng(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the state of the CPU's generator and of a CUDA device's."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda


def set_rng(device: torch.device, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Set what `get_rng` returned."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
