"""The offload of saved tensors that our schedules are compared with: same gradients, no race."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from repro.experiments.outofcore import offload
from repro.experiments.outofcore.offload import Offload
from simulated_device.mutations import Omission, noticed

SIM = torch.device("sim", 0)
OMISSIONS = [
    Omission(offload, "self._out.wait_stream(current)"),
    Omission(offload, "current.wait_event(left)"),
    Omission(offload, "current.wait_event(self._leaving.popleft()[1])", "self._leaving.popleft()"),
    Omission(offload, "current.wait_event(saved.arrived)"),
    Omission(offload, "self._in.wait_stream(accelerator.current_stream(self._device))"),
]


class Chain(nn.Module):
    """Layers of which some save the same tensors, and one writes in place."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = F.relu(layer(x), inplace=number % 2 == 0) * 1.5
        return x


def program(offloaded: bool = True) -> torch.Tensor:
    """Train three steps; return losses and gradients."""
    torch.manual_seed(0)
    model, images = Chain(9).to(SIM), torch.randn(16, 24).to(SIM)
    hooks, told = Offload(SIM, model.parameters()), []
    for _ in range(3):
        model.zero_grad()
        if offloaded:
            with hooks:
                loss = model(images).square().mean()
                loss.backward()
        else:
            loss = model(images).square().mean()
            loss.backward()
        told += [loss.detach().view(1), *(p.grad.flatten() for p in model.parameters())]
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return torch.cat(told).cpu()


@pytest.fixture
def expected(sim):
    return program(offloaded=False)


def test_gradients_are_the_same_to_the_bit(expected):
    assert not noticed(program, expected) and torch.equal(program(), expected)


@pytest.mark.parametrize("omission", OMISSIONS, ids=str)
def test_every_wait_is_needed(expected, omission):
    assert noticed(program, expected, omission)


def test_a_graph_that_is_kept_comes_back_twice(sim):
    weight = torch.randn(8, 8).to(SIM).requires_grad_()
    images = torch.randn(4, 8).to(SIM)
    with Offload(SIM, [weight]):
        out = (images @ weight).exp().sum()
        (first,) = torch.autograd.grad(out, weight, retain_graph=True)
        (second,) = torch.autograd.grad(out, weight)
    assert torch.equal(first.cpu(), second.cpu())
