"""Recording one iteration as a trace, with or without computing it."""

from collections.abc import Callable

import torch

from repro.outofcore.recording import Recording
from repro.outofcore.swapper import OutOfCore
from repro.outofcore.trace import Trace

_UNLIMITED = 1 << 62


def record(
    step: Callable[[], object],
    budget_bytes: int | None = None,
    warmup: int = 0,
    device: str | torch.device | None = None,
) -> Trace:
    """Run one iteration and return it as a trace, at storage granularity.

    With ``device="meta"`` nothing is computed and no memory is needed: make the model, its
    optimizer and the inputs, and call this, under torch's `FakeTensorMode`. The trace is that of
    the same iteration on a CPU, as long as no step depends on values; gradients of views that were
    changed in place may go through other copies.

    Args:
        step: One training iteration: forward, backward, optimizer.
        budget_bytes: Stay within it by swapping on demand; None for no limit.
        warmup: Iterations to run before, so that an optimizer has its state, and so that it is seen
            when what an iteration leaves behind dies in the next.
        device: As of `OutOfCore`, or ``"meta"``.

    Raises:
        BudgetTooSmall: An operation alone needs more than the budget.
        ValueError: `warmup` is negative, no operation ran, or a budget is given for ``"meta"``.
    """
    return record_timed(step, budget_bytes, warmup, device).trace


def record_timed(
    step: Callable[[], object],
    budget_bytes: int | None = None,
    warmup: int = 0,
    device: str | torch.device | None = None,
) -> Recording:
    """Run one iteration and return it with the seconds of its functions: see `record`."""
    if warmup < 0:
        raise ValueError(f"warmup is {warmup}: give 0 or more iterations")
    meta = device is not None and torch.device(device).type == "meta"
    if meta and budget_bytes is not None:
        raise ValueError(
            f"budget_bytes is {budget_bytes}, but on the device meta there is nothing to swap: "
            "give None"
        )
    budget = _UNLIMITED if budget_bytes is None else budget_bytes
    block = OutOfCore(budget, device="cpu" if meta else device)
    if meta:
        block.device = torch.device("meta")
    with block:
        block._iterations.record_only()
        block._leader = block
        for _ in range(warmup + 1):
            step()
            block.step()
    recorded = block._iterations.recorded
    if recorded is None:  # not on this device, at least
        raise ValueError(
            "no operation ran in the step on the device "
            f"{block.device}: it needs at least one; under torch's FakeTensorMode make the model, "
            'the optimizer and the inputs, and give device="meta"'
        )
    return recorded
