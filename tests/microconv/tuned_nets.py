"""What the tests of microconv share: images, errors, tuned layers, kernels in float64."""

import torch
import torch.nn.functional as F

from repro.microconv import TunedConv2d

BATCH = 7


def images(num_samples=BATCH, size=(12, 13), dtype=torch.float32, channels=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, channels, *size, generator=generator, dtype=dtype)


def relative_error(got, want):
    """The largest difference as a share of the largest value."""
    scale = want.abs().max().item() if want.numel() else 0.0
    difference = (got - want).abs().max().item() if want.numel() else 0.0
    return difference / scale if scale else difference


def assert_close(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.isfinite().all()
        assert relative_error(a, b) <= tolerance


def tuned_layers(model):
    return [name for name, module in model.named_modules() if isinstance(module, TunedConv2d)]


def kernels_in(model):
    return [
        kernel
        for module in model.modules()
        if isinstance(module, TunedConv2d)
        for kernels in module.tuned.values()
        for kernel in kernels.values()
    ]


def reference(kernel, first, second):
    """The kernel in float64 by another way: autograd through the whole mini-batch, on the CPU."""
    conv, first, second = kernel.conv, first.cpu().double(), second.cpu().double()
    shape = (conv.stride, conv.padding, conv.dilation, conv.groups)
    if kernel.kind == "forward":
        return F.conv2d(first, second, None, *shape)
    if kernel.kind == "backward_data":
        x = torch.zeros(conv.input_shape(len(first)), dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(F.conv2d(x, second, None, *shape), x, first)[0]
    w = torch.zeros(conv.weight_shape, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(F.conv2d(first, w, None, *shape), w, second)[0]
