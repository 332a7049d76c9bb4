"""Measures of gradients that choose a batch size: norms, noise, and the cost F itself.

None of these functions changes the model or the loss: when a call ends, even by an error, all that
`repro.measure.untouched.Snapshot` lists is restored. A loss's modules are itself, its method's, and
those that it closes over or names.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from repro.adaptive.controller import DivergedError, checked_number
from repro.adaptive.loss_check import NOT_CHECKED, adds_up, few, is_torchs, loss_check, weighted
from repro.adaptive.model_guards import check_initialized
from repro.measure.batches import (
    Batch,
    BatchError,
    call_model,
    leaves_of,
    map_leaves,
    read_batch,
    to_device,
)
from repro.measure.checks import is_whole
from repro.measure.loss_parts import LossCheckError, is_sharded, known_loss, leaves_of_graph
from repro.measure.outputs import joined
from repro.measure.precision import widened
from repro.measure.telling import Novelty, telling_samples
from repro.measure.untouched import WithoutGraph, detached, modules_in, seed_all, untouched

LossFunction = Callable[[Tensor, Tensor], Tensor]
Data = Any  # inputs and targets, (N, ...) each, or a loader with `set_batch_size`


class NoiseScale(float):
    """A noise scale tr(Σ) / |G|² in samples, with both estimates."""

    noise: float  # tr(Σ)
    signal: float  # |G|²; not above 0 if noise hides the gradient

    def __new__(cls, noise: float, signal: float) -> "NoiseScale":
        """Divide the one by the other; infinite where the signal is not above 0, NaN where NaN."""
        scale = super().__new__(cls, math.inf if signal <= 0 else noise / signal)
        scale.noise, scale.signal = noise, signal
        return scale

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return self.noise, self.signal


@dataclass(frozen=True)
class GradientNorm:
    """l2-norm of the averaged gradient at one batch size, over several mini-batches."""

    batch_size: int
    mean: float
    error: float  # standard error of the mean; NaN for a single mini-batch


def gradient_norms(
    model: nn.Module,
    data: Data,
    batch_sizes: Sequence[int],
    *,
    loss_fn: LossFunction = nn.functional.cross_entropy,
    batches: int = 8,
    seed: int = 0,
) -> list[GradientNorm]:
    """Measure ‖∇w‖ at the model's current parameters for several batch sizes (section III-D).

    Args:
        model: The network, measured in training mode; if it is there already, layers that are in
            evaluation, such as a frozen BatchNorm, stay so.
        data: Inputs (N, ...) and targets (N, ...), from which mini-batches are drawn without
            replacement; or a loader with `set_batch_size`, which gives the first mini-batches of
            an epoch for each size.
        batch_sizes: Distinct sizes.
        loss_fn: Mean loss over a mini-batch.
        batches: Mini-batches of each size, fewer if the data ends.
        seed: Seed of the draws, and of the model's own random numbers.

    Returns:
        One norm per batch size, in ascending order.
    """
    given = list(batch_sizes)
    sizes = sorted({int(size) for size in given if is_whole(size, 1)})
    if not sizes or len(sizes) < len(given) or batches < 1:
        raise ValueError(
            f"batch sizes are {given} and batches {batches}; give at least one size, distinct "
            "whole numbers of at least 1, and at least 1 mini-batch"
        )
    check_initialized(model, trained=True)
    results = []
    with _untouched(model, loss_fn, seed):
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
    """Return the largest batch size up to which norms are similar to the smallest size's norm.

    Section III-D: "if two batch sizes give a similar l2-norm of the averaged gradients, it implies
    they have a similar maximum allowed variance"; the paper does not define "similar": here a norm
    may lie below the smallest batch size's by a share `tolerance`.
    """
    checked_number("tolerance", tolerance, lambda x: 0 <= x < 1, "from 0 to below 1")
    if not norms:
        raise ValueError("there is no norm to compare; give at least one of gradient_norms")
    if not all(math.isfinite(norm.mean) for norm in norms):
        raise DivergedError(f"norms are not finite: {norms}; measure at parameters that are")
    ordered = sorted(norms, key=lambda norm: norm.batch_size)
    least = (1 - tolerance) * ordered[0].mean
    *_, largest = itertools.takewhile(lambda norm: norm.mean >= least, ordered)
    return largest.batch_size


def max_stable_batch(
    model: nn.Module,
    data: Data,
    batch_sizes: Sequence[int],
    *,
    tolerance: float = 0.10,
    **options: Any,
) -> int:
    """Return the maximum stable batch size B_s at the model's current parameters (section III-D).

    Norms fall with the batch size as averaging removes noise, ‖∇w‖² ≈ |G|² + tr(Σ)/B. Early in
    training, when gradients agree, every size is stable; later, when noise dominates, few are. So
    measure at the stage of training at which B_s is needed. See `gradient_norms` and `stable_batch`
    for the arguments and errors.
    """
    return stable_batch(gradient_norms(model, data, batch_sizes, **options), tolerance)


def noise_scale(
    model: nn.Module,
    data: Data,
    batch_size: int,
    *,
    loss_fn: LossFunction = nn.functional.cross_entropy,
    batches: int = 8,
    seed: int = 0,
) -> NoiseScale:
    """Return the simple noise scale tr(Σ) / |G|² at the current parameters, in samples.

    From n mini-batches of B samples: the mean of |g_B|² and |mean g_B|², which is |g_nB|², give
    unbiased estimates of |G|² and tr(Σ) (McCandlish et al., arXiv:1812.06162, appendix A.1).
    Infinite if the estimate of |G|² is not above 0, NaN if a gradient is NaN. A single ratio is
    noisy: average the results' `noise` and `signal` separately over several calls with different
    seeds, then divide.

    See `gradient_norms` for the other arguments.
    """
    check_initialized(model, trained=True)
    small, mean, count = 0.0, None, 0
    with _untouched(model, loss_fn, seed):
        for inputs, targets in _draw(data, batch_size, batches, seed):
            gradient = _gradient(model, loss_fn, inputs, targets)
            small += float(_square(gradient))
            if mean is None:  # parameters may share a gradient tensor
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
    return NoiseScale(noise, signal)


@torch.no_grad()
def full_cost(
    model: nn.Module,
    data: Data,
    batch_size: int,
    *,
    loss_fn: LossFunction = nn.functional.cross_entropy,
    seed: int = 0,
) -> float:
    """Return F(w), the loss over all of the data at the current parameters (equation 1).

    Computed in training mode, in which the cost is minimised; if the model is there already, layers
    that are in evaluation stay so. BatchNorm's statistics are restored.
    It equals `loss_fn` of all samples at once: also for torch's own sums, and for means by class
    weights or over targets that are not ignored.

    Args:
        model: The network.
        data: See `gradient_norms`; or any iterable of mini-batches of its own size, such as a
            DataLoader: pairs (inputs, targets) of any structure, see `repro.measure.batches`.
        batch_size: Samples computed at a time.
        loss_fn: One of torch's losses, or any mean over samples.
        seed: Seed of the model's own random numbers.

    Raises:
        ValueError: There is no data, all targets are ignored, or a mini-batch's loss is NaN.
        BatchError: A mini-batch for a custom loss cannot be divided.
        LossCheckError: A custom loss is no mean over samples.
        LossShapeError: One of torch's losses would compare each sample with every other.
        DivergedError: The parameters are not finite.
    """
    check_initialized(model)
    device, known = _device(model), known_loss(loss_fn)
    summed = known is not None and known.reduction == "sum"
    number, novelty, to_check = 0, Novelty(), list[Batch]()
    unlike: Batch | None = None
    forward = WithoutGraph()
    with _untouched(model, loss_fn, seed) as start_anew:
        total = torch.zeros((), dtype=torch.float64, device=device)
        divisor: float | Tensor = 0.0
        for inputs, targets in _draw(data, batch_size, None, None):
            if not (samples := _samples(inputs)):
                continue
            number += 1
            call = partial(call_model, model, to_device(inputs, device))
            if number == 1:
                outputs = forward(call, start_anew)
            else:
                with torch.set_grad_enabled(forward.needs_graph):
                    outputs = map_leaves(detached, call())
            both = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
            if known is not None and both and outputs.dim() != targets.dim():
                known.check(outputs, targets)
            loss = loss_fn(outputs, to_device(targets, device))
            part: float | Tensor = 1.0 if summed else float(samples)
            if known is not None and not summed and isinstance(targets, Tensor):
                each = known.counts(targets)
                part = known.divisor(targets) if each is None else each.sum()
            total += weighted(loss.double(), part)
            divisor = 1.0 if summed else divisor + part
            if not is_torchs(loss_fn):
                batch = read_batch(inputs, targets)
                if novelty.in_batch(batch):
                    to_check.append(batch)
                unlike = _unlike(unlike, batch)
        # Single samples show nothing, and are told of only where there is nothing else.
        to_check += [unlike] if unlike else []
        several = [batch for batch in to_check if batch.num_samples > 1] or to_check[:1]
        checked = [_adds_up(model, loss_fn, b, device) for b in several if number > 1]
        cost = float(total) / float(divisor) if float(divisor) > 0 else math.nan
        finite = math.isfinite(cost) or all(bool(p.isfinite().all()) for p in model.parameters())
    if not all(checked):
        text = f"full_cost: {NOT_CHECKED}; where it is no mean over samples add up the cost"
        warnings.warn(f"{text} yourself", UserWarning, stacklevel=3)
    if not finite:
        raise DivergedError(
            f"the cost is {cost} and parameters are not finite: training has diverged; lower the "
            "learning rate"
        )
    if math.isnan(cost):
        raise ValueError(
            f"the cost of {number} mini-batches is nan: every target is ignored or weighs nothing, "
            "a loss of your own finds no target in a mini-batch, or inputs are not finite; leave "
            "such samples out, or give one of torch's losses, which tell what they ignore"
        )
    return cost


def _unlike(kept: Batch | None, batch: Batch) -> Batch | None:
    """At most six samples, of those kept and of a mini-batch, whose weights may differ most.

    A mini-batch that cannot be joined with those kept, such as one of other lengths, adds none.
    """
    leaves = leaves_of((batch.inputs, batch.targets))
    if not all(leaf is None or isinstance(leaf, Tensor | int | float) for leaf in leaves):
        return kept
    count = min(3, -(-batch.num_samples // 2))
    chosen = dict.fromkeys(itertools.chain(*telling_samples(batch, count)))
    try:
        own = read_batch(*batch.take([*chosen]))
        if kept is None:
            return own
        counts = kept.num_samples, own.num_samples
        together = joined([(kept.inputs, kept.targets), (own.inputs, own.targets)], counts)
        if together is None:
            return kept
        both = read_batch(*together)
        first, second = telling_samples(both, min(3, both.num_samples // 2))
        return read_batch(*both.take([*first, *second]))
    except BatchError:  # of so few samples, lists may be ambiguous
        return kept


def _adds_up(model: nn.Module, loss_fn: LossFunction, batch: Batch, device: torch.device) -> bool:
    """Refuse a loss that is no mean over samples; return whether that could be checked."""
    advice = "Give one of torch's losses, whose class weights, ignored labels and sums are known. "
    told = {"advice": (advice, ""), "off": "Or add up the cost yourself", "named": ""}
    check = loss_check(model, loss_fn, device, **told)
    try:
        return batch.num_samples > 1 and adds_up(check, few(loss_fn, batch))
    except LossCheckError as error:
        raise LossCheckError(f"full_cost adds up mini-batches by their samples: {error}") from error


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise ValueError(
        f"a mini-batch is a {type(batch).__name__}, and no pair of inputs and targets; give pairs, "
        "such as ((batch['x'], batch['y']) for batch in loader)"
    )


def _samples(inputs: Any) -> int:
    return len(inputs) if isinstance(inputs, Tensor) else read_batch(inputs).num_samples


def _device(model: nn.Module) -> torch.device:
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _gradient(model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any) -> list[Tensor]:
    if is_sharded(model):
        raise ValueError("the model is fully sharded: measure it before it is sharded")
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = parameters[0].device
    with torch.enable_grad():
        outputs = call_model(model, to_device(inputs, device))
        loss = loss_fn(outputs, to_device(targets, device))
        known = known_loss(loss_fn)
        if known is not None and known.reduction == "sum":  # noise and norms are defined for means
            loss = loss / _samples(inputs)
        # Not by backward(), so that no hook on `grad` runs. A parameter that is not in the graph
        # may lie within a reversible block, which other leaves let run.
        own, leaves = {id(p) for p in parameters}, leaves_of_graph([loss])
        within = not own <= {id(leaf) for leaf in leaves}
        others = [leaf for leaf in leaves if within and id(leaf) not in own]
        try:
            gradients = torch.autograd.grad(loss, [*parameters, *others], allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            told = "torch.autograd.grad cannot pass a checkpoint: give it use_reentrant=False"
            raise ValueError(told) from error
    dense = []
    for parameter, gradient in zip(parameters, gradients, strict=False):
        # Such a block accumulates gradients itself; earlier ones are set aside.
        every = [g for g in (gradient, parameter.grad) if g is not None]
        parameter.grad = None
        strided = [g if g.layout is torch.strided else g.to_dense() for g in every]
        dense.append(reduce(torch.add, strided) if strided else torch.zeros_like(parameter))
    # Sums and squares of half precision would be rounded, or overflow.
    return [widened(g) for g in dense]


def _square(gradient: Sequence[Tensor]) -> Tensor:
    norms = torch._foreach_norm(list(gradient))
    return torch.stack([norm.double() for norm in norms]).square().sum()


def _draw(
    data: Data, size: int, batches: int | None, seed: int | None
) -> Iterator[tuple[Any, Any]]:
    """Yield at most `batches` full mini-batches; with None all of the data, with the rest."""
    if hasattr(data, "set_batch_size"):
        yield from itertools.islice(_load(data, size, batches is not None), batches)
        return
    pair = isinstance(data, tuple | list) and len(data) == 2
    if not pair or not all(isinstance(part, Tensor) for part in data):
        if batches is not None:
            raise ValueError(
                f"data is a {type(data).__name__}; give a pair of tensors (inputs, targets), or a "
                "loader with set_batch_size such as repro.datasets.TensorLoader"
            )
        yield from map(_pair, data)  # mini-batches of any size
        return
    inputs, targets = data
    count = len(inputs)
    if len(targets) != count or not is_whole(size, 1) or (batches is not None and size > count):
        raise ValueError(
            f"{count} inputs, {len(targets)} targets and a batch size of {size}; give a target for "
            f"each input and a size of 1 to {count}"
        )
    order = torch.arange(count)
    if batches is not None and seed is not None:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        order = order[: min(batches, count // size) * size]
    for chosen in order.to(inputs.device).split(int(size)) if count else ():
        yield inputs[chosen], targets[chosen]


def _load(loader: Any, size: int, full: bool) -> Iterator[tuple[Any, Any]]:
    """Yield a loader's mini-batches of a size, up to one that is smaller if they must be `full`."""
    before, epoch = loader.batch_size, getattr(loader, "epoch", None)
    loader.set_batch_size(size)
    try:
        for number, (inputs, targets) in enumerate(map(_pair, loader)):
            if full and (samples := _samples(inputs)) < size:
                if number == 0:
                    raise ValueError(f"a batch size of {size} is above the data's {samples}")
                return
            yield inputs, targets
    finally:
        loader.set_batch_size(before)
        if epoch is not None and hasattr(loader, "set_epoch"):  # iterating began a new epoch
            loader.set_epoch(epoch)


@contextmanager
def _untouched(model: nn.Module, loss_fn: LossFunction, seed: int) -> Iterator[Callable[[], None]]:
    """Put the model into training mode, and restore everything at the end.

    The function that is given restores everything and begins anew.
    """
    with untouched(model, *modules_in(loss_fn)) as before:

        def begin() -> None:
            seed_all(seed, model)
            if not model.training:  # else layers that are in evaluation stay so
                model.train()

        def begin_anew() -> None:
            before.restore()
            before.set_gradients_aside()
            begin()

        begin()
        yield begin_anew
