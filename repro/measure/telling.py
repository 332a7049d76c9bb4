"""The most informative samples for checking a loss, and mini-batches with new values."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repro.measure.batches import Batch, leaves_of

_COMPARED = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
_FEW = 2**16  # most elements of what is sorted, and of floats and bytes read among inputs
_RANGE = 4096  # widest range of integers that are remembered
_TRIES = 16  # most mini-batches counted as new for a value between known ones


def telling_samples(
    batch: Batch, count: int, classes_apart: bool = False
) -> tuple[list[int], list[int]]:
    """Two groups of `count` samples that differ in the quantities losses tend to weigh by.

    Padding and ignored labels show as integers that are negative or zero, as zeros of masks or as
    targets that are not finite; rare classes as infrequent targets; boxes as the rows of an item of
    a list. One group has the samples with the fewest of these, the other those with the most. If
    all samples are equal, they are taken evenly from the mini-batch. With `classes_apart`, where
    samples have one class each, few classes are equally often in both groups.
    """
    number = batch.num_samples
    scores, labels = np.zeros((2, number)), list[np.ndarray]()
    for rows in map(_rows, batch.lists()):
        scores += 1e3 * rows.numpy()
    for path, whole in _strided(batch):
        target, few = _is_target(path), whole.numel() <= _FEW
        whole_numbers = not whole.is_floating_point()
        if not whole.numel() or not (target or few or whole_numbers):
            continue
        rows = whole.detach().reshape(number, -1).cpu()
        unlike = rows < 0 if whole_numbers else ~rows.isfinite()
        scores += 1e3 * unlike.sum(1).numpy()
        common = np.zeros(number)
        if whole_numbers or bool(((rows == 0) | (rows == 1)).all()):
            common += (rows <= 0).sum(1).numpy()
        by_class = common
        if whole_numbers and target and few:
            _, inverse, counts = rows.unique(return_inverse=True, return_counts=True)
            # Of equally frequent classes the first and the last are told apart.
            rarity = number / counts.double() + 1e-6 * torch.ones_like(counts).cumsum(0)
            by_class = common = common + rarity[inverse].mean(1).numpy()
            if classes_apart and rows.shape[1] == 1:
                labels.append(inverse[:, 0].numpy())
                by_class = _one_of_each_first(labels[-1], rarity.numpy())
        scores += np.stack([common, by_class])

    def hidden(groups: tuple[np.ndarray, np.ndarray]) -> int:
        """How many weights both groups have equally much of: of one class, of class numbers."""
        found = 0
        for own in labels:
            one, other = (np.bincount(own[group], minlength=own.max() + 1) for group in groups)
            more = one - other
            found += int((more == 0).sum()) + int(more @ np.arange(len(more)) == 0)
        return found

    first, second = min((_ends(score, count) for score in scores), key=hidden)
    return sorted(first.tolist()), sorted(second.tolist())


def _ends(score: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples with the lowest and the highest scores."""
    order, number = np.argsort(score, kind="stable"), len(score)
    if score[order[0]] == score[order[-1]]:
        order = np.arange(number)
        spread = np.unique(np.linspace(0, number - 1, 2 * count).round().astype(int))
        if len(spread) == 2 * count:
            order = spread
    return order[:count], order[-count:]


def _one_of_each_first(classes: np.ndarray, rarity: np.ndarray) -> np.ndarray:
    """Scores that are positive for the rarer half of the classes, negative for the others.

    The farthest from zero are one sample of each class, then a second of each, and so on, for a
    loss may weigh any class.
    """
    rank = np.argsort(np.argsort(rarity))
    counts, earlier = np.bincount(classes), np.empty(len(classes))
    starts = np.repeat(counts.cumsum() - counts, counts)
    earlier[np.argsort(classes, kind="stable")] = np.arange(len(classes)) - starts
    middle = np.minimum(rank, len(rank) - 1 - rank) / len(rank)  # the rarest, the commonest first
    side = np.where(2 * rank >= len(rank), 1, -1)
    return side[classes] * (2 - (earlier + middle[classes]) / len(classes))


def one_of_each(batch: Batch, most: int, first: Iterable[int] = ()) -> list[int]:
    """At most `most` samples, one for each integer in small targets; those in `first` first."""
    found: list[int] = []
    for path, whole in _strided(batch):
        if not _is_label(path, whole) or whole.numel() > _FEW:
            continue
        rows = whole.reshape(batch.num_samples, -1).cpu()
        values = rows.unique().tolist()
        for value in [*(v for v in first if v in values), *values][:most]:
            found.append(int((rows == value).any(1).nonzero()[0]))
    return list(dict.fromkeys(found))[:most]


