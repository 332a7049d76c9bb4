"""A convolution that runs its division: an ``nn.Conv2d`` after `tune`."""

import weakref
from typing import Any, cast

import torch
from torch import nn
from torch._prims_common import suggest_memory_format
from torch.autograd import forward_ad

from repro.microconv import backends
from repro.microconv.operators import LayerGoneError, TunedLayer
from repro.microconv.tuned_kernel import Signature, TunedKernel

# Torch's definition: a replacement would compute something else.
_OWN = nn.Conv2d._conv_forward
_ATTRIBUTES = ("tuned", "untuned_calls", "geometry")


def compute_dtype(input: torch.Tensor) -> torch.dtype:
    """The data type in which a convolution takes `input`: autocast casts floats up to 32 bits."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.is_floating_point() and input.itemsize <= 4:
        return torch.get_autocast_dtype(kind)
    return input.dtype


def signature(input: torch.Tensor, weight: torch.Tensor) -> Signature:
    """The properties of a call that select its tuning, besides the batch size."""
    dtype, device = compute_dtype(input), str(input.device)
    # As torch decides whether it computes channels-last.
    last = torch.channels_last in map(suggest_memory_format, (input, weight))
    facts = str(dtype).removeprefix("torch."), device, "nhwc" if last else "nchw"
    return (input.shape[2], input.shape[3], *facts, backends.math_of(dtype, device))


class _IsTuned(type):
    def __instancecheck__(cls, module: object) -> bool:
        return isinstance(module, nn.Conv2d) and isinstance(
            vars(module).get("_conv_forward"), _Forward
        )


class TunedConv2d(nn.Conv2d, metaclass=_IsTuned):
    """The type, for ``isinstance``, of an ``nn.Conv2d`` with divided kernels; see `tune`.

    Its class stays ``nn.Conv2d``, which quantisation, ``torch.fx`` and others recognise. Torch
    computes all calls outside its tuning: another image size, data type or device, a changed
    stride, ``torch.compile``, ``torch.jit.script``, exported graphs, functional transforms,
    forward-mode and second derivatives, and tensors of subclasses or sparse layouts.

    A shallow copy (``copy.copy``) shares the tuning and geometry of the original.
    """

    tuned: dict[Signature, TunedLayer]
    geometry: tuple[Any, ...]  # tuned stride, padding, dilation, groups and padding mode
    untuned_calls: int  # that torch computed for want of a tuning


class _Forward:
    """Replaces the `_conv_forward` of one module, so that the module keeps its class.

    The module's own ``forward`` passes the weight, so that a parametrization computes it once, and
    a replica or a functional call passes its own weight.
    """

    def __init__(self, module: nn.Conv2d) -> None:
        self._module = weakref.ref(module)  # no cycle: the last reference to a model frees it

    def __reduce__(self) -> tuple[Any, ...]:
        return _Forward, (self._module(),)

    def __call__(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        module = cast("TunedConv2d | None", self._module())
        if module is None:
            raise LayerGoneError(
                "a shallow copy runs the tuning of a convolution that is gone; keep the original, "
                "call untune(copy), or make the copy by copy.deepcopy"
            )
        layer = None
        if not (
            torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
            or torch.onnx.is_in_onnx_export()
        ):
            tracer: Any = torch._C  # of torch.jit.trace, which would make sizes tensors
            state = tracer._get_tracing_state()
            tracer._set_tracing_state(None)
            try:
                layer = _layer(module, input, weight, bias)
            finally:
                tracer._set_tracing_state(state)
            module.untuned_calls += layer is None
        if layer is None:
            result: torch.Tensor = type(module)._conv_forward(module, input, weight, bias)
            return result
        dtype = compute_dtype(input)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(input.device.type, enabled=False):
            operands = input.to(dtype), weight.to(dtype), bias
            result = torch.ops.repro_microconv.convolution(*operands, layer.number)
        return result


def _layer(
    module: TunedConv2d, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> TunedLayer | None:
    """The kernels for a call, None if torch should compute it or raise an error."""
    given = [tensor for tensor in (input, weight, bias) if tensor is not None]
    changed = module.geometry != geometry_of(module) or type(module)._conv_forward is not _OWN
    if changed or not is_plain(*given) or input.dim() != 4 or not len(input):
        return None
    if (layer := module.tuned.get(signature(input, weight))) is None:
        return None
    conv = layer["forward"].kernel.conv
    shapes = conv.input_shape(len(input)), conv.weight_shape, (conv.out_channels,)
    alike = all(t.shape == shape for t, shape in zip(given, shapes, strict=False))
    return layer if alike and len({*map(compute_dtype, given)}) == 1 else None


def is_plain(*tensors: Any) -> bool:
    """Whether tensors are plain and strided ones, on one device and with memory."""
    return all(
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device == tensors[0].device
        and tensor.device.type != "meta"
        for tensor in tensors
    )


def is_replaced(module: nn.Conv2d) -> bool:
    """Whether ``nn.Conv2d``'s own forward pass has been replaced."""
    own = vars(module).get("_conv_forward")
    patched = "forward" in vars(module) or not (own is None or isinstance(own, _Forward))
    return patched or type(module)._conv_forward is not _OWN


def geometry_of(module: nn.Conv2d) -> tuple[Any, ...]:
    """The settings that determine a layer's result, besides its tensors."""
    return module.stride, module.padding, module.dilation, module.groups, module.padding_mode


def install(module: nn.Conv2d, call: Signature, kernels: dict[str, TunedKernel]) -> None:
    """Make a module run the kernels for calls of a signature; see `TunedConv2d`."""
    made = cast(TunedConv2d, module)
    if not isinstance(module, TunedConv2d):
        made.tuned, made.untuned_calls = {}, 0
        made.geometry = geometry_of(module)
        vars(module)["_conv_forward"] = _Forward(module)
    made.tuned[call] = TunedLayer(kernels)


def uninstall(module: nn.Module) -> None:
    """Undo `install` on any module."""
    held = vars(module)
    if held.keys() >= set(_ATTRIBUTES):
        for name in _ATTRIBUTES:
            del held[name]
    if isinstance(held.get("_conv_forward"), _Forward):  # else it has been replaced since
        del held["_conv_forward"]
