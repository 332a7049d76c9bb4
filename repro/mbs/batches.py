"""Mini-batches as pytrees of tensors whose first dimension is the sample."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from repro.mbs.errors import MicroBatchError, named_errors
from repro.measure.batches import Batch, read_batch


@dataclass(frozen=True)
class Piece:
    """Part of a mini-batch, or all of it.

    `weights` holds one weight per sample, or one per micro-batch; None weighs samples equally.
    """

    batch: Batch
    weights: torch.Tensor | None

    @property
    def inputs(self) -> Any:
        """As given."""
        return self.batch.inputs

    @property
    def targets(self) -> Any:
        """As given."""
        return self.batch.targets

    @property
    def num_samples(self) -> int:
        """Samples, at least 1."""
        return self.batch.num_samples

    def slice(self, start: int, stop: int) -> Any:
        """Return the (inputs, targets) of samples start..stop-1, as views without a graph."""
        return self.batch.slice(start, stop)

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
    with named_errors():
        batch = read_batch(inputs, targets)
    return Piece(batch, _checked_weights(weights))


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
