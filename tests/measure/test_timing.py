import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from repro.measure import Timing, accelerator, describe_device, time_interleaved


def test_every_function_is_called_in_turns_and_warm_up_is_not_recorded():
    calls = []
    functions = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    timings = time_interleaved(functions, warmup=1, repeats=2)
    assert "".join(calls) == "abc" + "cba" + "abc" and list(timings) == ["a", "b", "c"]
    assert all(len(t.samples_s) == 2 and t.warmup == 1 for t in timings.values())
    slept = time_interleaved({"": lambda: time.sleep(0.02)}, warmup=0, repeats=3)[""]
    assert min(slept.samples_s) >= 0.02 and slept.median_s < 0.2
    assert Timing((3.0, 1.0, 10.0, 2.0), 0).median_s == 2.5
    for given, warmup, repeats in (({}, 0, 1), (functions, -1, 1), (functions, 0, 0)):
        with pytest.raises(ValueError, match="at least one function, warmup >= 0 and repeats >= 1"):
            time_interleaved(given, warmup=warmup, repeats=repeats)


def test_describe_cpu_with_its_instructions(monkeypatch):
    facts, names = describe_device("cpu"), set()
    assert facts["type"] == "cpu" and facts["threads"] == torch.get_num_threads()
    assert facts["slug"].startswith("cpu-") and facts["slug"].endswith("-cores")
    assert facts["memory_bytes"] > 2**28
    accelerator.synchronize("cpu")  # which has nothing to do
    for capability in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda it=capability: it)
        names.add(describe_device("cpu")["name"])
    assert len(names) == 2 and all("AVX" in name for name in names)
    for absent in ("meta", "cuda:99"):
        with pytest.raises(ValueError, match=f"device.* '{absent}'"):
            describe_device(absent)


class Machine:
    """A host and a device with clocks of their own, in the place of `accelerator` and `time`."""

    def __init__(self) -> None:
        self.now = self.free_at = 0.0  # seconds: what the host is at, and what the device has

    def launch(self, host_s, device_s):
        self.now += host_s
        self.free_at = max(self.free_at, self.now) + device_s

    def synchronize(self, *_):
        self.now = max(self.now, self.free_at)

    def perf_counter(self):
        return self.now

    def module(self, device):
        return SimpleNamespace(_sleep=lambda cycles: self.launch(0, cycles / 2e9))

    def new_event(self, device, timing):
        return MachineEvent(self)

    on = current_stream = staticmethod(nullcontext)
    is_accelerator = staticmethod(bool)


class MachineEvent:
    def __init__(self, machine):
        self.machine = machine

    def record(self, stream):
        self.at = max(self.machine.now, self.machine.free_at)

    def query(self):
        return self.machine.now >= self.at

    def synchronize(self):
        self.machine.now = max(self.machine.now, self.at)

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr("repro.measure.timing.accelerator", machine)
    monkeypatch.setattr("repro.measure.timing.time", machine)
    return machine


def timed(function, queued=True, repeats=4, warmup=0, device="cuda"):
    options = {"warmup": warmup, "repeats": repeats, "device": device, "queued": queued}
    return time_interleaved({"": function}, **options)[""]


def test_the_launches_of_small_kernels_are_no_time_of_the_device(machine):
    def division():  # of three kernels
        for _ in range(3):
            machine.launch(host_s=40e-6, device_s=10e-6)

    for queued, seconds in ((True, 30e-6), (False, 130e-6)):
        assert timed(division, queued, warmup=1).samples_s == pytest.approx([seconds] * 4)


def test_more_is_queued_before_what_takes_the_host_longer(machine):
    calls = []

    def slow():
        calls.append(machine.now)
        machine.launch(host_s=5e-3, device_s=1e-3)

    assert timed(slow).samples_s == pytest.approx([1e-3] * 4)
    assert len(calls) == 3 + 4  # 1, 2 and 4 ms were too short: found out once


@pytest.mark.gpu
@pytest.mark.parametrize("queued", [False, True])
def test_samples_of_an_accelerator(device, queued, monkeypatch):
    x = torch.ones(1000, device=device)
    timing = timed(lambda: x.add_(1), queued, 3, 1, device)
    assert len(timing.samples_s) == 3
    assert min(timing.samples_s) > 0 and timing.median_s < 1
    monkeypatch.delattr(accelerator.module(device), "_sleep")  # as others have none
    timed(lambda: x.add_(1), True, 1, 0, device)
    facts = describe_device(device)
    assert facts["type"] == device.type and " " not in facts["slug"]
    assert facts["memory_bytes"] == accelerator.total_bytes(device)
    with pytest.raises(ValueError, match=f"'{device.type}:99', but there are .*:0 to"):
        describe_device(f"{device.type}:99")


@pytest.mark.gpu
@pytest.mark.cuda_only("a sleep takes time")
def test_samples_are_device_time():
    for queued in (False, True):  # about 10 ms, queued without waiting
        assert timed(lambda: torch.cuda._sleep(20_000_000), queued, 3, 1).median_s > 0.002
