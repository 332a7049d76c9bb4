"""The kernels of a tuned layer as operators of torch, so that whatever watches operators sees them.

``repro_microconv::convolution``, ``::data_gradient`` and ``::filter_gradient`` have shapes for fake
tensors, derivatives and a count of operations: a graph that ``make_fx`` or ``torch.jit.trace``
takes of a tuned model holds them, and ``FlopCounterMode`` counts them. The layer is a number in the
graph, of a layer in this process; run where that is not, the graph is refused (`LayerGoneError`).
"""

import itertools
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.flop_counter import conv_flop_count, register_flop_formula

from repro.microconv.torch_backend import native
from repro.microconv.tuned_kernel import TunedKernel

Tensor = torch.Tensor
_numbers = itertools.count(1)
_layers: "WeakValueDictionary[int, TunedLayer]" = WeakValueDictionary()


class LayerGoneError(RuntimeError):
    """A graph or a shallow copy runs a tuned layer that is not in this process."""


class TunedLayer(dict[str, "TunedKernel"]):
    """The three kernels of a layer by kind, with the number that operators know it by."""

    def __init__(self, kernels: "Mapping[str, TunedKernel]") -> None:
        super().__init__(kernels)
        self.number = next(_numbers)
        _layers[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return TunedLayer, (dict(self),)  # a copy has a number of its own


def convolve(input: Tensor, weight: Tensor, bias: Tensor | None, layer: TunedLayer) -> Tensor:
    """Return the convolution by a tuned layer, with derivatives; see `TunedConv2d`."""
    result: Tensor = torch.ops.repro_microconv.convolution(input, weight, bias, layer.number)
    return result


def _kernel(layer: int, kind: str) -> "TunedKernel":
    try:
        return _layers[layer][kind]
    except KeyError:
        raise LayerGoneError(
            f"the graph runs tuned layer {layer}, which is not in this process; keep the model "
            f"that was traced, or trace and save it after untune(model)"
        ) from None


def _convolution(input: Tensor, weight: Tensor, bias: Tensor | None, layer: int) -> Tensor:
    tuned = _kernel(layer, "forward")
    if not _as_tuned(tuned, input, weight):
        return native(tuned.kernel, input, weight, bias)
    return tuned.run(input, weight, tuned.kernel.conv.output_shape(len(input)), bias)


def _data_gradient(
    gradient: Tensor, weight: Tensor, input: Tensor | None, shape: list[int], layer: int
) -> Tensor:
    tuned = _kernel(layer, "backward_data")
    like = gradient.new_empty(shape) if input is None else input
    if not _as_tuned(tuned, gradient, weight):
        return native(tuned.kernel, gradient, weight, like=like)
    return tuned.run(gradient, weight, tuple(shape), like=like)


def _filter_gradient(input: Tensor, gradient: Tensor, weight: Tensor, layer: int) -> Tensor:
    tuned = _kernel(layer, "backward_filter")
    if not _as_tuned(tuned, input, gradient):
        return native(tuned.kernel, input, gradient, like=weight)
    return tuned.run(input, gradient, tuple(weight.shape), like=weight)


def _as_tuned(tuned: "TunedKernel", first: Tensor, second: Tensor) -> bool:
    """Return whether a division may read these operands: a graph may be run with any."""
    kernel = tuned.kernel
    shapes = kernel.shapes(len(first))
    return (
        len(first) > 0
        and (tuple(first.shape), tuple(second.shape)) == shapes[:2]
        and first.dtype == second.dtype == kernel.torch_dtype
        and str(first.device) == str(second.device) == kernel.device
    )


def _fake_convolution(input: Tensor, weight: Tensor, bias: Tensor | None, layer: int) -> Tensor:
    return native(_kernel(layer, "forward").kernel, input, weight, bias)


def _fake_data_gradient(
    gradient: Tensor, weight: Tensor, input: Tensor | None, shape: list[int], layer: int
) -> Tensor:
    like = gradient.new_empty(shape) if input is None else input
    return native(_kernel(layer, "backward_data").kernel, gradient, weight, like=like)


def _fake_filter_gradient(input: Tensor, gradient: Tensor, weight: Tensor, layer: int) -> Tensor:
    return native(_kernel(layer, "backward_filter").kernel, input, gradient, like=weight)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias, ctx.layer = inputs
    # Torch keeps the input for the filters' gradient alone.
    ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight)
    ctx.with_bias, ctx.shape = bias is not None, list(input.shape)


def _derivatives(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    input, weight = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    # With create_graph=True what follows must be differentiable; batched gradients must be seen by
    # torch.
    if torch.is_grad_enabled() or _batched(gradient):
        conv = _kernel(ctx.layer, "forward").kernel.conv
        gradients = torch.ops.aten.convolution_backward(
            gradient,
            gradient.new_empty(ctx.shape) if input is None else input,
            weight,
            [weight.shape[0]] if ctx.with_bias else None,
            conv.stride,
            conv.padding,
            conv.dilation,
            False,
            [0, 0],
            conv.groups,
            [needs_input, needs_weight, ctx.with_bias and needs_bias],
        )
        return (*gradients, None)
    operators = torch.ops.repro_microconv
    of_input = of_weight = of_bias = None
    if needs_input:
        of_input = operators.data_gradient(gradient, weight, input, ctx.shape, ctx.layer)
    if needs_weight:
        of_weight = operators.filter_gradient(input, gradient, weight, ctx.layer)
    if ctx.with_bias and needs_bias:
        of_bias = gradient.sum((0, 2, 3))
    return of_input, of_weight, of_bias, None


def _batched(tensor: Tensor) -> bool:
    return type(tensor) is not torch.Tensor or torch._C._functorch.is_legacy_batchedtensor(tensor)


# As torch counts ``aten.convolution`` and its backward pass.


def _convolution_flops(
    input: Any, weight: Any, bias: Any, layer: int, *, out_shape: Any, **_: Any
) -> int:
    return conv_flop_count(input, weight, out_shape)


def _data_gradient_flops(
    gradient: Any, weight: Any, input: Any, shape: Any, layer: int, *, out_shape: Any, **_: Any
) -> int:
    return conv_flop_count(gradient, weight, out_shape, transposed=True)


def _filter_gradient_flops(
    input: Any, gradient: Any, weight: Any, layer: int, *, out_shape: Any, **_: Any
) -> int:
    x, y, w = ([shape[1], shape[0], *shape[2:]] for shape in (input, gradient, out_shape))
    return conv_flop_count(x, y, w)


def _register() -> None:
    for name, schema, run, fake, flops in (
        (
            "convolution",
            "(Tensor input, Tensor weight, Tensor? bias, int layer) -> Tensor",
            _convolution,
            _fake_convolution,
            _convolution_flops,
        ),
        (
            "data_gradient",
            "(Tensor gradient, Tensor weight, Tensor? input, SymInt[] shape, int layer) -> Tensor",
            _data_gradient,
            _fake_data_gradient,
            _data_gradient_flops,
        ),
        (
            "filter_gradient",
            "(Tensor input, Tensor gradient, Tensor weight, int layer) -> Tensor",
            _filter_gradient,
            _fake_filter_gradient,
            _filter_gradient_flops,
        ),
    ):
        qualified = f"repro_microconv::{name}"
        torch.library.define(qualified, schema)
        torch.library.impl(qualified, "default", run)
        torch.library.register_fake(qualified, fake)
        register_flop_formula(getattr(torch.ops.repro_microconv, name))(flops)
    torch.library.register_autograd(
        "repro_microconv::convolution", _derivatives, setup_context=_remember
    )


_register()
