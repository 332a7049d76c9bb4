"""Visible parts of a user's function, by which a checkpoint refuses another function or state.

Visible are names, code, defaults, attributes, arguments of partials, values of closures and globals
that the code reads; for modules and objects their classes, attributes, parameters and buffers. Not
visible are the code of installed packages and attributes of their objects, iterators, containers
beyond their first 100 entries, most values of large tensors, and globals that methods read.
"""

import argparse
import dis
import hashlib
import inspect
import pickle
import random
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterator, Mapping
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Parts = dict[str, str]  # by path, such as "loss_fn.weight"
_PLAIN = (
    *(type(None), bool, int, float, complex, Decimal, Fraction, str, bytes, bytearray),
    *(range, slice, re.Pattern, np.dtype, torch.dtype, torch.device, Enum, PurePath),
)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_TORCHS = frozenset(vars(nn.Module()))  # of each module
_ENTRIES = 100  # of containers
_ELEMENTS = 2**16  # of tensors, at even distances
_INSTALLED = (sysconfig.get_paths()["stdlib"], str(PurePath(__file__).parents[1]), "<frozen")
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Paths of parts that differ; containers may grow; code is comparable within one Python."""

    def same(path: str) -> bool:
        one, other = before[path], now.get(path, "")
        of_two_pythons = path.endswith(".code") and other and one.split()[0] != other.split()[0]
        return bool(of_two_pythons) or one == other

    grown = [path for path in now if path not in before and "[" not in path]
    return [path for path in before if not same(path)] + grown


class Seen:
    """The parts of a value by path, which begins with `name`, found by walking through it.

    Without `objects` only class and generators of users' objects are included; without `tensors`
    no values of parameters and of a module's buffers; without `private` none of a module's
    attributes that begin with _. `trainable` are paths of tensors that require gradients.
    """

    def __init__(
        self, name: str, value: Any, *, objects: bool = True, tensors: bool = True,
        private: bool = True,
    ) -> None:  # fmt: skip
        self.parts: Parts = {}
        self.trainable: list[str] = []
        self._objects, self._tensors, self._private = objects, tensors, private
        # Kept alive, so that no id is reused; a value found again gets its first path.
        self._met: dict[int, tuple[str, Any]] = {}
        self._walk(name, value)

    def _walk(self, path: str, value: Any) -> None:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, _PLAIN):
            self.parts[path] = repr(value)
            return
        if id(value) in self._met:
            self.parts[path] = f"as {self._met[id(value)][0]}"
            return
        self._met[id(value)] = path, value
        if isinstance(value, Tensor):
            known = isinstance(value, nn.Parameter) and not self._tensors
            self.parts[path] = "parameter" if known else _values(value)
            if value.requires_grad:
                self.trainable.append(path)
        elif isinstance(value, np.ndarray):
            some = value.ravel()[:: max(1, value.size // _ELEMENTS)]
            self.parts[path] = f"{value.dtype} {value.shape} {_digest(pickle.dumps(some))}"
        elif isinstance(value, torch.Generator):
            self.parts[path] = _values(value.get_state())
        elif isinstance(value, _GENERATORS):
            self.parts[path] = _digest(pickle.dumps(value))
        else:
            # Statically, since an object may answer, or refuse, any name.
            named = isinstance(value, type | types.MethodType) or _static(value, "__qualname__")
            self.parts[path] = str((value if named else type(value)).__qualname__)
            for part, inner in self._inside(value):
                self._walk(path + part, inner)
            if _static(value, "__wrapped__"):  # as by functools.cache
                self._walk(f"{path}.wrapped", value.__wrapped__)
            if code := _code_of(value):
                self.parts[f"{path}.code"] = f"{_PYTHON} {_digest(code.encode())}"

    def _inside(self, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, list | tuple | deque):
            yield from ((f"[{i}]", v) for i, v in enumerate(islice(value, _ENTRIES)))
        elif isinstance(value, set | frozenset):
            yield from ((f"[{v}]", True) for v in sorted(map(_key, value))[:_ENTRIES])
        elif isinstance(value, Mapping):
            yield from ((f"[{_key(k)}]", v) for k, v in islice(value.items(), _ENTRIES))
        elif isinstance(value, partial):
            yield "", value.func
            yield from ((f"({i})", v) for i, v in enumerate(value.args))
            yield from ((f"({name})", v) for name, v in sorted(value.keywords.items()))
        elif isinstance(value, types.MethodType):
            yield "", value.__func__
            yield ".self", value.__self__
        elif isinstance(value, types.FunctionType):
            yield from _of_function(value)
        elif isinstance(value, nn.Module):
            for prefix, module in value.named_modules():
                of = f".{prefix}" if prefix else ""
                yield f"{of}.class", type(module)
                public = _installed(type(module)) or not self._private
                held = sorted((k, v) for k, v in vars(module).items() if k not in _TORCHS)
                yield from ((f"{of}.{k}", v) for k, v in held if k[0] != "_" or not public)
            if self._tensors:
                yield from ((f".{name}", p) for name, p in value.named_parameters())
                yield from ((f".{name}", b) for name, b in value.named_buffers())
        else:
            wanted = object if self._objects else _GENERATORS
            held = sorted(_attributes(value).items())
            yield from ((f".{k}", v) for k, v in held if isinstance(v, wanted))


def _key(key: Any) -> str:
    """A key, without the address that a function or an object has in this process."""
    if isinstance(key, Tensor):  # its values change
        return f"tensor {tuple(key.shape)}"
    return re.sub(" at 0x[0-9a-f]+", "", repr(key))


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes of a user's class, or of an object of one: the class's, its own, its slots'."""
    kind, held = value if isinstance(value, type) else type(value), dict[str, Any]()
    hidden = "_" if issubclass(kind, nn.Module) else "__"  # such as a count of models
    for base in (base for base in reversed(kind.__mro__) if not _installed(base)):
        plain = {k: v for k, v in vars(base).items() if not hasattr(v, "__get__")}  # no methods
        held |= {name: v for name, v in plain.items() if not name.startswith(hidden)}
    if value is not kind and (kind is types.SimpleNamespace or not _installed(kind)):
        state: Any = object.__getstate__(value)
        for part in state if isinstance(state, tuple) else (state,):
            held |= part or {}
    return held


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not set yet
            continue
    if _installed(function):
        return
    yield from ((f"(default {i})", v) for i, v in enumerate(function.__defaults__ or ()))
    named = function.__kwdefaults__ or {}
    yield from ((f"(default {name})", v) for name, v in sorted(named.items()))
    kept = sorted(vars(function).items())
    yield from ((f"(attribute {k})", v) for k, v in kept if k != "__wrapped__")
    read = {}
    for name, part in _globals_of(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType | argparse.Namespace):
            # Of settings and a command line what is read: others, such as --resume, may differ.
            own = isinstance(value, argparse.Namespace) or not _installed(value)
            if own and part in vars(value):
                read[f".{name}.{part}"] = vars(value)[part]
        elif name in function.__globals__:
            read[f".{name}"] = value
    yield from sorted(read.items())


