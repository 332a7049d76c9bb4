"""Gradients averaged beside a training on a device: in order, and none of its waits too many.

Two processes that compute the same are played by one: their average is what each has.
"""

import pytest
import torch
import torch.nn.functional as F
from joined import pretend
from torch import nn

from repro.adaptive import averaging
from repro.adaptive.averaging import OverlappedAverager
from simulated_device.mutations import Omission, noticed

FIRST = "bucket.filled.record(accelerator.current_stream(self._device))"
OMISSIONS = [
    Omission(averaging, FIRST),
    Omission(averaging, "self._stream.wait_event(bucket.filled)"),
    Omission(averaging, "bucket.averaged.record(self._stream)"),
    Omission(averaging, "self._after(bucket)", within="OverlappedAverager._wait"),
    Omission(averaging, "self._after(bucket)", within="OverlappedAverager.abandon"),
    Omission(averaging, "self._after(bucket)", within="OverlappedAverager.close"),
]


@pytest.fixture
def alike(monkeypatch):
    """Collectives between this process and one that has the same."""
    pretend(monkeypatch, 1.0)


def make_model(device):
    torch.manual_seed(0)
    layers = [nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 5)]
    return nn.Sequential(*layers).double().to(device)


def batches(device):
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(8, 20, generator=generator, dtype=torch.float64)
        yield x.to(device), torch.randint(5, (8,), generator=generator).to(device)


def plainly(device):
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for x, y in batches(device):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def averaged(device, method):
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    averager = OverlappedAverager(model, optimizer, method, None, 2**14, 30.0)
    try:
        for number, (x, y) in enumerate(batches(device)):
            for failing in (True, False) if number == 2 else (False,):
                averager.begin()
                loss = F.cross_entropy(model(x), y)
                averager.check_read()
                averager.gathering = True
                loss.backward()
                if failing:  # after the backward pass: its gradients are under way
                    averager.abandon()
                    continue
                averager.end()
                averager.defer()
        averager.finish()
        averager.gathering = True  # once more, for the end of a job whose updates are given up
        F.cross_entropy(model(x), y).backward()
        averager.end()
    finally:
        averager.close()
        results = [p.detach().cpu() for p in model.parameters()]
        buckets = len(averager.buckets)
        del averager
    fresh = [torch.full((9000,), 7.0, device=device, dtype=torch.float64) for _ in range(6)]
    assert buckets > 2
    return [*results, torch.stack(fresh).cpu()]


@pytest.fixture(scope="module")
def expected():
    return [*plainly(torch.device("cpu")), torch.full((6, 9000), 7.0, dtype=torch.float64)]


def close(result, expected):
    pairs = zip(result, expected, strict=True)
    return [torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs]


@pytest.mark.parametrize("method", ["all_to_all", "reduce_scatter"])
def test_it_is_plain_training(sim, alike, expected, method):
    assert not noticed(lambda: close(averaged(sim, method), expected), [True] * len(expected))


@pytest.mark.parametrize("omission", OMISSIONS, ids=str)
def test_an_omission_is_noticed(sim, alike, expected, omission):
    right = [True] * len(expected)
    assert noticed(lambda: close(averaged(sim, "all_to_all"), expected), right, omission)
