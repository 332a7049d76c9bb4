"""The divisors of torch's own losses, and comparisons of a loss with the losses of its parts."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import _reduction
from torch.nn.modules import loss as losses

from repro.measure.batches import BatchError, leaves_of, replaced
from repro.measure.memory import is_out_of_memory
from repro.measure.outputs import is_float
from repro.measure.precision import Widening, rounds_to_tf32, widened

# Allowed relative difference between two computations of one number. Rounding differs by a few eps
# (the parts have other shapes, and so other kernels), amplified by the model's depth; the faults
# that the check looks for change the first or second digit.
_TOLERANCE = {
    torch.float64: 1e-6, torch.float32: 1e-3, torch.complex64: 1e-3, torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}  # fmt: skip
_TF32 = 1e-2
_FILLED = 1e4  # least size of a mask's values; of half precision they are at most 65504
# For losses of the very same outputs, or for values alone, which are sums of many terms.
_NARROW = _TOLERANCE | {torch.float32: 2e-4, torch.complex64: 2e-4}


OFF = "check='off' computes it all the same"


class LossCheckError(BatchError):
    """The losses of a mini-batch's parts do not add up to the mini-batch's loss."""


class MixedSamplesError(BatchError):
    """The model's outputs for a sample depend on the other samples of its part."""


class LossShapeError(BatchError):
    """The loss is not a scalar tensor."""


class LossReductionError(LossShapeError):
    """The loss's reduction gives no scalar."""


class UnsupportedLossError(BatchError):
    """The loss needs the mini-batch as a whole."""


# Means over samples, or over elements, of which all samples have the same number.
_SAMPLE_MEANS: tuple[Any, ...] = (
    losses.BCELoss, losses.BCEWithLogitsLoss, losses.HingeEmbeddingLoss, losses.HuberLoss,
    losses.KLDivLoss, losses.L1Loss, losses.MSELoss, losses.MultiLabelMarginLoss,
    losses.MultiLabelSoftMarginLoss, losses.MultiMarginLoss, losses.PoissonNLLLoss,
    losses.SmoothL1Loss, losses.SoftMarginLoss,
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.hinge_embedding_loss,
    F.huber_loss, F.kl_div, F.l1_loss, F.mse_loss, F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss, F.multi_margin_loss, F.poisson_nll_loss, F.smooth_l1_loss,
    F.soft_margin_loss,
)  # fmt: skip
# Means over the targets' classes: divided by the sum of the weights of classes not ignored.
_CLASS_MEANS: tuple[Any, ...] = (
    losses.CrossEntropyLoss, losses.NLLLoss, losses.NLLLoss2d, F.cross_entropy, F.nll_loss,
)  # fmt: skip
# Means over the rows of a mini-batch, called with more than outputs and targets.
_ROW_MEANS: tuple[Any, ...] = (
    losses.CosineEmbeddingLoss, losses.CTCLoss, losses.GaussianNLLLoss, losses.MarginRankingLoss,
    losses.TripletMarginLoss, losses.TripletMarginWithDistanceLoss,
    F.cosine_embedding_loss, F.ctc_loss, F.gaussian_nll_loss, F.margin_ranking_loss,
    F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
)  # fmt: skip
_ANY_DIMS = (*_CLASS_MEANS, *_ROW_MEANS, losses.MultiMarginLoss, F.multi_margin_loss)
_OPTIONS = ("reduction", "weight", "pos_weight", "ignore_index", "label_smoothing")


