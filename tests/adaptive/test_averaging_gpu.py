"""Averaging on an accelerator, beside both passes: each layout, optimizer and way, and no race.

The other process is a pretended one, whose gradients are three times ours; `test_updates` has real
ones on CPUs. Of ``"allreduce"`` all but the hook is DistributedDataParallel's.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from joined import pretend
from test_updates import LATER, OPTIMIZERS, PADDED, SPLIT, alone, batch, make
from torch import nn

from repro.adaptive import LossCheckError, full_cost, noise_scale
from repro.adaptive.averaging import OverlappedAverager
from repro.measure import accelerator

pytestmark = pytest.mark.gpu

FIRST = 3.0  # the other's gradients in ours


@pytest.fixture
def two(monkeypatch):
    pretend(monkeypatch, FIRST)


def train(model, optimizer, averager=None, overlap=False):
    """Make three steps; each as DataParallel does, or an ordinary one of the mean gradient."""
    device = next(model.parameters()).device
    for number in (0, 1, 3):
        x, y = (part.to(device) for part in batch(number))
        optimizer.zero_grad()
        if averager is None:
            ((1 + FIRST) / 2 * F.cross_entropy(model(x), y)).backward()
            optimizer.step()
            continue
        averager.begin()
        loss = F.cross_entropy(model(x), y)
        averager.gathering = True
        loss.backward()
        averager.end()
        if overlap:
            averager.defer()
        else:
            averager.gather()
            optimizer.step()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("method", SPLIT)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_of_every_layout_train_as_on_a_cpu(device, two, name, method, overlap):
    plain = make()
    model = copy.deepcopy(plain).to(device)
    strides = [p.stride() for p in plain.parameters()]
    assert [p.stride() for p in model.parameters()] == strides
    train(plain, OPTIMIZERS[name](plain.parameters()))
    optimizer = OPTIMIZERS[name](model.parameters())
    averager = OverlappedAverager(model, optimizer, method, object(), 200, 30.0)
    train(model, optimizer, averager, overlap)
    averager.finish()
    averager.close()
    accelerator.synchronize(device)
    assert [p.stride() for p in model.parameters()] == strides
    for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), wanted, rtol=1e-10, atol=1e-10)


def test_labels_on_an_accelerator_are_read_before_the_step(device):
    model, (loss, y, left_out) = nn.Linear(8, 4).to(device), LATER["padding"]
    parallel = alone(model, loss, micro_batch=4)
    x, padded = torch.randn(12, 8, device=device), torch.where(PADDED, left_out, y)
    for _ in range(2):
        parallel.step(x, y.to(device))
    before = model.weight.detach().clone()
    with pytest.raises(LossCheckError):
        parallel.step(x, padded.to(device))
    assert torch.equal(before, model.weight)


@pytest.mark.parametrize("fails", [False, True])
def test_measuring_leaves_the_generators_of_the_device(device, fails):
    def draw(*_):
        torch.rand(1, device=device)
        if fails:
            raise KeyError("hook")

    model, data = nn.Linear(8, 3).to(device), (torch.randn(12, 8), torch.arange(12) % 3)
    model.register_forward_hook(draw)
    torch.rand(1, device=device)
    before = accelerator.get_rng(device)
    for measure in (full_cost, noise_scale):
        with pytest.raises(KeyError) if fails else nullcontext():
            measure(model, data, 4)
    assert all(map(torch.equal, before, accelerator.get_rng(device)))
