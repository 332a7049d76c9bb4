"""What part of a mini-batch's loss a piece of it has: of samples, of tokens, or of a sum."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

# Their mean divides by the (weighted) number of targets that are not ignored.
_BY_CLASS: tuple[Any, ...] = (
    nn.CrossEntropyLoss, nn.NLLLoss, nn.NLLLoss2d, F.cross_entropy, F.nll_loss,
)  # fmt: skip


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
    if weights is not None:
        each: Tensor | None = torch.as_tensor(weights, dtype=torch.float64)
        assert each is not None
        if each.shape != (samples,):
            raise ValueError(
                f"weights have the shape {tuple(each.shape)}, and the mini-batch {samples} "
                "samples; give one weight for each"
            )
    elif is_sum(loss_fn):
        return [1.0 if stop > start else 0.0 for start, stop in pieces]
    else:
        each = counted(loss_fn, targets)
    if each is None:
        return [(stop - start) / samples for start, stop in pieces]
    total = each.sum()
    return [each[start:stop].sum() / total for start, stop in pieces]


def is_sum(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss is one of torch's and adds up what others take the mean of.

    Raises:
        ValueError: It is one of torch's and gives no scalar.
    """
    options, kind = _options(loss_fn)
    reduction = options.get("reduction", "mean")
    if not _is_torchs(kind):
        return False
    if reduction == "none":
        raise ValueError("the loss has reduction='none' and gives no scalar; give 'mean' or 'sum'")
    return bool(reduction == "sum")


def counted(loss_fn: Callable[..., Any], targets: Any) -> Tensor | None:
    """Return what each sample adds to what a loss divides by, (samples,); None for 1 of each."""
    options, kind = _options(loss_fn)
    if kind not in _BY_CLASS or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    # In a smaller type, ignore_index would be taken for another number.
    classes, weight = targets.long(), options.get("weight")
    kept = classes != options.get("ignore_index", -100)
    if weight is None:
        each: Tensor = kept.double()
    else:
        # Classes out of range are refused where the loss is computed.
        classes = torch.where(kept, classes, 0).clamp(0, len(weight) - 1)
        each = weight.detach().to(targets.device, torch.float64)[classes] * kept
    return each.flatten(1).sum(1) if each.dim() > 1 else each


def is_known(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss is one of torch's, without a hook, of which is known what it divides by."""
    hooked = bool(_global_forward_hooks or _global_forward_pre_hooks)
    if isinstance(loss_fn, nn.Module):
        hooked |= bool(loss_fn._forward_hooks or loss_fn._forward_pre_hooks)
    kind = _options(loss_fn)[1]
    a_loss = not isinstance(kind, type) or issubclass(kind, nn.modules.loss._Loss)
    return _is_torchs(kind) and a_loss and not isinstance(kind, nn.Module) and not hooked


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
            same = kind.forward is base.forward and kind.__call__ is base.__call__
            same = same and "forward" not in vars(loss)
            return base if same else kind
    return kind


def _is_torchs(kind: Any) -> bool:
    return (getattr(kind, "__module__", None) or "").startswith("torch.nn")
