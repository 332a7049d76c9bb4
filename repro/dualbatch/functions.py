"""Visible parts of a user's function, by which a checkpoint refuses another function or state.

Seen are names, code, defaults, arguments of partials, values of closures and the globals that the
code reads; of modules and objects their classes, attributes, parameters and buffers, or those that
the function reads by name. Not seen are the code of installed packages, iterators, containers
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
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Parts = dict[str, str]  # by path, such as "loss_fn.weight"
Names = frozenset[str] | None
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_ENTRIES = 100  # of containers
_ELEMENTS = 2**16  # of tensors, at even distances
_INSTALLED = (sysconfig.get_paths()["stdlib"], str(PurePath(__file__).parents[1]), "<frozen")
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Paths of parts that differ; containers may grow, and code is compared by the same Python."""

    def same(path: str) -> bool:
        one, other = before[path], now.get(path, "")
        if path.endswith(".code") and other and one.split()[0] != other.split()[0]:
            return True
        return one == other

    return [path for path in before if not same(path)] + [
        path for path in now if path not in before and "[" not in path
    ]


class Seen:
    """The parts of a value, found by walking through it.

    Args:
        name: The path's beginning.
        value: A function, or an object in its place.
        objects: Look into objects of users' classes, too; else at their class and generators.
        tensors: Look at the values of a module's parameters and buffers, too.

    Attributes:
        parts: By path.
        trainable: Paths of tensors that require gradients.
    """

    def __init__(
        self, name: str, value: Any, *, objects: bool = True, tensors: bool = True
    ) -> None:
        self.parts: Parts = {}
        self.trainable: list[str] = []
        self._objects, self._tensors = objects, tensors
        # Alive, so that their numbers stay theirs; met again, a value has the first path.
        self._met: dict[tuple[int, Names], tuple[str, Any]] = {}
        self._walk(name, value, None)

    def _walk(self, path: str, value: Any, names: Names) -> None:
        """Note a value and what is in it; of objects what a function reads, by its names."""
        if isinstance(value, (*_PLAIN, PurePath)):
            self.parts[path] = repr(value)
            return
        if (id(value), names) in self._met:
            self.parts[path] = f"as {self._met[id(value), names][0]}"
            return
        self._met[id(value), names] = path, value
        if isinstance(value, Tensor):
            self.parts[path] = _values(value)
            if value.requires_grad:
                self.trainable.append(path)
        elif isinstance(value, np.ndarray):
            stride = max(1, value.size // _ELEMENTS)
            self.parts[path] = f"{value.dtype} {value.shape} {_digest(value.ravel()[::stride])}"
        elif isinstance(value, torch.Generator):
            self.parts[path] = _values(value.get_state())
        elif isinstance(value, _GENERATORS):
            self.parts[path] = _digest(pickle.dumps(value))
        else:
            self.parts[path] = _name(value)
            reader = getattr(value, "__func__", value)
            if isinstance(reader, types.FunctionType):
                names = frozenset(_names_of(reader.__code__))
            for part, inner in self._inside(value, names):
                self._walk(path + part, inner, names)
            if (code := _code_of(value)) is not None:
                self.parts[f"{path}.code"] = f"{_PYTHON} {code}"

    def _inside(self, value: Any, names: Names) -> Iterator[tuple[str, Any]]:
        if isinstance(value, list | tuple | deque):
            yield from ((f"[{i}]", v) for i, v in enumerate(islice(value, _ENTRIES)))
        elif isinstance(value, set | frozenset):
            yield from ((f"[{v}]", True) for v in sorted(map(repr, value))[:_ENTRIES])
        elif isinstance(value, Mapping):
            yield from ((f"[{k!r}]", v) for k, v in islice(value.items(), _ENTRIES))
        elif isinstance(value, partial):
            yield "", value.func
            yield from ((f"({i})", v) for i, v in enumerate(value.args))
            yield from ((f"({name})", v) for name, v in sorted(value.keywords.items()))
        elif isinstance(value, types.MethodType):
            yield "", value.__func__
            yield ".self", value.__self__
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, nn.Module) or not (
            isinstance(value, type) or _installed(type(value))
        ):
            yield from self._of_object(value, names)
        elif isinstance(value, _NAMESPACES):
            yield from ((f".{name}", v) for name, v in sorted(vars(value).items()))
        if hasattr(value, "__wrapped__"):
            yield ".wrapped", value.__wrapped__

    def _of_function(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            try:
                yield f".{name}", cell.cell_contents
            except ValueError:  # not set yet
                continue
        if _installed(function):
            return
        defaults = function.__defaults__ or ()
        yield from ((f"(default {i})", v) for i, v in enumerate(defaults))
        named = function.__kwdefaults__ or {}
        yield from ((f"(default {name})", v) for name, v in sorted(named.items()))
        for name in sorted(_globals_of(function.__code__)):
            value = function.__globals__.get(name)
            if name in function.__globals__ and not isinstance(value, types.ModuleType):
                yield f".{name}", value

    def _of_object(self, value: Any, names: Names) -> Iterator[tuple[str, Any]]:
        held = dict(getattr(value, "__dict__", {}))
        if not self._objects:
            held = {name: v for name, v in held.items() if isinstance(v, _GENERATORS)}
            names = None
        if isinstance(value, nn.Module):
            held = {n: v for n, v in held.items() if not n.startswith("_") and n != "training"}
            held |= dict(value.named_parameters(recurse=False)) | dict(value.named_children())
            held |= dict(value.named_buffers(recurse=False))
        elif names is None and self._objects:
            names = frozenset({"__call__"})
        read = _reached(type(value), names or frozenset())
        if chosen := sorted(read & held.keys()):
            yield from ((f".{name}", held[name]) for name in chosen)
            methods = ((name, getattr(type(value), name, None)) for name in sorted(read))
            yield from ((f".{n}", m) for n, m in methods if isinstance(m, types.FunctionType))
        elif isinstance(value, nn.Module):
            yield from self._of_module(value)
        else:
            yield from ((f".{name}", v) for name, v in sorted(held.items()))

    def _of_module(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        for prefix, sub in module.named_modules():
            of = f".{prefix}" if prefix else ""
            yield f"{of}.class", type(sub)
            for name, value in sorted(vars(sub).items()):
                if not name.startswith("_") and name != "training":
                    yield f"{of}.{name}", value
        if self._tensors:
            yield from ((f".{name}", p) for name, p in module.named_parameters())
            yield from ((f".{name}", b) for name, b in module.named_buffers())


def _names_of(code: types.CodeType) -> set[str]:
    """Names of globals and attributes in code, that of functions within it, too."""
    inner = (_names_of(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*inner)


def _reached(kind: type, names: frozenset[str]) -> set[str]:
    """The names, and those read by methods of a user's class that are among them."""
    reached: set[str] = set()
    new = set(names)
    while new:
        reached |= new
        methods = [getattr(kind, name, None) for name in new]
        functions = [m for m in methods if isinstance(m, types.FunctionType) and not _installed(m)]
        new = set().union(*(_names_of(f.__code__) for f in functions)) - reached
    return reached


def _name(value: Any) -> str:
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return re.sub(r"\b0x[0-9a-fA-F]+", "", str(name))


def _installed(value: Any) -> bool:
    if isinstance(value, type):
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        if file is None:
            return value.__module__ != "__main__"
    else:
        file = value.__code__.co_filename
    return file.startswith(_INSTALLED) or "site-packages" in file or "dist-packages" in file


def _code_of(value: Any) -> str | None:
    """Digest of the code of a user's function, or of the methods of a user's class."""
    if isinstance(value, types.FunctionType):
        return None if _installed(value) else _digest(_text(value.__code__))
    if isinstance(value, partial | types.MethodType):
        return None
    found = []
    for kind in (value if isinstance(value, type) else type(value)).__mro__:
        if not _installed(kind):
            methods = {n: getattr(m, "__func__", m) for n, m in sorted(vars(kind).items())}
            functions = {n: m for n, m in methods.items() if isinstance(m, types.FunctionType)}
            # torch wraps the step of an optimizer's class when the first one is made.
            found += [f"{n} {_text(inspect.unwrap(m).__code__)}" for n, m in functions.items()]
    return _digest("\n".join(found)) if found else None


def _text(code: types.CodeType) -> str:
    constants = [
        _text(c) if isinstance(c, types.CodeType)
        else str(sorted(map(repr, c))) if isinstance(c, frozenset) else repr(c)
        for c in code.co_consts
    ]  # fmt: skip
    names = (code.co_names, code.co_varnames, code.co_freevars)
    return f"{code.co_code.hex()} {names} {constants}"


def _globals_of(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return names.union(*(_globals_of(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _values(tensor: Tensor) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    try:
        some = tensor.detach().flatten()[:: max(1, tensor.numel() // _ELEMENTS)]
        some = some.to("cpu", copy=True)  # of which the address may be taken
        return f"{kind} {_digest(some.contiguous().view(torch.uint8).numpy())}"
    except (RuntimeError, NotImplementedError):  # sparse, or without values
        return kind


def _digest(content: Any) -> str:
    if isinstance(content, str):
        content = content.encode()
    elif isinstance(content, np.ndarray):
        content = pickle.dumps(content.tolist()) if content.dtype.hasobject else content.tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()
