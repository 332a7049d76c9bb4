"""`tune` on two devices of one kind at once, and 16 bits and groups on a device."""

import threading

import pytest
import torch
from torch import nn

from repro.microconv import BenchmarkCache, measuring, tune
from simulated_device.checking import checked


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Measure little where times mean nothing."""
    monkeypatch.setattr(measuring, "_ROUNDS", (1, 1))
    monkeypatch.setattr(measuring, "_TRIAL_ROUNDS", 1)


def test_micro_batch_sizes_are_shared_out_among_devices(sim, monkeypatch):
    seen, plain = [], measuring.Bench._time

    def noted(self, kernel, batch, wanted):
        seen.append((kernel.device, sorted(wanted), threading.get_ident()))
        return plain(self, kernel, batch, wanted)

    monkeypatch.setattr(measuring.Bench, "_time", noted)
    model = nn.Conv2d(3, 4, 3, padding=1).to("sim:0")
    images, cache = torch.randn(8, 3, 9, 9, device="sim:0"), BenchmarkCache(None)
    options = {"algorithms": ["torch"], "cache": cache, "min_gain": -float("inf")}
    with checked():
        report = tune(model, images, devices=["sim:0", "sim:1"], **options)
    assert {device for device, _, _ in seen} == {"sim:0", "sim:1"}
    assert len({thread for _, _, thread in seen}) > 1 and len(seen) == 2 * len(report.kernels)
    for (_, own, _), (_, others, _) in zip(seen[::2], seen[1::2], strict=True):
        assert sorted(own + others) == [1, 2, 4, 8] and [8] in (own, others)
    # What one device has measured is another's of its kind: nothing is measured again.
    again = tune(model, images, **options)
    assert again.measured == 0 and {entry.kernel.device for entry in again.kernels} == {"sim:0"}


def test_devices_that_cannot_measure_for_the_model(sim):
    model, images = nn.Conv2d(3, 4, 3).to("sim:0"), torch.randn(4, 3, 6, 6, device="sim:0")
    with pytest.raises(ValueError, match="on sim:0, which is not among the devices sim:1"):
        tune(model, images, devices=["sim:1"], cache=None)
