"""Sums of gradients made in place, as plain autograd makes them.

Where a tensor is used twice, autograd sums two gradients of it. Without a dispatch mode it sums
into the first where nobody else holds that; under one it always takes a new tensor, so that an
iteration would hold one more than it does otherwise. Such a sum is told in the iteration that is
recorded, by the end of one operand right after it, and made in place in those that follow the
plan: a + b = b + a to the last bit. The other operand may be a slice of something larger, as where
what was put together is divided again.
"""

import sys
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

ADD: OpOverload = torch.ops.aten.add.Tensor
ADD_INTO: OpOverload = torch.ops.aten.add_.Tensor
_OURS = (__name__, "repro.outofcore.", "torch._dynamo", "torch._compile")


class _Holders(NamedTuple):
    """How many hold a tensor in C++ and in Python, and its storage."""

    tensor: int
    wrapper: int
    storage: int


def _holders(args: tuple[Any, ...], position: int) -> _Holders:
    storage = args[position].untyped_storage()
    return _Holders(
        args[position]._use_count(),
        sys.getrefcount(args[position]),
        torch._C._storage_Use_Count(storage._cdata),
    )


def _in_the_engine() -> bool:
    """Whether autograd runs an operation in a backward pass, and none of the user's code does."""
    if torch._C._current_graph_task_id() < 0 or torch.is_grad_enabled():
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


class _Probe(TorchDispatchMode):
    """Notes who holds the operands of a sum that autograd alone holds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.holders: list[tuple[_Holders, _Holders]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ADD and _in_the_engine():
            self.holders.append((_holders(args, 0), _holders(args, 1)))
        return func(*args, **(kwargs or {}))


class Sums:
    """Tells the sums that can be made in place.

    Who holds a tensor is torch's own affair, so it is measured on a small graph first: where that
    shows nothing, no sum is made in place.

    Args:
        device: Where the graph is.
    """

    def __init__(self, device: torch.device) -> None:
        self._alone: tuple[_Holders, _Holders] | None = None
        probe = _Probe()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                x = torch.zeros(2, device=device, requires_grad=True)
                y = x * 1.0
                end = (y * 2.0 + y * 3.0).sum()  # two gradients of y, neither held elsewhere
                with probe:
                    torch.autograd.grad(end, x)
        except (RuntimeError, NotImplementedError, AttributeError):
            return
        if len(probe.holders) == 1:
            self._alone = probe.holders[0]

    def into(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return which operand a sum of two gradients may go into, or None."""
        if self._alone is None or kwargs or len(args) != 2 or not _in_the_engine():
            return None
        if any(not isinstance(v, torch.Tensor) or v.layout is not torch.strided for v in args):
            return None
        alone = [_holders(args, i) == self._alone[i] for i in (0, 1)]  # before we hold them
        one, other = args
        if (
            not any(alone)
            or one.dtype != other.dtype
            or one.shape != other.shape
            or any(t.is_conj() or t.is_neg() for t in args)
        ):
            return None
        if alone[0] and _dense(one):  # where plain autograd does it, too
            return 0
        return 1 if alone[1] and one.stride() == other.stride() and _dense(other) else None


def _dense(tensor: torch.Tensor) -> bool:
    return torch._debug_has_internal_overlap(tensor) == 0  # it is dense, too
