"""All-or-nothing gradients: what lets a mini-batch be tried again after it ran out of memory."""

from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import nn

from repro.mbs.randomness import Randomness


class Transaction:
    """Run a backward pass so that it either happens whole or leaves no trace.

    On entry the gradients are set aside and new ones start from None, so that nothing is copied
    when they are None already. Leaving normally adds the new gradients to those set aside, in
    place. Leaving by an exception puts back the gradients (the very tensors), the buffers
    (BatchNorm's running statistics among them; the very tensors, where a module
    replaces its own) and the random number generators.

    A `torch.amp.GradScaler` needs nothing put back: scaling a loss does not change its state.

    Args:
        parameters: Those whose gradients are accumulated, each once.
        buffers: Those that a forward pass may change.
        randomness: The random number generators.
        keep: Whether leaving normally keeps what was done; a probe puts everything back.
        copy_gradients: Set copies of the gradients aside, for gradients that lie in memory which
            the backward pass writes, as views of `DistributedDataParallel`'s buckets do.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buffers: "Buffers",
        randomness: Randomness,
        keep: bool = True,
        copy_gradients: bool = False,
    ) -> None:
        self._keep = keep
        self._copy_gradients = copy_gradients
        self._parameters = parameters
        self._buffers = buffers
        self._randomness = randomness

    def __enter__(self) -> "Transaction":
        # First what may run out of memory, while nothing has changed yet.
        self._saved_buffers = self._buffers.copies()
        self._gradients = [
            p.grad.clone() if self._copy_gradients and p.grad is not None else p.grad
            for p in self._parameters
        ]
        self._states = self._randomness.get()
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
            self._buffers.write(self._saved_buffers)
            self._randomness.set(self._states)
        del self._gradients, self._saved_buffers


class Buffers:
    """The buffers of modules, which a forward pass may write or replace.

    Args:
        modules: Those whose own buffers are meant, without what they contain.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._entries = [
            (module._buffers, name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
        ]
        buffers = (buffer for _, _, buffer in self._entries)
        self._tensors = list({id(b): b for b in buffers if b is not None}.values())

    def copies(self) -> list[torch.Tensor]:
        """Return copies of the values."""
        return copy_tensors(self._tensors)

    def write(self, copies: Sequence[torch.Tensor]) -> None:
        """Put back the buffers of before, with these values."""
        for buffers, name, buffer in self._entries:
            if buffers.get(name) is not buffer:
                buffers[name] = buffer
        write_tensors(self._tensors, copies)


def parameters_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters to train of these modules themselves, tied ones once.

    Several times faster than walking the module tree, and done for each mini-batch.
    """
    parameters = (p for module in modules for p in module._parameters.values())
    return list({id(p): p for p in parameters if p is not None and p.requires_grad}.values())


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
