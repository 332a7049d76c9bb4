"""The two passes of a loss that needs the outputs of the whole mini-batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from repro.mbs.batches import Piece, Plan, Sketch, concatenate, joined_targets, own_memory
from repro.mbs.batchnorm import DeferredBatchNorm
from repro.mbs.distributed import Processes
from repro.mbs.errors import NondeterministicModelError, explained
from repro.mbs.precision import Precision
from repro.mbs.randomness import Randomness
from repro.mbs.results import Totals
from repro.mbs.staging import Stager
from repro.mbs.transaction import Buffers
from repro.measure.batches import call_model, leaves_of, to_device


class TwoPass:
    """Computes outputs first, the loss of all of them next, and the parameters' gradients last.

    Args:
        module: The model, in no wrapper of processes.
        device: Where it computes.
        stager: What the micro-batches go through.
        randomness: What the model draws from, which the second pass repeats.
        processes: The processes that compute.
        precision: Of the passes.
        loss: Takes the loss of outputs and targets.
        check_finite: Refuses a mini-batch whose loss is not finite.
        meet: Called with tensors before a backward pass from them.
        forward_ended: Called after each forward pass of the first pass.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        stager: Stager,
        randomness: Randomness,
        processes: Processes,
        precision: Precision,
        loss: Callable[[Any, Any], torch.Tensor],
        check_finite: Callable[[Totals], None],
        meet: Callable[[Sequence[torch.Tensor]], Any],
        forward_ended: Callable[[], None],
    ) -> None:
        self._module = module
        self._device = device
        self._stager = stager
        self._randomness = randomness
        self._processes = processes
        self._precision = precision
        self._loss = loss
        self._check_finite = check_finite
        self._meet = meet
        self._forward_ended = forward_ended
        self._sketches: dict[torch.dtype | None, Sketch] = {}

    def run(
        self,
        model: nn.Module,
        piece: Piece,
        plan: Plan,
        updates: DeferredBatchNorm,
        module_buffers: Buffers,
    ) -> Totals:
        """Accumulate the gradient of a mini-batch, each process that of its own samples.

        Args:
            model: The model, with the wrapper that synchronises gradients.
            piece: The mini-batch.
            plan: Its micro-batches.
            updates: Of BatchNorm's statistics, made by the second pass.
            module_buffers: Those that the first pass may change.

        Raises:
            NondeterministicModelError: The second pass had other outputs.
        """
        buffers = module_buffers.copies()
        states, outputs, sketches = [], [], []
        dtype = self._precision.dtype
        sketch = self._sketches.setdefault(dtype, Sketch(dtype))
        with torch.no_grad(), self._precision.forward():
            for (inputs, _), bound in zip(
                self._stager.stream(plan.parts()), plan.bounds, strict=True
            ):
                states.append(self._randomness.get())
                with explained(bound, plan.bounds[-1][1]):
                    outputs.append(own_memory(call_model(self._module, inputs), inputs))
                self._forward_ended()
                sketches.append(sketch.of(outputs[-1]))
        # The second pass updates buffers and moments, and needs weights cast with a graph.
        module_buffers.write(buffers)
        updates.moments.clear()
        torch.clear_autocast_cache()

        whole = concatenate(outputs, plan.bounds)
        del outputs
        targets = piece.targets
        if piece.split is not None:  # in the order of the outputs
            targets = joined_targets([part[1] for part in plan.parts()], plan.bounds)
        with self._precision.forward():
            loss = self._loss(whole, to_device(targets, self._device))
        totals = Totals.over(plan.bounds)
        totals.add(loss.detach(), 1.0)
        if not self._processes.several:
            self._check_finite(totals)
        if loss.requires_grad:
            self._meet([loss])
            with self._processes.synchronization(False):  # parameters may take part in the loss
                self._precision.backward(loss)
        gradients = [getattr(leaf, "grad", None) for leaf in leaves_of(whole)]
        del whole, loss

        after = self._randomness.get()
        differences = []
        for index, (inputs, _) in enumerate(self._stager.stream(plan.parts())):
            self._randomness.set(states[index])  # so that dropout repeats
            # A sharded model synchronises with each micro-batch, others at the end.
            with self._processes.synchronization(False):
                with self._precision.forward():
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
                    self._meet([pair[0] for pair in pairs])
                    with self._precision.without_autocast():
                        torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
                del leaves, pairs
        self._randomness.set(after)  # what the loss drew comes after the first pass
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
