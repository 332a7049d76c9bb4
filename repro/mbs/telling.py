"""Which samples of a mini-batch tell most about a loss, and which labels are new."""

from typing import Any

import numpy as np
import torch

from repro.measure.batches import Batch


def telling_samples(batch: Batch, count: int) -> tuple[list[int], list[int]]:
    """Return two groups of `count` samples that differ in what losses tend to weigh by.

    Padding and ignored labels show as integers that are negative or zero, or as zeros of masks;
    rare classes as targets of which there are few. One group has the samples with the fewest of
    them, the other those with the most. Without any, samples all over the mini-batch are taken.
    """
    number = batch.num_samples
    score = np.zeros(number)
    for path, leaf in batch.tensors():
        whole = torch.as_tensor(leaf)
        if whole.layout != torch.strided or len(whole) != number or not whole.numel():
            continue
        if _is_integer(leaf):
            rows = whole.reshape(number, -1).cpu()
            score += (rows <= 0).sum(1).numpy()
            score += 1e3 * (rows < 0).sum(1).numpy()
            if _is_target(path) and rows.numel() <= _FEW:
                _, inverse, counts = rows.unique(return_inverse=True, return_counts=True)
                score += (number / counts.double())[inverse].mean(1).numpy()
        elif _is_target(path) and whole.is_floating_point() and whole.numel() <= _FEW:
            rows = whole.reshape(number, -1).cpu()
            if bool(((rows == 0) | (rows == 1)).all()):
                score += (rows == 0).sum(1).numpy()
    order = np.argsort(score, kind="stable")
    if score[order[0]] == score[order[-1]]:
        order = np.arange(number)
        spread = np.unique(np.linspace(0, number - 1, 2 * count).round().astype(int))
        if len(spread) == 2 * count:
            order = spread
    return sorted(order[:count].tolist()), sorted(order[-count:].tolist())


_FEW = 2**16  # elements whose values are counted
_RANGE = 4096  # values that are told apart
_TRIES = 16  # mini-batches checked again for a value between those seen before


class LabelValues:
    """Remembers which integers targets have had, and says when others come.

    What a loss ignores or weighs by may be missing from the first mini-batch: a padding label, a
    rare class. The smallest and the largest value are remembered, and of small targets all values.
    Of integers among the inputs, which may be tokens, only negative ones are new.
    """

    def __init__(self) -> None:
        self._extremes: dict[Any, tuple[int, int]] = {}
        self._values: dict[Any, set[int]] = {}
        self._tries = 0

    def has_new(self, batch: Batch) -> bool:
        """Return whether a value is new, and remember it."""
        new = False
        for path, leaf in batch.tensors():
            if not _is_integer(leaf) or len(leaf) == 0:
                continue
            values = torch.as_tensor(leaf)
            if values.numel() == 0 or values.dtype == torch.bool:
                continue
            target = _is_target(path)
            low, high = (int(v) for v in values.aminmax())
            low, high = (low, high) if target else (min(low, 0), 0)
            before = self._extremes.get(path)
            if before is None or low < before[0] or high > before[1]:
                self._extremes[path] = (
                    min(low, before[0] if before else low), max(high, before[1] if before else high)
                )  # fmt: skip
                new = True
            small = values.numel() <= _FEW and high - low < _RANGE
            if target and small and self._tries < _TRIES:
                counts = torch.bincount((values.reshape(-1).long() - low).cpu())
                labels = {low + number for number in counts.nonzero().reshape(-1).tolist()}
                known = self._values.setdefault(path, set())
                if not labels <= known:
                    self._tries += before is not None and not new
                    known |= labels
                    new = True
        return new


def _is_target(path: Any) -> bool:
    names = [part for part in path[1:] if isinstance(part, str)]
    return path[0] == "targets" or any("label" in name or "target" in name for name in names)


def _is_integer(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind in "iub"
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return False
    return not (leaf.is_floating_point() or leaf.is_complex())
