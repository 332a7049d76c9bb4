"""The kernels of a tuned layer as operators of torch, visible to graphs and counters.

``repro_microconv::convolution``, ``::data_gradient`` and ``::filter_gradient`` have shapes for fake
tensors, derivatives and a count of operations: graphs from ``make_fx`` or ``torch.jit.trace`` of a
tuned model contain them, and ``FlopCounterMode`` counts them. In the graph a layer is a number,
valid in this process only; another process refuses the graph (`LayerGoneError`).
"""

import os
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count, register_flop_formula

from repro.microconv.tuned_kernel import TunedKernel

_layers: "WeakValueDictionary[int, TunedLayer]" = WeakValueDictionary()


class LayerGoneError(RuntimeError):
    """A graph or a shallow copy runs a tuned layer that is not in this process."""


class TunedLayer(dict[str, TunedKernel]):
    """The three kernels of a layer by kind, with the layer's number in operators."""

    def __init__(self, kernels: Mapping[str, TunedKernel]) -> None:
        super().__init__(kernels)
        # By chance, so that a saved graph finds no other layer in another process.
        self.number = int.from_bytes(os.urandom(7))
        _layers[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return TunedLayer, (dict(self),)  # a copy has its own number


def _kernel(layer: int, kind: str) -> TunedKernel:
    try:
        return _layers[layer][kind]
    except KeyError:
        raise LayerGoneError(
            f"the graph runs tuned layer {layer}, which is not in this process; keep the model "
            f"that was traced, or trace and save it after untune(model)"
        ) from None


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, bias, ctx.layer = inputs
    # Also the input of frozen filters, as torch does: another one would be allocated instead.
    ctx.save_for_backward(input, weight)
    ctx.with_bias = bias is not None
    ctx.tuned = _layers.get(ctx.layer)  # a graph may outlive its model, or the tuning


def _derivatives(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    input, weight = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    needs_bias = ctx.with_bias and needs_bias
    # With create_graph=True the following operations must be differentiable, and torch itself must
    # compute batched gradients.
    batched = type(gradient) is not Tensor or torch._C._functorch.is_legacy_batchedtensor(gradient)
    if torch.is_grad_enabled() or batched:
        conv = _kernel(ctx.layer, "forward").kernel.conv
        geometry = conv.stride, conv.padding, conv.dilation, False, [0, 0], conv.groups
        of_bias = [weight.shape[0]] if ctx.with_bias else None
        needs = [needs_input, needs_weight, needs_bias]
        gradients = torch.ops.aten.convolution_backward(
            gradient, input, weight, of_bias, *geometry, needs
        )
        return (*gradients, None)
    operators = torch.ops.repro_microconv
    of_input = of_weight = None
    if needs_input:
        of_input = operators.data_gradient(gradient, weight, input, ctx.layer)
    if needs_weight:
        of_weight = operators.filter_gradient(input, gradient, weight, ctx.layer)
    return of_input, of_weight, gradient.sum((0, 2, 3)) if needs_bias else None, None


# Operations are counted by the shapes of input, filters and output, as torch counts its own.
_OPERATORS: tuple[tuple[str, str, Callable[..., Tensor], Callable[..., int]], ...] = (
    (
        "convolution",
        "Tensor input, Tensor weight, Tensor? bias",
        lambda x, w, bias, layer: _kernel(layer, "forward").run(x, w, bias),
        lambda x, w, *_, out_shape, **__: conv_flop_count(x, w, out_shape),
    ),
    (
        "data_gradient",
        "Tensor gradient, Tensor weight, Tensor input",
        lambda y, w, x, layer: _kernel(layer, "backward_data").run(y, w, like=x),
        lambda y, w, *_, out_shape, **__: conv_flop_count(out_shape, w, y),
    ),
    (
        "filter_gradient",
        "Tensor input, Tensor gradient, Tensor weight",
        lambda x, y, w, layer: _kernel(layer, "backward_filter").run(x, y, like=w),
        # Of all pairs of channels, also for groups.
        lambda x, y, *_, out_shape, **__: conv_flop_count([x[1]], [y[1], y[0], *y[2:]], out_shape),
    ),
)
for _name, _schema, _run, _count in _OPERATORS:
    _qualified = f"repro_microconv::{_name}"
    torch.library.define(_qualified, f"({_schema}, int layer) -> Tensor")
    torch.library.impl(_qualified, "default", _run)
    torch.library.register_fake(_qualified, _run)
    register_flop_formula(getattr(torch.ops.repro_microconv, _name))(_count)
torch.library.register_autograd(
    "repro_microconv::convolution", _derivatives, setup_context=_remember
)
