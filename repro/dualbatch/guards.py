"""Guards around a worker's steps: refused optimizers, and buffers outside the state."""

from typing import Any

import torch
from torch import Tensor, nn


class UnsavedBuffers:
    """The initial values of a model's buffers registered with ``persistent=False``.

    A state does not contain them: a worker that kept their changes by forward passes would train
    differently from its replacement. Attributes that are no buffers are not restored.

    Args:
        model: The model with its initial buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._initial: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for module in model.modules():
            for name in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers.get(name)
                if buffer is not None:  # else the forward pass makes it
                    # An expanded buffer cannot be written.
                    module._buffers[name] = buffer = buffer.contiguous()
                    self._initial.append((module, name, buffer, buffer.detach().clone()))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the initial values in place, since captured graphs refer to these tensors."""
        for module, name, buffer, initial in self._initial:
            buffer.resize_(initial.shape).copy_(initial)
            module._buffers[name] = buffer


def storages(model: nn.Module) -> set[int]:
    """Identifiers of the storages of a model's state."""
    tensors = (t for t in model.state_dict().values() if isinstance(t, Tensor))
    kept = (t for t in tensors if not nn.parameter.is_lazy(t) and t.layout is torch.strided)
    # Not by address: out-of-core training may move tensors until their address is read.
    with torch._C.DisableTorchFunction():
        return {t.untyped_storage()._cdata for t in kept}


def buffers_of(module: Any) -> dict[str, Tensor]:
    """Copies of the buffers in a module's state; empty for a function."""
    if not isinstance(module, nn.Module):
        return {}
    saved = module.state_dict()
    return {n: b.detach().clone() for n, b in module.named_buffers() if n in saved}


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise a ValueError unless an optimizer has exactly the trainable weights of a model."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer_fn returns {kind}; give one optimizer of torch")
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if taken - {id(parameter) for parameter in model.parameters()}:
        raise ValueError(
            f"optimizer_fn makes {kind} of parameters that are not the worker's; give it those "
            "that optimizer_fn is called with"
        )
    named = model.named_parameters()
    if left_out := [name for name, p in named if p.requires_grad and id(p) not in taken]:
        raise ValueError(
            f"optimizer_fn leaves parameters out that require gradients "
            f"({', '.join(left_out[:5])}); give it all, or freeze those in model_fn"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            "optimizer_fn attaches a learning-rate scheduler, which nobody steps; leave it out: "
            "the rates are those of the schedule (Stage, warmup_epochs)"
        )
