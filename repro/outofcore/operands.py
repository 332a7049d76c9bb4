"""Which variables an operation is given, and which it has made or resized."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from repro.outofcore.recording import Signature, components, tensors_in
from repro.outofcore.residency import Residency, Variable


class Operands:
    """Finds the variables of operations, and has new ones counted.

    Args:
        residency: What knows them.
        hold: Keeps a tensor on the device for good.
    """

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
        """Return the variables that an operation is given, and those of them that it writes."""
        writes = known.writes
        find = self._residency.look_up if known.view else self._residency.find
        inputs: list[Variable] = []
        written: list[Variable] = []
        for position, value in enumerate(args):
            if isinstance(value, torch.Tensor | list | tuple):
                for tensor in (value,) if isinstance(value, torch.Tensor) else tensors_in(value):
                    variable = find(tensor)
                    writes_it = position < len(writes) and writes[position]
                    if variable is None and (variable := self._unmet(tensor, writes_it)) is None:
                        continue
                    if variable not in inputs:
                        inputs.append(variable)
                    if writes_it and variable not in written:
                        written.append(variable)
                        if not variable.kind and known.name.endswith("batch_norm"):
                            variable.kind = "buffer"
                    elif not variable.kind and isinstance(tensor, torch.nn.Parameter):
                        variable.kind, variable.raw = "parameter", tensor.requires_grad
        for name, value in kwargs.items():
            for tensor in tensors_in(value):
                variable = find(tensor)
                writes_it = name in known.writes_named
                if variable is None and (variable := self._unmet(tensor, writes_it)) is None:
                    continue
                if variable not in inputs:
                    inputs.append(variable)
                if writes_it and variable not in written:
                    written.append(variable)
        return inputs, written

    def _unmet(self, tensor: torch.Tensor, writes: bool) -> Variable | None:
        """Return the variable of what was left alone, where it counts from now on."""
        if writes and (variable := self._residency.adopt(tensor)) is not None:
            return variable
        self._hold_components(tensor)
        return None

    def held(self, *arguments: Any) -> list[Variable]:
        """Return the variables of all that arguments hold, however deep, modules included."""
        inputs: list[Variable] = []
        for leaf in tree_leaves(arguments):
            tensors = [leaf] if isinstance(leaf, torch.Tensor) else []
            if isinstance(leaf, torch.nn.Module):
                tensors = [*leaf.parameters(), *leaf.buffers()]
            for tensor in tensors:
                variable = self._residency.find(tensor)
                if variable is not None and variable not in inputs:
                    inputs.append(variable)
        return inputs

    def _hold_components(self, tensor: torch.Tensor) -> None:
        """Keep what a sparse or nested tensor consists of, which C++ code holds on to, for good."""
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
        """Count anew what an operation may have resized, and what had no bytes before."""
        for variable in written:
            if variable.died is None:
                self._residency.resized(variable)
        values = [a for a, write in zip(args, known.writes, strict=False) if write]
        values += [value for name, value in kwargs.items() if name in known.writes_named]
        made += (v for v in self.made(values, written) if v not in made)