@dataclass(frozen=True)
class KnownLoss:
    """One of torch's losses, called as ``loss_fn(outputs, targets)``."""

    reduction: str  # "mean", "batchmean" or "sum"
    hooked: bool  # hooks of its own may change its result
    _kind: Any  # its class or function
    _options: dict[str, Any]

    def counts(self, targets: Any) -> Tensor | None:
        """Each sample's share of a mean's divisor, (N,) float64; None for 1 each.

        On the targets' device; the host does not wait.
        """
        labels = isinstance(targets, Tensor) and not targets.is_floating_point()
        # Probabilities of classes count by samples.
        if self._kind not in _CLASS_MEANS or not labels:
            return None
        classes = targets.long()  # -100 as uint8 would be class 156
        each = (kept := classes != self._options.get("ignore_index", -100)).double()
        if (weight := self._options.get("weight")) is not None:
            # torch itself refuses a class out of range when it computes the loss.
            classes = torch.where(kept, classes, 0).clamp(0, len(weight) - 1)
            each = weight.detach().to(targets.device, torch.float64)[classes] * kept
        return each.flatten(1).sum(1) if each.dim() > 1 else each

    def weights(self, targets: Sequence[Tensor], even: bool = True) -> list[float] | None:
        """The divisor of each part's loss, None if it is the number of samples; waits, once."""
        each = [self.counts(part) for part in targets]
        if None not in [*each[:1]]:
            sums = torch.stack([part.sum() for part in each if part is not None]).tolist()
            ignored = self._options.get("ignore_index", -100)
            smoothed = self._options.get("label_smoothing")
            for labels, total in zip(targets, sums, strict=True):
                if total == 0 and smoothed and bool((labels.long() != ignored).any()):
                    raise UnsupportedLossError(
                        f"a micro-batch of {len(labels)} samples has classes of weight 0 alone; "
                        f"label_smoothing counts them, but divides by 0; use two_pass=True"
                    )
            return sums
        return None if even else [self.divisor(part) for part in targets]

    def divisor(self, targets: Tensor) -> float:
        """The divisor of a mean where `counts` is None."""
        if self._kind in _CLASS_MEANS and targets.dim() > 1:  # probabilities of all classes
            return targets.numel() / targets.shape[1]
        by_row = self._kind in (*_CLASS_MEANS, *_ROW_MEANS) or self.reduction == "batchmean"
        return float(len(targets) if by_row else targets.numel())

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse operands that torch would broadcast over samples."""
        if self._kind in _ANY_DIMS or targets.dim() == 0:
            return
        if outputs.dim() != targets.dim():
            raise LossShapeError(
                f"outputs have shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}: "
                f"the loss would compare each sample with every other; give them the same shape"
            )
        for weight in map(self._options.get, ("weight", "pos_weight")):
            if weight is None or weight.dim() < targets.dim():
                continue
            if weight.shape[weight.dim() - targets.dim()] > 1:
                raise UnsupportedLossError(
                    f"the loss has a weight of shape {tuple(weight.shape)} for targets of shape "
                    f"{tuple(targets.shape)}: one for each sample of the mini-batch, which "
                    f"micro-batches do not have; give it in the targets, or use two_pass=True"
                )


def known_loss(loss_fn: Callable[..., Any]) -> KnownLoss | None:
    """Read one of torch's losses: a module, a subclass with its `forward`, a function, a partial.

    None for any other loss. A reduction that gives no scalar is a `LossReductionError`, a class of
    losses a `TypeError`.
    """
    made = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    if isinstance(made, type) and issubclass(made, nn.Module):
        raise TypeError(f"loss_fn is the class {made.__name__}; give an object of it")
    kind, options, hooked = _read(loss_fn)
    known = kind in (*_CLASS_MEANS, *_ROW_MEANS, *_SAMPLE_MEANS)
    if not known or {"input", "target"} & set(options):
        return None
    reduction = options.get("reduction", "mean")
    legacy = options.get("size_average"), options.get("reduce")
    if legacy != (None, None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns where the loss is called
            reduction = _reduction.legacy_get_string(*legacy)
    if reduction not in ("mean", "sum", "batchmean"):
        raise LossReductionError(
            f"the loss has reduction={reduction!r} and gives no scalar; use 'mean' or 'sum'"
        )
    return KnownLoss(reduction, hooked, kind, options)


def _read(loss_fn: Callable[..., Any]) -> tuple[Any, dict[str, Any], bool]:
    """A loss's function or class in torch, its options, and whether it has hooks."""
    compiled: Any = loss_fn
    if type(compiled).__name__ == "OptimizedModule":  # of torch.compile, with hooks of its own
        *read, hooked = _read(compiled._orig_mod)
        own = compiled._forward_hooks or compiled._forward_pre_hooks
        return read[0], read[1], hooked or bool(own)
    if isinstance(loss_fn, partial):
        return (None if loss_fn.args else loss_fn.func), dict(loss_fn.keywords), False
    if not isinstance(loss_fn, nn.Module) or isinstance(loss_fn, torch.jit.ScriptModule):
        return loss_fn, {}, False
    kind: Any = type(loss_fn)
    base = next((b for b in kind.__mro__ if b.__module__ == losses.__name__), kind)
    inherited = kind.forward is base.forward and kind.__call__ is base.__call__
    options = {n: v for n in _OPTIONS if (v := getattr(loss_fn, n, None)) is not None}
    hooked = bool(loss_fn._forward_hooks or loss_fn._forward_pre_hooks)
    return (base if inherited and "forward" not in vars(loss_fn) else None), options, hooked