def _globals_of(code: types.CodeType) -> set[tuple[str, str]]:
    """Globals that a function reads, each with the attribute that it reads of it, if any."""
    steps = [*dis.get_instructions(code)]
    parts = [i.argval if i.opname in ("LOAD_ATTR", "LOAD_METHOD") else "" for i in steps[1:]]
    both = zip(steps, [*parts, ""], strict=True)
    names = {(i.argval, part) for i, part in both if i.opname == "LOAD_GLOBAL"}
    return names.union(*(_globals_of(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _static(value: Any, name: str) -> bool:
    return inspect.getattr_static(value, name, None) is not None


def _installed(value: Any) -> bool:
    if isinstance(value, type | types.ModuleType):
        name = value.__module__ if isinstance(value, type) else value.__name__
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            return name != "__main__"
    else:
        file = value.__code__.co_filename
    return file.startswith(_INSTALLED) or "site-packages" in file or "dist-packages" in file


def _code_of(value: Any) -> str:
    """The code of a user's function, or of a user's class's methods."""
    if isinstance(value, types.FunctionType):
        return "" if _installed(value) else _text(value.__code__)
    kinds = (value if isinstance(value, type) else type(value)).__mro__
    methods = {
        (kind, name): inspect.unwrap(getattr(method, "__func__", method))
        for kind in kinds
        for name, method in sorted(vars(kind).items())
    }
    # When the first optimizer is made, torch wraps its class's `step`, an inherited one as well.
    return "\n".join(
        f"{kind.__qualname__}.{name} {_text(method.__code__)}"
        for (kind, name), method in methods.items()
        if isinstance(method, types.FunctionType)
        and not _installed(kind)
        and all(methods.get((base, name)) is not method for base in kind.__mro__[1:])
    )


def _text(code: types.CodeType) -> str:
    constants = [
        _text(c) if isinstance(c, types.CodeType)
        else str(sorted(map(repr, c))) if isinstance(c, frozenset) else repr(c)
        for c in code.co_consts
    ]  # fmt: skip
    names = (code.co_names, code.co_varnames, code.co_freevars)
    return f"{code.co_code.hex()} {names} {constants}"


def _values(tensor: Tensor) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    try:
        flat = tensor.detach().reshape(-1)
        # Reading the address of a copy has no side effects.
        some = flat[:: max(1, len(flat) // _ELEMENTS)].to("cpu", copy=True)
        return f"{kind} {_digest(some.contiguous().view(torch.uint8).numpy().tobytes())}"
    except (RuntimeError, NotImplementedError):  # sparse, or without values
        return kind


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
