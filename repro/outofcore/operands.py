"""The variables that an operation is given, makes or resizes, and their kinds."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from repro.outofcore.recording import Signature, components, tensors_in
from repro.outofcore.residency import Residency, Variable

# ---- kinds, known from modules and optimizers; until then a variable's operations suggest its kind


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, list[object]]:
    parameters = parameters_of(optimizer)
    states = [optimizer.state.get(parameter, {}).values() for parameter in parameters]
    return {
        "parameter": [*parameters],
        "gradient": [p.grad for p in parameters],
        "optimizer state": [value for state in states for value in state],
    }


def meet_module(residency: Residency, module: nn.Module) -> None:
    """Count a module's parameters, their gradients, and buffers."""
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters]
    buffers = list(module.buffers())
    _meet(residency, {"parameter": parameters, "gradient": gradients, "buffer": buffers})


def meet_optimizer(residency: Residency, optimizer: torch.optim.Optimizer) -> None:
    """Count an optimizer's parameters, their gradients, and state."""
    _meet(residency, _of_optimizer(optimizer))


def _meet(residency: Residency, named: Mapping[str, Iterable[object]]) -> None:
    for kind, values in named.items():
        for value in values:
            if isinstance(value, torch.Tensor):
                variable = residency.find(value, named=True)
                if variable is not None and not variable.kind:
                    variable.kind = kind
                    variable.raw = kind == "parameter" and value.requires_grad


def classify(residency: Residency, optimizer: torch.optim.Optimizer) -> None:
    """Set the kinds of an optimizer's known variables."""
    for kind, values in _of_optimizer(optimizer).items():
        for value in values:
            variable = variable_of(residency, value) if isinstance(value, torch.Tensor) else None
            if variable is not None:
                variable.kind = kind


def variable_of(residency: Residency, tensor: torch.Tensor) -> Variable | None:
    """Return a tensor's variable if it is known already, else None."""
    with torch._C.DisableTorchFunction():
        return residency.look_up(tensor)


# ---- operands


class Operands:
    """Finds the variables of operations, and counts new ones; `hold` locks a tensor for good."""

    def __init__(self, residency: Residency, hold: Callable[[torch.Tensor], None]) -> None:
        self._residency, self._hold = residency, hold

    def made(self, result: Any, inputs: list[Variable]) -> list[Variable]:
        """Return the variables that an operation has made."""
        residency = self._residency
        made: list[Variable] = []
        for tensor in (result,) if isinstance(result, torch.Tensor) else tensors_in(result):
            variable = residency.find(tensor, made=True)
            if variable is None:
                self._hold_components(tensor)
            if variable is None or variable in inputs or variable in made:
                continue
            variable.used = residency.clock
            if variable.since == residency.clock and variable.bound < 0:
                made.append(variable)
        return made

    def of(
        self, known: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Variable], list[Variable]]:
        """Return an operation's input variables, and the inputs that it writes."""
        find = self._residency.look_up if known.view else self._residency.find
        inputs: list[Variable] = []
        written: list[Variable] = []
        writes = (*known.writes, *(False for _ in args))
        given = [(value, write, True) for value, write in zip(args, writes, strict=False)]
        if kwargs:
            given += [(value, name in known.writes_named, False) for name, value in kwargs.items()]
        for value, writes_it, by_position in given:
            if not isinstance(value, torch.Tensor | list | tuple):
                continue
            for tensor in (value,) if isinstance(value, torch.Tensor) else tensors_in(value):
                variable = find(tensor)
                if variable is None and (variable := self._unmet(tensor, writes_it)) is None:
                    continue
                if by_position and not variable.kind:
                    self._show_kind(variable, tensor, writes_it, known)
                if variable not in inputs:
                    inputs.append(variable)
                if writes_it and variable not in written:
                    written.append(variable)
        return inputs, written

    @staticmethod
    def _show_kind(variable: Variable, tensor: torch.Tensor, writes: bool, by: Signature) -> None:
        if writes and by.name.endswith("batch_norm"):
            variable.kind = "buffer"
        elif not writes and isinstance(tensor, nn.Parameter):
            variable.kind, variable.raw = "parameter", tensor.requires_grad

    def _unmet(self, tensor: torch.Tensor, writes: bool) -> Variable | None:
        """Return the variable of a tensor that was not managed, if it counts from now on."""
        if writes and (variable := self._residency.adopt(tensor)) is not None:
            return variable
        self._hold_components(tensor)
        return None

    def held(self, *arguments: Any) -> list[Variable]:
        """Return the variables of all tensors in arguments, at any depth, modules included."""
        inputs: list[Variable] = []
        for leaf in tree_leaves(arguments):
            tensors = [leaf] if isinstance(leaf, torch.Tensor) else []
            if isinstance(leaf, nn.Module):
                tensors = [*leaf.parameters(), *leaf.buffers()]
            for tensor in tensors:
                variable = self._residency.find(tensor)
                if variable is not None and variable not in inputs:
                    inputs.append(variable)
        return inputs

    def _hold_components(self, tensor: torch.Tensor) -> None:
        """Lock the parts of a sparse or nested tensor for good: C++ code holds them."""
        for part in components(tensor):
            self._hold(part)

    def resized(
        self,
        known: Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Variable],
        made: list[Variable],
    ) -> None:
        """Update the bytes of storages that an operation may have resized, or that were empty."""
        for variable in written:
            if variable.died is None:
                self._residency.resized(variable)
        values = [a for a, write in zip(args, known.writes, strict=False) if write]
        values += [value for name, value in kwargs.items() if name in known.writes_named]
        made += (v for v in self.made(values, written) if v not in made)