def connected(loss: Tensor, outputs: Any) -> Tensor:
    """A loss with a graph, even if it is constant, as without a positive sample."""
    if loss.requires_grad:
        return loss
    for leaf in leaves_of(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            # Not times 0, since infinity times 0 is NaN.
            loss = loss + leaf.masked_fill(torch.ones_like(leaf, dtype=torch.bool), 0).real.sum()
    return loss


def leaves_of_graph(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaf tensors that receive a gradient in a backward pass from `tensors`."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, leaves = set(waiting), []
    while waiting:
        node = waiting.pop()
        new = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= new
        waiting += new
        leaf = None if node.next_functions else getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
    return leaves


def is_sharded(model: nn.Module) -> bool:
    """Whether a model is sharded by FSDP or FSDP2: others than its parameters get gradients."""
    names = {kind.__name__ for m in model.modules() for kind in type(m).__mro__}
    return not {"FSDPModule", "FullyShardedDataParallel"}.isdisjoint(names)


@contextmanager
def one_backward() -> Iterator[None]:
    """Say why a part of a mini-batch cannot be differentiated, where parts share a graph."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            error.add_note(
                "the loss or the model uses a tensor that was computed, with a graph, before this "
                "part of the mini-batch: compute it in the model or in loss_fn, or detach it"
            )
        raise


@contextmanager
def same_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Refuse a forward pass that changes gradients, which are sums over parts of a mini-batch."""
    before = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in parameters]
    yield
    if any(p.grad is not g or (g is not None and g._version != v) for p, g, v in before):
        raise BatchError(
            "the model or the loss changes gradients of the model's parameters, which are sums "
            "over the parts of the mini-batch: call torch.autograd.grad in place of backward() "
            f"there, and zero_grad() before the step. {OFF}"
        )


# A loss and its gradient by the outputs


@dataclass(frozen=True)
class Evaluated:
    """A loss, and its gradient by the model's outputs."""

    loss: Tensor  # (), float64, without a graph
    gradients: list[Tensor]  # by each output with dimensions; zeros for an unused output
    size: float  # of the largest output; rounding is relative to it if terms of the loss cancel
    # The loss depends on no output, or on one without dimensions, such as a loss in the model.
    inside: bool


def evaluate(loss_of: Callable[[Any], Tensor], outputs: Any, *, wide: bool = False) -> Evaluated:
    """Compute a loss of outputs without a graph, and its gradient by the outputs.

    `loss_of` receives copies of the outputs, which it may change in place; with `wide` outputs of
    half precision become float32, and so does what is computed.
    """
    with torch.enable_grad():
        leaves = leaves_of(outputs)
        for position, leaf in enumerate(leaves):
            if is_float(leaf):
                leaves[position] = (widened(leaf) if wide else leaf).detach().requires_grad_()
        copies = [leaf.clone() if is_float(leaf) else leaf for leaf in leaves]
        with Widening() if wide else nullcontext():
            loss = loss_of(replaced(outputs, copies))
        return differentiated(loss, [leaf for leaf in leaves if is_float(leaf)])


def differentiated(loss: Tensor, wanted: list[Tensor]) -> Evaluated:
    """Differentiate a loss by outputs in its graph."""
    gradients: Sequence[Tensor | None] = [None] * len(wanted)
    if loss.requires_grad and wanted:
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    inside, found, size = not loss.requires_grad, [], 0.0
    for leaf, gradient in zip(wanted, gradients, strict=True):
        if leaf.dim() == 0:
            inside |= gradient is not None
            continue
        found.append(torch.zeros_like(leaf) if gradient is None else gradient)
        size = max(size, float(leaf.detach().abs().max()) if leaf.numel() else 0.0)
    return Evaluated(loss.detach().double(), found, size, inside)


def compare(
    whole: Evaluated, parts: Sequence[Evaluated], factors: Sequence[float]
) -> tuple[float, float, float]:
    """Compare a loss with the sum of its parts, each times its factor.

    A part with factor 0 does not count, and may be 0 / 0.

    Returns the sum; its relative difference from the loss, infinite if a part is not finite; the
    relative difference of their gradients by the outputs.
    """
    pairs = [(f, part) for f, part in zip(factors, parts, strict=True) if f > 0]
    combined = float(sum(factor * part.loss for factor, part in pairs))
    value = relative(combined, whole, *(part.loss for _, part in pairs))
    gradient = 0.0
    shapes = [g.shape[1:] for g in whole.gradients]  # of ragged outputs not those of the parts
    if shapes and all([g.shape[1:] for g in part.gradients] == shapes for part in parts):
        expected = [
            torch.cat([f * g if f > 0 else 0 * torch.nan_to_num(g)
                       for f, g in zip(factors, column, strict=True)])
            for column in zip(*(part.gradients for part in parts), strict=True)
        ]  # fmt: skip
        gradient = difference(expected, whole.gradients) or 0.0
    return combined, value, gradient


def gradients_apart(
    loss_of: Callable[..., Tensor],
    parameters: Sequence[Tensor],
    ours: Iterable[tuple[float, Any]],
    theirs: Iterable[tuple[float, Any]],
) -> float:
    """Difference of two sums of gradients by the parameters, relative to the larger of their sizes.

    Each term is (factor, arguments of `loss_of`), a size the sum of the terms' norms. Sparse
    gradients are left out.
    """
    rest: dict[int, Tensor] = {}
    sizes = []
    for sign, terms in ((1, ours), (-1, theirs)):
        sizes.append(0.0)
        for factor, arguments in terms:
            found = torch.autograd.grad(loss_of(*arguments), parameters, allow_unused=True)
            scaled = {
                number: (sign * factor * gradient).cpu()
                for number, gradient in enumerate(found)
                if gradient is not None and not gradient.is_sparse
            }
            sizes[-1] += _norm(scaled.values())
            for number, gradient in scaled.items():
                rest[number] = rest[number].add_(gradient) if number in rest else gradient
    return _norm(rest.values()) / max(*sizes, 1e-300)


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in tensors))


