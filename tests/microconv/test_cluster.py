"""`split_batch` against exhaustive search, and in training by two processes."""

import itertools
import math
import os
import random
from pathlib import Path

import joined
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from repro.adaptive import METHODS, DataParallel, join_processes
from repro.microconv import split_batch


def exhaustive(batch, times):
    """(Slowest, sum) of the best split over every choice of at most one size; None without one."""
    options = [[(0, 0), *measured.items()] for measured in times.values()]
    splits = [
        (max(time for _, time in choice), sum(time for _, time in choice))
        for choice in itertools.product(*options)
        if sum(size for size, _ in choice) == batch
    ]
    return min(splits, default=None)


def draw(rng, time):
    return {
        f"gpu{index}": {
            rng.randint(1, 14): time(rng) for _ in range(rng.randint(0 if index else 1, 6))
        }
        for index in range(rng.randint(1, 4))
    }


@pytest.mark.parametrize("most", [9, 2**30])  # many ties, and none
def test_against_exhaustive_search(most):
    rng, solved = random.Random(0), 0
    for _ in range(300):
        # Sums are exact in floating point.
        batch, times = rng.randint(1, 24), draw(rng, lambda rng: rng.randint(0, most) * 2.0**-40)
        expected = exhaustive(batch, times)
        if expected is None:
            with pytest.raises(ValueError, match=f"sums to the mini-batch {batch};"):
                split_batch(batch, times)
            continue
        solved += 1
        split = split_batch(batch, times)
        assert sum(split.values()) == batch
        taken = [times[device][size] for device, size in split.items()]
        assert (max(taken), sum(taken)) == expected
    assert 100 < solved < 275


@pytest.mark.parametrize(
    ("batch", "times", "message"),
    [
        *((n, {"a": {1: 1.0}}, f"batch is {n}; it must be a whole number from 1") for n in
          (0, 2.5, True, None)),
        *((4, {"a": {4: 1.0}, "b": {2: 1.0, n: time}}, f"'b' has the time {time} at batch size")
          for n, time in ((0, 1.0), (1.5, 1.0), (True, 1.0), (4, -0.1), (4, math.nan))),
        *((8, times, r"sums to the mini-batch 8; the sizes are .*: measure")
          for times in ({}, {"a": {}}, {"a": {2: 1.0, 4: 1.0}, "b": {9: 1.0}})),
        (6, {"a": {4: 1.0, 2: 1.0}}, r"'a': \[2, 4\]"),  # one device does not take two sizes
    ],
)  # fmt: skip
def test_what_cannot_be_split(batch, times, message):
    with pytest.raises(ValueError, match=message):
        split_batch(batch, times)


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


@pytest.mark.slow
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
