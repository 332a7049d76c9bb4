"""How often the host waits for the device: never in a loop, once where a decision is made."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from repro.adaptive import ThetaController
from repro.datasets import TensorLoader
from repro.dualbatch import DualBatchPlan
from repro.dualbatch.progressive import EpochSetting
from repro.dualbatch.worker import Recipe, Worker
from repro.mbs import MicroBatchStreamer
from repro.measure import TimeModel
from simulated_device.checking import counted_blocks


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


def counts(program) -> Counter:
    with counted_blocks() as blocks:
        program()
    return blocks.counts()


@pytest.mark.parametrize("memory", ["pageable", "pinned", "device"])
def test_streaming_waits_as_often_for_many_micro_batches_as_for_few(sim, memory):
    model = make_model().to(sim)
    x, y = torch.randn(64, 12), torch.randint(3, (64,))
    if memory == "pinned":
        x, y = x.pin_memory(), y.pin_memory()
    elif memory == "device":
        x, y = x.to(sim), y.to(sim)
    found = []
    for size in (32, 2):
        streamer = MicroBatchStreamer(model, F.cross_entropy, size, prefetch=1)
        streamer.backward(x, y)
        found.append(counts(lambda s=streamer: s.backward(x, y)))
    few, many = found
    # A buffer of the host is used again only when its copy has left it: events, of copies alone.
    events = "waited for an event"
    assert few - Counter({events: few[events]}) == many - Counter({events: many[events]})
    assert many[events] <= 2 * 32 * (memory == "pageable") + 2 * (memory == "pinned")


def test_a_loader_waits_for_nothing(sim):
    images = torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8)
    loader = TensorLoader(images, torch.arange(40), 4, padding=2, flip=True, device=sim)
    assert counts(lambda: list(loader)) == Counter()


@pytest.mark.parametrize("layers", [1, 20])
def test_a_decision_of_theta_waits_once_whatever_the_model(sim, layers):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))).to(sim)
    controller = ThetaController(4, 64, 0.1)
    controller.observe(2.0, model.parameters())
    with torch.no_grad():
        model[0].weight.add_(0.1)
    assert counts(lambda: controller.observe(1.0, model.parameters())).total() == 1


def test_a_share_of_a_worker_waits_as_often_for_many_steps_as_for_few(sim):
    data = torch.randn(96, 12, device=sim), torch.randint(3, (96,), device=sim)
    found = []
    for large in (24, 6):
        plan = DualBatchPlan.solve(TimeModel(1e-3, 1e-2), 1.0, 0, 2, large, 96)
        worker = Worker(Recipe(make_model, data, device=str(sim)), plan)
        state = {name: tensor.clone() for name, tensor in worker.model.state_dict().items()}
        setting = EpochSetting(1, 1, 1, 0.1, None, None, None)
        worker.train(0, 0, state, setting)
        found.append(counts(lambda w=worker, s=state, e=setting: w.train(0, 0, s, e)))
    assert found[0] == found[1]
