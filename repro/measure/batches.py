"""Mini-batches of any structure: find the parts that belong to samples, and take samples out.

A mini-batch is (inputs, targets), each a tensor, an array, a `PackedSequence`, or a tuple, list,
dictionary, dataclass or other container of them. Its samples are found by these rules;
an ambiguous mini-batch is refused, never guessed:

- A tensor or array with dimensions holds one sample in each entry of its first dimension; a tensor
  without dimensions, a number, a text or another object without tensors belongs to all samples.
- A list or tuple of items of one kind, one for each sample (images of different sizes, dictionaries
  of boxes, texts), is divided itself. If it could also be a structure of tensors that hold the
  samples, a list is refused and a tuple is a structure.
- An input with a leading dimension of 1 and further dimensions, such as positions (1, T),
  broadcasts over the samples if other inputs have several, and belongs to all samples.
- Parts named in `shared` belong to all samples.
- An object that holds tensors and is none of these is refused.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from repro.measure.checks import is_whole
from repro.measure.containers import (
    BatchError,
    BatchSizeMismatchError,
    EmptyBatchError,
    InputGradientError,
    UnsplittableBatchError,
    Which,
    parts_of,
    pick,
    samples_of,
)

Path = tuple[Any, ...]  # of keys, from "inputs" or "targets" down
SplitFunction = Callable[[Any, int], Sequence[Any]]

_MOVABLE: Any = (torch.Tensor, PackedSequence)
_SAMPLES, _WHOLE, _STRUCTURE, _OPEN = "samples", "whole", "structure", "open"


@dataclass(frozen=True)
class Batch:
    """A mini-batch that was read: its samples can be counted and taken out."""

    inputs: Any  # as given, with other mappings made dictionaries
    targets: Any
    num_samples: int  # at least 1
    _kinds: dict[Path, str] = field(repr=False)

    def slice(self, start: int, stop: int) -> tuple[Any, Any]:
        """The (inputs, targets) of samples start to stop - 1, as views without a graph."""
        return self._taken(slice(start, stop))

    def take(self, indices: Sequence[int]) -> tuple[Any, Any]:
        """The (inputs, targets) of these samples, copied."""
        return self._taken(list(indices))

    def tensors(self) -> Iterator[tuple[Path, Any]]:
        """Yield path and value of each tensor or array with samples in its first dimension."""
        for path, leaf in _leaves_with_paths({"inputs": self.inputs, "targets": self.targets}, ()):
            array = isinstance(leaf, torch.Tensor | np.ndarray)
            if array and self._kinds.get(path) == _SAMPLES:
                yield path, leaf

    def lists(self) -> Iterator[list[Any]]:
        """Yield each list or tuple with an item for each sample."""
        waiting: list[tuple[Path, Any]] = [(("inputs",), self.inputs), (("targets",), self.targets)]
        for path, tree in waiting:
            if (parts := parts_of(tree)) is None:
                continue
            if self._kinds.get(path) == _SAMPLES:
                yield tree
            else:
                waiting += [((*path, key), child) for key, child in parts[0]]

    def num_splittable(self) -> int:
        """Number of parts of the inputs that are divided."""
        return sum(k == _SAMPLES and path[0] == "inputs" for path, k in self._kinds.items())

    def _taken(self, which: Which) -> tuple[Any, Any]:
        inputs = self._cut(self.inputs, ("inputs",), which)
        return inputs, self._cut(self.targets, ("targets",), which)

    def _cut(self, tree: Any, path: Path, which: Which) -> Any:
        # A method, since a nested recursive function would keep the mini-batch alive.
        kind = self._kinds.get(path)
        if kind == _WHOLE:
            return tree.detach() if isinstance(tree, torch.Tensor) else tree
        if kind == _SAMPLES:
            return pick(tree, which)
        parts = parts_of(tree)
        if parts is None:
            return tree
        pairs, rebuild = parts
        return rebuild([self._cut(child, (*path, key), which) for key, child in pairs])


@dataclass(frozen=True)
class Sample:
    """Groups of samples of a mini-batch, such as its micro-batches, and all groups as one."""

    parts: Iterable[Any]  # (inputs, targets) of each group
    counts: Sequence[int]
    weights: Sequence[float]  # of each group
    exact: bool  # whether a group's share is its weight over the total weight; else losses add up
    targets: Callable[[int], Any]  # of the first groups, concatenated
    inputs: Any = None  # of all groups, concatenated; None if that is impossible
    # Inputs of the second group, after as many of its own as the first has; None without one.
    twice: Any = None
    batch: Batch | None = None  # of which the groups are

    @classmethod
    def of(
        cls,
        batch: Batch,
        groups: tuple[list[int], list[int]],
        weights: Sequence[float],
        exact: bool,
    ) -> "Sample":
        """Take two groups of samples out of a mini-batch."""
        first, second = groups
        inputs, targets = batch.take([*first, *second])
        own = [second[number % len(second)] for number in range(len(first))]
        parts, twice = (batch.take(first), batch.take(second)), batch.take([*own, *second])[0]
        counts = [len(first), len(second)]
        return cls(parts, counts, weights, exact, lambda _: targets, inputs, twice, batch)


def read_batch(
    inputs: Any,
    targets: Any = None,
    *,
    shared: Sequence[Any] = (),
    known: dict[Path, str] | None = None,
) -> Batch:
    """Find the samples of a mini-batch.

    Args:
        inputs: The model's arguments, see `call_model`: the items of a tuple or list are
            arguments, never samples.
        targets: The loss's targets, or None.
        shared: Parts that belong to all samples: names ("mask", "graph.edges", "targets.table"; the
            keys of dictionaries, fields of dataclasses and positions of tuples, joined by dots),
            positions among the arguments, or the tensors themselves.
        known: Kinds of the lists in earlier mini-batches, which decide an ambiguous list; this
            function keeps them up to date.

    Raises:
        BatchError: Its kinds; the samples are none, unequal, unknown or ambiguous.
    """
    finder = _Finder(shared, {} if known is None else known)
    trees = {"inputs": _without_mappings(inputs), "targets": _without_mappings(targets)}
    for name, tree in trees.items():
        finder.visit(tree, (name,), arguments=name == "inputs")
    finder.check_shared()
    kinds, num_samples = finder.decide(trees)
    if num_samples == 0:
        raise EmptyBatchError("the mini-batch has no samples; skip it, or give at least one")
    return Batch(trees["inputs"], trees["targets"], num_samples, kinds)


def bounds(num_samples: int, most: int, fewest: int = 1) -> list[tuple[int, int]]:
    """The fewest sample ranges of at most `most` samples, of equal size but for one sample.

    There are at least `fewest` ranges, which need as many samples. 65 samples in ranges of at most
    64 are 33 and 32: BatchNorm could not normalise a last range of one sample.
    """
    count = max(-(-num_samples // most), fewest)
    each, rest = divmod(num_samples, count)
    starts = [number * each + min(number, rest) for number in range(count + 1)]
    return list(itertools.pairwise(starts))


def split_by(split: SplitFunction, inputs: Any, targets: Any, most: int) -> list[Any]:
    """(inputs, targets, number of samples) of the micro-batches that a `split` function makes.

    `split` is called with ((inputs, targets), most), and returns the list of micro-batches, each
    (inputs, targets) or, where its samples cannot be counted, (inputs, targets, count). Anything
    else is an UnsplittableBatchError, no micro-batch an EmptyBatchError.
    """
    parts = split((inputs, targets), most)
    if not isinstance(parts, list | tuple) or not all(
        isinstance(part, list | tuple) and len(part) in (2, 3) for part in parts
    ):
        raise UnsplittableBatchError(
            f"split returned a {type(parts).__name__}; it must return a list of micro-batches, "
            "each (inputs, targets) or (inputs, targets, number of samples)"
        )
    if not parts:
        raise EmptyBatchError("split returned no micro-batch; give at least one sample")
    micro_batches = []
    for part_inputs, part_targets, *given in parts:
        if given and not is_whole(given[0], 1):
            raise UnsplittableBatchError(
                f"split gave {given[0]!r} as a number of samples; give at least 1"
            )
        try:
            count = int(given[0]) if given else read_batch(part_inputs, part_targets).num_samples
        except BatchError as error:
            raise UnsplittableBatchError(
                f"the samples of a micro-batch that split returned cannot be counted ({error}); "
                "return (inputs, targets, number of samples)"
            ) from error
        micro_batches.append((*map(_without_mappings, (part_inputs, part_targets)), count))
    return micro_batches


def to_device(tree: Any, device: torch.device) -> Any:
    """The structure with its tensors on `device`."""
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, _MOVABLE) else leaf, tree)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call with positional (tuple, list) or keyword (mapping) arguments, else with one."""
    if isinstance(inputs, PackedSequence) or hasattr(inputs, "_fields"):  # tuples, but one input
        return model(inputs)
    if not isinstance(inputs, tuple | list | Mapping):
        return model(inputs)
    try:
        return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    except TypeError as error:
        called = getattr(type(model).forward, "__qualname__", "")
        if str(error).startswith(f"{called}()"):
            error.add_note(
                "a tuple or list of inputs is given to the model as positional arguments, a "
                "mapping as keyword arguments: leave targets out; for one argument give (inputs,)"
            )
        raise


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to each leaf; a container of unchanged leaves is returned itself."""
    parts = parts_of(tree)
    if parts is None:
        return function(tree)
    pairs, rebuild = parts
    values = [map_leaves(function, child) for _, child in pairs]
    same = all(value is child for value, (_, child) in zip(values, pairs, strict=True))
    # A mapping such as a tokenizer's output becomes a dictionary, with which models are called.
    foreign = isinstance(tree, Mapping) and not isinstance(tree, dict)
    return tree if same and not foreign else rebuild(values)


def leaves_of(tree: Any) -> list[Any]:
    """All leaves (parts other than containers), in order."""
    return [leaf for _, leaf in _leaves_with_paths(tree, ())]


def check_no_graph(tree: Any, what: str) -> None:
    """Raise if inputs or targets require a gradient, which they would not receive."""
    for leaf in leaves_of(tree):
        tensor = leaf.data if isinstance(leaf, PackedSequence) else leaf
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise InputGradientError(
                f"{what} of shape {tuple(tensor.shape)} requires a gradient, and would receive "
                f"none: parts of a mini-batch are taken without the graph behind them. Put what "
                f"computed it, or differentiates by it, into the model, such as "
                f"nn.Sequential(generator, discriminator) for a generator's step, or give it as "
                f".detach()"
            )


def replaced(tree: Any, leaves: Sequence[Any]) -> Any:
    """The structure with its leaves replaced by these, in order."""
    following = iter(leaves)
    return map_leaves(lambda leaf: next(following), tree)


class _Finder:
    """Reads the parts of a mini-batch, then decides which belong to samples."""

    def __init__(self, shared: Sequence[Any], known: dict[Path, str]) -> None:
        self._shared = list(shared)
        self._used: set[int] = set()  # numbers of entries that were found
        self._known = known
        self._whole: set[Path] = set()
        self._sizes: dict[Path, int] = {}  # of leaves that have samples
        self._lengths: dict[Path, int] = {}  # of lists and tuples that may hold one item a sample
        self._fixed: set[int] = set()  # the sizes of leaves in no such list
        # Inputs with a leading dimension of 1 and further ones, such as positions (1, T).
        self._single: set[Path] = set()
        self._seen: list[str] = []

    def visit(self, tree: Any, path: Path, arguments: bool = False, listed: bool = False) -> None:
        self._seen.append(_name(path))
        if self._is_shared(tree, path):
            self._whole.add(path)
            return
        parts = parts_of(tree)
        if parts is None:
            size = samples_of(tree)
            if isinstance(size, int):
                self._sizes[path] = size
                more = size == 1 and len(getattr(tree, "shape", ())) > 1
                if more and path[0] == "inputs" and not listed:
                    self._single.add(path)
                self._fixed |= set() if listed else {size}
            return
        if not arguments and _is_alike(tree):
            self._lengths[path] = len(tree)
            listed = True
        for key, child in parts[0]:
            self.visit(child, (*path, key), listed=listed)

    def _is_shared(self, tree: Any, path: Path) -> bool:
        names = {_name(path), _name(path[1:])} - {""}

        def means(entry: Any) -> bool:
            if isinstance(entry, str):
                return entry in names
            return path == ("inputs", entry) if isinstance(entry, int) else tree is entry

        found = {number for number, entry in enumerate(self._shared) if means(entry)}
        self._used |= found
        return bool(found)

    def check_shared(self) -> None:
        for number, entry in enumerate(self._shared):
            if number not in self._used:
                shown = repr(entry) if isinstance(entry, str | int) else f"a {type(entry).__name__}"
                raise UnsplittableBatchError(
                    f"shared names {shown}, which the mini-batch does not have; it has "
                    f"{', '.join(self._seen)}"
                )

    def _find_broadcast(self) -> None:
        """Share inputs with a leading 1 among several samples."""
        rest = {size for path, size in self._sizes.items() if path not in self._single}
        if self._single and self._fixed == {1, *rest} and len(rest) == 1 and 1 not in rest:
            self._whole |= self._single
            self._fixed = rest
            for path in self._single:
                del self._sizes[path]

    def decide(self, trees: dict[str, Any]) -> tuple[dict[Path, str], int]:
        self._find_broadcast()
        candidates = self._fixed or {*self._sizes.values(), *self._lengths.values()}
        by_count = {}
        for number in sorted(candidates):
            kinds: dict[Path, str] = {}
            fits = all(
                self._assign(tree, (name,), number, kinds, arguments=name == "inputs")
                for name, tree in trees.items()
            )
            if fits and not {_SAMPLES, _OPEN}.isdisjoint(kinds.values()):
                by_count[number] = kinds
        kinds = next(iter(by_count.values())) if by_count else {}
        self._refuse_objects(trees, kinds)
        if not candidates:
            raise BatchError(
                f"the mini-batch has no tensor with a batch dimension (inputs are "
                f"{type(trees['inputs']).__name__}); give tensors or arrays, or a tuple, list, "
                f"dictionary or dataclass of them, whose first dimension is the batch"
            )
        sizes = ", ".join(
            [f"{_name(path)} has {size}" for path, size in self._sizes.items()]
            + [f"{_name(path)} {size} items" for path, size in self._lengths.items()]
        )
        if not by_count:
            raise BatchSizeMismatchError(
                f"the tensors of the mini-batch have first dimensions "
                f"{list(self._sizes.values())}; they must be equal, one entry per sample; name in "
                f"shared= what belongs to the whole mini-batch; what has its samples in another "
                f"dimension (a recurrent layer's state) needs split= ({sizes})"
            )
        if len(by_count) > 1:
            raise UnsplittableBatchError(
                f"the mini-batch may have {' or '.join(map(str, by_count))} samples ({sizes}); "
                f"stack the tensors of a list, or give split="
            )
        number = next(iter(by_count))
        # As of zip(*samples): beside a list that has an item for each sample a tuple may have, too.
        zipped = not self._sizes.keys() <= kinds.keys()
        for path, kind in kinds.items():
            # A tuple of lists with an item for each sample, such as (boxes, labels), is no list.
            items = [(*path, position) for position in range(number)]
            listed = any(kinds.get(p) == _SAMPLES and p in self._lengths for p in items)
            alike = kind == _STRUCTURE and self._lengths[path] == number and not listed
            if kind == _OPEN or (zipped and alike and path not in self._known):
                raise UnsplittableBatchError(
                    f"{_name(path)} has {number} items, as many as the mini-batch has samples: "
                    f"they may be one for each sample, or belong to the whole; give a tensor whose "
                    f"first dimension is the batch, name it in shared=, or give split="
                )
            if path in self._lengths:
                self._known[path] = kind
        return kinds, number

    def _assign(
        self, tree: Any, path: Path, number: int, kinds: dict[Path, str], arguments: bool = False
    ) -> bool:
        """Note the kind of each part for `number` samples; return whether the parts allow it."""
        if path in self._whole:
            kinds[path] = _WHOLE
            return True
        parts = parts_of(tree)
        if parts is None:
            size = self._sizes.get(path)
            kinds[path] = _WHOLE if size is None else _SAMPLES
            return size is None or size == number
        below: dict[Path, str] = {}
        # Up to the first part that does not fit: most numbers are sizes of single items.
        fits = all(self._assign(child, (*path, key), number, below) for key, child in parts[0])
        if path not in self._lengths or arguments:
            kinds.update(below)
            return fits
        tensors = any(samples_of(leaf) is not None for leaf in leaves_of(tree))
        if self._lengths[path] != number:
            if tensors and self._known.get(path) == _SAMPLES:
                return False
            kind = _STRUCTURE if tensors else _WHOLE
        elif tensors and not fits:
            kind = _SAMPLES
        elif isinstance(tree[0], str | bytes):
            kind = self._known.get(path, _SAMPLES)
        else:
            kind = _STRUCTURE if tensors and isinstance(tree, tuple) else _OPEN
            kind = self._known.get(path, kind)
        kinds[path] = kind
        if kind == _STRUCTURE:
            kinds.update(below)
            return fits
        return True

    def _refuse_objects(self, trees: dict[str, Any], kinds: dict[Path, str]) -> None:
        for path, leaf in _leaves_with_paths(trees, ()):
            what = samples_of(leaf)
            divided = any(kinds.get(path[:depth]) == _SAMPLES for depth in range(len(path)))
            shared = any(path[: len(above)] == above for above in self._whole)
            if isinstance(what, str) and not divided and not shared:
                raise UnsplittableBatchError(
                    f"{_name(path)} is {what}, whose samples cannot be told apart; give tensors, "
                    f"arrays, or dataclasses or dictionaries of them, name it in shared= if it "
                    f"belongs to the whole mini-batch, or give split=, a function "
                    f"(batch, micro_batch_size) that returns the micro-batches"
                )


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _leaves_with_paths(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    parts = parts_of(tree)
    if parts is None:
        yield path, tree
        return
    for key, child in parts[0]:
        yield from _leaves_with_paths(child, (*path, key))


def _is_alike(tree: Any) -> bool:
    """Whether a container is a list or tuple whose types allow one item for each sample."""
    if not isinstance(tree, list | tuple) or hasattr(tree, "_fields"):
        return False

    def kind(item: Any) -> Any:
        if isinstance(item, torch.Tensor | np.ndarray):
            return type(item), item.dtype, len(item.shape)
        if isinstance(item, Mapping):
            return type(item), tuple(item)
        return float if isinstance(item, int | float) else type(item)

    return len({kind(item) for item in tree}) == 1


def _without_mappings(tree: Any) -> Any:
    return map_leaves(lambda leaf: leaf, tree)
