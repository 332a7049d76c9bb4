import gc
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from repro.measure import accelerator
from repro.models import resnet20, unet
from repro.outofcore import OutOfCore

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def train(device, budget: int | None, model="resnet20", optimizer="sgd", n=5, side=16):
    """Return losses, tensors and the block of some iterations; a GPU's are larger."""
    torch.manual_seed(0)
    batch, side, width = (32, 64, 16) if device.type == "cuda" else (2, side, 4)
    network = (resnet20() if model == "resnet20" else unet(width=width)).to(device)
    if optimizer == "sgd":
        steps = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    else:
        steps = torch.optim.Adam(network.parameters())
    generator, losses = torch.Generator().manual_seed(1), []
    with OutOfCore(budget, device=device) if budget else nullcontext() as block:
        for _ in range(n):
            images = torch.randn(batch, 3, side, side, generator=generator)
            labels = torch.randint(0, 10, (batch,), generator=generator).to(device)
            steps.zero_grad()
            out = network(images.to(device, non_blocking=True))
            loss = F.cross_entropy(out, labels) if out.ndim == 2 else out.square().mean()
            loss.backward()
            steps.step()
            losses.append(loss.detach())
    accelerator.synchronize(device)
    state = [t for s in steps.state_dict()["state"].values() for t in s.values()]
    tensors = [*network.state_dict().values(), *state, *(p.grad for p in network.parameters())]
    return [loss.item() for loss in losses], tensors, block


@pytest.mark.parametrize(("model", "optimizer"), [("resnet20", "sgd"), ("unet", "adam")])
def test_training_is_bit_identical_at_every_budget(device, model, optimizer):
    losses, tensors, _ = train(device, None, model, optimizer)
    if device.type == "cuda" and train(device, None, model, optimizer)[0] != losses:
        pytest.skip("this training is not repeatable on this GPU")
    _, _, ample = train(device, 1 << 40, model, optimizer)
    low, high = ample.trace.smallest_budget, ample.trace.peak_bytes
    for budget in (low, (low + high) // 2):
        ours, theirs, block = train(device, budget, model, optimizer)
        assert ours == losses
        assert all(torch.equal(a, b) for a, b in zip(theirs, tensors, strict=True))
        assert all(t.untyped_storage().nbytes() > 0 for t in theirs)
        assert block.statistics.peak_bytes <= budget and block.statistics.replayed >= 3
        block.plan.verify()


@pytest.mark.parametrize(
    "make",
    [torch.tensor, torch.as_tensor, torch.asarray, lambda x: torch.ones(1).new_tensor(x)],
)
def test_a_tensor_made_of_tensors_that_are_away(device, make):
    """torch reads each item by its address."""
    ones = [torch.full((), float(i), device=device) for i in range(3)]
    others = [torch.ones(1000, device=device) for _ in range(6)]
    with OutOfCore(8000, device=device):
        for tensor in (*ones, *others):
            tensor.add_(1)
        assert make([[ones[0], 7.0], [ones[1], ones[2]]]).tolist() == [[1, 7], [2, 3]]


def test_the_device_takes_less_memory(device):
    _, _, ample = train(device, 1 << 40, "unet", side=64)
    peaks = {}
    for budget in (1 << 40, ample.trace.peak_bytes // 2):
        gc.collect()
        accelerator.empty_cache(device)
        accelerator.reset_peak_memory(device)
        before = accelerator.memory_allocated(device)
        train(device, budget, "unet", side=64)
        peaks[budget] = accelerator.max_memory_allocated(device) - before
    whole, half = peaks.values()
    # Libraries take workspace beside the budget, the same in both.
    assert whole - half > 0.3 * ample.trace.peak_bytes
