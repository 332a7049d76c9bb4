"""A check, before the first mini-batch is computed, that pieces of its loss add up to it."""

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from repro.adaptive.losses import parts_of, weighted
from repro.measure import accelerator
from repro.measure.batches import Batch, call_model, leaves_of, replaced, to_device
from repro.measure.precision import rounds_to_tf32

LossCheck = Literal["first", "off"]
_SAMPLES = 6
# Of what rounding may differ; what the check is for differs in the first digits.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class LossCheckError(ValueError):
    """A loss is not that of the mini-batch where it is computed in pieces."""


def check_loss_adds_up(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Batch,
    weights: Any,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
) -> bool:
    """Compare the loss of a few samples as a whole with that of two unequal parts.

    Compared are its value and its gradient by the model's outputs; of a loss that the model
    computes itself the value. The model is called without a graph and in evaluation mode (in
    training mode where its outputs are of another form there). Nothing stays changed: buffers,
    modes and generators are as before. No process waits for another, and all decide the same.

    Args:
        model: On the device.
        loss_fn: The loss.
        batch: The mini-batch; of it those samples that differ most in what losses tend to weigh
            by, such as ignored labels.
        weights: What each sample counts, or None.
        device: The device.
        precision: Makes the context of the forward pass.

    Returns:
        Whether the check could be made. It says nothing of fewer than three samples, of models
        that draw random numbers in evaluation mode or cannot be called in it and compute their
        loss themselves, and of losses that are not finite.

    Raises:
        LossCheckError: They differ.
    """
    if batch.num_samples < 3:
        return False
    order = _telling(batch)
    few = max(1, len(order) // 3)
    parts = [batch.take(order[:few]), batch.take(order[few:])]
    whole = batch.take(order)
    ends = [(0, few), (few, len(order))]
    if weights is not None:
        weights = torch.as_tensor(weights, dtype=torch.float64)[order]
    factors = parts_of(loss_fn, whole[1], weights, len(order), ends)

    def loss_of(outputs: Any, targets: Any) -> Tensor:
        with precision():
            if targets is None:
                return loss_fn(outputs)
            return loss_fn(outputs, to_device(targets, device))

    def forward(inputs: Any) -> Any:
        with torch.no_grad(), precision():
            return call_model(model, to_device(inputs, device))

    for training in (False, True):
        try:
            with _unchanged(model, loss_fn, training, device):
                before = _generators(device)
                outputs = forward(whole[0])
                drawn_from = _generators(device)
                compared = _by_outputs(
                    loss_of, outputs, whole[1], [p[1] for p in parts], ends, factors
                )
                if compared is None:  # the model's own loss
                    drawn_from = before
                    if training or _mixes(model):
                        break
                    with torch.no_grad():
                        losses = [loss_of(outputs, whole[1])]
                        losses += [loss_of(forward(x), t) for x, t in parts]
                    compared = _Compared.of(losses, factors, outputs)
                if _generators(device) != drawn_from:
                    break
        except Exception:
            # A model may be unable to evaluate, or a loss need what only training gives; what
            # fails in any case fails in the training step, with an error of its own.
            continue
        if not compared.is_finite:
            return False
        compared.check(_tolerance(model, outputs, device, precision), (few, len(order)))
        return True
    warnings.warn(
        "it could not be checked whether the loss of a mini-batch is the mean of its parts' losses "
        "(the loss or the model draws random numbers, needs more samples, or cannot be called in "
        "evaluation mode); where it is no mean over samples give weights=; check='off' checks "
        "nothing",
        UserWarning,
        stacklevel=3,
    )
    return True


class _Compared:
    """A loss as a whole and in parts."""

    def __init__(self, value: float, combined: float, off: float, scale: float) -> None:
        self.value, self.combined, self.off, self.scale = value, combined, off, scale
        self.is_finite = math.isfinite(value)

    @classmethod
    def of(
        cls,
        losses: Sequence[Tensor],
        factors: Sequence[float | Tensor],
        outputs: Any,
        gradients: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ()),
    ) -> "_Compared":
        whole = float(losses[0].detach())
        each = [
            float(weighted(loss.detach(), part))
            for loss, part in zip(losses[1:], factors, strict=True)
        ]
        combined = sum(each)
        # Where parts cancel, they are exact to the rounding of the outputs only.
        largest = [float(leaf.detach().abs().max()) for leaf in _floats(outputs) if leaf.numel()]
        scale = max(abs(whole), *map(abs, each), 1e-3 * max(largest, default=0.0), 1e-30)
        off = abs(whole - combined) / scale
        for one, other in zip(*gradients, strict=True):
            a, b = one.double(), other.double()
            norm = float(a.norm())
            size = max(norm, float(b.norm()))
            if math.isfinite(norm) and size > 0:
                off = max(off, float((a - b).norm()) / size)
        # A part that is not finite, such as a mean over no target, makes it all so.
        return cls(whole, combined, off if not math.isnan(off) else math.inf, scale)

    def check(self, tolerance: float, counts: tuple[int, int]) -> None:
        if self.off <= tolerance:
            return
        first, number = counts
        off = f"{self.off:.2g}" if math.isfinite(self.off) else "not finite, and so wholly"
        raise LossCheckError(
            f"the loss of {number} samples of the mini-batch is {self.value:.6g} at once and "
            f"{self.combined:.6g} in parts of {first} and {number - first}, as processes and "
            f"micro-batches compute it (value or gradient off by {off} of its size): it is no mean "
            "over samples. Give weights= to step, what each sample counts in the loss, such as its "
            "tokens that are not ignored or its classes' weights; or one of torch's own losses, "
            "whose class weights, ignored labels and sums are known; a loss that compares samples "
            "or takes a root of their mean cannot be divided. check='off' computes it all the same"
        )


