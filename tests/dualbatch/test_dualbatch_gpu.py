import math

import pytest
import torch
from torch import nn

from repro.dualbatch import (
    CyclicProgressiveSchedule,
    DualBatchPlan,
    NonFiniteError,
    Stage,
    SubStage,
    train_dual_batch,
)
from repro.measure import TimeModel, probe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_model():
    features = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    head = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 4))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), head)


def train(**options):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(512, 3, 16, 16, generator=generator)
    data = images.cuda(), torch.randint(4, (512,), generator=generator).cuda()
    plan = DualBatchPlan.solve(TimeModel(1e-3, 1e-2), 1.1, 2, 2, 48, 512)
    schedule = CyclicProgressiveSchedule(
        [Stage(2, 0.1), Stage(2, 0.01)], [SubStage(12, 0.1), SubStage(16, 0.2)]
    )
    return train_dual_batch(make_model, data, plan, schedule, device="cuda", **options)


@pytest.mark.parametrize("sync", ["asp", "bsp"])
@pytest.mark.parametrize("fast", [False, True])
def test_it_trains_on_the_device(sync, fast):
    options = {"autocast": torch.bfloat16, "channels_last": True} if fast else {}
    result = train(sync=sync, **options)
    assert {tensor.device.type for tensor in result.state.values()} == {"cuda"}
    assert all(math.isfinite(epoch.train_loss) for epoch in result.history)
    assert len(result.log) == 16


def test_a_loss_that_is_not_finite():
    def loss_fn(outputs, targets):
        calls.append(1)
        loss = nn.functional.cross_entropy(outputs, targets)
        return loss * float("inf") if len(calls) == 3 else loss

    calls = []
    with pytest.raises(NonFiniteError, match=r"the loss is inf .*step 3 of its share"):
        train(loss_fn=loss_fn)


def test_a_resumed_run_ends_like_one_never_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    path = tmp_path / "run.pt"

    def stop(epoch):
        if epoch.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(checkpoint=path, on_epoch=stop)
    resumed, whole = train(checkpoint=path), train()
    for name, tensor in whole.state.items():
        torch.testing.assert_close(resumed.state[name], tensor)


def test_the_gpus_random_state_is_left_alone():
    torch.cuda.manual_seed(7)
    before = torch.cuda.get_rng_state()
    train()
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_probe_fits_lines():
    def make_step(batch_size):
        model = make_model().cuda()
        images = torch.randn(batch_size, 3, 64, 64, device="cuda")
        return lambda: model(images).sum().backward()

    found = probe(make_step, [256, 512, 1024, 2048], device="cuda")
    assert found.memory.predict(4096) > found.peaks[2048]
    assert found.time.a > 0
