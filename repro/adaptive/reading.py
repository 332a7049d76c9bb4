"""Parameters that are updated before they are read, and detection of unseen readers."""

import gc
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

_TORCHS = frozenset(vars(nn.Module())) - {"_buffers"}  # attributes that torch gives a module
_CONTAINERS = (dict, list, tuple, set, deque, partial, CellType)


def _reading_all(method: Any) -> Any:
    """A method of `dict` that first updates all parameters."""

    def read(self: "Parameters", *arguments: Any) -> Any:
        self._update(dict.values(self))
        return method(self, *arguments)

    return read


class Parameters(dict[str, Any]):
    """A module's dictionary of parameters, which updates each parameter before it is read.

    Attribute access, `parameters()` and `state_dict()` read from it. A copy, pickled or not, is a
    plain dictionary of updated parameters. `update` is called with parameters about to be read.
    """

    def __init__(self, members: dict[str, Any], update: Callable[[Iterable[Any]], None]) -> None:
        super().__init__(members)
        self._update = update

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self._update([parameter])
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """Return one parameter, updated."""
        parameter = super().get(name, default)
        self._update([parameter])
        return parameter

    values, items = _reading_all(dict.values), _reading_all(dict.items)
    pop, popitem = _reading_all(dict.pop), _reading_all(dict.popitem)
    setdefault = _reading_all(dict.setdefault)

    def __iter__(self) -> Any:
        # Overridden, so that dict(...) and {**...} read by keys, and not past these methods.
        return super().__iter__()

    def copy(self) -> dict[str, Any]:
        """Return a plain dictionary of the parameters, updated."""
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self.copy(),)


def held_elsewhere(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that a module holds, or shares memory with, other than as its parameters.

    Searched are attributes and buffers: tensors, and containers, partial functions and closures.
    """
    by_memory = {
        p.untyped_storage().data_ptr(): p for p in model.parameters() if p.layout is torch.strided
    }
    waiting: list[Any] = []
    for module in model.modules():
        waiting += [value for name, value in vars(module).items() if name not in _TORCHS]
    found, seen = set(), dict[int, Any]()  # kept alive, so that no id is reused
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            if value.layout is torch.strided and value.numel():
                found.add(by_memory.get(value.untyped_storage().data_ptr()))
        elif isinstance(value, FunctionType | MethodType):
            waiting += getattr(value, "__closure__", None) or ()
        elif isinstance(value, _CONTAINERS):
            waiting += gc.get_referents(value)
    return {p for p in found if p is not None}


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's calls, and so its reading of parameters, are compiled or scripted."""
    compiled = module._compiled_call_impl is not None
    scripted = isinstance(module, torch.jit.ScriptModule)
    return compiled or scripted or hasattr(module, "_torchdynamo_orig_callable")
