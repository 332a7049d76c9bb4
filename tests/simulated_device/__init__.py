"""A simulated accelerator on host memory: whatever runs on a GPU runs on it, and is checked.

torch sees it as the device ``sim`` (``sim:0`` and ``sim:1``) with `torch.sim` beside `torch.cuda`.
`load` builds and registers it, once in a process and before the first backward pass there; it is
there (`torch.sim.is_available`) inside of `present` alone.

Promised: what CUDA promises, and no more. Streams run side by side, an event is complete for the
host only once the host has waited for it, memory is handed out again as soon as it is freed, fresh
memory holds NaN, copies that do not block are under way until somebody waits for them. `checked`
finds operations that nothing orders, whether or not they went wrong; `deferred` makes them go
wrong; `counted_blocks` tells where the host waits; `virtual_time` gives each stream a clock, by
which kernels and copies take what their bytes are said to.

Not simulated: the speed of kernels otherwise, cuDNN and cuBLAS with their workspaces, CUDA graphs,
NCCL, other processes. What one thread of the host waited for, all of them are taken to know.
Kernels are the CPU's, and their temporary memory counts as the device's.
"""

import importlib.util
import sys

import torch

from simulated_device.building import NAME, BuildError, NoCompilerError, build

__all__ = ["BuildError", "NoCompilerError", "load"]


def load() -> None:
    """Build the device where that has not been done, and register it with torch.

    Raises:
        BuildError: It cannot be built here.
        RuntimeError: There is a real accelerator, which it would hide.
    """
    if NAME in sys.modules:
        return
    if torch.cuda.is_available():
        raise RuntimeError("there is a CUDA device: the simulated one would hide it")
    path = build()
    torch.utils.rename_privateuse1_backend("sim")
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules[NAME] = native
    from simulated_device import interface

    torch._register_device_module("sim", interface)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
