"""Parameters that are updated before they are read, and detection of unseen readers."""

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
    """Calls a method of its owner, held weakly, with the hooked object.

    In a copy of the hooked object, pickled or not, it does nothing. Copying finishes the original
    first, since a copy has no pending updates.
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
    """The owner of a copied hook, which is freed at once."""


class Parameters(dict[str, Any]):
    """A module's dictionary of parameters, which updates each parameter before it is read.

    Attribute access, `parameters()` and `state_dict()` read from it. A copy, pickled or not, is a
    plain dictionary of updated parameters.
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
        """Return one parameter, updated."""
        parameter = super().get(name, default)
        self._ready(parameter)
        return parameter

    def values(self) -> Any:
        """Return all parameters, updated."""
        self._ready(*super().values())
        return super().values()

    def items(self) -> Any:
        """Return names and parameters, updated."""
        self._ready(*super().values())
        return super().items()

    def plain(self) -> dict[str, Any]:
        """Return a plain dictionary of the parameters, without updating them."""
        return dict(super().items())

    def copy(self) -> dict[str, Any]:
        """Return a plain dictionary of the parameters, updated."""
        return dict(self.items())

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self.copy(),)


def held_elsewhere(model: nn.Module) -> set[nn.Parameter]:
    """Return parameters that a module holds, or shares memory with, other than as its parameters.

    The search covers attributes and buffers of modules of classes outside torch: tensors, and
    lists, tuples, sets, dictionaries, partial functions and closures with tensors.
    """
    by_memory = {
        p.untyped_storage().data_ptr(): p for p in model.parameters() if p.layout is torch.strided
    }
    waiting: list[Any] = []
    for module in model.modules():
        if not type(module).__module__.startswith("torch."):
            members = vars(module).items()
            waiting += [v for name, v in members if name not in _TORCHS or name == "_buffers"]
    found, seen = set(), dict[int, Any]()  # kept alive, so that no id is reused
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
            with suppress(ValueError):  # an empty cell
                contents.append(cell.cell_contents)
    return contents


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's calls, and so its hooks, are compiled."""
    return module._compiled_call_impl is not None or hasattr(module, "_torchdynamo_orig_callable")
