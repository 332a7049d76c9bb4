"""The variables that an operation is given, makes or resizes, and their kinds."""

from collections.abc import Iterable, Mapping
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


def meet(residency: Residency, holder: object) -> None:
    """Count the tensors of a module or an optimizer: parameters, gradients, buffers, state."""
    if isinstance(holder, nn.Module):
        parameters: list[torch.Tensor] = [*holder.parameters()]
        gradients = [parameter.grad for parameter in parameters]
        buffers = [*holder.buffers()]
        named = _tensors({"parameter": parameters, "gradient": gradients, "buffer": buffers})
    else:
        assert isinstance(holder, torch.optim.Optimizer)
        named = _of_optimizer(holder)
    for kind, value in named:
        variable = residency.find(value, named=True)
        if variable is not None and not variable.kind:
            variable.kind = kind
            variable.raw = kind == "parameter" and value.requires_grad


def classify(residency: Residency, optimizer: torch.optim.Optimizer) -> None:
    """Set the kinds of an optimizer's known variables."""
    for kind, value in _of_optimizer(optimizer):
        if (variable := residency.look_up(value)) is not None:
            variable.kind = kind


def _of_optimizer(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    parameters = parameters_of(optimizer)
    gradients = [parameter.grad for parameter in parameters]
    state = [value for p in parameters for value in optimizer.state.get(p, {}).values()]
    return _tensors({"parameter": parameters, "gradient": gradients, "optimizer state": state})


def _tensors(named: Mapping[str, Iterable[object]]) -> list[tuple[str, torch.Tensor]]:
    return [
        (kind, value)
        for kind, values in named.items()
        for value in values
        if isinstance(value, torch.Tensor)
    ]


# ---- operands


class Operands:
    """Finds the variables of operations, and counts new ones."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

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
        given += [(value, name in known.writes_named, False) for name, value in kwargs.items()]
        for value, writes_it, by_position in given:
            for tensor in (value,) if isinstance(value, torch.Tensor) else tensors_in(value):
                variable = find(tensor)
                if variable is None and writes_it:
                    variable = self._residency.adopt(tensor)
                if variable is None:
                    self._hold_components(tensor)
                    continue
                if by_position and not variable.kind:
                    if writes_it and known.name.endswith("batch_norm"):
                        variable.kind = "buffer"
                    elif not writes_it and isinstance(tensor, nn.Parameter):
                        variable.kind, variable.raw = "parameter", tensor.requires_grad
                if variable not in inputs:
                    inputs.append(variable)
                if writes_it and variable not in written:
                    written.append(variable)
        return inputs, written

    def held(self, *arguments: Any) -> list[Variable]:
        """Return the variables of all tensors in arguments, at any depth, modules included."""
        tensors: list[torch.Tensor] = []
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, nn.Module):
                tensors += [*leaf.parameters(), *leaf.buffers()]
            elif isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
        found = dict.fromkeys(map(self._residency.find, tensors))
        return [variable for variable in found if variable is not None]

    def _hold_components(self, tensor: torch.Tensor) -> None:
        """Lock the parts of a sparse or nested tensor for good: C++ code holds them."""
        for part in components(tensor):
            self._residency.bring(part, lock=True)

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
