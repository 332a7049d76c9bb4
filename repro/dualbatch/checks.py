"""Checks of arguments, models and optimizers, and of states and losses, which must be finite."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from repro.measure.checks import is_number


class NonFiniteError(FloatingPointError):
    """A worker's loss or weights became infinite or NaN; nothing of its share was merged.

    Attributes:
        worker: Number of the worker.
        epoch: Epoch of the share's setting, from 1; without a training loop around the
            `ParameterServer`, the number of the share.
        step: The first such mini-batch of the share, from 1; None without a training loop.
    """

    def __init__(
        self, what: str, worker: int, epoch: int, step: int | None, lr: float | None = None
    ) -> None:
        super().__init__(what, worker, epoch, step, lr)  # by which it is pickled
        self.worker, self.epoch, self.step = worker, epoch, step

    def __str__(self) -> str:
        what, worker, epoch, step, lr = self.args
        where = f"epoch {epoch}" if step is None else f"epoch {epoch}, step {step} of its share"
        rate = "" if lr is None else f" (it was {lr:g})"
        return (
            f"training diverged: {what} (worker {worker}, {where}); nothing of this share was "
            f"merged; lower the learning rate{rate}, or look for such values in data and loss"
        )


class ClusterError(RuntimeError):
    """A cluster cannot be reached, is too small or died, or an exception cannot cross it."""


def positive(name: str, value: Any) -> float:
    """A finite number above 0 as a float; anything else raises a ValueError."""
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name} is {value!r}; give a finite number above 0")
    return float(value)


def not_finite(state: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor with NaN or an infinity, or None."""
    found = defaultdict[torch.device, dict[str, Tensor]](dict)
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.numel():
            # On a CPU ten times as fast as isfinite; NaN propagates.
            ends = torch.stack(torch.aminmax(tensor.detach()))
            found[tensor.device][name] = ends.isfinite().all()
    finite = dict[str, bool]()
    for each in found.values():  # a device is waited for once
        finite |= zip(each, torch.stack([*each.values()]).tolist(), strict=True)
    return next((name for name in state if not finite.get(name, True)), None)


def storages(model: nn.Module) -> set[int]:
    """Identifiers of the storages of a model's parameters, and of the buffers that are saved."""
    tensors = list[Tensor | None](model.parameters())
    for module in model.modules():
        unsaved = module._non_persistent_buffers_set
        tensors += [buffer for name, buffer in module._buffers.items() if name not in unsaved]
    # Not of `state_dict()`, which may make tensors: the next ones would get their identifiers.
    kept = [t for t in tensors if t is not None and t.layout is torch.strided]
    # Not by address: out-of-core training may move tensors until their address is read.
    with torch._C.DisableTorchFunction():
        return {t.untyped_storage()._cdata for t in kept}


def check_initialized(model: nn.Module) -> None:
    """Raise a ValueError if lazy layers of a model have not made their tensors yet."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    if lazy := [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]:
        raise ValueError(
            f"model_fn's model has {', '.join(lazy[:5])}, of lazy layers, which have no shape yet; "
            "have model_fn call the model with a mini-batch before it returns it"
        )


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise a ValueError unless an optimizer has exactly the trainable weights of a model."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer_fn returns {kind}; give one optimizer of torch")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"optimizer_fn makes {kind}, whose step needs a closure; give another")
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
