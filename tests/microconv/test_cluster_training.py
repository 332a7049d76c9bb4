"""A mini-batch shared out by what each process has measured, and trained on in those shares."""

import json
import os
from pathlib import Path

import joined
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from repro.adaptive import METHODS, DataParallel, join_processes
from repro.microconv import BenchmarkCache, cached_times, find_kernels, split_batch, tune

pytestmark = pytest.mark.slow
BATCH, STEPS = 16, 3
SECONDS = (1e-3, 3e-3)  # that a sample takes, by rank: the second process is slowed


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(216, 4))
    return model, torch.randn(BATCH, 3, 8, 8), torch.arange(BATCH) % 4


def measured(rank, folder):
    """Tune as a node does, into a file of its own, on a device of its own name and speed."""
    model, images, _ = made()
    measurements = BenchmarkCache(None)
    tune(model, images, algorithms=["torch:im2col"], cache=measurements)
    store = BenchmarkCache(folder / f"node{rank}.sqlite")
    for text, b, listed, times in measurements.contents():
        key = json.dumps(json.loads(text) | {"device": f"node {rank}"}, sort_keys=True)
        store.store_listing(key, b, listed)
        store.store_times(key, b, {name: [SECONDS[rank] * b] for name in times if times[name]})


def shares_of(folder):
    """Return how the caches of both nodes, merged, share a mini-batch out, by rank."""
    merged = BenchmarkCache(None)
    for rank in range(2):
        merged.take(BenchmarkCache(folder / f"node{rank}.sqlite"))
    model, images, _ = made()
    times = cached_times(find_kernels(model, images), merged)
    split = split_batch(BATCH, times)
    return [sum(n for name, n in split.items() if f"node {rank}" in name) for rank in range(2)]


def train(rank, port, folder):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    torch.set_num_threads(1)
    join_processes("cpu", 60)
    folder = Path(folder)
    measured(rank, folder)
    dist.barrier()
    shares = shares_of(folder)
    weights = []
    for averaging in METHODS:
        model, images, labels = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        training = DataParallel(model, F.cross_entropy, optimizer, averaging, check="off")
        for _ in range(STEPS):
            training.step(images, labels, shares=shares)
        training.finish()
        weights.append([p.detach().clone() for p in model.parameters()])
        training.close()
    torch.save({"shares": shares, "weights": weights}, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_uneven_shares_of_measured_speed_train_as_one_process(tmp_path):
    answers = joined.both(joined.forked("repro.microconv"), train, tmp_path)
    model, images, labels = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    for answer in answers:
        assert answer["shares"] == [12, 4]  # the slowed one takes a third of the other's
        for weights in answer["weights"]:
            for got, want in zip(weights, model.parameters(), strict=True):
                torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-6)