class Novelty:
    """Detects mini-batches with new kinds of values, for which a loss may behave differently.

    Values that a loss ignores or weighs may be missing from the first mini-batch: a padding label,
    a rare class, a masked element, a target that is NaN. Remembered are the smallest and the
    largest integer of each target, and all integers of a narrow range; whether booleans were true
    and false; whether targets and small inputs were zero, negative, positive, not finite, or
    unequal; and whether samples had unequally many of those that a loss may ignore. Of integer
    inputs, which may be tokens, only a lower negative one is new, and a mask's first zero.
    `values` are integers that occurred first in the last mini-batch.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, list[float]] = {}
        self._values: dict[Any, set[int]] = {}
        self._tries = 0
        self.values: set[int] = set()

    def in_batch(self, batch: Batch) -> bool:
        """Whether a mini-batch has new values; waits for its device."""
        self.values = set()
        found = False
        for path, whole in _strided(batch):
            if (traits := _traits(path, whole, batch.num_samples)) is not None:
                now, before = traits.tolist(), self._seen.get(path)
                self._seen[path] = now if before is None else [*map(max, now, before)]
                found |= self._seen[path] != before
                found |= self._has_new_value(path, whole)
        return found

    def _has_new_value(self, path: Any, values: Tensor) -> bool:
        """Whether a target has a new integer between known ones; remembers its integers."""
        if not _is_label(path, values) or self._tries >= _TRIES:
            return False
        least, most = (int(value) for value in values.aminmax())
        if most - least >= _RANGE:
            return False
        counts = torch.bincount(values.reshape(-1).long() - least)
        labels = {least + number for number in counts.nonzero().reshape(-1).tolist()}
        first = path not in self._values
        new = labels - self._values.setdefault(path, labels)
        self._values[path] |= labels
        self.values |= new
        self._tries += bool(new)
        return first or bool(new)


def _traits(path: Any, values: Tensor, number: int) -> Tensor | None:
    """Numbers that are new when they grow, None for a tensor that is not read."""
    target, few = _is_target(path), values.numel() <= _FEW
    large = values.is_floating_point() or values.dtype == torch.uint8  # images and the like
    if not values.numel() or not (target or few or not large):
        return None
    rows = values.detach().reshape(number, -1)
    if values.dtype == torch.bool:
        return torch.stack([values.any(), ~values.all(), _uneven(~rows)]).float()
    extremes = values.detach().aminmax()
    low, high = (value.float() for value in extremes)
    if not target and not values.is_floating_point() and bool((low >= 0) & (high > 1)):
        return torch.zeros(4)  # tokens, indices
    zero = (values == 0).any().float()
    if values.is_floating_point():
        finite = low.isfinite() & high.isfinite()
        uneven = map(_uneven, (rows < 0, rows == 0, ~rows.isfinite()))
        return torch.stack([low < 0, high > 0, zero > 0, ~finite, low != high, *uneven]).float()
    masked = zero * (high <= 1)  # no tokens, of which others are larger
    negative, zeros = _uneven(rows < 0).float(), _uneven(rows == 0).float()
    if target:
        largest = _uneven(rows == extremes.max).float()  # such as 255, which is ignored
        return torch.stack([-low, high, zero, negative, zeros, largest])
    return torch.stack([(-low).clamp(min=0), masked, negative, masked * zeros])


def _uneven(chosen: Tensor) -> Tensor:
    """Whether samples have unequally many of the chosen elements, (samples, elements)."""
    least, most = chosen.sum(1, dtype=torch.int32).aminmax()  # five times faster than int64
    return least != most


def _strided(batch: Batch) -> Iterator[tuple[Any, Tensor]]:
    """Yield path and value of dense tensors and numeric arrays with samples, as tensors."""
    for path, leaf in batch.tensors():
        if isinstance(leaf, np.ndarray):
            if leaf.dtype.kind not in "biuf":
                continue
            # Torch takes no negative strides or those of fields, nor the bytes of another machine.
            if not leaf.dtype.isnative or any(s < 0 or s % leaf.itemsize for s in leaf.strides):
                leaf = np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("="))
            leaf = torch.from_numpy(leaf)
        if leaf.layout is torch.strided and not leaf.is_complex():
            yield path, leaf if leaf.dtype in _COMPARED else leaf.float()
    for number, items in enumerate(batch.lists()):
        yield ("targets", None, number), _rows(items)


def _rows(items: Iterable[Any]) -> Tensor:
    """The rows of tensors of each sample in a list, such as its boxes, which a loss may count."""
    arrays = Tensor | np.ndarray
    tensors = ([x for x in leaves_of(i) if isinstance(x, arrays) and x.ndim] for i in items)
    return torch.tensor([sum(map(len, each)) for each in tensors]).float()


def _is_label(path: Any, values: Tensor) -> bool:
    """Whether these are the integers of a target."""
    whole = not values.is_floating_point() and values.dtype != torch.bool
    return whole and _is_target(path) and values.numel() > 0


def _is_target(path: Any) -> bool:
    names = [part for part in path[1:] if isinstance(part, str)]
    return path[0] == "targets" or any("label" in name or "target" in name for name in names)
