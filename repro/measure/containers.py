"""Containers in a mini-batch: their parts, and rebuilding them from parts."""

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils._pytree import SUPPORTED_NODES

Which = slice | list[int]


class BatchError(ValueError):
    """A mini-batch cannot be used in its given form."""


class EmptyBatchError(BatchError):
    """The mini-batch has no sample."""


class BatchSizeMismatchError(BatchError):
    """The parts of a mini-batch disagree in their number of samples."""


class UnsplittableBatchError(BatchError):
    """The assignment of a mini-batch's parts to samples is unknown or ambiguous."""


class InputGradientError(BatchError):
    """An input or target requires a gradient, which parts of a mini-batch do not give it."""


def samples_of(leaf: Any) -> int | str | None:
    """The number of samples of a leaf, None without samples, the leaf's kind if unknown."""
    if isinstance(leaf, torch.Tensor):
        if leaf.is_nested or leaf.layout not in (torch.strided, torch.sparse_coo):
            return "a nested tensor" if leaf.is_nested else f"a tensor of {leaf.layout}"
        return leaf.shape[0] if leaf.dim() > 0 else None
    if isinstance(leaf, np.ndarray):
        return leaf.shape[0] if leaf.ndim > 0 else None
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | np.generic):
        return None
    if isinstance(leaf, Iterator):
        return "an iterator"
    if isinstance(leaf, type | nn.Module) or (callable(leaf) and not hasattr(leaf, "__len__")):
        return None
    return f"a {type(leaf).__name__}" if holds_tensors(leaf, 3) else None


def holds_tensors(tree: Any, depth: int) -> bool:
    """Whether an object holds tensors or arrays, at most `depth` levels down."""
    if isinstance(tree, torch.Tensor | np.ndarray):
        return True
    if depth == 0 or isinstance(tree, str | bytes | int | float | type | nn.Module):
        return False
    state: Any = object.__getstate__(tree)  # attributes, or a pair of these and of slots
    children: list[Any] = []
    for part in state if isinstance(state, tuple) else (state,):
        children += (part or {}).values()
    if isinstance(tree, Mapping):
        children += list(tree.values())
    elif isinstance(tree, list | tuple | set | frozenset):
        children += list(tree)
    return any(holds_tensors(child, depth - 1) for child in children if child is not None)


def pick(value: Any, which: Which) -> Any:
    """Samples of a leaf, or of a list with one item per sample."""
    if isinstance(value, PackedSequence):
        items = unpack_sequence(value)
        chosen: Any = [items[number] for number in np.arange(len(items))[which]]
        in_order = all(len(a) >= len(b) for a, b in itertools.pairwise(chosen))
        return pack_sequence(chosen, enforce_sorted=value.sorted_indices is None and in_order)
    if isinstance(value, list | tuple):
        chosen = value[which] if isinstance(which, slice) else [value[number] for number in which]
        return type(value)(chosen)
    if not isinstance(value, torch.Tensor):
        return value[which]
    if value.layout == torch.strided:
        return value[which].detach()
    numbers = range(len(value))[which] if isinstance(which, slice) else which
    return value.detach().index_select(0, torch.tensor(list(numbers), device=value.device))


def parts_of(tree: Any) -> tuple[list[tuple[Any, Any]], Callable[[list[Any]], Any]] | None:
    """A container's parts by key and the function that rebuilds it, None for a leaf."""
    if isinstance(tree, torch.Tensor | np.ndarray | PackedSequence | str | torch.Size):
        return None
    if isinstance(tree, Mapping):
        keys = list(tree)
        if dataclasses.is_dataclass(tree):  # such as Hugging Face's ModelOutput
            kind: Any = type(tree)
            return list(tree.items()), lambda values: kind(**dict(zip(keys, values, strict=True)))
        kept = OrderedDict if type(tree) is OrderedDict else dict
        return list(tree.items()), lambda values: kept(zip(keys, values, strict=True))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        pairs = [(name, getattr(tree, name)) for name in names if hasattr(tree, name)]
        return pairs, lambda values: _remade(tree, [name for name, _ in pairs], values)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree, strict=True)), lambda values: type(tree)(*values)
    if isinstance(tree, list | tuple):
        return list(enumerate(tree)), type(tree)
    if type(tree) in SUPPORTED_NODES:
        children, context = SUPPORTED_NODES[type(tree)].flatten_fn(tree)
        unflatten = SUPPORTED_NODES[type(tree)].unflatten_fn
        return list(enumerate(children)), lambda values: unflatten(values, context)
    return None


def _remade(original: Any, names: list[str], values: list[Any]) -> Any:
    """A dataclass with other values in its fields.

    Attributes that the class derives in `__post_init__` are derived anew. A class that changes its
    fields there would change them twice, and is refused.
    """
    given = {field.name for field in dataclasses.fields(original) if field.init}
    new = dict(zip(names, values, strict=True))
    if all(getattr(original, name) is value for name, value in new.items()):
        return original
    hint = "; give it in a dictionary, or give split="
    try:
        made = dataclasses.replace(original, **{n: v for n, v in new.items() if n in given})
    except Exception as error:
        raise UnsplittableBatchError(
            f"a {type(original).__name__} cannot be made of its own fields ({error}){hint}"
        ) from error
    for name, value in new.items():
        remade = getattr(made, name)
        tensors = isinstance(remade, torch.Tensor) and isinstance(value, torch.Tensor)
        equal = tensors and torch.equal(remade, value)
        derived = name not in given and (equal or not holds_tensors(value, 3))
        if remade is not value and not derived:
            raise UnsplittableBatchError(
                f"{type(original).__name__} changes its field {name} when it is made, which would "
                f"happen again for each micro-batch{hint}"
            )
    return made
