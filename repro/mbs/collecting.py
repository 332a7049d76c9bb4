"""Outputs, losses and gradients of micro-batches, kept to be compared with the whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from repro.measure import memory_state
from repro.measure.batches import BatchError, leaves_of, replaced
from repro.measure.containers import holds_tensors
from repro.measure.loss_parts import Evaluated

_MOST_BYTES = 2**28  # of outputs, and as much of their gradients


def room_for_outputs(device: torch.device) -> int:
    """Return how many bytes of outputs may be kept, in host memory, for one comparison."""
    if memory_state(device).simulated:
        return 0  # a budget counts every byte, so that a size that fits would seem not to
    host = memory_state("cpu")
    return min(_MOST_BYTES, max(0, host.limit_bytes - host.live_bytes) // 16)


@dataclass
class Part:
    """One micro-batch: its outputs without a graph, and the gradient of its loss by them.

    Attributes:
        leaves: Copies in host memory, of tensors.
        count: Samples.
        weight: Its weight in the mini-batch.
        probed: Positions of the leaves that take part in the backward pass.
        gradients: Of the loss times its factor, by position.
        loss: Detached, None where the micro-batch does not count.
    """

    leaves: list[Any]
    count: int
    weight: float
    probed: list[int] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    loss: torch.Tensor | None = None

    def keep(self, position: int, gradient: torch.Tensor) -> None:
        """Keep the gradient by one leaf."""
        self.gradients[position] = gradient.detach().to("cpu", copy=True)

    def evaluated(
        self, positions: Sequence[int], scale: float, device: torch.device, size: float
    ) -> Evaluated:
        """Return loss and gradients as `evaluate` does, without what scaled the backward pass."""
        gradients = [
            self.gradients[n].to(device) / (scale * self.weight)
            if n in self.gradients
            else torch.zeros_like(self.leaves[n], device=device)
            for n in positions
        ]
        loss = torch.zeros(()) if self.loss is None else self.loss
        return Evaluated(loss.double().to(device), gradients, size, False)


class Collector:
    """Keeps outputs of the micro-batches' own forward passes, and gradients by them.

    The gradient is that by the outputs as the loss takes them: where one output is computed from
    another, what reaches the first through the second is not in it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._room = most_bytes
        self._full = False
        self.template: Any = None
        self.parts: list[Part] = []
        self.usable = True

    def watch(self, outputs: Any, count: int, weight: float) -> Any:
        """Keep the outputs of the next micro-batch; return those to be given to the loss."""
        leaves = leaves_of(outputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(leaf.layout != torch.strided or leaf.is_nested for leaf in tensors) or any(
            not isinstance(leaf, torch.Tensor) and holds_tensors(leaf, 3) for leaf in leaves
        ):
            self.usable = False
        self._room -= sum(leaf.numel() * leaf.element_size() for leaf in tensors)
        self._full = self._full or self._room < 0 or not self.usable
        if self._full:
            return outputs
        part = Part([], count, weight)
        watched = list(leaves)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad and weight > 0:
                    # A view's hook would see nothing of a change in place.
                    watched[position] = leaf.clone()
                    watched[position].register_hook(partial(part.keep, position))
                    part.probed.append(position)
                leaf = leaf.detach().to("cpu", copy=True)
            part.leaves.append(leaf)
        try:
            given = replaced(outputs, watched)
            if self.template is None:
                self.template = replaced(outputs, part.leaves)
        except (BatchError, TypeError):
            self.usable = False
            return outputs
        self.parts.append(part)
        return given

    def note(self, loss: torch.Tensor) -> None:
        """Keep the loss of the micro-batch that was watched last."""
        if not self._full and self.usable and self.parts:
            self.parts[-1].loss = loss.detach().cpu().double()
