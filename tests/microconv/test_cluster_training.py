"""A mini-batch shared out by the speed of each process, and trained on in those shares."""

import os
from pathlib import Path

import joined
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from repro.adaptive import METHODS, DataParallel, join_processes
from repro.microconv import split_batch

pytestmark = pytest.mark.slow
BATCH, STEPS = 16, 3
SECONDS = (1e-3, 3e-3)  # that a sample takes, by rank


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(216, 4))
    return model, torch.randn(BATCH, 3, 8, 8), torch.arange(BATCH) % 4


def train(rank, port, folder):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    torch.set_num_threads(1)
    join_processes("cpu", 60)
    folder = Path(folder)
    times = {rank: {b: SECONDS[rank] * b for b in range(1, BATCH + 1)} for rank in range(2)}
    split = split_batch(BATCH, times)
    shares = [split[rank] for rank in range(2)]
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


def test_uneven_shares_train_as_one_process(tmp_path):
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
