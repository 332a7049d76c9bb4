"""Plants omissions in the source of a module, and tells whether anything notices.

A mutation test shows that every wait, record and `record_stream` of a module is needed, and that
the programs of its tests would notice were it gone.
"""

import ast
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from simulated_device.checking import checked, deferred

SEEDS: tuple[int | None, ...] = (None, 0, 1)  # orders of deferred work, as `deferred` takes them


@dataclass(frozen=True)
class Omission:
    """A change of one place in a module.

    Attributes:
        module: Whose source is changed; it is imported already.
        old: Text of that source, within functions or methods.
        new: What stands there instead.
        within: The function in which `old` is, such as ``"Stager.take"``, where it is in several.
    """

    module: ModuleType
    old: str
    new: str = "pass"
    within: str = ""

    def __str__(self) -> str:
        name = self.module.__name__.rpartition(".")[2]
        new = "" if self.new == "pass" else f" -> {' '.join(self.new.split())}"
        return f"{name}.{self.within or '*'}: {' '.join(self.old.split())}{new}"


@dataclass(frozen=True)
class Found:
    """How a program showed that something is wrong.

    Attributes:
        how: ``"race"``, ``"numbers"``, ``"error"``, or empty where it did not show.
        told: The races, the numbers or the error.
    """

    how: str
    told: str = ""

    def __bool__(self) -> bool:
        return bool(self.how)


def _spans(node: ast.AST, prefix: str = "") -> dict[str, tuple[int, int]]:
    """Return the lines of a module's functions and of its classes' methods, by their names."""
    found = {}
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found[prefix + child.name] = child.lineno, child.end_lineno or child.lineno
        elif isinstance(child, ast.ClassDef):
            found |= _spans(child, f"{prefix}{child.name}.")
    return found


def _code(code: CodeType, name: str) -> CodeType:
    for part in name.split("."):
        (code,) = (c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == part)
    return code


def _live(module: ModuleType, name: str) -> FunctionType:
    """Return the function of a name, below whatever decorates it."""
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    while not isinstance(found, FunctionType):
        found = getattr(found, "fget", None) or found.__func__
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found


def _changed(omission: Omission) -> tuple[str, CodeType]:
    """Return the name of the function that changes, and its new code."""
    file = omission.module.__file__
    assert file is not None
    source = Path(file).read_text(encoding="utf-8")
    spans, places = _spans(ast.parse(source)), []
    start = source.find(omission.old)
    while start >= 0:
        line = source.count("\n", 0, start) + 1
        names = [name for name, (first, last) in spans.items() if first <= line <= last]
        places += [(start, name) for name in names if omission.within in ("", name)]
        start = source.find(omission.old, start + 1)
    if len(places) != 1:
        raise ValueError(
            f"{omission} is in {len(places)} places of functions: give a text that is in one, "
            "or the function as `within`"
        )
    start, name = places[0]
    other = source[:start] + omission.new + source[start + len(omission.old) :]
    return name, _code(compile(other, file, "exec", dont_inherit=True), name)


@contextlib.contextmanager
def planted(omission: Omission) -> Iterator[None]:
    """Have the module run with the omission inside, whoever has imported what of it.

    Raises:
        ValueError: Its text is in no function, or in several.
    """
    name, code = _changed(omission)
    function = _live(omission.module, name)
    before = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = before


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def noticed(
    program: Callable[[], Any], expected: Any = None, omission: Omission | None = None
) -> Found:
    """Run a program, with an omission planted where one is given, and say how it shows.

    First under the race checker, then with its work deferred. With `None` for the omission it has
    to return nothing: the program is right.

    Args:
        program: Runs on the device, which must be present, and returns numbers (tensors, or lists,
            tuples or dictionaries of them).
        expected: What it returns where nothing is missing; None where that is not compared.
        omission: What to plant.
    """

    def once() -> Found:
        try:
            result = program()
            if expected is not None and not _same(result, expected):
                return Found("numbers", str(result)[:500])
        except Exception as error:  # whatever comes of it
            return Found("error", f"{type(error).__name__}: {error}")
        return Found("")

    with planted(omission) if omission else contextlib.nullcontext():
        with checked(raises=False) as findings:
            found = once()
        if findings.races:
            return Found("race", "\n".join(map(str, findings.races)))
        for seed in SEEDS:
            if found:
                break
            with deferred(seed):
                found = once()
    return found
