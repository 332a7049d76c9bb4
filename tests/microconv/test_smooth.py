"""Why gradients of tuned networks differ from torch's: units at an edge, and no kernel."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from repro.microconv import tune
from repro.models import build

MIB = 2**20


def smooth(model: nn.Module) -> nn.Module:
    """Put Softplus for ReLU, and average for max pooling: nothing turns at an edge."""
    for part in model.modules():
        for name, child in list(part.named_children()):
            if isinstance(child, nn.ReLU):
                setattr(part, name, nn.Softplus())
            if isinstance(child, nn.MaxPool2d):
                setattr(part, name, nn.AvgPool2d(child.kernel_size, child.stride))
    return model


@pytest.mark.exhaustive
def test_without_edges_a_tuned_vgg_is_as_near_to_float64_as_torchs_own():
    torch.manual_seed(2)
    plain = smooth(build("torchvision/vgg11").eval())
    images, labels = torch.randn(4, 3, 112, 112), torch.randint(0, 1000, (4,))
    tuned = copy.deepcopy(plain)
    report = tune(tuned, images, 512 * MIB, strict=False, cache=None)
    if not any(entry.division for entry in report.kernels):
        pytest.skip("on this machine torch's own are fastest: nothing is left to compare")

    def gradients(model, inputs):
        functional.cross_entropy(model(inputs), labels).backward()
        return [parameter.grad.double() for parameter in model.parameters()]

    exact = gradients(copy.deepcopy(plain).double(), images.double())

    def error(model):
        found = gradients(model, images)
        return max(
            float((one - other).abs().max() / other.abs().max())
            for one, other in zip(found, exact, strict=True)
        )

    assert error(tuned) <= max(1e-4, 5 * error(plain))
