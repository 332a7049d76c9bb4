"""Half precision, autocast, compiled functions, and TF32 in CUDA's products of float32 numbers.

TF32 is read and written as `fp32_precision` of an operator: `allow_tf32` raises once that has been
set.
"""

import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

HALF = (torch.float16, torch.bfloat16)
_MOST_ADDED = 64  # a sum of 256 equal terms in bfloat16 grows no further; a quarter of that


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


def widened(value: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A tensor of half precision in a wider dtype; anything else as it is."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in HALF else value


def warn_of_sums(parameters: Iterable[torch.nn.Parameter], count: int, stacklevel: int) -> None:
    """Warn of gradients that many micro-batches are added to in bfloat16."""
    if count > _MOST_ADDED and any(
        p.grad is not None and p.grad.dtype == torch.bfloat16 for p in parameters
    ):
        warnings.warn(
            f"gradients of {count} micro-batches are added up in bfloat16, whose 8 significant "
            f"bits lose small ones: take at most {_MOST_ADDED}, or float32 weights with autocast",
            RuntimeWarning,
            stacklevel=stacklevel,
        )


class Widening(TorchFunctionMode):
    """Computes in wider precision what would be computed in half, inside autocast, too.

    What an operation writes in place stays as it is, or its caller would not see the result.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = (args, kwargs or {}), getattr(func, "__name__", "")
        tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]
        wide = [x.dtype for x in tensors if x.is_floating_point() and x.dtype not in HALF]
        wider = reduce(torch.promote_types, wide, torch.float32)

        def widen(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return wider if value in HALF else value
            return widened(value, wider) if wide else value

        if wide and name in ("half", "bfloat16"):
            return args[0]
        if not re.fullmatch(r".*[^_]_|__(i\w+|set|setitem)__", name) and "out" not in given[1]:
            given = pytree.tree_map(widen, given)
        kind = tensors[0].device.type if tensors else "cpu"
        if not torch.is_autocast_enabled(kind):
            return func(*given[0], **given[1])
        with torch.autocast(kind, enabled=False):
            return func(*given[0], **given[1])


_stance, _entered, _entering = ExitStack(), list[None](), threading.Lock()


def _begin() -> None:
    _stance.enter_context(torch.compiler.set_stance("force_eager"))


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled functions as they are, in all threads, until the last such context ends."""
    with _entering:
        if not _entered:
            torch.compiler.disable(_begin)()  # the caller may be compiled
        _entered.append(None)
    try:
        yield
    finally:
        with _entering:
            _entered.pop()
            if not _entered:
                torch.compiler.disable(_stance.close)()


def rounds(call: Callable[[], Any]) -> bool:
    """Whether a call goes on with numbers that it rounded to half precision, as inside autocast."""
    with uncompiled(), _Rounding() as rounding:
        result = call()
    return rounding.used or rounding.holds(result)


class _Rounding(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.used = False  # wider numbers were computed of rounded ones
        self._rounded: dict[int, Any] = {}  # storages by address, kept so that none comes again

    def holds(self, tree: Any) -> bool:
        """Whether some tensors hold rounded numbers."""
        return any(storage._cdata in self._rounded for storage in _halves(tree))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        from_rounded = self.holds((args, kwargs))
        self.used |= from_rounded and _any_wide(result)
        if from_rounded or _any_wide((args, kwargs)):
            self._rounded |= {storage._cdata: storage for storage in _halves(result)}
        return result


def _halves(tree: Any) -> list[torch.UntypedStorage]:
    """The memory of tensors of half precision."""
    tensors = [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
    return [t.untyped_storage() for t in tensors if t.dtype in HALF and t.layout is torch.strided]


def _any_wide(tree: Any) -> bool:
    tensors = [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
    return any(t.is_floating_point() and t.dtype not in HALF for t in tensors)
