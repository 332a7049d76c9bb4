"""The two passes of a loss that needs the outputs of the whole mini-batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from repro.mbs.batches import Piece, Plan, concatenate, joined_targets, own_memory
from repro.mbs.batchnorm import DeferredBatchNorm
from repro.mbs.distributed import Processes
from repro.mbs.errors import NondeterministicModelError, explained
from repro.mbs.precision import Precision
from repro.mbs.randomness import Randomness
from repro.mbs.results import Totals
from repro.mbs.staging import Stager
from repro.mbs.transaction import Ledger
from repro.measure.batches import call_model, leaves_of, to_device

# Relative, for what nondeterministic kernels (sums by atomic additions) leave of the same
# computation: some eps, amplified by depth. Random numbers drawn anew differ by far more.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass
class TwoPass:
    """Computes outputs first, the loss of all of them next, and the parameters' gradients last."""

    module: nn.Module  # in no wrapper of processes
    device: torch.device
    stager: Stager
    processes: Processes
    randomness: Randomness
    precision: Precision
    ledger: Ledger
    loss: Callable[[Any, Any], torch.Tensor]
    check_finite: Callable[[Totals], None]  # before the first backward pass
    forward_ended: Callable[[], None]
    _sketches: dict[torch.dtype | None, "Sketch"] = field(default_factory=dict)

    def run(
        self,
        model: nn.Module,
        piece: Piece,
        plan: Plan,
        updates: DeferredBatchNorm,
    ) -> Totals:
        """Accumulate the gradient of a mini-batch, each process that of its own samples.

        Raises:
            NondeterministicModelError: The second pass had other outputs.
        """
        # First pass: all outputs, without a graph.
        buffers = self.ledger.buffers.copies()
        states, outputs, sketches = [], [], []
        dtype = self.precision.dtype
        sketch = self._sketches.setdefault(dtype, Sketch(dtype))
        stream = zip(self.stager.stream(plan.parts()), plan.bounds, strict=True)
        with torch.no_grad(), self.precision.forward():
            for (inputs, _), bound in stream:
                states.append(self.randomness.get())
                with explained(bound, plan.bounds[-1][1]):
                    outputs.append(own_memory(call_model(self.module, inputs), inputs))
                self.forward_ended()
                sketches.append(sketch.of(outputs[-1]))
        # The second pass updates buffers and moments, and needs weights cast with a graph.
        self.ledger.buffers.write(buffers)
        updates.moments.clear()
        torch.clear_autocast_cache()

        # The loss of the whole, and its gradient by the outputs.
        whole = concatenate(outputs, plan.bounds)
        del outputs
        targets = piece.targets
        if piece.split is not None:  # in the order of the outputs
            targets = joined_targets([part[1] for part in plan.parts()], plan.bounds)
        with self.precision.forward():
            loss = self.loss(whole, to_device(targets, self.device))
        totals = Totals.over(plan.bounds)
        totals.add(loss.detach(), 1.0)
        if not self.processes.several:
            self.check_finite(totals)
        if loss.requires_grad:
            self.ledger.meet([loss])
            with self.processes.synchronization(False):  # parameters may take part in the loss
                self.precision.backward(loss)
        gradients = [getattr(leaf, "grad", None) for leaf in leaves_of(whole)]
        del whole, loss

        # Second pass: from there to the parameters, one micro-batch after the other.
        after = self.randomness.get()
        differences = []
        for index, (inputs, _) in enumerate(self.stager.stream(plan.parts())):
            self.randomness.set(states[index])  # so that dropout repeats
            # A sharded model synchronises with each micro-batch, others at the end.
            with self.processes.synchronization(False):
                with self.precision.forward():
                    again = call_model(model, inputs)
                    differences.append(sketch.differ(sketches[index], sketch.of(again)))
                    leaves = leaves_of(again)
                    del again
                pairs = [
                    (leaf, gradient[slice(*plan.bounds[index])])
                    for leaf, gradient in zip(leaves, gradients, strict=True)
                    if gradient is not None and leaf.requires_grad
                ]
                if pairs:
                    self.ledger.meet([pair[0] for pair in pairs])
                    with self.precision.without_autocast():
                        torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
                del leaves, pairs
        self.randomness.set(after)  # the loss drew its numbers after the first pass
        worst = [difference for difference in differences if difference is not None]
        if worst and float(torch.stack(worst).max()) > 1:
            raise NondeterministicModelError(
                "the second pass computed other outputs than the first, so that gradients would "
                "be wrong: the model draws from a random number generator of its own, which "
                "generators= takes, changes its inputs in place, or keeps a state between calls "
                "outside its buffers, such as a counter or an averaged copy of its weights; "
                "register it as a buffer, or update it outside forward"
            )
        return totals


class Sketch:
    """A few numbers for each sample of an output, by which a second one is compared.

    The outputs of the first of two passes are gone when the second is computed. A random
    projection of each sample's outputs shows any difference but by a chance like that of a random
    vector being orthogonal to a given one, and takes two numbers a sample.
    """

    def __init__(self, autocast: torch.dtype | None) -> None:
        self._least = _TOLERANCE.get(autocast, 0.0) if autocast is not None else 0.0
        self._signs: dict[Any, torch.Tensor] = {}

    def of(self, outputs: Any) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        """Return projection and size of each sample, (n,) each, and the tolerance, by leaf."""
        sketches = []
        for leaf in leaves_of(outputs):
            tensor = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
            if not tensor or leaf.dim() == 0:
                continue
            value = leaf.detach()
            tolerance = max(_TOLERANCE.get(value.dtype, 1e-9), self._least)
            value = torch.view_as_real(value) if value.is_complex() else value
            wide = torch.promote_types(value.dtype, torch.float32)
            rows = value.reshape(len(value), -1).to(wide)
            key = (rows.shape[1], rows.dtype, rows.device)
            if key not in self._signs:
                kind: Any = {"dtype": rows.dtype, "device": rows.device}
                generator = torch.Generator(rows.device).manual_seed(rows.shape[1])
                self._signs[key] = torch.randn(rows.shape[1], generator=generator, **kind)
            sketches.append(((rows * self._signs[key]).sum(1), rows.norm(dim=1), tolerance))
        return sketches

    def differ(
        self,
        one: list[tuple[torch.Tensor, torch.Tensor, float]],
        other: list[tuple[torch.Tensor, torch.Tensor, float]],
    ) -> torch.Tensor | None:
        """Return the largest difference over its tolerance, None where there is nothing."""
        worst = []
        for (a, size, tolerance), (b, _, _) in zip(one, other, strict=True):
            difference = (a - b).abs() / (size * tolerance + torch.finfo(size.dtype).tiny)
            same = (a == b) | (a.isnan() & b.isnan())
            worst.append(torch.where(same, 0.0, difference).nan_to_num(torch.inf).max())
        return torch.stack([value.double() for value in worst]).max() if worst else None
