"""Torch's `save_on_cpu`, that asks first whether the host has the memory that it pins."""

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from repro.measure import accelerator


def save_pinned(device: torch.device | str) -> save_on_cpu:
    """Return a block whose saved tensors wait in pinned memory of the host.

    Raises:
        HostMemoryError: In the block, before a tensor for which the host has too little.
    """
    hooks = save_on_cpu(pin_memory=True, device_type=torch.device(device).type)
    pack = hooks.pack_hook

    def checked(tensor: Tensor) -> tuple[torch.device, Tensor]:
        accelerator.check_pinnable(accelerator.pinned_bytes(tensor.nbytes))
        packed: tuple[torch.device, Tensor] = pack(tensor)
        return packed

    hooks.pack_hook = checked
    return hooks
