"""CUDA's multiplication of float32 numbers, unrounded (IEEE) or rounded to TF32 first; autocast.

TF32 is read and written as `fp32_precision` of an operator: `allow_tf32` raises once that has been
set.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch


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
