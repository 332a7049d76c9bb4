import math

import pytest
import torch
import trainings
from torch import nn
from trainings import make_data, make_plan

from repro.dualbatch import CyclicProgressiveSchedule, NonFiniteError, Stage, SubStage

pytestmark = pytest.mark.gpu


def train(device, **options):
    data = tuple(tensor.to(device) for tensor in make_data(512))
    stages, sub_stages = [Stage(2, 0.1), Stage(2, 0.01)], [SubStage(4, 0.1), SubStage(6, 0.2)]
    given = {"schedule": CyclicProgressiveSchedule(stages, sub_stages), "device": device.type}
    return trainings.train(make_plan(2, 2, 512), data=data, **given, **options)


@pytest.mark.parametrize(("sync", "fast"), [("asp", False), ("bsp", True)])
def test_it_trains_on_the_device(device, sync, fast):
    options = {"autocast": torch.bfloat16, "channels_last": True} if fast else {}
    result = train(device, sync=sync, **options)
    assert {tensor.device.type for tensor in result.state.values()} == {device.type}
    assert all(math.isfinite(epoch.train_loss) for epoch in result.history)
    assert len(result.log) == 16


def test_a_loss_that_is_not_finite(device):
    def loss_fn(outputs, targets):
        calls.append(1)
        loss = nn.functional.cross_entropy(outputs, targets)
        return loss * float("inf") if len(calls) == 3 else loss

    calls = []
    with pytest.raises(NonFiniteError, match=r"the loss is inf .*step 3 of its share"):
        train(device, loss_fn=loss_fn)


def test_a_resumed_run_ends_like_one_never_interrupted(device, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    path = tmp_path / "run.pt"

    def stop(epoch):
        if epoch.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(device, checkpoint=path, on_epoch=stop)
    resumed, whole = train(device, checkpoint=path), train(device)
    for name, tensor in whole.state.items():
        torch.testing.assert_close(resumed.state[name], tensor)


def test_the_devices_random_state_is_left_alone(device):
    of = torch.get_device_module(device)
    of.manual_seed(7)
    before = of.get_rng_state()
    train(device)
    assert torch.equal(of.get_rng_state(), before)
