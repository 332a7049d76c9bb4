"""A check, before the first mini-batch is computed, that pieces of its loss add up to it."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from repro.adaptive.losses import is_known, parts_of, weighted
from repro.measure.batches import Batch, call_model, leaves_of, replaced, to_device
from repro.measure.precision import rounds_to_tf32
from repro.measure.telling import Novelty, one_of_each, telling_samples
from repro.measure.untouched import bits, untouched

LossCheck = Literal["first", "off"]
_SAMPLES, _LABELS = 6, 8  # that tell most, and that have other labels
# Of what rounding may differ; what the check is for differs in the first digits.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class LossCheckError(ValueError):
    """A loss is not that of the mini-batch where it is computed in pieces."""


class Checks:
    """What is compared before mini-batches are computed in pieces, and when.

    Of the first mini-batch the loss (see `check_loss_adds_up`) and the model (see `check_model`);
    the loss again where another one is given and, unless it is one of torch's, where a mini-batch
    shows what none before did, such as padding (see `repro.measure.telling.Novelty`). No process
    waits for another, and all decide the same.

    Args:
        model: On the device.
        device: The device.
        precision: Makes the context of the forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        precision: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._model, self._device, self._precision = model, device, precision
        self._novelty: Novelty[tuple[Batch, Any]] = Novelty()
        self._checked: Any = None  # the loss
        self._ways: set[bool] = set()  # in which the model was checked
        self._told: set[str] = set()

    def due(
        self, loss_fn: Callable[..., Tensor], batch: Batch, weights: Any, repeated: bool
    ) -> tuple[Batch, Any] | None:
        """Return mini-batch and weights that are to be checked now, None for none; see `make`."""
        item = batch, weights
        first = None if self._checked is loss_fn and repeated in self._ways else item
        return first if is_known(loss_fn) else self._novelty.newest(batch, item) or first

    def make(
        self, loss_fn: Callable[..., Tensor], batch: Batch, weights: Any, repeated: bool
    ) -> None:
        """Check a mini-batch.

        Args:
            loss_fn: The loss.
            batch: The mini-batch.
            weights: What each sample counts, or None.
            repeated: Whether a process calls the model several times for a mini-batch.

        Raises:
            LossCheckError: The loss is not that of its parts.
        """
        try:
            made = check_loss_adds_up(
                self._model,
                loss_fn,
                batch,
                weights,
                self._device,
                self._precision,
                new=self._novelty.values,
            )
        except NotComparableError as error:
            made = True
            self._tell("loss", f"{error}; where it is no mean over samples give weights=")
        except LossCheckError:
            self._novelty, self._checked = Novelty(), None  # what is like it is refused, too
            raise
        if repeated not in self._ways and batch.num_samples > 2:
            self._ways.add(repeated)
            given = self._model, batch, self._device, self._precision, repeated
            for kind, text in check_model(*given):
                self._tell(kind, text)
        if made:
            self._checked = loss_fn

    def _tell(self, kind: str, text: str) -> None:
        """Warn, once of each kind."""
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(f"{text}; check='off' checks nothing", UserWarning, stacklevel=4)


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
    precision: Callable[[], AbstractContextManager[Any]],
    modes: Sequence[bool] = (False, True),
    new: Iterable[int] = (),
) -> bool:
    """Compare the loss of a few samples as a whole with that of two unequal parts.

    Compared are its value and its gradient by the model's outputs; of a loss that the model
    computes itself the value. The model is called without a graph and in evaluation mode (in
    training mode where its outputs are of another form there). Nothing stays changed: parameters,
    buffers, modes and generators are as before.

    Args:
        model: On the device.
        loss_fn: The loss.
        batch: The mini-batch; of it those samples that differ most in what losses tend to weigh
            by, such as ignored labels.
        weights: What each sample counts, or None.
        device: The device.
        precision: Makes the context of the forward pass.
        modes: In which to call the model, False for evaluation, until it can be called.
        new: Labels that no mini-batch before had.

    Returns:
        Whether the check could be made. It says nothing of fewer than three samples, and of losses
        that are not finite.

    Raises:
        LossCheckError: They differ.
        NotComparableError: The model draws random numbers in evaluation mode or cannot be called
            in it and computes its loss itself, or the loss draws some.
    """
    if batch.num_samples < 3:
        return False
    order, ends = _some(batch, new)
    few = ends[0][1]
    parts = [batch.take(order[:few]), batch.take(order[few:])]
    whole = batch.take(order)
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

    for training in modes:
        try:
            with untouched(model, loss_fn) as before:
                for root in () if training else (model, loss_fn):
                    for module in root.modules() if isinstance(root, nn.Module) else ():
                        module.training = False
                at_first = before.generators()
                outputs = forward(whole[0])
                drawn_from = before.generators()
                compared = _by_outputs(
                    loss_of, outputs, whole[1], [p[1] for p in parts], ends, factors
                )
                if compared is None:  # the model's own loss
                    drawn_from = at_first
                    if training or _mixes(model):
                        break
                    with torch.no_grad():
                        losses = [loss_of(outputs, whole[1])]
                        losses += [loss_of(forward(x), t) for x, t in parts]
                    compared = _Compared.of(losses, factors, outputs)
                if before.generators() != drawn_from:
                    break
        except Exception:
            # A model may be unable to evaluate, or a loss need what only training gives; what
            # fails in any case fails in the training step, with an error of its own.
            continue
        if not compared.is_finite:
            return False
        compared.check(_tolerance(model, outputs, device, precision), (few, len(order)))
        return True
    raise NotComparableError


