"""Guards around a worker's steps: refused losses and optimizers, and buffers that no state has."""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from repro.dualbatch.checks import largest
from repro.dualbatch.shares import Share


class UnsavedBuffers:
    """The buffers of a model that are registered with ``persistent=False``, as they were at first.

    A state does not carry them, so that a worker who kept the changes that a forward makes in them
    would train otherwise than one that takes its place. Attributes that are no buffers are not
    seen.

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
        """Name of the first one that became NaN; infinities are common in masks."""
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


def storages(model: nn.Module) -> set[int]:
    """Numbers of the memory that the tensors of a model's state have."""
    tensors = (t for t in model.state_dict().values() if isinstance(t, Tensor))
    kept = (t for t in tensors if not nn.parameter.is_lazy(t) and t.layout is torch.strided)
    # Not by address: out-of-core training moves tensors whose address nobody took.
    with torch._C.DisableTorchFunction():
        return {t.untyped_storage()._cdata for t in kept}


def buffers_of(module: Any) -> dict[str, Tensor]:
    """Copies of the buffers in a module's state; none of a function."""
    if not isinstance(module, nn.Module):
        return {}
    own = {name for name, _ in module.named_buffers()} & module.state_dict().keys()
    return {n: b.detach().clone() for n, b in module.named_buffers() if n in own}


def is_mean(loss: Any) -> bool:
    """Whether a loss is one real number."""
    return isinstance(loss, Tensor) and not loss.dim() and loss.is_floating_point()


def described(loss: Any) -> str:
    """Type and shape of a loss, in words."""
    return f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else str(type(loss))


def check_loss(loss: Any) -> None:
    """Raise a ValueError where a loss is not one real number that depends on the weights."""
    if not is_mean(loss):
        raise ValueError(
            f"loss_fn returns {described(loss)}; give the mean over the samples, one number as a "
            "floating tensor of shape (), such as with reduction='mean' or .mean()"
        )
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returns a loss that depends on no weight which is trained; leave detach(), "
            "item() and no_grad() out of forward and loss"
        )


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise a ValueError where an optimizer is not one of all weights of a model to be trained."""
    groups, kind = getattr(optimizer, "param_groups", None), type(optimizer).__name__
    if not isinstance(groups, list) or not hasattr(optimizer, "step"):
        raise ValueError(
            f"optimizer_fn returns {kind}; give one optimizer, such as "
            "torch.optim.SGD(parameters, lr)"
        )
    taken = {id(parameter) for group in groups for parameter in group["params"]}
    if taken - {id(parameter) for parameter in model.parameters()}:
        raise ValueError(
            f"optimizer_fn makes {kind} of parameters that are not the worker's; give it those "
            "that optimizer_fn is called with"
        )
    named = model.named_parameters()
    if left_out := [name for name, p in named if p.requires_grad and id(p) not in taken]:
        raise ValueError(
            f"optimizer_fn leaves parameters out that require gradients "
            f"({', '.join(left_out[:5])}); give the optimizer all that it is called with, or have "
            "model_fn freeze those by requires_grad_(False)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"optimizer_fn makes {kind}, whose step() needs a closure, which workers have not; "
            "take one that steps without"
        )
    if any("initial_lr" in group for group in groups):
        raise ValueError(
            "optimizer_fn attaches a learning-rate scheduler, which nobody steps; leave it out: "
            "the rates are those of the schedule (Stage, warmup_epochs)"
        )


def in_words(changed: Sequence[str]) -> str | None:
    """Say which parts of users' functions changed, and what to do; None for nothing."""
    if not changed:
        return None
    return (
        f"{', '.join(changed[:5])} changed as the training went on, which is kept neither by "
        "worker nor in a checkpoint; keep what a loss remembers in buffers of a module that is "
        "loss_fn itself, draw what is random by Share.seed, and log to lists, which may grow"
    )


@contextmanager
def single_samples_named(share: Share, count: int, whose: str) -> Iterator[None]:
    """Explain torch's error where batch normalization gets a single sample."""
    try:
        yield
    except ValueError as error:
        # With several values of each channel, as of images, a single sample is trained on.
        if count != 1 or "more than 1 value per channel" not in str(error):
            raise
        samples, batch = len(share.indices), share.batch_size
        possible = [size for size in range(2, samples + 1) if samples % size != 1]
        near = sorted(sorted(possible, key=lambda size: abs(size - batch))[:3])
        raise ValueError(
            f"a share of {samples} samples in batches of {batch} ({whose}) has a batch of one "
            "sample, on which batch normalization cannot train; give a plan with another batch "
            f"size ({', '.join(map(str, near)) or 'and more samples'} would do) or other shares"
        ) from error
