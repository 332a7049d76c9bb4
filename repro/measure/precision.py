"""Half precision, autocast, and CUDA's multiplication of float32 numbers: IEEE, or TF32.

TF32 is read and written as `fp32_precision` of an operator: `allow_tf32` raises once that has been
set.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

HALF = (torch.float16, torch.bfloat16)


def rounds_to_tf32(operator: Literal["conv", "matmul"]) -> bool:
    """Whether torch rounds a kind of operator's factors to TF32 on CUDA."""
    cudnn: Any = torch.backends.cudnn
    own: Any = cudnn.conv if operator == "conv" else torch.backends.cuda.matmul
    settings: tuple[Any, ...] = (own, cudnn, torch.backends)  # the first that is set holds
    given = [setting.fp32_precision for setting in settings if setting.fp32_precision != "none"]
    return bool(given) and given[0] == "tf32"


@contextmanager
def without_tf32() -> Iterator[None]:
    """Multiply float32 numbers without rounding them to TF32 inside."""
    cudnn: Any = torch.backends.cudnn
    settings: tuple[Any, ...] = cudnn.conv, torch.backends.cuda.matmul
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value


@contextmanager
def without_autocast(kind: str) -> Iterator[None]:
    """Disable the caller's autocast, meant for forward passes, and its cached old weights."""
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, enabled=False):
        yield
    torch.clear_autocast_cache()


def widened(value: Any) -> Any:
    """A tensor of half precision in float32; anything else as it is."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value


class Widening(TorchFunctionMode):
    """Computes in float32 what would be computed in half precision, inside autocast, too.

    What an operation writes in place stays as it is, or its caller would not see the result.
    """

    rounds = False  # whether a tensor with a graph was written into one of half precision

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = (args, kwargs or {}), getattr(func, "__name__", "")
        tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]
        wide = [x for x in tensors if x.is_floating_point() and x.dtype not in HALF]
        in_place = re.fullmatch(r".*[^_]_|__(i\w+|set|setitem)__", name) or "out" in given[1]
        if wide and not in_place:
            given = pytree.tree_map(widened, given)
        with torch.autocast(tensors[0].device.type, enabled=False) if tensors else nullcontext():
            result = func(*given[0], **given[1])
        if not wide or not any(getattr(x, "dtype", 0) in HALF for x in pytree.tree_leaves(result)):
            return result
        if name in ("half", "bfloat16", "to", "type", "type_as"):
            return args[0].to(result.device)
        self.rounds |= any(x.requires_grad for x in wide)
        return result
