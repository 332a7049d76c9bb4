"""All-or-nothing gradients: what lets a mini-batch be tried again after it ran out of memory."""

from collections import defaultdict
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
        parameters: Those whose gradients are accumulated, each once.
        buffers: Those that a forward pass may change.
        device: The device whose random number generator is saved beside the CPU's.
        keep: Whether leaving normally keeps what was done; a probe puts everything back.
        copy_gradients: Set copies of the gradients aside, for gradients that lie in memory which
            the backward pass writes, as views of `DistributedDataParallel`'s buckets do.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[torch.Tensor],
        device: torch.device,
        keep: bool = True,
        copy_gradients: bool = False,
    ) -> None:
        self._keep = keep
        self._copy_gradients = copy_gradients
        self._parameters = parameters
        self._buffers = buffers
        self._device = device

    def __enter__(self) -> "Transaction":
        # First what may run out of memory, while nothing has changed yet.
        self._saved_buffers = copy_tensors(self._buffers)
        self._gradients = [
            p.grad.clone() if self._copy_gradients and p.grad is not None else p.grad
            for p in self._parameters
        ]
        self._rng = get_rng(self._device)
        for parameter in self._parameters:
            parameter.grad = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        kept = kind is None and self._keep
        sums, terms = [], []
        for parameter, before in zip(self._parameters, self._gradients, strict=True):
            if kept and before is None:
                continue
            if kept and before is not None and parameter.grad is not None:
                sums.append(before)
                terms.append(parameter.grad)
            parameter.grad = before
        if sums:
            torch._foreach_add_(sums, terms)
        if not kept:
            write_tensors(self._buffers, self._saved_buffers)
            set_rng(self._device, self._rng)
        del self._gradients, self._saved_buffers


def tensors_of(modules: Sequence[nn.Module]) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """Return the parameters to train and the buffers of these modules themselves, tied ones once.

    Several times faster than walking the module tree, and done for each mini-batch.
    """
    parameters = (p for module in modules for p in module._parameters.values())
    buffers = (b for module in modules for b in module._buffers.values())
    return (
        list({id(p): p for p in parameters if p is not None and p.requires_grad}.values()),
        list({id(b): b for b in buffers if b is not None}.values()),
    )


def copy_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies, made by a few kernels however many tensors there are."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    write_tensors(copies, tensors)
    return copies


@torch.no_grad()
def write_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy `sources` into `targets`."""
    # One call per kind of tensor: a mixed list is copied tensor by tensor.
    alike: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]]
    alike = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        group = alike[target.device, target.dtype]
        group[0].append(target)
        group[1].append(source)
    for group in alike.values():
        torch._foreach_copy_(*group)


def get_rng(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the state of the CPU's generator and of a CUDA device's."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda


def set_rng(device: torch.device, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Set what `get_rng` returned."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