def check_model(
    model: nn.Module,
    batch: Batch,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
    repeated: bool,
) -> Iterator[tuple[str, str]]:
    """Yield what pieces of a mini-batch make of the model that the whole does not: kind and words.

    The model is called in its own mode, but for normalisation by batches (which is known to see
    each piece alone) and dropout. Nothing stays changed.

    Args:
        model: On the device.
        batch: Of it a few samples are taken, at once and in parts.
        device: The device.
        precision: Makes the context of the forward pass.
        repeated: Whether a process calls the model several times for a mini-batch.
    """
    order, ends = _some(batch)

    def forward(*groups: tuple[int, int]) -> tuple[list[Any], bool, dict[str, Tensor]]:
        with untouched(model) as before, torch.no_grad(), precision():
            for module in model.modules():
                if isinstance(module, _NormBase | _DropoutNd):
                    module.training = False
            states = before.generators()
            given = (batch.take(order[a:b])[0] for a, b in groups)
            outputs = [call_model(model, to_device(inputs, device)) for inputs in given]
            return outputs, before.generators() != states, before.changed()

    try:
        (outputs,), drawn, changed = forward((0, len(order)))
        pieces = [forward(*ends)] if repeated else [forward(each) for each in ends]
    except Exception:  # the training step has an error of its own
        return
    tolerance = 10 * _tolerance(model, outputs, device, precision)
    names = [
        name
        for name in {name: None for each in (changed, *(p[2] for p in pieces)) for name in each}
        if any(not _alike(changed.get(name), p[2].get(name), tolerance) for p in pieces)
    ]
    if names and (repeated or not drawn):  # a piece draws others
        yield (
            "state",
            f"the model's forward pass changes {', '.join(names[:5])}, in each process and "
            "micro-batch once and by its own samples, so that training is not that of the whole "
            "mini-batch: change them once a step, outside the model, or do not divide mini-batches",
        )
        return
    if drawn or any(piece[1] for piece in pieces) or _mixes(model):
        return
    together = _floats(outputs)
    columns = [_floats(each) for piece in pieces for each in piece[0]]
    if any(len(leaves) != len(together) for leaves in columns):
        return
    for leaf, *parts in zip(together, *columns, strict=True):
        divided = leaf.dim() > 0 and len(leaf) == len(order)
        if not divided or any(
            p.shape != (b - a, *leaf.shape[1:]) for p, (a, b) in zip(parts, ends, strict=True)
        ):
            continue
        if not _alike(leaf, torch.cat(parts), tolerance):
            yield (
                "mixing",
                "what the model returns for a sample depends on the other samples of its "
                "mini-batch, of which processes and micro-batches see their own alone (as "
                "with DistributedDataParallel): compare samples in loss_fn, which is checked, "
                "or name in shared= what belongs to all of them",
            )
            return


def _alike(one: Tensor | None, other: Tensor | None, tolerance: float) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    if torch.equal(bits(one), bits(other)):
        return True
    if not one.is_floating_point():
        return False
    a, b = one.double(), other.double()
    return bool((a - b).norm() <= tolerance * a.norm())


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


def _mixes(model: nn.Module) -> bool:
    """Whether a layer mixes samples in evaluation mode, too."""
    return any(isinstance(m, _BatchNorm) and m.running_mean is None for m in model.modules())


def _some(batch: Batch, new: Iterable[int] = ()) -> tuple[list[int], list[tuple[int, int]]]:
    """Return a few samples that tell most, and where two unequal parts of them begin and end."""
    first, second = telling_samples(batch, min(_SAMPLES, batch.num_samples) // 2)
    few = max(1, len(first) - 1)
    order = list(dict.fromkeys([*first, *second, *one_of_each(batch, _LABELS, new)]))
    return order, [(0, few), (few, len(order))]


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
