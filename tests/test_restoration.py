"""The peak signal-to-noise ratio, against scikit-image and against the formula by hand."""

import math

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio
from torch import nn

from repro.training import evaluate_psnr, psnr


def pair(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator), torch.rand(shape, generator=generator)


@pytest.mark.parametrize("shape", [(4, 3, 5, 7), (2, 1, 8, 8), (1, 1, 1, 1)])
def test_scikit_images_values(shape):
    restored, target = pair(*shape)
    ratios = psnr(restored, target)
    assert ratios.shape == (shape[0],)
    for value, a, b in zip(ratios, restored.double(), target.double(), strict=True):
        expected = peak_signal_noise_ratio(b.numpy(), a.numpy(), data_range=1)
        assert float(value) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 4, 4)])
def test_wrong_arguments(shape):
    with pytest.raises(ValueError, match="differ"):
        psnr(torch.zeros(2, 3, 4, 4), torch.zeros(shape))


class Stretched(nn.Module):
    """Leaves [0, 1] on both sides; knows whether it evaluates."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.modes = []

    def forward(self, x):
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.scale * (x - 0.5) + 0.5


@pytest.mark.parametrize("sizes", [[7], [3, 3, 1], [1] * 7])
def test_evaluation_by_brute_force(sizes):
    inputs, targets = pair(7, 2, 4, 5)
    model = Stretched()
    metrics = evaluate_psnr(model, zip(inputs.split(sizes), targets.split(sizes), strict=True))
    values, errors = [], []
    for x, y in zip(inputs.double().numpy(), targets.double().numpy(), strict=True):
        restored = 2 * (x - 0.5) + 0.5
        values.append(-10 * math.log10(np.mean((restored.clip(0, 1) - y) ** 2)))
        errors.append(np.abs(restored - y).mean())
    assert set(metrics) == {"psnr", "test_l1"}
    assert metrics["psnr"] == pytest.approx(np.mean(values), rel=1e-6)
    assert metrics["test_l1"] == pytest.approx(np.mean(errors), rel=1e-6)
    assert set(model.modes) == {(False, False)}
