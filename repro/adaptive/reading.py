"""Parameters that are updated before anyone reads them, and who may read them unseen."""

import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

_TORCHS = frozenset(vars(nn.Module()))  # attributes that torch itself gives a module


class Hook:
    """Calls a method of an object, which it holds weakly, with the hooked one.

    In a copy of the hooked thing, pickled or not, it does nothing. The original is finished first,
    since a copy has no updates under way.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = weakref.ref(owner), name

    def __call__(self, hooked: Any = None, *_: Any) -> None:
        """Call the owner's method, if the owner is alive."""
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._name)(hooked)

    def __reduce__(self) -> tuple[type["Hook"], tuple[Any, str]]:
        owner = self._owner()
        if owner is not None:
            owner.finish()
        return Hook, (_Gone(), "")


class _Gone:
    """The owner of a copied hook: no reference outlives it."""


class Parameters(dict[str, Any]):
    """The parameters of a module, each of which is updated before anyone reads it from here.

    A module's attributes are read from here, and so are `parameters()` and `state_dict()`. A copy,
    pickled or not, is finished and a dictionary like any other.
    """

    def __init__(self, members: dict[str, Any], owner: Any) -> None:
        super().__init__(members)
        self._owner = weakref.ref(owner)

    def _ready(self, *parameters: Any) -> None:
        owner = self._owner()
        if owner is not None:
            owner.ready(parameters)

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self._ready(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """Return one of them, updated."""
        parameter = super().get(name, default)
        self._ready(parameter)
        return parameter

    def values(self) -> Any:
        """Return all of them, updated."""
        self._ready(*super().values())
        return super().values()

    def items(self) -> Any:
        """Return names and all of them, updated."""
        self._ready(*super().values())
        return super().items()

    def plain(self) -> dict[str, Any]:
        """Return a dictionary like any other of all of them, as they are."""
        return dict(super().items())

    def copy(self) -> dict[str, Any]:
        """Return a dictionary like any other of all of them, updated."""
        return dict(self.items())

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self.copy(),)


def held_elsewhere(model: nn.Module) -> set[nn.Parameter]:
    """Return parameters that a module holds, or shares memory with, otherwise than as its own.

    Looked at are attributes and buffers of modules whose class is not torch's: tensors, and lists,
    tuples, sets, dictionaries, partial functions and closures with tensors.
    """
    by_memory = {
        p.untyped_storage().data_ptr(): p for p in model.parameters() if p.layout is torch.strided
    }
    waiting: list[Any] = []
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            members = vars(module).items()
            waiting += [v for name, v in members if name not in _TORCHS or name == "_buffers"]
    found, seen = set(), dict[int, Any]()  # kept, so that no other gets an id of these
    while waiting:
        value = waiting.pop()
        if value is None or isinstance(value, str | int | float) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            if value.layout is torch.strided and value.numel():
                found.add(by_memory.get(value.untyped_storage().data_ptr()))
        else:
            waiting += _contents(value)
    return {p for p in found if p is not None}


def _contents(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | deque):
        return list(value)
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    contents = []
    if isinstance(value, FunctionType | MethodType):
        for cell in getattr(value, "__closure__", None) or ():
            with suppress(ValueError):  # an empty one
                contents.append(cell.cell_contents)
    return contents


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's calls are compiled, and so its hooks would be."""
    return module._compiled_call_impl is not None or hasattr(module, "_torchdynamo_orig_callable")
