"""Cutting of mini-batches, or pieces of them, into micro-batches, and joining of outputs."""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import _disable_current_modes

from repro.mbs.errors import MicroBatchError
from repro.mbs.transaction import same_memory
from repro.measure.batches import (
    Batch,
    BatchError,
    SplitFunction,
    UnsplittableBatchError,
    bounds,
    check_no_graph,
    leaves_of,
    map_leaves,
    read_batch,
    split_by,
)
from repro.measure.containers import holds_tensors
from repro.measure.loss_parts import KnownLoss
from repro.measure.outputs import joined


@dataclass(frozen=True)
class Plan:
    """A piece cut into micro-batches."""

    bounds: list[tuple[int, int]]  # sample range of each micro-batch
    weights: list[float]  # weight of each in the mini-batch's loss
    parts: Callable[[], Iterator[Any]]  # yields (inputs, targets) of each, made on demand


@dataclass(frozen=True)
class Piece:
    """Part of a mini-batch, or all of it."""

    inputs: Any
    targets: Any
    num_samples: int
    weights: torch.Tensor | None  # of each sample, with `split` of each micro-batch; None: equal
    batch: Batch | None  # which takes samples out; None with `split`
    split: SplitFunction | None = None  # makes micro-batches of at most a given size

    def plan(
        self,
        micro_batch_size: int,
        as_in_paper: bool = False,
        loss: KnownLoss | None = None,
        fewest: int = 1,
    ) -> Plan:
        """Cut into micro-batches of at most this size, with their weights in the loss.

        Sizes differ by at most one sample, and there are `fewest` micro-batches or more;
        `as_in_paper` all but the last have the full size. Without weights those of a known `loss`
        are used.
        """
        if self.batch is not None:
            ranges = bounds(self.num_samples, micro_batch_size, fewest)
            if as_in_paper:
                starts = range(0, self.num_samples, micro_batch_size)
                ranges = list(itertools.pairwise([*starts, self.num_samples]))
            parts: Any = partial(itertools.starmap, self.batch.slice, ranges)
        else:
            assert self.split is not None
            every = split_by(self.split, self.inputs, self.targets, micro_batch_size)
            ends = list(itertools.accumulate((count for _, _, count in every), initial=0))
            ranges = list(itertools.pairwise(ends))
            parts = partial(map, operator.itemgetter(0, 1), every)
            if ends[-1] != self.num_samples:
                raise UnsplittableBatchError(
                    f"split returned micro-batches of {ends[-1]} samples in all for at most "
                    f"{micro_batch_size} each, but of {self.num_samples} where any size would do; "
                    f"each sample has to be in one of them, and in one only"
                )
        weights = None
        if loss is not None and self.weights is None:
            targets = [target for _, target in parts()]
            if all(isinstance(target, torch.Tensor) for target in targets):
                weights = loss.weights(targets, even=self.batch is not None)
        return Plan(ranges, self._weights_of(ranges) if weights is None else weights, parts)

    def _weights_of(self, ranges: list[tuple[int, int]]) -> list[float]:
        """Return each micro-batch's weight: the sum of its samples' weights, or their number."""
        if self.weights is None:
            return [float(stop - start) for start, stop in ranges]
        if self.batch is not None:
            return [float(self.weights[start:stop].sum()) for start, stop in ranges]
        if len(self.weights) != len(ranges):
            raise MicroBatchError(
                f"{len(self.weights)} weights were given for {len(ranges)} micro-batches of split; "
                f"give one weight per micro-batch"
            )
        return self.weights.tolist()


_ALL = 2**31 - 1  # more samples than any mini-batch has


