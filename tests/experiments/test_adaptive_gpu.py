"""Captured steps on a GPU: the same training as without graphs, whatever the batch size."""

import copy

import pytest
import torch
from torch import nn

from repro.adaptive import DataParallel
from repro.experiments import captured
from repro.experiments.adaptive import experiments, runs
from repro.experiments.one_run import load
from repro.measure.precision import without_tf32

pytestmark = pytest.mark.gpu
GRAPHS = pytest.mark.cuda_only("CUDA graphs are CUDA's alone")

SIZES = (8, 8, 16, 5, 32, 16, 8)  # growing, a ragged one, and some again


def make_model(device):
    torch.manual_seed(0)
    return nn.Sequential(
        # A bias's gradient would be nothing but rounding before BatchNorm; Adam makes a step of it.
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    ).to(device)


@GRAPHS
@without_tf32()
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_captured_steps_train_like_ordinary_ones(device, monkeypatch, kind, autocast):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    model = make_model(device)
    other = copy.deepcopy(model)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    losses = []
    for net, capture in ((model, True), (other, False)):
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.01, fused=True, **options)
        loss_fn = nn.functional.cross_entropy
        passes = captured.CapturedPasses(net, loss_fn, autocast, captured=capture)
        step = captured.captured_step(passes, optimizer)
        generator = torch.Generator().manual_seed(1)
        net.train()
        own = []
        for number, size in enumerate(SIZES):
            x = torch.randn(size, 3, 12, 12, generator=generator)
            y = torch.randint(4, (size,), generator=generator)
            for group in optimizer.param_groups:  # the rate changes between steps
                group["lr"] = 0.01 * (1 + number % 3)
            own.append(float(step(x, y)))
        losses.append(own)
        assert len(passes._graphs) == (len(set(SIZES)) if capture else 0)
        assert len({own.graph.pool() for own in passes._graphs.values()}) == int(capture)
    tolerance = 1e-4 if autocast is None else 2e-2
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        if a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance / 10, msg=name)
        else:
            assert torch.equal(a, b), name  # batches tracked: the warm-up is no training


@GRAPHS
def test_a_training_with_graphs():
    chosen = dict(zip(runs.TASKS, ("digits", "photos", "phantom"), strict=True))
    for task in runs.TASKS:
        config = runs.training("smoke", task, chosen, "theta").config | runs.FAST
        data = load(config, None)
        fast = experiments.train(config, 0, data, "cuda").metrics
        plain = experiments.train(config | {"captured": False}, 0, data, "cuda").metrics
        assert not fast["diverged"] and fast["completed"] == config["epochs"]
        # Rounding to bfloat16 grows from epoch to epoch: only the first says something of graphs.
        assert fast["train_cost"][0] == pytest.approx(plain["train_cost"][0], rel=0.05)
        assert fast["updates"][0] == plain["updates"][0]


def test_steps_on_a_gpu_are_not_timed_by_the_hosts_clock(device):
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parallel = DataParallel(model, nn.functional.cross_entropy, optimizer)
    for _ in range(2):
        x, y = torch.randn(4, 3, 12, 12).to(device), torch.randint(4, (4,)).to(device)
        assert parallel.step(x, y).isfinite()
    parallel.close()
    assert parallel.timings == []
