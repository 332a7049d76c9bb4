"""Measurements in processes of their own: what is told of a failure, and when they end."""

import time

import pytest
from torch.multiprocessing import ProcessRaisedException

from repro.experiments.adaptive import runs, worker
from repro.measure import describe_device


@pytest.mark.slow
def test_a_worker_that_fails_is_named():
    job = runs.parallel("smoke", {})[0].config | {"jobs": {"CIFAR": {}}, "seed": 0}
    with pytest.raises(ProcessRaisedException, match=r"(?s)Process 0 terminated.*KeyError"):
        worker.launch(job, 2)


def test_a_launch_ends_at_its_limit_whatever_hangs():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"2 processes did not end in 0.2 s"):
        worker.launch(60, 2, timeout_s=0.2, function=time.sleep)
    assert time.monotonic() - start < 20


def test_the_measurement_is_of_cpus_whatever_the_device(monkeypatch):
    asked = []
    monkeypatch.setattr(worker, "launch", lambda *given: asked.append(given) or {"CIFAR": {}})
    for profile in ("quick", "paper"):
        config = runs.parallel(profile, {})[0].config
        found = worker.parallel(config, 3, None, "cuda").metrics
        assert asked.pop() == ({**config, "seed": 3}, 2)
        assert found == {"tasks": {"CIFAR": {}}, "device": describe_device("cpu")["name"]}
