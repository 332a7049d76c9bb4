"""Fake tensors (shapes without content): training steps without data or device.

The memory of a step, and its computations, follow from the shapes alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partialmethod
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from repro.measure.memory import MemoryMeter


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations of a call of a matrix product or convolution, 0 of another."""
    count = flop_registry.get(getattr(func, "_overloadpacket", func))
    return int(count(*args, **kwargs, out_val=result)) if count else 0


class _Ones(TorchDispatchMode):
    """Returns 1 as the number in a fake tensor, such as a loss."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def imagined(ones: bool = True) -> Iterator[None]:
    """Make tensors inside fake: of any size, with shapes and no content.

    Code that reads a number from a fake tensor, such as a loss, gets 1; without `ones` torch's
    error.
    """

    def like(tensor: Tensor, made: Tensor) -> Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(made, tensor.requires_grad) if is_parameter else made

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        # torch's own `to` fails on fake tensors. All lie on one device, and a layout changes no
        # size, so that only the dtype applies.
        _, kind, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if kind is not None:
            for part in module.modules():
                tables: list[dict[str, Any]] = [part._parameters, part._buffers]
                for tensors in tables:
                    for name, tensor in tensors.items():
                        if tensor is not None and tensor.is_floating_point():
                            tensors[name] = like(tensor, tensor.to(kind))
        return module

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        # torch's own copies a storage, which a fake tensor lacks.
        copied = like(tensor, tensor.detach().clone())
        memo[id(tensor)] = copied
        return copied

    dtypes = "double", "float", "half", "bfloat16"
    kinds: dict[str, Any] = {name: partialmethod(to, getattr(torch, name)) for name in dtypes}
    with (
        FakeTensorMode(),
        mock.patch.multiple(nn.Module, to=to, **kinds),
        mock.patch.object(Tensor, "__deepcopy__", deepcopy),
        _Ones() if ones else nullcontext(),
    ):
        yield


def first_steps(step: Callable[[], Any], resident: Sequence[nn.Module | Tensor]) -> int:
    """Peak live bytes of two training steps: an optimizer has its state from the second on.

    `resident` are modules and tensors that lie on the device before.
    """
    with MemoryMeter("cpu", resident=resident) as meter:
        step()
        step()
    return meter.peak_bytes
