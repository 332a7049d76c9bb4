"""The share of each piece in a mini-batch's loss, and checks that pieces add up to the whole."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from repro.measure import is_out_of_memory
from repro.measure.batches import Batch, Sample
from repro.measure.loss_check import LossCheck
from repro.measure.loss_parts import MixedSamplesError, known_loss
from repro.measure.telling import Novelty, one_of_each, telling_samples
from repro.measure.untouched import bits, modules_in, untouched

Choice = Literal["first", "off"]
_SAMPLES, _LABELS = 6, 8  # samples with extreme values, and with distinct labels
_TRIES = 3  # mini-batches after which a loss that cannot be checked is left
_ADVICE = (
    "Give weights= to step, what each sample counts in the loss, such as its tokens that are not "
    "ignored or its classes' weights; or one of torch's own losses, whose class weights, ignored "
    "labels and sums are known; a loss that compares samples or takes a root of their mean cannot "
    "be divided. ",
    "",
)
NOT_CHECKED = (
    "it could not be checked whether the loss of a mini-batch is the mean of its parts' losses "
    "(the loss or the model draws random numbers, needs more samples, or cannot be called in "
    "evaluation mode, or what belongs to which sample cannot be told)"
)


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
    `weights`, (samples,), its share of these; for a sum 1. Nothing waits for a GPU. A piece is
    (first sample, sample after the last).
    """
    known = known_loss(loss_fn)
    if weights is not None:
        each = torch.as_tensor(weights, dtype=torch.float64)
        if each.shape != (samples,):
            raise ValueError(
                f"weights have the shape {tuple(each.shape)}, and the mini-batch {samples} "
                "samples; give one weight for each"
            )
    elif known is not None and known.reduction == "sum":
        return [1.0 if stop > start else 0.0 for start, stop in pieces]
    elif known is None or (counts := known.counts(targets)) is None:
        return [(stop - start) / samples for start, stop in pieces]
    else:
        each = counts
    total = each.sum()
    return [each[start:stop].sum() / total for start, stop in pieces]


def weighted(loss: Tensor, part: float | Tensor) -> Tensor:
    """Return a piece's loss times its factor; 0 for a factor of 0, even if the loss is 0 / 0."""
    if isinstance(part, Tensor):
        part = part.to(loss.device)
        loss = torch.where(part > 0, loss, torch.zeros_like(loss))
    return loss * part


