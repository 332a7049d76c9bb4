"""A convolution that runs its division: what `tune` puts in the place of ``nn.Conv2d``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch._prims_common import suggest_memory_format
from torch.autograd import forward_ad

from repro.measure import time_interleaved
from repro.microconv import backends
from repro.microconv.operators import TunedLayer, convolve
from repro.microconv.tuned_kernel import Signature, TunedKernel, Workspace, kernels_of


def layout_of(input: torch.Tensor, weight: torch.Tensor) -> str:
    """Return ``nhwc`` where torch would compute channels-last, else ``nchw``."""
    for tensor in (input, weight):
        if suggest_memory_format(tensor) == torch.channels_last:
            return "nhwc"
    return "nchw"


def compute_dtype(input: torch.Tensor) -> torch.dtype:
    """Return the data type that a convolution of `input` computes in, autocast considered."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return input.dtype


def signature(input: torch.Tensor, weight: torch.Tensor) -> Signature:
    """Return what, besides the batch size, decides which tuning a call belongs to."""
    dtype, device = compute_dtype(input), str(input.device)
    return (
        input.shape[2],
        input.shape[3],
        str(dtype).removeprefix("torch."),
        device,
        layout_of(input, weight),
        backends.math_of(dtype, device),
    )


class TunedConv2d(nn.Conv2d):
    """An ``nn.Conv2d`` whose kernels run divided; made by `tune`, undone by `untune`.

    Parameters, buffers, hooks and the place in the model are the module's own. Calls that it was
    not tuned for are computed by torch, as before: another image size, data type or device, a
    stride that was changed since, ``torch.compile``, functional transforms, forward-mode and
    second derivatives, tensors that are no plain ones.

    Attributes:
        tuned: By signature of a call, then kind, the kernels.
        geometry: Stride, padding, dilation, groups and padding mode that were tuned for.
        untuned_calls: How many calls torch computed for want of a tuning.
    """

    tuned: dict[Signature, TunedLayer]
    geometry: tuple[Any, ...]
    untuned_calls: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias  # read once: a parametrization computes them
        if (
            torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
        ):
            return self._conv_forward(input, weight, bias)  # type: ignore[no-any-return]
        with _untraced():
            kernels = self._kernels(input, weight, bias)
        if kernels is None:
            self.untuned_calls += 1
            return self._conv_forward(input, weight, bias)  # type: ignore[no-any-return]
        dtype = compute_dtype(input)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(input.device.type, enabled=False):
            return convolve(input.to(dtype), weight.to(dtype), bias, kernels)

    def _kernels(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> TunedLayer | None:
        """Return the kernels for a call, None where torch is to compute it, or to complain."""
        given = [tensor for tensor in (input, weight, bias) if tensor is not None]
        plain = all(
            type(tensor) in (torch.Tensor, nn.Parameter)
            and tensor.layout == torch.strided
            and tensor.device == given[0].device
            for tensor in given
        )
        if not plain or input.device.type == "meta" or input.dim() != 4:
            return None
        if self.geometry != geometry_of(self) or not len(input):
            return None
        kernels = self.tuned.get(signature(input, weight))
        if kernels is None:
            return None
        conv = kernels["forward"].kernel.conv
        alike = input.shape[1] == conv.in_channels and weight.shape == conv.weight_shape
        if bias is not None:
            alike = alike and bias.shape == (conv.out_channels,)
        autocast = torch.is_autocast_enabled(input.device.type)
        same_type = autocast or all(tensor.dtype == input.dtype for tensor in given)
        return kernels if alike and same_type else None

    def extra_repr(self) -> str:
        kinds = {
            f"{kind} {sum(1 for _ in k.parts)} parts"
            for kernels in self.tuned.values()
            for kind, k in kernels.items()
            if k.parts is not None
        }
        untuned = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{untuned}, tuned: {', '.join(sorted(kinds))}"


@contextmanager
def _untraced() -> Iterator[None]:
    """Pause ``torch.jit.trace``, under which the sizes of tensors are tensors."""
    tracer: Any = torch._C
    state = tracer._get_tracing_state()
    if state is None:
        yield
        return
    tracer._set_tracing_state(None)
    try:
        yield
    finally:
        tracer._set_tracing_state(state)


def geometry_of(module: nn.Conv2d) -> tuple[Any, ...]:
    """Return what decides a layer's result besides its tensors."""
    return module.stride, module.padding, module.dilation, module.groups, module.padding_mode


def call_overhead(device: str, training: bool) -> list[float]:
    """Return by how many seconds a call of a tuned layer costs more than one of torch's.

    Measured on one pixel, with every kernel left to torch, so that only the way there differs.
    """
    plain, tuned = (nn.Conv2d(1, 1, 1, device="meta").to_empty(device=device) for _ in range(2))
    for parameter in (*plain.parameters(), *tuned.parameters()):
        nn.init.zeros_(parameter)
    input = torch.zeros(1, 1, 1, 1, device=device, requires_grad=training)
    call = signature(input, tuned.weight)
    kernels = {
        kind: TunedKernel(kernel, 1, None, {}, 0, 0, 0, Workspace(device))
        for kind, kernel in kernels_of(tuned, call).items()
    }
    install(tuned, call, kernels)

    def run(module: nn.Module) -> None:
        with torch.set_grad_enabled(training):
            result = module(input)
        if training:
            result.backward()

    timed = time_interleaved(
        {"plain": lambda: run(plain), "tuned": lambda: run(tuned)}, warmup=10, repeats=50
    )
    pairs = zip(timed["tuned"].samples_s, timed["plain"].samples_s, strict=True)
    return [tuned_s - plain_s for tuned_s, plain_s in pairs]


def install(module: nn.Conv2d, call: Signature, kernels: dict[str, TunedKernel]) -> None:
    """Turn a module into a `TunedConv2d` in place, with the kernels for calls of a signature."""
    made = cast(TunedConv2d, module)
    if not isinstance(module, TunedConv2d):
        cast(nn.Module, module).__class__ = TunedConv2d
        made.tuned, made.untuned_calls = {}, 0
        made.geometry = geometry_of(module)
    made.tuned[call] = TunedLayer(kernels)
