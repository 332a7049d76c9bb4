"""The share of each piece in a mini-batch's loss, and checks that pieces add up to the whole.

The checks are made before the first mini-batch is computed.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from repro.measure.batches import Batch, call_model, leaves_of, replaced, to_device
from repro.measure.loss_parts import (
    Evaluated,
    LossCheckError,
    compare,
    evaluate,
    floats,
    is_float,
    kinds_of,
    known_loss,
    normalises_by_batch,
    tolerance,
)
from repro.measure.telling import Novelty, one_of_each, telling_samples
from repro.measure.untouched import Snapshot, bits, untouched

LossCheck = Literal["first", "off"]
_SAMPLES, _LABELS = 6, 8  # samples with extreme values, and with distinct labels


def parts_of(
    loss_fn: Callable[..., Any],
    targets: Any,
    weights: Any,
    samples: int,
    pieces: Sequence[tuple[int, int]],
) -> list[float] | list[Tensor]:
    """Return the factor of each piece's loss in the loss of the mini-batch.

    For a mean over samples it is the piece's share of samples; for torch's cross-entropy and
    negative log likelihood its share of the class weights of targets that are not ignored; with
    `weights` its share of these; for a sum 1. Nothing waits for a GPU.

    Args:
        loss_fn: One of torch's losses, a partial of one, or any mean over samples.
        targets: Targets of the whole mini-batch.
        weights: Weight of each sample, (samples,), or None.
        samples: Number of samples of the mini-batch.
        pieces: (first sample, sample after the last) of each piece.

    Raises:
        ValueError: The loss is no scalar, or the number of weights is not that of samples.
    """
    if weights is not None:
        each: Tensor | None = torch.as_tensor(weights, dtype=torch.float64)
        assert each is not None
        if each.shape != (samples,):
            raise ValueError(
                f"weights have the shape {tuple(each.shape)}, and the mini-batch {samples} "
                "samples; give one weight for each"
            )
    else:
        known = known_loss(loss_fn)
        if known is not None and known.reduction == "sum":
            return [1.0 if stop > start else 0.0 for start, stop in pieces]
        each = None if known is None else known.counts(targets)
    if each is None:
        return [(stop - start) / samples for start, stop in pieces]
    total = each.sum()
    return [each[start:stop].sum() / total for start, stop in pieces]


def weighted(loss: Tensor, part: float | Tensor) -> Tensor:
    """Return a piece's loss times its factor; 0 for a factor of 0, even if the loss is 0 / 0."""
    if isinstance(part, Tensor):
        part = part.to(loss.device)
        loss = torch.where(part > 0, loss, torch.zeros_like(loss))
    return loss * part


