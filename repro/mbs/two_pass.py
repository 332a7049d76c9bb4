"""Two passes for a loss that needs the outputs of the whole mini-batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from repro.mbs.batches import Piece, Plan, concatenate, own_memory, targets_in_order
from repro.mbs.batchnorm import DeferredBatchNorm
from repro.mbs.checking import Verification
from repro.mbs.errors import NondeterministicModelError, explained
from repro.mbs.setting import Setting
from repro.mbs.weighing import Totals
from repro.measure.batches import call_model, leaves_of, map_leaves, to_device
from repro.measure.loss_parts import same_gradients
from repro.measure.precision import without_autocast
from repro.measure.untouched import WithoutGraph

# Relative difference of two equal computations by nondeterministic kernels (sums by atomic
# additions): some eps, amplified by depth. New random numbers cause far larger differences.
_TOLERANCE: dict[torch.dtype | None, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}


class _Given(torch.autograd.Function):
    """Outputs in the same memory, which a loss may change in place, as it may a model's."""

    @staticmethod
    def forward(_: Any, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.detach()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _given(leaf: Any) -> Any:
    apply: Any = _Given.apply
    return apply(leaf) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf


def run_two_passes(
    setting: Setting,
    piece: Piece,
    plan: Plan,
    updates: DeferredBatchNorm,
    loss_of: Callable[[Any, Any], torch.Tensor],
    check_finite: Callable[[Totals], None],
    verification: Verification,
) -> Totals:
    """Compute outputs first, the loss of all of them next, and the parameters' gradients last.

    Accumulates the gradient of this process's samples of a mini-batch. `check_finite` is called
    before the first backward pass. Where the second pass has other outputs, a
    `NondeterministicModelError` is raised.
    """
    precision, ledger = setting.precision, setting.ledger
    kinds = {precision.dtype, *(p.dtype for p in ledger.parameters if p.requires_grad)}
    # First pass: all outputs, without a graph.
    buffers = ledger.buffers.copies()
    states: list[Callable[[], None]] = []
    outputs, sketches, forward = [], [], WithoutGraph()

    def again() -> None:  # of the micro-batch, mostly the first, that shows that a graph is needed
        states[-1]()
        if len(states) == 1:
            ledger.buffers.write(buffers)

    stream = zip(setting.stager.stream(plan.parts()), plan.bounds, strict=True)
    with torch.no_grad(), precision.forward():
        for (inputs, _), bound in stream:
            states.append(ledger.random_state())
            call = partial(call_model, setting.module, inputs)
            with explained(bound, plan.bounds[-1][1]):
                outputs.append(own_memory(forward(call, again), inputs))
            verification.note_state()
            sketches.append(_sketch(outputs[-1], kinds))
    # The second pass updates buffers and moments.
    ledger.buffers.write(buffers)
    updates.moments.clear()

    # The loss of the whole, and its gradient by the outputs.
    whole = concatenate(outputs, plan.bounds)
    del outputs
    targets = piece.targets
    if piece.split is not None:
        targets = targets_in_order(piece, plan, len(plan.bounds), rows=True)
    with precision.forward():
        loss = loss_of(map_leaves(_given, whole), to_device(targets, setting.device))
    totals = Totals(sizes=tuple(stop - start for start, stop in plan.bounds))
    totals.add(loss.detach(), 1.0)
    if not setting.processes.several:
        check_finite(totals)
    if loss.requires_grad:
        ledger.meet([loss])
        precision.backward(loss)  # parameters may take part in it
    gradients = [x.grad if isinstance(x, torch.Tensor) else None for x in leaves_of(whole)]
    del whole, loss

    # Second pass: from the outputs to the parameters, one micro-batch after the other.
    after = ledger.random_state()
    differences = []
    for index, (inputs, _) in enumerate(setting.stager.stream(plan.parts())):
        states[index]()  # so that dropout repeats
        with precision.forward(), same_gradients(verification.watched(index)):
            again = call_model(setting.module, inputs)
        differences += _differences(sketches[index], _sketch(again, kinds))
        pairs = [
            (leaf, gradient[slice(*plan.bounds[index])])
            for leaf, gradient in zip(leaves_of(again), gradients, strict=True)
            if gradient is not None and leaf.requires_grad
        ]
        del again
        if pairs:
            ledger.meet([pair[0] for pair in pairs])
            with without_autocast(setting.device.type):
                torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
        del pairs
    after()  # the loss drew its numbers after the first pass
    if differences and float(torch.stack(differences).max()) > 1:
        raise NondeterministicModelError(
            "the second pass computed other outputs than the first, so that gradients would be "
            "wrong: the model draws from a random number generator of its own, which generators= "
            "takes, changes its inputs in place, or keeps a state between calls outside its "
            "buffers, such as a counter or an averaged copy of its weights; register it as a "
            "buffer, or update it outside forward"
        )
    return totals


# The first pass's outputs are freed before the second pass. A random projection of each sample's
# outputs takes two numbers a sample and shows any difference, unless the difference happens to be
# orthogonal to a random vector.

_Sketch = tuple[torch.Tensor, torch.Tensor]  # projection of each sample; the difference allowed


@torch.no_grad()
def _sketch(outputs: Any, kinds: set[torch.dtype | None]) -> list[_Sketch]:
    sketches = []
    for leaf in leaves_of(outputs):
        tensor = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
        if not tensor or leaf.dim() == 0:
            continue
        value = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        rows = value.reshape(len(value), -1).to(torch.promote_types(value.dtype, torch.float32))
        generator = torch.Generator(rows.device).manual_seed(rows.shape[1])
        signs = torch.empty_like(rows[0]).normal_(generator=generator)
        tolerance = max(_TOLERANCE.get(kind, 1e-9) for kind in {leaf.dtype, *kinds})
        allowed = rows.norm(dim=1) * tolerance + torch.finfo(rows.dtype).tiny
        sketches.append(((rows * signs).sum(1), allowed))
    return sketches


def _differences(one: list[_Sketch], other: list[_Sketch]) -> list[torch.Tensor]:
    """Return each tensor's largest difference, relative to what is allowed."""
    worst = []
    for (a, allowed), (b, _) in zip(one, other, strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        off = torch.where(same, 0.0, (a - b).abs() / allowed)
        worst.append(off.nan_to_num(torch.inf).max().double())
    return worst
