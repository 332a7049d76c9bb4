"""The kernels of a tuned layer as operators of torch, visible to graphs and counters.

``repro_microconv::convolution``, ``::data_gradient`` and ``::filter_gradient`` have shapes for fake
tensors, derivatives and a count of operations: graphs from ``make_fx`` or ``torch.jit.trace`` of a
tuned model contain them, and ``FlopCounterMode`` counts them. In the graph a layer is a number,
valid in this process only; another process refuses the graph (`LayerGoneError`).
"""

import itertools
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import conv_flop_count, register_flop_formula

from repro.microconv.torch_backend import native
from repro.microconv.tuned_kernel import TunedKernel

_numbers = itertools.count(1)
_layers: "WeakValueDictionary[int, TunedLayer]" = WeakValueDictionary()


class LayerGoneError(RuntimeError):
    """A graph or a shallow copy runs a tuned layer that is not in this process."""


class TunedLayer(dict[str, TunedKernel]):
    """The three kernels of a layer by kind, with the layer's number in operators."""

    def __init__(self, kernels: Mapping[str, TunedKernel]) -> None:
        super().__init__(kernels)
        self.number = next(_numbers)
        _layers[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return TunedLayer, (dict(self),)  # a copy has its own number


def convolve(input: Tensor, weight: Tensor, bias: Tensor | None, layer: TunedLayer) -> Tensor:
    """The convolution by a tuned layer, with derivatives; see `TunedConv2d`."""
    result: Tensor = torch.ops.repro_microconv.convolution(input, weight, bias, layer.number)
    return result


def _kernel(layer: int, kind: str) -> TunedKernel:
    try:
        return _layers[layer][kind]
    except KeyError:
        raise LayerGoneError(
            f"the graph runs tuned layer {layer}, which is not in this process; keep the model "
            f"that was traced, or trace and save it after untune(model)"
        ) from None


def _compute(
    tuned: TunedKernel,
    first: Tensor,
    second: Tensor,
    bias: Tensor | None = None,
    like: Tensor | None = None,
) -> Tensor:
    """Run a division if the operands fit it, else torch's own: a graph may be run with any.

    Arguments as in `native`.
    """
    kernel, real = tuned.kernel, not isinstance(first, FakeTensor)
    if (
        real
        and len(first) > 0
        and (tuple(first.shape), tuple(second.shape)) == kernel.shapes(len(first))[:2]
        and first.dtype == second.dtype == kernel.torch_dtype
        and str(first.device) == str(second.device) == kernel.device
    ):
        return tuned.run(first, second, bias, like)
    return native(kernel, first, second, bias, like)


def _convolution(input: Tensor, weight: Tensor, bias: Tensor | None, layer: int) -> Tensor:
    return _compute(_kernel(layer, "forward"), input, weight, bias)


def _data_gradient(
    gradient: Tensor, weight: Tensor, input: Tensor | None, shape: list[int], layer: int
) -> Tensor:
    like = gradient.new_empty(shape) if input is None else input
    return _compute(_kernel(layer, "backward_data"), gradient, weight, like=like)


def _filter_gradient(input: Tensor, gradient: Tensor, weight: Tensor, layer: int) -> Tensor:
    return _compute(_kernel(layer, "backward_filter"), input, gradient, like=weight)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias, ctx.layer = inputs
    # Like torch, keep the input only for the filters' gradient.
    ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight)
    ctx.with_bias, ctx.shape = bias is not None, list(input.shape)


def _derivatives(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    input, weight = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    needs_bias = ctx.with_bias and needs_bias
    # With create_graph=True the following operations must be differentiable, and torch itself must
    # compute batched gradients.
    if torch.is_grad_enabled() or _batched(gradient):
        conv = _kernel(ctx.layer, "forward").kernel.conv
        like = gradient.new_empty(ctx.shape) if input is None else input
        geometry = conv.stride, conv.padding, conv.dilation, False, [0, 0], conv.groups
        of_bias = [weight.shape[0]] if ctx.with_bias else None
        needs = [needs_input, needs_weight, needs_bias]
        gradients = torch.ops.aten.convolution_backward(
            gradient, like, weight, of_bias, *geometry, needs
        )
        return (*gradients, None)
    operators = torch.ops.repro_microconv
    of_input = of_weight = None
    if needs_input:
        of_input = operators.data_gradient(gradient, weight, input, ctx.shape, ctx.layer)
    if needs_weight:
        of_weight = operators.filter_gradient(input, gradient, weight, ctx.layer)
    return of_input, of_weight, gradient.sum((0, 2, 3)) if needs_bias else None, None


def _batched(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor or torch._C._functorch.is_legacy_batchedtensor(tensor)


# Operations are counted as in torch for ``aten.convolution`` and its backward pass.


def _flops(input: Any, weight: Any, bias: Any, layer: int, *, out_shape: Any, **_: Any) -> int:
    return conv_flop_count(input, weight, out_shape)


def _data_flops(
    gradient: Any, weight: Any, input: Any, shape: Any, layer: int, *, out_shape: Any, **_: Any
) -> int:
    return conv_flop_count(gradient, weight, out_shape, transposed=True)


def _filter_flops(
    input: Any, gradient: Any, weight: Any, layer: int, *, out_shape: Any, **_: Any
) -> int:
    x, y, w = ([shape[1], shape[0], *shape[2:]] for shape in (input, gradient, out_shape))
    return conv_flop_count(x, y, w)


for _name, _schema, _run, _count in (
    ("convolution", "Tensor input, Tensor weight, Tensor? bias", _convolution, _flops),
    (
        "data_gradient",
        "Tensor gradient, Tensor weight, Tensor? input, SymInt[] shape",
        _data_gradient,
        _data_flops,
    ),
    (
        "filter_gradient",
        "Tensor input, Tensor gradient, Tensor weight",
        _filter_gradient,
        _filter_flops,
    ),
):
    _qualified = f"repro_microconv::{_name}"
    torch.library.define(_qualified, f"({_schema}, int layer) -> Tensor")
    torch.library.impl(_qualified, "default", _run)
    torch.library.register_fake(_qualified, _run)
    register_flop_formula(getattr(torch.ops.repro_microconv, _name))(_count)
torch.library.register_autograd(
    "repro_microconv::convolution", _derivatives, setup_context=_remember
)
