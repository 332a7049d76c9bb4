"""Shared by the tests of microconv: images, errors, tuned layers, invented times, float64."""

import torch
import torch.nn.functional as F

from repro.microconv import BenchmarkCache, TunedConv2d

BATCH = 7


class InventedTimes(BenchmarkCache):
    """Answers from a formula: the fastest division is known, and nothing is measured.

    A micro-batch of b takes 4 + b² seconds, so that parts of two are best; torch's own convolution
    takes ten times that, or equally long where a test is about dividing it.
    """

    def __init__(self, division_s=1.0, native_s=2.0, slowdown=10.0):
        super().__init__(None)
        self.trial, self.slowdown = {"divided": [division_s], "native": [native_s]}, slowdown

    def times(self, key, micro_batch):
        listing = self.listing(key, micro_batch)
        if listing is None:
            return self.trial
        return {
            name: [(4.0 + micro_batch**2) * (self.slowdown if name == "torch:native" else 1.0)]
            for name, _ in listing
        }


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
    tuned = [module.tuned for module in model.modules() if isinstance(module, TunedConv2d)]
    return [kernel for own in tuned for kernels in own.values() for kernel in kernels.values()]


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
