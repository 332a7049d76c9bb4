"""Outputs of the parts of a mini-batch: joined, told apart by sample, moved a little, copied."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from repro.measure.batches import leaves_of, map_leaves, replaced, to_device
from repro.measure.containers import holds_tensors


def is_float(leaf: Any) -> bool:
    """Whether this is a floating-point or complex tensor."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def floats(tree: Any) -> list[Tensor]:
    """A structure's floating-point and complex tensors with dimensions."""
    return [leaf for leaf in leaves_of(tree) if is_float(leaf) and leaf.dim() > 0]


def some_as_long(part: Any, whole: Any) -> bool:
    """Whether an output has as many rows for a part as for the whole: they belong to no sample."""
    ours, theirs = (
        [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        for tree in (part, whole)
    )
    same = len(ours) == len(theirs)
    return same and any(len(a) == len(b) for a, b in zip(ours, theirs, strict=True))


def can_be_joined(leaf: Any) -> bool:
    """Whether an output can be concatenated with those of other parts."""
    if isinstance(leaf, Tensor):
        return leaf.layout == torch.strided and not leaf.is_nested
    # A number may be that of the part's samples.
    return type(leaf) not in (int, float) and not holds_tensors(leaf, 3)


def joined(outputs: Sequence[Any], counts: Sequence[int] | None) -> Any:
    """The parts' outputs, of `counts` samples if given, concatenated; None if shapes do not fit."""
    every = [leaves_of(output) for output in outputs]
    if len({len(leaves) for leaves in every}) != 1:
        return None
    together: list[Any] = []
    for column in zip(*every, strict=True):
        numbers = {x if isinstance(x, int | float) else None for x in column}
        if len(numbers) > 1 or len({isinstance(x, Tensor) for x in column}) > 1:
            return None
        if not isinstance(column[0], Tensor) or column[0].dim() == 0:
            together.append(column[0])
            continue
        if any(
            leaf.dim() == 0
            or (counts is not None and len(leaf) != counts[number])
            or leaf.shape[1:] != column[0].shape[1:]
            for number, leaf in enumerate(column)
        ):
            return None
        together.append(torch.cat(list(column)))
    return replaced(outputs[0], together)


def near(tree: Any) -> Any:
    """The structure with its tensors of `floats`, on a CPU, made smaller by up to 1 %."""
    noise = torch.Generator().manual_seed(0)

    def moved(leaf: Any) -> Any:  # stays within the range of probabilities
        if not floats(leaf):
            return leaf
        return leaf * (1 - 0.01 * torch.rand(leaf.shape, generator=noise)).to(leaf.dtype)

    return map_leaves(moved, tree)


def rows_of_part(
    alone: list[Tensor], whole: list[Tensor], start: int, count: int, total: int
) -> tuple[list[Tensor], list[Tensor]]:
    """A part's outputs with rows of its `count` samples, and their rows among the whole's."""
    if len(alone) == len(whole):  # the others happen to be as long, or belong to no sample
        pairs = zip(alone, whole, strict=True)
        rows = [
            (a, w[start : start + count]) for a, w in pairs if (len(a), len(w)) == (count, total)
        ]
        return [a for a, _ in rows], [w for _, w in rows]
    each = len(alone) // count  # tensors for each sample, in a list
    if (len(alone), len(whole)) != (each * count, each * total):
        return [], []
    return alone, whole[each * start : each * (start + count)]


def fresh(tree: Any, device: torch.device) -> Any:
    """A structure with copies of its tensors on a device, which may be changed in place."""

    def copied(leaf: Any) -> Any:
        moved = to_device(leaf, device)
        return moved.clone() if moved is leaf and isinstance(leaf, Tensor) else moved

    return map_leaves(copied, tree)
