"""Recording one iteration as a trace, with or without computing it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from repro.outofcore.operands import meet
from repro.outofcore.recording import Recording
from repro.outofcore.running import UNLIMITED
from repro.outofcore.sequence import Trace
from repro.outofcore.swapper import OutOfCore


def record(
    step: Callable[[], object],
    warmup: int = 0,
    device: str | torch.device | None = None,
    model: nn.Module | Iterable[nn.Module] = (),
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    in_parts: bool = True,
) -> Trace:
    """Run one iteration and return it as a trace, at storage granularity.

    With ``device="meta"`` nothing is computed and no memory is needed: make the model, its
    optimizer and the inputs, and call this function, under torch's `FakeTensorMode`. The trace is
    that of the same iteration on a CPU, provided that no step depends on values; gradients of views
    that were changed in place may go through other copies.

    Tensors that no operation uses are in the trace if a called module or a stepping optimizer has
    them. Others, such as an average of the weights that is updated elsewhere, must be given by
    `model` and `optimizer`.

    Args:
        step: One training iteration: forward, backward, optimizer.
        warmup: Iterations to run before, so that an optimizer has its state, and the ends of
            variables that an iteration leaves behind are known.
        device: See `OutOfCore`, or ``"meta"``.
        model: One or more modules held on the device, whether the step uses them or not.
        optimizer: Likewise.
        in_parts: Record operations on lists of tensors (`foreach` and fused optimizers) element by
            element, as they run in a block with the smallest budget; otherwise whole.
    """
    if not callable(step):
        raise ValueError(f"step is {step!r:.200}: give a function that runs one iteration")
    if warmup < 0:
        raise ValueError(f"warmup is {warmup}: give 0 or more iterations")
    meta = device is not None and torch.device(device).type == "meta"
    budget = UNLIMITED if in_parts else UNLIMITED - 1
    block = OutOfCore(budget, device="cpu" if meta else device, model=model, optimizer=optimizer)
    if meta:
        block.device = torch.device("meta")
    holders: WeakKeyDictionary[object, None] = WeakKeyDictionary()
    hooks = (
        register_module_forward_pre_hook(lambda module, _: holders.setdefault(module)),
        register_optimizer_step_post_hook(lambda optimizer, *_: holders.setdefault(optimizer)),
    )
    try:
        with block:
            block._iterations.planner = None  # it only records
            block._leader = block
            for _ in range(warmup + 1):
                step()
                block.step()
            recorded = block._iterations.recorded
            trace = _with_held(recorded, block, list(holders)) if recorded else None
    finally:
        for hook in hooks:
            hook.remove()
    if trace is None:  # no operation ran on this device
        raise ValueError(
            f"no operation ran in the step on the device {block.device}: it needs at least one; "
            'under FakeTensorMode make all tensors, and give device="meta"'
        )
    return trace


def _with_held(recorded: Recording, block: OutOfCore, holders: Iterable[object]) -> Trace:
    """Return a recorded trace, with modules' and optimizers' tensors that no operation uses."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        for holder in holders:
            meet(block._residency, holder)
    used, trace = set(recorded.order), recorded.trace
    held = [v for v in block._residency.variables() if v.kind and v not in used]
    sizes = {f"held{n}": variable.nbytes for n, variable in enumerate(held)}
    kinds = {f"held{n}": variable.kind for n, variable in enumerate(held)}
    return replace(trace, sizes={**trace.sizes, **sizes}, kinds={**trace.kinds, **kinds})