def relative(value: float | Tensor, whole: Evaluated, *more: Tensor) -> float:
    """Difference of two losses, relative to the largest among both and `more`."""
    if not np.isfinite(float(value)):
        return float("inf")
    scale = max(abs(float(each)) for each in (value, whole.loss, *more))
    # A mean of outputs that cancel is only as exact as their rounding.
    off = max(0.0, abs(float(value) - float(whole.loss)) - 1e-6 * whole.size)
    return off / scale if scale > 0 else 0.0


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float | None:
    """Largest difference of tensors relative to their norm.

    Values that a mask has put into both, such as -inf or -1e9, do not count: beside them no other
    would. None if counts or shapes differ, or a tensor is not finite elsewhere.
    """
    if [a.shape for a in ours] != [b.shape for b in theirs]:
        return None
    largest = 0.0
    for pair in zip(ours, theirs, strict=True):
        a, b = (each.to(torch.promote_types(each.dtype, torch.float64)) for each in pair)
        filled = ((a == b) & (a.abs() >= _FILLED)) | (a.isnan() & b.isnan())
        a, b = a.masked_fill(filled, 0), b.masked_fill(filled, 0)
        size = float(torch.maximum(a.norm(), b.norm()))
        if not np.isfinite(size):
            return None
        largest = max(largest, float((a - b).norm()) / size if size > 0 else 0.0)
    return largest


def tolerance(
    kinds: Iterable[torch.dtype],
    device: torch.device,
    *,
    narrow: bool = False,
    multiplied_by: Sequence[Any] = ("matmul", "conv"),
) -> float:
    """Largest relative difference that rounding may cause to numbers of these dtypes on a device.

    `narrow`: whether losses of the very same outputs are compared; `multiplied_by`: kinds of
    operators for which CUDA may round to TF32.
    """
    table = _NARROW if narrow else _TOLERANCE
    worst = max((table.get(kind, 0.0) for kind in kinds), default=0.0)
    tf32 = device.type == "cuda" and any(map(rounds_to_tf32, multiplied_by))
    return max(worst or table[torch.float32], _TF32 if tf32 else 0.0)


def alike(firsts: list[Evaluated], again: list[Evaluated], narrow: float, allowed: float) -> bool:
    """Whether evaluations with a finite loss repeat within the tolerances."""
    return all(
        relative(b.loss, a) <= narrow and (difference(a.gradients, b.gradients) or 0.0) <= allowed
        for a, b in zip(firsts, again, strict=True)
        if torch.isfinite(a.loss)
    )


# Errors


@contextmanager
def fails_as(kind: type[BatchError], why: str, off: str = OFF) -> Iterator[None]:
    """Raise an error of this kind for one of the model or the loss, but for lack of memory."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise kind(f"{why} ({error}). {off}") from error


def mixed(off: float, count: int) -> MixedSamplesError:
    """The error of outputs of `count` samples that differ by a share of their norm."""
    return MixedSamplesError(
        f"what the model returns for a sample depends on the other samples beside it, or on their "
        f"number (by {100 * off:.2g} % for {count} samples), and a part of the mini-batch has only "
        f"its own. Name in shared= what belongs to the whole mini-batch, give samples first "
        f"(batch_first=True of torch's recurrent layers and transformers), or let the model "
        f"treat samples one by one. If it is to compare them, return embeddings, one row for "
        f"each sample, and compare them in loss_fn, which is checked. If it is a normalisation "
        f"by the batch that may be one by the part, as BatchNorm's is, {OFF}"
    )
