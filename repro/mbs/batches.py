"""Mini-batches as pytrees of tensors whose first dimension is the sample."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from repro.mbs.errors import BatchSizeMismatchError, EmptyBatchError, MicroBatchError


@dataclass(frozen=True)
class Piece:
    """Part of a mini-batch, or all of it: pytrees whose tensors share their first dimension.

    `weights` holds one weight per sample, or one per micro-batch; None weighs samples equally.
    """

    inputs: Any
    targets: Any
    weights: torch.Tensor | None
    num_samples: int

    def slice(self, start: int, stop: int) -> Any:
        """Return the (inputs, targets) of samples start..stop-1, as views without a graph."""

        def cut(leaf: Any) -> Any:
            return leaf[start:stop].detach() if is_batched(leaf) else leaf

        return tree_map(cut, (self.inputs, self.targets))

    def bounds(self, micro_batch_size: int) -> list[tuple[int, int]]:
        """Return the sample ranges of the micro-batches; the last may be shorter."""
        return [
            (start, min(start + micro_batch_size, self.num_samples))
            for start in range(0, self.num_samples, micro_batch_size)
        ]

    def weights_of(self, bounds: list[tuple[int, int]]) -> list[float]:
        """Return the weight of each micro-batch: its samples' sum, or their number.

        Raises:
            MicroBatchError: The weights fit neither the samples nor the micro-batches.
        """
        if self.weights is None:
            return [float(stop - start) for start, stop in bounds]
        if len(self.weights) == self.num_samples:
            return [float(self.weights[start:stop].sum()) for start, stop in bounds]
        if len(self.weights) == len(bounds):
            return [float(weight) for weight in self.weights]
        raise MicroBatchError(
            f"{len(self.weights)} weights were given for {self.num_samples} samples in "
            f"{len(bounds)} micro-batches; give one weight per sample, or one per micro-batch"
        )


_END = object()


def as_piece(inputs: Any, targets: Any, weights: Any) -> Piece:
    """Check a mini-batch, or a part of one, and return it as a `Piece`.

    Raises:
        EmptyBatchError: No sample.
        BatchSizeMismatchError: First dimensions differ.
        MicroBatchError: No batched tensor, or unusable weights.
    """
    inputs, targets = _without_mappings(inputs), _without_mappings(targets)
    sizes = [leaf.shape[0] for leaf in tree_leaves((inputs, targets)) if is_batched(leaf)]
    if not sizes:
        raise MicroBatchError(
            f"the mini-batch has no tensor with a batch dimension (inputs are "
            f"{type(inputs).__name__}); give tensors, or a tuple, list or dictionary of tensors, "
            f"whose first dimension is the batch"
        )
    if len(set(sizes)) > 1:
        raise BatchSizeMismatchError(
            f"the tensors of the mini-batch have first dimensions {sizes}; they must be equal, "
            f"one entry per sample"
        )
    if sizes[0] == 0:
        raise EmptyBatchError("the mini-batch has no samples; skip it, or give at least one")
    return Piece(inputs, targets, _checked_weights(weights), sizes[0])


def pieces_of(inputs: Any, targets: Any, weights: Any) -> Iterator[Piece] | None:
    """Return the pieces of a mini-batch that comes piece by piece, None if it is whole.

    An iterable yields (inputs, targets) or (inputs, targets, weights).

    Raises:
        MicroBatchError: Targets or weights beside an iterable.
    """
    whole = isinstance(inputs, torch.Tensor | tuple | list | Mapping)
    if whole or not isinstance(inputs, Iterable):
        return None
    if targets is not None or weights is not None:
        raise MicroBatchError(
            "a mini-batch given as an iterable yields (inputs, targets) or (inputs, targets, "
            "weights) itself; do not pass targets or weights beside it"
        )
    return _read_pieces(iter(inputs))


def _read_pieces(source: Iterator[Any]) -> Iterator[Piece]:
    for item in source:
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            raise MicroBatchError(
                f"the iterable yielded {type(item).__name__}; each piece must be (inputs, "
                f"targets) or (inputs, targets, weights)"
            )
        yield as_piece(item[0], item[1], item[2] if len(item) == 3 else None)


def mark_last(items: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each item with whether it is the last, which takes the next one in advance."""
    iterator = iter(items)
    item = next(iterator, _END)
    while item is not _END:
        following = next(iterator, _END)
        yield item, following is _END
        item = following


def is_batched(leaf: Any) -> bool:
    """Whether a leaf is a tensor with a sample dimension."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _without_mappings(tree: Any) -> Any:
    # A mapping that pytrees do not know, such as a tokenizer's output, would pass for a leaf and
    # reach every micro-batch whole; it becomes a dictionary.
    def convert(leaf: Any) -> Any:
        return _without_mappings(dict(leaf)) if isinstance(leaf, Mapping) else leaf

    return tree_map(convert, tree)


def _checked_weights(weights: Any) -> torch.Tensor | None:
    if weights is None:
        return None
    try:
        values = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MicroBatchError(
            f"weights must be a list or 1-D tensor of numbers; got {type(weights).__name__}: "
            f"{error}"
        ) from error
    usable = values.dim() == 1 and bool(torch.isfinite(values).all()) and bool((values >= 0).all())
    if not usable or not values.sum() > 0:
        raise MicroBatchError(
            f"weights must be a list or 1-D tensor of finite numbers, none negative and not all "
            f"zero; got shape {tuple(values.shape)} with sum {float(values.sum())}"
        )
    return values


def to_device(tree: Any, device: torch.device) -> Any:
    """Return the pytree with its tensors on `device`."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call with a tuple or list as positional, a dictionary as keyword arguments, else with one."""
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def own_memory(outputs: Any, inputs: Any) -> Any:
    """Return `outputs`, copied where they share memory with `inputs`, whose buffer is reused."""
    shared = {
        leaf.untyped_storage().data_ptr()
        for leaf in tree_leaves(inputs)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    }

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return leaf
        return leaf.clone() if leaf.untyped_storage().data_ptr() in shared else leaf

    return tree_map(own, outputs)


def concatenate(outputs: Sequence[Any], bounds: list[tuple[int, int]]) -> Any:
    """Join the micro-batches' outputs, (n_μ, ...) each, to leaves (N_B, ...) that want gradients.

    Raises:
        MicroBatchError: An output tensor does not have its micro-batch's samples first.
    """
    columns = list(zip(*(tree_flatten(output)[0] for output in outputs), strict=True))
    if not any(isinstance(column[0], torch.Tensor) for column in columns):
        raise MicroBatchError(
            f"two_pass needs outputs that are tensors, or a tuple, list or dictionary of them; "
            f"the model returned {type(outputs[0]).__name__}"
        )
    joined = []
    for column in columns:
        if not isinstance(column[0], torch.Tensor):
            joined.append(column[0])
            continue
        for part, (start, stop) in zip(column, bounds, strict=True):
            if part.dim() == 0 or part.shape[0] != stop - start:
                raise MicroBatchError(
                    f"two_pass needs outputs whose first dimension is the batch; a micro-batch "
                    f"of {stop - start} samples gave an output of shape {tuple(part.shape)}"
                )
        whole = torch.cat(column)
        joined.append(whole.requires_grad_(whole.is_floating_point() or whole.is_complex()))
    return tree_unflatten(joined, tree_flatten(outputs[0])[1])