def is_torchs(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss is one of torch's (with a known divisor), without hooks."""
    known = known_loss(loss_fn)
    hooked = bool(_global_forward_hooks or _global_forward_pre_hooks)
    return known is not None and not known.hooked and not hooked


def loss_check(
    model: nn.Module, loss_fn: Callable[..., Tensor], device: torch.device, **told: Any
) -> LossCheck:
    """The check of a loss as processes and micro-batches compute it."""
    roots = [model, *modules_in(loss_fn)]
    modules = [module for root in roots for module in root.modules()]
    given = model, modules, loss_fn, device, partial(untouched, *roots)
    return LossCheck(*given, multiplied_by=("matmul",), **{"advice": _ADVICE} | told)


def few(
    loss_fn: Callable[..., Any], batch: Batch, weights: Any = None, new: Iterable[int] = ()
) -> Sample:
    """A few informative samples of a mini-batch of at least two, and those with `new` labels."""
    first, second = telling_samples(batch, min(_SAMPLES, batch.num_samples) // 2)
    order = list(dict.fromkeys([*first, *second, *one_of_each(batch, _LABELS, new)]))
    # Parts of equal size would more often have equal weights, which hide a plain mean.
    cut = max(1, len(first) - 1)
    targets = batch.take(order)[1]
    if weights is not None:
        weights = torch.as_tensor(weights, dtype=torch.float64)[order]
    ends = [(0, cut), (cut, len(order))]
    parts = parts_of(loss_fn, targets, weights, len(order), ends)
    known = known_loss(loss_fn)
    summed = weights is None and known is not None and known.reduction == "sum"
    groups = order[:cut], order[cut:]
    return Sample.of(batch, groups, [float(part) for part in parts], not summed)


def adds_up(check: LossCheck, sample: Sample) -> bool:
    """`LossCheck.loss_adds_up`, also False if these samples at once are more than memory holds."""
    try:
        return check.loss_adds_up(sample)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False


class Checks:
    """Compares mini-batches with their pieces, if due, before they are computed in pieces.

    The first mini-batch checks the loss and the model. The loss is checked again if it is replaced
    and, unless it is one of torch's, if a mini-batch has new values, such as padding (see
    `repro.measure.telling.Novelty`). `several`: processes divide it; `repeated`: a process calls
    the model several times for a mini-batch.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, several: bool, repeated: bool
    ) -> None:
        self._model, self._device = model, device
        self._several, self._repeated = several, repeated
        self._novelty = Novelty()
        self._checked: Any = None  # the loss checked last
        self._model_checked, self._failures = False, 0

    def due(self, loss_fn: Callable[..., Tensor], batch: Batch) -> bool:
        """Whether this mini-batch is to be checked with `make`."""
        new = not is_torchs(loss_fn) and self._novelty.in_batch(batch)
        return new or self._checked is not loss_fn or not self._model_checked

    def make(self, loss_fn: Callable[..., Tensor], batch: Batch, weights: Any) -> bool | None:
        """Check a mini-batch; return whether its loss was compared, None for a single sample."""
        if batch.num_samples < 2:
            return None
        check = loss_check(self._model, loss_fn, self._device)
        sample = few(loss_fn, batch, weights, self._novelty.values)
        compared = adds_up(check, sample)
        if not self._model_checked:
            self._model_checked = True
            if text := self._check_model(check, sample):
                warn(text)
        return compared

    def settle(self, loss_fn: Callable[..., Tensor], compared: bool) -> None:
        """Note whether all processes compared the loss, so that all check the same mini-batches."""
        self._failures = 0 if compared else self._failures + 1
        if compared or self._failures >= _TRIES:
            self._checked = loss_fn
        if self._failures >= _TRIES:
            self._failures = 0
            warn(f"{NOT_CHECKED}; where it is no mean over samples give weights=")

    def _check_model(self, check: LossCheck, sample: Sample) -> str | None:
        """What is wrong with a model that compares samples, or changes buffers by those it sees."""
        parts = [inputs for inputs, _ in sample.parts]
        # What a process may compute of the whole.
        divided = [parts] * self._repeated + [[part] for part in parts] * self._several
        try:
            whole = self._changed(check, [sample.inputs])
            others = [self._changed(check, groups) for groups in divided]
            check.samples_stay_apart(sample)
        except MixedSamplesError as error:
            return str(error)
        except Exception:
            return None  # the training step raises its own error
        names = dict.fromkeys(
            name
            for changed in others
            for name in whole | changed
            if whole.get(name) != changed.get(name)
        )
        if not names:
            return None
        return (
            f"the model's forward pass changes {', '.join([*names][:5])}, in each process and "
            "micro-batch once and by its own samples, so that training is not that of the whole "
            "mini-batch: change them once a step, outside the model, or do not divide mini-batches"
        )

    def _changed(self, check: LossCheck, groups: Sequence[Any]) -> dict[str, bytes]:
        """What forward passes change outside batch normalisation, which is known to."""
        with untouched(self._model) as before:
            for inputs in groups:
                check.compute(inputs, _BatchNorm)
            return {k: bytes(bits(v).cpu().numpy()) for k, v in before.changed().items()}


def warn(text: str, stacklevel: int = 5) -> None:
    """Warn of what ``check="off"`` does not look for."""
    warnings.warn(f"{text}; check='off' checks nothing", UserWarning, stacklevel=stacklevel)
