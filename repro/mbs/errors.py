"""Named errors about mini-batches and arguments, and the checks that raise them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from repro.measure import accelerator, batches, is_out_of_memory
from repro.measure.checks import is_whole
from repro.measure.loss_parts import LossShapeError

MicroBatchError = batches.BatchError  # of which all others are, also those of `repro.measure`


class MicroBatchSizeError(MicroBatchError):
    """The micro-batch size is neither a whole number of at least 1 nor ``"auto"``."""


class NondeterministicModelError(MicroBatchError):
    """The second of two passes computed outputs other than the first's."""


class HookError(MicroBatchError):
    """A parameter has a hook that cannot be called once per mini-batch."""


class DistributedModelError(MicroBatchError):
    """The model's distribution over processes does not support the requested arguments."""


class NonFiniteLossError(MicroBatchError):
    """The loss is infinite or not a number."""


def checked_size(size: Any) -> int | None:
    """Return a micro-batch size, None for ``"auto"``."""
    if isinstance(size, str) and size == "auto":
        return None
    if not is_whole(size, 1):
        raise MicroBatchSizeError(
            f"micro_batch_size is {size!r}; give a whole number of at least 1, or 'auto'"
        )
    return int(size)


@contextmanager
def explained(bound: tuple[int, int], total: int) -> Iterator[None]:
    """Add a note on micro-batches to an error of the model or the loss."""
    count = bound[1] - bound[0]
    try:
        yield
    except (ValueError, RuntimeError, IndexError) as error:
        if not isinstance(error, MicroBatchError) and count < total and not is_out_of_memory(error):
            error.add_note(
                f"a micro-batch has {count} of the mini-batch's {total} samples. Name in shared= "
                f"what belongs to the whole mini-batch, and give in the targets what the loss "
                f"knows of single samples. BatchNorm cannot train on one sample: give a "
                f"micro_batch_size of which none is left over (2 leaves one of an odd number)"
            )
        raise


def resolve_device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the device, with its index, on which the model's parameters must be."""
    if not isinstance(model, nn.Module):
        kind = getattr(model, "__name__", type(model).__name__)
        raise MicroBatchError(
            f"model is {kind}, which is no module; what trains or decides by mini-batches goes "
            f"around it: stream inside θ-adaptive or dual-batch training (passes_fn=)"
        )
    parameter = next(model.parameters(), None)
    if device is None:
        return parameter.device if parameter is not None else torch.device("cpu")
    resolved = accelerator.resolve(device)
    if parameter is not None and parameter.device != resolved:
        raise ValueError(
            f"the model's parameters are on {parameter.device}, device is {resolved}; move the "
            f"model there first with model.to({str(resolved)!r})"
        )
    return resolved


def loss_of(loss_fn: Callable[..., Any], outputs: Any, targets: Any) -> torch.Tensor:
    """Return the loss, called without targets that are None; it must be a scalar tensor."""
    loss = loss_fn(outputs) if targets is None else loss_fn(outputs, targets)
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
    raise LossShapeError(
        f"loss_fn returned {got}; it must return a scalar tensor, the mean over the "
        f"micro-batch's samples (for a loss per sample, take its mean())"
    )
