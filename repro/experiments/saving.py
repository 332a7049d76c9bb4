"""Blocks around training steps: saved tensors in pinned memory, steps that no block sees."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import _disable_current_modes

from repro.measure import accelerator


def save_pinned(device: torch.device | str) -> save_on_cpu:
    """Return torch's `save_on_cpu`, that asks first whether the host has the memory that it pins.

    In the block it raises `HostMemoryError` before a tensor for which the host has too little.
    """
    hooks = save_on_cpu(pin_memory=True, device_type=torch.device(device).type)
    pack = hooks.pack_hook

    def checked(tensor: Tensor) -> tuple[torch.device, Tensor]:
        accelerator.check_pinnable(accelerator.pinned_bytes(tensor.nbytes))
        packed: tuple[torch.device, Tensor] = pack(tensor)
        return packed

    hooks.pack_hook = checked
    return hooks


@contextmanager
def unseen() -> Iterator[None]:
    """Compute outside of the blocks around, which see every operation."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
