import pytest
import torch
import torch.nn.functional as F

from repro.models import resnet20, unet
from repro.outofcore import BudgetTooSmall, OutOfCore

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def repeatable():
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def train(budget: int | None, model: str = "resnet20", optimizer: str = "sgd"):
    """Return losses, tensors and the block of six iterations at 64 × 64."""
    torch.manual_seed(0)
    network = (resnet20() if model == "resnet20" else unet(width=16)).cuda()
    if optimizer == "sgd":
        steps = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    else:
        steps = torch.optim.Adam(network.parameters())
    generator = torch.Generator().manual_seed(1)
    losses = []

    def loop() -> None:
        for _ in range(6):
            images = torch.randn(32, 3, 64, 64, generator=generator).cuda(non_blocking=True)
            labels = torch.randint(0, 10, (32,), generator=generator).cuda()
            steps.zero_grad()
            out = network(images)
            loss = F.cross_entropy(out, labels) if out.ndim == 2 else out.square().mean()
            loss.backward()
            steps.step()
            losses.append(loss.detach())

    block = None
    if budget is None:
        loop()
    else:
        with OutOfCore(budget) as block:
            loop()
    torch.cuda.synchronize()
    state = [t for s in steps.state_dict()["state"].values() for t in s.values()]
    tensors = [*network.state_dict().values(), *state, *(p.grad for p in network.parameters())]
    return [loss.item() for loss in losses], tensors, block


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("model", ["resnet20", "unet"])
def test_training_is_bit_identical_at_every_budget(model, optimizer):
    losses, tensors, _ = train(None, model, optimizer)
    again, _, _ = train(None, model, optimizer)
    if again != losses:
        pytest.skip("this training is not repeatable on this GPU")
    _, _, ample = train(1 << 40, model, optimizer)
    low, high = ample.trace.smallest_budget, ample.trace.peak_bytes
    for budget in (low, (low + high) // 2, high):
        ours, theirs, block = train(budget, model, optimizer)
        assert ours == losses
        assert all(torch.equal(a, b) for a, b in zip(theirs, tensors, strict=True))
        assert block.statistics.peak_bytes <= budget
        assert block.statistics.replayed >= 3
        block.plan.verify()


def test_the_device_takes_less_memory():
    _, _, ample = train(1 << 40, "unet")
    peaks = {}
    for budget in (1 << 40, ample.trace.peak_bytes // 2):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train(budget, "unet")
        peaks[budget] = torch.cuda.max_memory_allocated() - before
    whole, half = peaks.values()
    assert half < 0.75 * whole  # libraries take workspace beside the budget


def test_tensors_come_back_to_the_device():
    _, tensors, _ = train(1 << 24)
    assert all(t.untyped_storage().nbytes() > 0 for t in tensors)


def test_too_small_a_budget():
    with pytest.raises(BudgetTooSmall, match="smallest feasible budget"):
        train(1 << 20)
