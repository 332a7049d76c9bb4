"""Which variables are parameters, gradients, buffers or optimizer state.

Modules and optimizers tell. Before, a variable has the kind that its operations show, or none.
"""

from collections.abc import Iterable

import torch
from torch import nn

from repro.outofcore.residency import Residency, Variable


def meet_module(residency: Residency, module: nn.Module) -> None:
    """Count what a module has."""
    parameters = list(module.parameters())
    _meet(residency, "parameter", parameters)
    _meet(residency, "gradient", [p.grad for p in parameters])
    _meet(residency, "buffer", module.buffers())


def meet_optimizer(residency: Residency, optimizer: torch.optim.Optimizer) -> None:
    """Count what an optimizer has."""
    parameters = parameters_of(optimizer)
    _meet(residency, "parameter", parameters)
    _meet(residency, "gradient", [p.grad for p in parameters])
    for parameter in parameters:
        _meet(residency, "optimizer state", optimizer.state.get(parameter, {}).values())


def _meet(residency: Residency, kind: str, values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            variable = residency.find(value, named=True)
            if variable is not None and not variable.kind:
                variable.kind = kind
                variable.raw = kind == "parameter" and value.requires_grad


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def variable_of(residency: Residency, tensor: torch.Tensor) -> Variable | None:
    """Return a tensor's variable if it is known already, else None."""
    with torch._C.DisableTorchFunction():
        return residency.look_up(tensor)


def classify(residency: Residency, optimizer: torch.optim.Optimizer) -> None:
    """Set the kinds of all known variables that an optimizer works on."""
    for parameter in parameters_of(optimizer):
        _classify(residency, "parameter", [parameter])
        _classify(residency, "gradient", [parameter.grad])
        _classify(residency, "optimizer state", optimizer.state.get(parameter, {}).values())


def _classify(residency: Residency, kind: str, values: Iterable[object]) -> None:
    for value in values:
        variable = variable_of(residency, value) if isinstance(value, torch.Tensor) else None
        if variable is not None:
            variable.kind = kind
