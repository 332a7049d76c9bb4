"""What gradients say of a batch size: their norms, their noise, and the cost F itself.

None of these functions changes the model: parameters, gradients, buffers, mode and random state
are as they were when a call ends, whether it raises or not.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from repro.measure import accelerator

LossFunction = Callable[[Tensor, Tensor], Tensor]
Data = Any  # inputs and targets, (N, ...) each, or a loader with `set_batch_size`


@dataclass(frozen=True)
class GradientNorm:
    """l2-norm of the averaged gradient at one batch size, over several mini-batches.

    Attributes:
        batch_size: Samples of a mini-batch.
        mean: Mean norm.
        error: Its standard error; NaN for a single mini-batch.
    """

    batch_size: int
    mean: float
    error: float


def gradient_norms(
    model: nn.Module,
    data: Data,
    batch_sizes: Sequence[int],
    *,
    loss_fn: LossFunction = nn.functional.cross_entropy,
    batches: int = 8,
    seed: int = 0,
) -> list[GradientNorm]:
    """Measure ‖∇w‖ at the model's present parameters for several batch sizes (section III-D).

    Args:
        model: In training mode while it is measured.
        data: Inputs (N, ...) and targets (N, ...), from which mini-batches are drawn without
            replacement; or a loader with `set_batch_size`, of which each size takes the first
            mini-batches of an epoch.
        batch_sizes: Distinct sizes.
        loss_fn: Mean loss over a mini-batch.
        batches: Mini-batches of each size, fewer where the data has no more.
        seed: Of the draws, and of the model's own random numbers.

    Returns:
        One norm per batch size, in ascending order.

    Raises:
        ValueError: A size is below 1 or above the number of samples, or one is given twice.
    """
    sizes = sorted(batch_sizes)
    if not sizes or sizes[0] < 1 or len(set(sizes)) < len(sizes) or batches < 1:
        raise ValueError(
            f"batch sizes are {list(batch_sizes)} and batches {batches}; give at least one size, "
            "distinct ones of at least 1, and at least 1 mini-batch"
        )
    results = []
    with _untouched(model, seed):
        for size in sizes:
            norms = [
                float(_square(_gradient(model, loss_fn, inputs, targets)) ** 0.5)
                for inputs, targets in _draw(data, size, batches, seed)
            ]
            mean = sum(norms) / len(norms)
            spread = sum((norm - mean) ** 2 for norm in norms)
            error = (spread / (len(norms) - 1) / len(norms)) ** 0.5 if norms[1:] else float("nan")
            results.append(GradientNorm(size, mean, error))
    return results


def stable_batch(norms: Sequence[GradientNorm], tolerance: float = 0.10) -> int:
    """Return the largest batch size up to which norms are similar to that of the smallest.

    Section III-D: "if two batch sizes give a similar l2-norm of the averaged gradients, it implies
    they have a similar maximum allowed variance"; what is similar the paper leaves open.

    Args:
        norms: What `gradient_norms` returns.
        tolerance: Share by which a norm may lie below that of the smallest batch size.

    Raises:
        ValueError: There is no norm, or `tolerance` is not in [0, 1).
    """
    if not norms or not 0 <= tolerance < 1:
        raise ValueError(
            f"{len(norms)} norms and a tolerance of {tolerance}; give at least one norm and a "
            "share from 0 to below 1"
        )
    ordered = sorted(norms, key=lambda norm: norm.batch_size)
    best = ordered[0].batch_size
    for norm in ordered[1:]:
        if norm.mean < (1 - tolerance) * ordered[0].mean:
            break
        best = norm.batch_size
    return best


def max_stable_batch(
    model: nn.Module,
    data: Data,
    batch_sizes: Sequence[int],
    *,
    loss_fn: LossFunction = nn.functional.cross_entropy,
    tolerance: float = 0.10,
    batches: int = 8,
    seed: int = 0,
) -> int:
    """Return the maximum stable batch size B_s at the model's present parameters (section III-D).

    Norms fall with the batch size as averaging takes noise away, ‖∇w‖² ≈ |G|² + tr(Σ)/B. At first,
    where all gradients point the same way, every size is stable; later, where noise dominates,
    few are. So ask where the answer is to hold. See `gradient_norms` and `stable_batch` for the
    arguments and errors.
    """
    norms = gradient_norms(model, data, batch_sizes, loss_fn=loss_fn, batches=batches, seed=seed)
    return stable_batch(norms, tolerance)


def noise_scale(
    model: nn.Module,
    data: Data,
    batch_size: int,
    *,
    loss_fn: LossFunction = nn.functional.cross_entropy,
    batches: int = 8,
    seed: int = 0,
) -> float:
    """Return the simple noise scale tr(Σ) / |G|² at the present parameters, in samples.

    From n mini-batches of B samples: the mean of |g_B|² and |mean g_B|², which is |g_nB|², give
    unbiased estimates of |G|² and tr(Σ) (McCandlish et al., arXiv:1812.06162, appendix A.1).
    Infinite where the estimate of |G|² is not above 0: noise is all that is seen.

    Args:
        model: In training mode while it is measured.
        data: As in `gradient_norms`.
        batch_size: B, the small batch.
        loss_fn: Mean loss over a mini-batch.
        batches: n, at least 2.
        seed: As in `gradient_norms`.

    Raises:
        ValueError: `batch_size` is below 1, or there are fewer than 2 mini-batches of it.
    """
    small, mean, count = 0.0, None, 0
    with _untouched(model, seed):
        for inputs, targets in _draw(data, batch_size, batches, seed):
            gradient = _gradient(model, loss_fn, inputs, targets)
            small += float(_square(gradient))
            if mean is None:  # parameters may share one tensor of a gradient
                mean = [part.clone() for part in gradient]
            else:
                torch._foreach_add_(mean, gradient)
            count += 1
    if count < 2 or mean is None:
        raise ValueError(
            f"the noise of gradients needs at least 2 mini-batches, and there is {count} of "
            f"{batch_size} samples; give a smaller batch size, or more data"
        )
    square_small = small / count
    square_large = float(_square(mean)) / count**2
    large = batch_size * count
    signal = (large * square_large - batch_size * square_small) / (large - batch_size)
    noise = (square_small - square_large) / (1 / batch_size - 1 / large)
    return noise / signal if signal > 0 else math.inf


@torch.no_grad()
def full_cost(
    model: nn.Module,
    data: Data,
    batch_size: int,
    *,
    loss_fn: LossFunction = nn.functional.cross_entropy,
    seed: int = 0,
) -> float:
    """Return F(w), the mean loss over all of the data at the present parameters (equation 1).

    In training mode, in which the cost is minimised; BatchNorm's statistics are put back.

    Args:
        model: A network whose loss is a mean over samples.
        data: As in `gradient_norms`, or any iterable of mini-batches, such as a DataLoader, whose
            own batch size then counts; all of it is used, or all that a loader yields.
        batch_size: Samples computed at a time.
        loss_fn: Mean loss over a mini-batch.
        seed: Of the model's own random numbers.

    Raises:
        ValueError: There is no data.
    """
    samples = 0
    device = next(model.parameters()).device
    with _untouched(model, seed):
        sums = torch.zeros((), dtype=torch.float64, device=device)
        for inputs, targets in _draw(data, batch_size, None, None):
            sums += loss_fn(model(inputs.to(device)), targets.to(device)).double() * len(inputs)
            samples += len(inputs)
        total = float(sums)
    if not samples:
        raise ValueError("there is no data to compute the cost of; give at least one sample")
    return total / samples


def _gradient(
    model: nn.Module, loss_fn: LossFunction, inputs: Tensor, targets: Tensor
) -> list[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    loss = loss_fn(model(inputs.to(device)), targets.to(device))
    # Not by backward(): gradients that are there stay, and no hook runs.
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [
        torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)
    ]


def _square(gradient: Sequence[Tensor]) -> Tensor:
    norms = torch._foreach_norm(list(gradient))
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _draw(
    data: Data, size: int, batches: int | None, seed: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield whole mini-batches, at most `batches`; with None all of the data, the rest too."""
    if hasattr(data, "set_batch_size"):
        before, epoch = data.batch_size, getattr(data, "epoch", None)
        data.set_batch_size(size)
        try:
            for number, (inputs, targets) in enumerate(data):
                if batches is not None and (number == batches or len(inputs) < size):
                    if number == 0:
                        raise ValueError(
                            f"a batch size of {size} is above the data's {len(inputs)}"
                        )
                    return
                yield inputs, targets
        finally:
            data.set_batch_size(before)
            if epoch is not None:  # iterating began a new one
                data.set_epoch(epoch)
        return
    pair = isinstance(data, tuple | list) and len(data) == 2
    if not pair or not all(isinstance(part, Tensor) for part in data):
        if batches is not None:
            raise ValueError(
                f"data is a {type(data).__name__}; give a pair of tensors (inputs, targets), or a "
                "loader with set_batch_size such as repro.datasets.TensorLoader"
            )
        yield from data  # mini-batches of any size
        return
    inputs, targets = data
    count = len(inputs)
    if len(targets) != count:
        raise ValueError(f"{count} inputs but {len(targets)} targets; give one for each")
    if size < 1 or (batches is not None and size > count):
        raise ValueError(f"a batch size of {size}, and {count} samples; give 1 to {count}")
    if batches is None or seed is None:
        yield from zip(inputs.split(size), targets.split(size), strict=True)
        return
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for start in range(0, min(batches, count // size) * size, size):
        chosen = order[start : start + size].to(inputs.device)
        yield inputs[chosen], targets[chosen]


@contextmanager
def _untouched(model: nn.Module, seed: int) -> Iterator[None]:
    """Put the model into training mode, and everything back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    device = next(model.parameters()).device
    with accelerator.forked_rng(device):
        torch.manual_seed(seed)
        model.train()
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, saved in buffers:
                    buffer.copy_(saved)
            for module, training in modes:
                module.training = training
