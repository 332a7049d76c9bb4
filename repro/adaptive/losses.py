"""What part of a mini-batch's loss a piece of it has: of samples, of tokens, or of a sum."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Their mean divides by the (weighted) number of targets that are not ignored.
_BY_CLASS: tuple[Any, ...] = (nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss)


def parts_of(
    loss_fn: Callable[..., Any],
    targets: Any,
    weights: Any,
    samples: int,
    pieces: Sequence[tuple[int, int]],
) -> list[float] | list[Tensor]:
    """Return by what the loss of each piece counts in the loss of the mini-batch.

    Of a mean over samples that is its share of them; of torch's cross-entropy and negative log
    likelihood its share of the targets that are not ignored, by their classes' weights; with
    `weights` its share of those; of a sum 1. Nothing waits for a GPU.

    Args:
        loss_fn: One of torch's losses, a partial of one, or any mean over samples.
        targets: Of the whole mini-batch.
        weights: What each sample counts, (samples,), or None.
        samples: Of the mini-batch.
        pieces: First sample of each, and the one after its last.

    Raises:
        ValueError: The loss is no scalar, or there is not one weight for each sample.
    """
    options, kind = _options(loss_fn)
    reduction = options.get("reduction", "mean")
    if reduction == "none" and isinstance(kind, type) and issubclass(kind, nn.modules.loss._Loss):
        raise ValueError("the loss has reduction='none' and gives no scalar; give 'mean' or 'sum'")
    if weights is not None:
        each = torch.as_tensor(weights, dtype=torch.float64)
        if each.shape != (samples,):
            raise ValueError(
                f"weights have the shape {tuple(each.shape)}, and the mini-batch {samples} "
                "samples; give one weight for each"
            )
    elif reduction == "sum" and _is_torchs(kind):
        return [1.0 if stop > start else 0.0 for start, stop in pieces]
    elif kind in _BY_CLASS and isinstance(targets, Tensor) and not targets.is_floating_point():
        each = _counted(targets, options.get("weight"), options.get("ignore_index", -100))
    else:
        return [(stop - start) / samples for start, stop in pieces]
    total = each.sum()
    return [each[start:stop].sum() / total for start, stop in pieces]


def weighted(loss: Tensor, part: float | Tensor) -> Tensor:
    """Return a piece's loss times its part; that of no token at all, 0 / 0, does not count."""
    if isinstance(part, Tensor):
        part = part.to(loss.device)
        loss = torch.where(part > 0, loss, torch.zeros_like(loss))
    return loss * part


def _options(loss_fn: Callable[..., Any]) -> tuple[dict[str, Any], Any]:
    if isinstance(loss_fn, nn.Module):
        names = ("reduction", "weight", "ignore_index")
        return {n: getattr(loss_fn, n) for n in names if hasattr(loss_fn, n)}, _torchs(loss_fn)
    if isinstance(loss_fn, partial) and not loss_fn.args:
        return dict(loss_fn.keywords), loss_fn.func
    return {}, loss_fn


def _torchs(loss: nn.Module) -> Any:
    """Return the one of torch's losses that a module computes, also where it only inherits it."""
    kind: Any = type(loss)
    for base in kind.__mro__:
        if _is_torchs(base):
            same = kind.forward is base.forward and "forward" not in vars(loss)
            return base if same else kind
    return kind


def _is_torchs(kind: Any) -> bool:
    return getattr(kind, "__module__", "").startswith("torch.nn")


def _counted(targets: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return what each sample adds to the divisor of a mean over targets, (samples,)."""
    kept = targets != ignore_index
    if weight is None:
        each = kept.double()
    else:
        # Classes out of range are refused where the loss is computed.
        classes = torch.where(kept, targets, 0).clamp(0, len(weight) - 1)
        each = weight.detach().to(targets.device, torch.float64)[classes] * kept
    return each.flatten(1).sum(1) if each.dim() > 1 else each
