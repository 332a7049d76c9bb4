"""Collectives of torch.distributed: what they work on stays where it is until they are done."""

from typing import Any

import torch

from repro.outofcore.recording import tensors_in
from repro.outofcore.residency import Variable


class Collectives:
    """The collectives that a block has begun.

    Attributes:
        works: Those under way, with what each works on.
    """

    def __init__(self) -> None:
        self.works: list[tuple[list[Any], list[Variable]]] = []

    def work_on(self, result: Any, inputs: list[Variable]) -> None:
        """Keep where they are what a collective works on, until it is done."""
        handles = [value for value in result if isinstance(value, torch.ScriptObject)]
        for variable in inputs:
            variable.pins += 1
        works = [torch._C._distributed_c10d.Work.unbox(handle) for handle in handles]
        self.works.append((works, inputs))
        self.let_go()

    def let_go(self) -> None:
        """Let go what collectives that are done have worked on."""
        under_way = []
        for works, variables in self.works:
            if all(work.is_completed() for work in works):
                for variable in variables:
                    variable.pins -= 1
            else:
                under_way.append((works, variables))
        self.works = under_way


def wait_for(result: Any) -> None:
    """Wait for a collective whose tensors only its result tells of."""
    for tensor in tensors_in(result):
        torch.ops._c10d_functional.wait_tensor(tensor)