def _by_outputs(
    loss_of: Callable[[Any, Any], Tensor],
    outputs: Any,
    targets: Any,
    targets_of_parts: Sequence[Any],
    ends: Sequence[tuple[int, int]],
    factors: Sequence[float | Tensor],
) -> _Compared | None:
    """Compare losses of given outputs; None where the loss is not a function of their samples."""
    count = ends[-1][1]
    leaves = leaves_of(outputs)
    wanted = [leaf.detach().requires_grad_() if _is_float(leaf) else leaf for leaf in leaves]
    divided = [
        isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count for leaf in leaves
    ]
    by = [leaf for leaf in wanted if _is_float(leaf)]
    if not by:
        return None

    def gradients(losses: list[Tensor], factors: Sequence[float | Tensor]) -> list[Tensor | None]:
        total = torch.stack(
            [weighted(loss, part).double() for loss, part in zip(losses, factors, strict=True)]
        ).sum()
        if not total.requires_grad:
            return [None] * len(by)
        return list(torch.autograd.grad(total, by, allow_unused=True))

    with torch.enable_grad():
        # Copies, since losses may work in place.
        together = loss_of(replaced(outputs, [_copied(leaf) for leaf in wanted]), targets)
        of_whole = gradients([together], [1.0])
        used = [gradient is not None for gradient in of_whole]
        samples = [d for leaf, d in zip(wanted, divided, strict=True) if _is_float(leaf)]
        if not any(used) or any(u and not s for u, s in zip(used, samples, strict=True)):
            return None
        losses = []
        for (start, stop), target in zip(ends, targets_of_parts, strict=True):
            piece = [
                _copied(leaf[start:stop] if by_sample else leaf)
                for leaf, by_sample in zip(wanted, divided, strict=True)
            ]
            losses.append(loss_of(replaced(outputs, piece), target))
        of_parts = gradients(losses, factors)
    pairs = [
        (a, torch.zeros_like(a) if b is None else b)
        for a, b in zip(of_whole, of_parts, strict=True)
        if a is not None
    ]
    split: Any = tuple(zip(*pairs, strict=True))
    return _Compared.of([together, *losses], factors, outputs, split)


@contextmanager
def _unchanged(
    model: nn.Module, loss_fn: Any, training: bool, device: torch.device
) -> Iterator[None]:
    """Evaluate, and leave modes, buffers and generators as they were.

    Raises:
        _NotComparableError: Random numbers were drawn, which differ between whole and parts.
    """
    modules = list(model.modules())
    modules += list(loss_fn.modules()) if isinstance(loss_fn, nn.Module) else []
    modes = [(module, module.training) for module in modules]
    buffers = [(b, b.detach().clone()) for m in modules for b in m.buffers(recurse=False)]
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with accelerator.forked_rng(device):
            if not training:
                for module, _ in modes:
                    module.training = False
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def _generators(device: torch.device) -> tuple[Any, ...]:
    states = [state for state in accelerator.get_rng(device) if state is not None]
    of_numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    return *(bytes(state.numpy()) for state in states), random.getstate(), repr(of_numpy)


def _mixes(model: nn.Module) -> bool:
    """Whether a layer mixes samples in evaluation mode, too."""
    return any(isinstance(m, _BatchNorm) and m.running_mean is None for m in model.modules())


def _telling(batch: Batch) -> list[int]:
    """Return samples, those first of which losses that weigh samples tend to count most.

    Ignored labels and padding show as integers below or at zero, rare classes as large ones.
    """
    keys = np.zeros((3, batch.num_samples))
    for path, leaf in batch.tensors():
        tensor = torch.as_tensor(leaf)
        if tensor.layout != torch.strided or tensor.is_complex():
            continue
        if tensor.is_floating_point() and path[0] == "inputs":
            continue
        flat = tensor.detach().reshape(batch.num_samples, -1).double().cpu().numpy()
        keys[0] += (flat < 0).sum(1)
        keys[1] += (flat == 0).sum(1)
        keys[2] += flat.sum(1) if path[0] == "targets" else 0
    order = np.lexsort(keys[::-1])
    most = min(len(order), _SAMPLES)
    few = most // 3
    return [*order[:few].tolist(), *order[len(order) - (most - few) :].tolist()]


def _tolerance(
    model: nn.Module,
    outputs: Any,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
) -> float:
    kinds = {leaf.dtype for leaf in _floats(outputs)} | {p.dtype for p in model.parameters()}
    with precision():
        if torch.is_autocast_enabled(device.type):
            kinds.add(torch.get_autocast_dtype(device.type))
    largest = max((_TOLERANCE.get(kind, 0.0) for kind in kinds), default=0.0)
    tf32 = device.type == "cuda" and rounds_to_tf32("matmul")
    return max(largest or _TOLERANCE[torch.float32], 1e-2 if tf32 else 0.0)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _floats(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(tree) if _is_float(leaf)]


def _copied(leaf: Any) -> Any:
    return leaf.clone() if _is_float(leaf) else leaf
