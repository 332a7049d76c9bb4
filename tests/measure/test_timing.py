import statistics
import time

import pytest
import torch

from repro.measure import Timing, describe_device, synchronize, time_interleaved


def test_every_function_is_called_in_turns_and_warm_up_is_not_recorded():
    calls = []
    functions = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    timings = time_interleaved(functions, warmup=1, repeats=2)
    assert "".join(calls) == "abc" + "cba" + "abc"
    assert list(timings) == ["a", "b", "c"]
    assert all(len(t.samples_s) == 2 and t.warmup == 1 for t in timings.values())


def test_samples_are_the_time_of_the_call():
    timings = time_interleaved(
        {"short": lambda: time.sleep(0.002), "long": lambda: time.sleep(0.02)}, warmup=0, repeats=3
    )
    assert min(timings["short"].samples_s) >= 0.002
    assert 0.02 <= timings["long"].median_s < 0.2
    assert timings["short"].median_s < timings["long"].median_s


def test_median_is_the_medians_definition():
    samples = (3.0, 1.0, 10.0, 2.0)
    assert Timing(samples, 0).median_s == statistics.median(samples) == 2.5


@pytest.mark.parametrize(
    ("functions", "warmup", "repeats"),
    [({}, 0, 1), ({"a": int}, -1, 1), ({"a": int}, 0, 0)],
)
def test_bad_timing_arguments_are_refused(functions, warmup, repeats):
    with pytest.raises(ValueError, match="at least one function, warmup >= 0 and repeats >= 1"):
        time_interleaved(functions, warmup=warmup, repeats=repeats)


def test_describe_cpu():
    facts = describe_device("cpu")
    assert facts["type"] == "cpu"
    assert facts["slug"].startswith("cpu-") and facts["slug"].endswith("-cores")
    assert facts["threads"] == torch.get_num_threads()
    assert facts["memory_bytes"] > 2**28
    assert facts["name"]
    synchronize("cpu")


@pytest.mark.parametrize("device", ["meta", "cuda:99"])
def test_describe_an_absent_device(device):
    with pytest.raises(ValueError, match=f"'{device}' is not available here; allowed are 'cpu'"):
        describe_device(device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is present")
def test_cuda_samples_are_device_time():
    def sleep() -> None:
        torch.cuda._sleep(20_000_000)  # about 10 ms, queued without waiting

    timing = time_interleaved({"sleep": sleep}, warmup=1, repeats=3, device="cuda")["sleep"]
    assert timing.median_s > 0.002
    facts = describe_device("cuda")
    assert facts["type"] == "cuda" and " " not in facts["slug"] and facts["memory_bytes"] > 2**30