def connected(loss: Tensor, outputs: Any) -> Tensor:
    """Return a loss with a graph, even if it is constant, as without a positive sample."""
    if loss.requires_grad:
        return loss
    for leaf in leaves_of(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            # Not times 0, since infinity times 0 is NaN.
            loss = loss + leaf.masked_fill(torch.ones_like(leaf, dtype=torch.bool), 0).real.sum()
    return loss


def is_torchs(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss is one of torch's (with a known divisor), without hooks."""
    known = known_loss(loss_fn)
    hooked = bool(_global_forward_hooks or _global_forward_pre_hooks)
    return known is not None and not known.hooked and not hooked


class Checks:
    """Compares mini-batches with their pieces, if due, before they are computed in pieces.

    The first mini-batch checks the loss (see `check_loss_adds_up`) and the model (see
    `check_model`). The loss is checked again if it is replaced and, unless it is one of torch's,
    if a mini-batch has new values, such as padding (see `repro.measure.telling.Novelty`).

    Args:
        model: The model.
        device: Its device.
        repeated: Whether a process calls the model several times for a mini-batch.
    """

    def __init__(self, model: nn.Module, device: torch.device, repeated: bool) -> None:
        self._model, self._device, self._repeated = model, device, repeated
        self._novelty: Novelty[tuple[Batch, Any]] = Novelty()
        self._checked: Any = None  # the loss checked last
        self._model_checked = self._told = False

    def due(
        self, loss_fn: Callable[..., Tensor], batch: Batch, weights: Any
    ) -> tuple[Batch, Any] | None:
        """Return the mini-batch and weights to check now with `make`, or None."""
        item = batch, weights
        first = None if self._checked is loss_fn and self._model_checked else item
        return first if is_torchs(loss_fn) else self._novelty.newest(batch, item) or first

    def make(self, loss_fn: Callable[..., Tensor], batch: Batch, weights: Any) -> None:
        """Check a mini-batch.

        Raises:
            LossCheckError: The loss differs from its parts' combined loss.
        """
        new, made = self._novelty.values, True
        try:
            made = check_loss_adds_up(self._model, loss_fn, batch, weights, self._device, new=new)
        except NotComparableError as error:
            if not self._told:
                _warn(f"{error}; where it is no mean over samples give weights=")
            self._told = True
        if not self._model_checked and batch.num_samples > 2:
            self._model_checked = True
            if text := check_model(self._model, batch, self._device, self._repeated):
                _warn(text)
        if made:
            self._checked = loss_fn


def _warn(text: str) -> None:
    warnings.warn(f"{text}; check='off' checks nothing", UserWarning, stacklevel=5)


class NotComparableError(Exception):
    """Nothing can be compared."""

    def __str__(self) -> str:
        return (
            "it could not be checked whether the loss of a mini-batch is the mean of its parts' "
            "losses (the loss or the model draws random numbers, needs more samples, or cannot be "
            "called in evaluation mode, or what belongs to which sample cannot be told)"
        )


def check_loss_adds_up(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batch: Batch,
    weights: Any,
    device: torch.device,
    modes: Sequence[bool] = (False, True),
    new: Iterable[int] = (),
) -> bool:
    """Compare the loss of a few samples with the combined loss of two unequal parts of them.

    Compared are its value and its gradient by the model's outputs; for a loss that the model
    computes itself only the value. The model is called without a graph and in evaluation mode (in
    training mode if its outputs have another form there). Everything is restored.

    `modes` are tried in order until the model can be called, False for evaluation; `new` are labels
    that no earlier mini-batch had. Returns False, undecided, for fewer than three samples and for
    losses that are not finite.

    Raises:
        LossCheckError: The losses differ.
        NotComparableError: The loss draws random numbers; or the model computes its loss itself and
            draws random numbers in evaluation mode, or cannot be called in that mode.
    """
    if batch.num_samples < 3:
        return False
    order, ends = _some(batch, new)
    groups = [batch.take(order[a:b]) for a, b in ends]
    if weights is not None:
        weights = torch.as_tensor(weights, dtype=torch.float64)[order]
    parts = parts_of(loss_fn, groups[0][1], weights, len(order), ends[1:])

    def loss_of(targets: Any, outputs: Any) -> Tensor:
        given = () if targets is None else (to_device(targets, device),)
        return loss_fn(outputs, *given)

    def forward(inputs: Any) -> Any:
        with torch.no_grad():
            return call_model(model, to_device(inputs, device))

    for training in modes:
        try:
            with _in_mode(training, model, loss_fn) as before:
                at_first = before.generators()
                outputs = forward(groups[0][0])
                drawn_from = before.generators()
                losses = _by_outputs(loss_of, outputs, groups, ends)
                if losses is None:  # the model's own loss
                    drawn_from = at_first
                    if training or normalises_by_batch(model.modules()):
                        break
                    losses = [evaluate(partial(loss_of, y), forward(x)) for x, y in groups]
                if before.generators() != drawn_from:
                    break
        except Exception:
            # Some models cannot evaluate, and some losses need outputs in training mode. Any other
            # failure is raised by the training step itself.
            continue
        whole, *pieces = losses
        if not torch.isfinite(whole.loss):
            return False
        found = compare(whole, pieces, [float(part) for part in parts])
        if max(found.value, found.gradient) > _tolerance(model, outputs, device):
            raise LossCheckError(
                f"the loss of {len(order)} samples of the mini-batch is {found.whole:.6g} at once "
                f"and {found.combined:.6g} in two parts, as processes and micro-batches compute it "
                f"(its value is off by {found.value:.2g} of its size, its gradient by "
                f"{found.gradient:.2g}): it is no mean over samples. Give weights= to step, what "
                "each sample counts in the loss, such as its tokens that are not ignored or its "
                "classes' weights; or one of torch's own losses, whose class weights, ignored "
                "labels and sums are known; a loss that compares samples or takes a root of their "
                "mean cannot be divided. check='off' computes it all the same"
            )
        return True
    raise NotComparableError


@contextmanager
def _in_mode(training: bool, *roots: Any) -> Iterator[Snapshot]:
    """Restore modules at the end; inside they are in evaluation mode unless `training`."""
    with untouched(*roots) as before:
        for root in () if training else roots:
            for module in root.modules() if isinstance(root, nn.Module) else ():
                module.training = False
        yield before


def _by_outputs(
    loss_of: Callable[[Any, Any], Tensor],
    outputs: Any,
    groups: Sequence[tuple[Any, Any]],
    ends: Sequence[tuple[int, int]],
) -> list[Evaluated] | None:
    """Return the losses of given outputs, of the whole and of each part.

    None if the loss is not a function of the samples' outputs.
    """
    losses: list[Evaluated] = []
    for (start, stop), (_, targets) in zip(ends, groups, strict=True):
        piece = [
            leaf[start:stop] if isinstance(leaf, Tensor) and leaf.shape[:1] == ends[0][1:] else leaf
            for leaf in leaves_of(outputs)
        ]
        given = replaced(outputs, piece)
        losses.append(evaluate(partial(loss_of, targets), given, samples=stop - start))
        if losses[0].inside or not any(bool(each.any()) for each in losses[0].gradients):
            return None
    return losses


def check_model(model: nn.Module, batch: Batch, device: torch.device, repeated: bool) -> str | None:
    """Return in words how the model's pieces differ from the whole mini-batch, None if not.

    The model is called in its own mode, except batch normalisation (known to see only its piece)
    and dropout, which are in evaluation mode. Everything is restored.

    With `repeated` a process calls the model several times for a mini-batch.
    """
    order, (all_of, *ends) = _some(batch)

    def forward(*groups: tuple[int, int]) -> tuple[list[Any], bool, dict[str, Tensor]]:
        with untouched(model) as before, torch.no_grad():
            for module in model.modules():
                if isinstance(module, _NormBase | _DropoutNd):
                    module.training = False
            states = before.generators()
            given = (batch.take(order[a:b])[0] for a, b in groups)
            outputs = [call_model(model, to_device(inputs, device)) for inputs in given]
            return outputs, before.generators() != states, before.changed()

    try:
        (outputs,), drawn, changed = forward(all_of)
        pieces = [forward(*ends)] if repeated else [forward(each) for each in ends]
    except Exception:  # the training step raises its own error
        return None
    allowed = 10 * _tolerance(model, outputs, device)
    names = [
        name
        for name in {name: None for each in (changed, *(p[2] for p in pieces)) for name in each}
        if any(not _alike(changed.get(name), p[2].get(name), allowed) for p in pieces)
    ]
    if names and (repeated or not drawn):  # pieces draw different random numbers
        return (
            f"the model's forward pass changes {', '.join(names[:5])}, in each process and "
            "micro-batch once and by its own samples, so that training is not that of the whole "
            "mini-batch: change them once a step, outside the model, or do not divide mini-batches"
        )
    if drawn or any(piece[1] for piece in pieces) or normalises_by_batch(model.modules()):
        return None
    columns = [floats(each) for each in (outputs, *(o for piece in pieces for o in piece[0]))]
    for leaf, *parts in zip(*columns, strict=False):
        shapes = [(b - a, *leaf.shape[1:]) for a, b in (all_of, *ends)]
        divided = [part.shape for part in (leaf, *parts)] == shapes
        if divided and not _alike(leaf, torch.cat(parts), allowed):
            return (
                "what the model returns for a sample depends on the other samples of its "
                "mini-batch, of which processes and micro-batches see their own alone (as with "
                "DistributedDataParallel): compare samples in loss_fn, which is checked, or name "
                "in shared= what belongs to all of them"
            )
    return None


def _alike(one: Tensor | None, other: Tensor | None, allowed: float) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    if torch.equal(bits(one), bits(other)):
        return True
    if not one.is_floating_point():
        return False
    a, b = one.double(), other.double()
    return bool((a - b).norm() <= allowed * a.norm())


def _some(batch: Batch, new: Iterable[int] = ()) -> tuple[list[int], list[tuple[int, int]]]:
    """Return a few informative samples, and the bounds of all and of two unequal parts of them."""
    first, second = telling_samples(batch, min(_SAMPLES, batch.num_samples) // 2)
    few = max(1, len(first) - 1)
    order = list(dict.fromkeys([*first, *second, *one_of_each(batch, _LABELS, new)]))
    return order, [(0, len(order)), (0, few), (few, len(order))]


def _tolerance(model: nn.Module, outputs: Any, device: torch.device) -> float:
    kinds = kinds_of(model, [leaf for leaf in leaves_of(outputs) if is_float(leaf)], device)
    return tolerance(kinds, device, multiplied_by=("matmul",))