class Reader:
    """Reads mini-batches."""

    def __init__(
        self,
        shared: Sequence[Any] = (),
        split: SplitFunction | None = None,
        graph_of_targets: bool = False,
    ) -> None:
        self._graph_of_targets = graph_of_targets
        one = isinstance(shared, str | int | torch.Tensor)
        self._shared = [shared] if one else list(shared)
        self._split = split
        self._known: dict[Any, str] = {}
        if split is not None and (self._shared or not callable(split)):
            raise ValueError(
                "split is a function (batch, micro_batch_size) that returns the micro-batches; "
                "with it there is nothing for shared to name"
            )

    def read(self, inputs: Any, targets: Any, weights: Any) -> Piece:
        """Check a mini-batch, or a part of one."""
        check_no_graph(inputs, "an input")
        if not self._graph_of_targets:
            check_no_graph(targets, "a target")
        checked = None if weights is None else _checked_weights(weights)
        if self._split is not None:
            every = split_by(self._split, inputs, targets, _ALL)
            count = sum(part[2] for part in every)
            _check_all_samples(inputs, targets, every, count)
            return Piece(inputs, targets, count, checked, None, self._split)
        batch = read_batch(inputs, targets, shared=self._shared, known=self._known)
        if checked is not None and len(checked) != batch.num_samples:
            raise MicroBatchError(
                f"{len(checked)} weights were given for {batch.num_samples} samples; give one "
                f"weight per sample"
            )
        return Piece(batch.inputs, batch.targets, batch.num_samples, checked, batch)

    def pieces_of(self, inputs: Any, targets: Any, weights: Any) -> Iterator[Piece] | None:
        """Return the pieces (inputs, targets) of a mini-batch given as an iterator, else None."""
        if not isinstance(inputs, Iterator):
            return None
        if targets is not None or weights is not None:
            raise MicroBatchError(
                "a mini-batch given as an iterator yields (inputs, targets) itself, and has no "
                "weights; do not pass targets or weights beside it"
            )
        return (self._piece(item) for item in inputs)  # map would end at `split`'s StopIteration

    def _piece(self, item: Any) -> Piece:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise MicroBatchError(
                f"the iterator yielded {type(item).__name__}; each piece must be (inputs, targets)"
            )
        return self.read(item[0], item[1], None)


def _check_all_samples(inputs: Any, targets: Any, parts: list[Any], count: int) -> None:
    """Raise if micro-batches lack samples, or repeat them, as far as samples can be counted."""
    try:
        whole = read_batch(inputs, targets).num_samples
        alike = sum(read_batch(*part[:2]).num_samples for part in parts) == count
    except BatchError:
        return  # only `split` can read it
    if alike and whole != count:
        raise UnsplittableBatchError(
            f"split returned micro-batches of {count} samples in all of a mini-batch of {whole}; "
            f"each sample has to be in one of them, and in one only"
        )


def _checked_weights(weights: Any) -> torch.Tensor:
    try:
        values = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise MicroBatchError(
            f"weights must be a list or 1-D tensor of numbers; got {type(weights).__name__}: "
            f"{error}"
        ) from error
    if values.dim() != 1 or not bool((values.isfinite() & (values >= 0)).all()):
        raise MicroBatchError(
            f"weights must be a list or 1-D tensor of finite numbers, none negative; got "
            f"shape {tuple(values.shape)} with sum {float(values.sum())}"
        )
    return values


def own_memory(outputs: Any, inputs: Any) -> Any:
    """Return `outputs`, copied where they share memory with `inputs`: that buffer is reused."""
    given = [leaf for leaf in leaves_of(inputs) if isinstance(leaf, torch.Tensor)]

    def unshared(leaf: Any) -> Any:
        strided = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
        return leaf.clone() if strided and any(same_memory(leaf, one) for one in given) else leaf

    return map_leaves(unshared, outputs)


