"""What torch's own losses divide by, read from the loss itself."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import _reduction
from torch.nn.modules import loss as losses

from repro.mbs.errors import LossReductionError, LossShapeError, UnsupportedLossError

# Means over the elements of a mini-batch, of which each sample has as many, or over its samples.
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
# Means over the classes of the targets: divided by the sum of class weights that are not ignored.
_CLASS_MEANS: tuple[Any, ...] = (
    losses.CrossEntropyLoss, losses.NLLLoss, losses.NLLLoss2d, F.cross_entropy, F.nll_loss,
)  # fmt: skip
_CLASS_TARGETS = (losses.MultiMarginLoss, F.multi_margin_loss)
_ELEMENT_WEIGHTS = (F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss)


@dataclass(frozen=True)
class KnownLoss:
    """One of torch's losses, called as ``loss_fn(outputs, targets)``.

    Attributes:
        reduction: ``"mean"``, ``"batchmean"`` or ``"sum"``.
    """

    reduction: str
    _by_class: bool
    _same_dims: bool
    _weight: torch.Tensor | None
    _broadcast: tuple[torch.Tensor, ...]
    _ignore_index: int

    def weights(self, targets: Sequence[Any], even: bool = True) -> list[float] | None:
        """Return what each micro-batch's loss was divided by, None where that is its samples.

        The host waits for the device where targets are there, once.

        Args:
            targets: Of each micro-batch.
            even: Whether all samples have as many elements.
        """
        if not self._by_class or targets[0].is_floating_point():  # or probabilities of classes
            if even:
                return None
            # Rows, of all classes where they have probabilities; elements of any other.
            by_rows = self._by_class or self.reduction == "batchmean"
            return [float(len(t) if by_rows else t.numel()) for t in targets]
        return torch.stack([self._class_weight(target) for target in targets]).tolist()

    def _class_weight(self, target: torch.Tensor) -> torch.Tensor:
        kept = target.long() != self._ignore_index  # -100 as uint8 would be class 156
        if self._weight is None:
            return kept.sum(dtype=torch.float64)
        # torch refuses a class out of range with its own message, as it computes the loss.
        classes = target[kept].long().clamp(0, len(self._weight) - 1)
        weight = self._weight.detach().to(target.device, torch.float64)
        return weight[classes].sum()

    def check(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Refuse what torch would broadcast over samples.

        Raises:
            LossShapeError: Outputs and targets have different numbers of dimensions.
            UnsupportedLossError: The loss's `weight` or `pos_weight` has an entry per sample.
        """
        if self._same_dims and targets.dim() > 0 and outputs.dim() != targets.dim():
            raise LossShapeError(
                f"outputs have shape {tuple(outputs.shape)} and targets {tuple(targets.shape)}: "
                f"the loss would compare each sample with every other; give them the same shape"
            )
        for weight in self._broadcast:
            if weight.dim() >= targets.dim() > 0 and weight.shape[weight.dim() - targets.dim()] > 1:
                raise UnsupportedLossError(
                    f"the loss has a weight of shape {tuple(weight.shape)} for targets of shape "
                    f"{tuple(targets.shape)}: one for each sample of the mini-batch, which "
                    f"micro-batches do not have; give it in the targets, or use two_pass=True"
                )


def known_loss(loss_fn: Callable[..., Any]) -> KnownLoss | None:
    """Return what is known of a loss, None unless it is one of torch's, or a partial of one.

    One with a `forward` or hooks of its own is none.

    Raises:
        LossReductionError: Its reduction gives no scalar.
        UnsupportedLossError: It weighs elements of the whole mini-batch.
    """
    kind: Any = type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    options: dict[str, Any] = {}
    if isinstance(loss_fn, partial):
        kind, options = loss_fn.func, dict(loss_fn.keywords)
        if loss_fn.args:
            return None
    elif isinstance(loss_fn, nn.Module):
        if _is_changed(loss_fn):
            return None
        options = {
            name: getattr(loss_fn, name, None)
            for name in ("reduction", "weight", "pos_weight", "ignore_index")
            if getattr(loss_fn, name, None) is not None
        }
    if not any(kind is known for known in (*_SAMPLE_MEANS, *_CLASS_MEANS)):
        return None
    weight, pos_weight = options.get("weight"), options.get("pos_weight")
    if {"input", "target"} & set(options):
        return None
    by_class = any(kind is known for known in _CLASS_MEANS)
    reduction = options.get("reduction", "mean")
    if options.get("size_average") is not None or options.get("reduce") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns where the loss is called
            reduction = _reduction.legacy_get_string(
                options.get("size_average"), options.get("reduce")
            )
    if reduction not in ("mean", "sum", "batchmean"):
        raise LossReductionError(
            f"the loss has reduction={reduction!r}, which gives no scalar; use 'mean' or 'sum'"
        )
    if weight is not None and any(kind is known for known in _ELEMENT_WEIGHTS):
        raise UnsupportedLossError(
            "the loss has a weight for each element of the mini-batch, which micro-batches do "
            "not have; give it in the targets, or use two_pass=True"
        )
    same_dims = not by_class and not any(kind is known for known in _CLASS_TARGETS)
    return KnownLoss(
        reduction,
        by_class,
        same_dims,
        weight if by_class else None,
        tuple(w for w in (weight, pos_weight) if w is not None) if same_dims else (),
        options.get("ignore_index", -100),
    )


def _is_changed(loss: nn.Module) -> bool:
    """Return whether a loss computes something else than its class does in torch."""
    own = "forward" in vars(loss) or type(loss).forward.__module__ != losses.__name__
    return own or bool(loss._forward_hooks or loss._forward_pre_hooks)


def normalization_of(known: KnownLoss | None, normalization: str, two_pass: bool) -> str:
    """Return the normalisation that a loss needs: a sum's parts are summed.

    Raises:
        UnsupportedLossError: The paper's normalisation of a sum.
    """
    if known is None or known.reduction != "sum" or two_pass:
        return normalization
    if normalization == "paper":
        raise UnsupportedLossError(
            "the loss has reduction='sum', which normalization='paper' would divide by the number "
            "of micro-batches; use reduction='mean', or normalization='exact'"
        )
    return "none"


def token_counts(
    labels: torch.Tensor, *, shift: bool = False, ignore_index: int = -100
) -> torch.Tensor:
    """Return how many tokens of each sample count, for `weights`.

    A language model's loss is the mean over tokens, of which a padded sample has fewer than its
    row is long.

    Args:
        labels: Integers, (samples, tokens).
        shift: Whether each position predicts the next one, as in causal language models, so that
            the first label is predicted by none.
        ignore_index: The label of what does not count.

    Returns:
        Counts, (samples,), float64.
    """
    kept = (labels[:, 1:] if shift else labels).long()  # -100 as uint8 would be class 156
    return (kept != ignore_index).flatten(1).sum(1).to(torch.float64)