def uncounted_copy(micro_batch: Any, device: torch.device) -> Any:
    """Copy a micro-batch's tensors on the device, outside any memory budget's count."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf._replace(data=copied(leaf.data))
        there = isinstance(leaf, torch.Tensor) and leaf.device == device
        return leaf.clone() if there else leaf  # a tensor elsewhere is copied to the device later

    with _disable_current_modes():
        return map_leaves(copied, micro_batch)


class UnjoinedOutputError(MicroBatchError, AttributeError):
    """The loss of two passes reads an output of which only single micro-batches have values."""


class _Unjoined:
    """In the place of an output that holds tensors and is none, such as a cache of a decoder."""

    _kind = ""  # of a copy in the making

    def __init__(self, kind: str) -> None:
        self._kind = kind

    @classmethod
    def of(cls, leaf: Any) -> Any:
        """The leaf itself if it is a tensor, or holds none."""
        kept = isinstance(leaf, torch.Tensor) or not holds_tensors(leaf, 3)
        return leaf if kept else cls(type(leaf).__name__)

    def __getattr__(self, name: str) -> Any:
        raise UnjoinedOutputError(
            f"two_pass joins outputs that are tensors, or in a tuple, list or dictionary; the loss "
            f"reads {name} of {self._kind}, of which each micro-batch has its own: let the model "
            f"return tensors with a row for each sample, and make it in loss_fn"
        )


def concatenate(
    outputs: Sequence[Any], bounds: list[tuple[int, int]] | None, gradients: bool = True
) -> Any:
    """Join micro-batches' outputs, (n_μ, ...) each, to leaves (N_B, ...) that require gradients.

    Without `bounds` a sample may have any number of rows, such as a graph's nodes.
    """
    counts = None if bounds is None else [stop - start for start, stop in bounds]
    every = (leaf for output in outputs for leaf in leaves_of(output))
    tensors = [leaf for leaf in every if isinstance(leaf, torch.Tensor)]
    whole = joined(outputs, counts) if tensors and all(x.dim() > 0 for x in tensors) else None
    if whole is None:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        by = "the model" if gradients else "split, as targets,"
        raise MicroBatchError(
            f"two_pass needs outputs that are tensors, or a tuple, list or dictionary of them, "
            f"with a row for each sample; all else must be equal in all micro-batches; for "
            f"{counts} samples {by} returned {type(outputs[0]).__name__} of shapes {shapes}; "
            f"compute losses, pairs of samples and what depends on their number in loss_fn, and "
            f"read a parameter, such as a temperature, from the model there"
        )
    for leaf in leaves_of(whole):
        if isinstance(leaf, torch.Tensor):
            leaf.requires_grad_(gradients and (leaf.is_floating_point() or leaf.is_complex()))
    return map_leaves(_Unjoined.of, whole)


def targets_in_order(piece: Piece, plan: Plan, count: int, rows: bool) -> Any:
    """Return the targets of the first micro-batches of `split`, in the order of their outputs.

    With `rows` each sample has one row. What `split` makes of all samples at once serves if these
    keep their order: targets of parts may number their samples from 0, as boxes do.
    """
    parts = list(itertools.islice(plan.parts(), count))
    if count == len(plan.bounds):
        whole = [*replace(piece, weights=None).plan(_ALL).parts()]
        if len(whole) == 1 and in_order(whole[0][0], parts, plan.bounds):
            return whole[0][1]
    every = [part[1] for part in parts]
    if every[0] is None:
        return None
    return concatenate(every, plan.bounds[:count] if rows else None, gradients=False)


def in_order(inputs: Any, parts: list[Any], bounds: list[tuple[int, int]]) -> bool:
    """Whether inputs are tensors of which each part has the samples within its bounds."""
    leaves, own = leaves_of(inputs), [leaves_of(part[0]) for part in parts]
    if not all(isinstance(leaf, torch.Tensor) for leaf in itertools.chain(leaves, *own)):
        return False
    with suppress(RuntimeError, IndexError):  # sparse, without dimensions, or on two devices
        slices = ([leaf[slice(*bound)] for leaf in leaves] for bound in bounds)
        return all(
            len(some) == len(given) and all(map(torch.equal, some, given))
            for some, given in zip(slices, own, strict=True)
        )
    return False
