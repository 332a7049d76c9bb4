"""Does averaging hide under computation? Eight processes whose layers sleep where they compute.

Sleep takes no core, so that averaging competes with nothing but itself, as on a node of its own.
"""

import os
import statistics
import time
from pathlib import Path

import joined
import pytest
import torch
import torch.distributed as dist
from torch import nn

from repro.adaptive import DataParallel, join_processes, leave_processes

PROCESSES = 8
LAYERS, SIZE = 8, 2**15  # 128 KiB of gradients a layer, a bucket each
STEPS, ROUNDS = 4, 5
# Figure 9: on 128 nodes communication "grows to be similar to the main thread's computation time".
COMPUTATION = 1.0  # as a multiple of communication


class Asleep(torch.autograd.Function):
    """Adds to x the first of the weights; the backward pass takes twice the forward pass."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x + weight[0]

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, gradient.sum().expand(SIZE), None


class Layer(nn.Module):
    seconds = 0.0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x):
        return Asleep.apply(x, self.weight, self.seconds)


def measure(rank, port, folder):
    """Save seconds: of computation, with a step after it, with the step's averaging within it."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(PROCESSES), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    join_processes(timeout_s=60)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = DataParallel(model, torch.mean, optimizer, "all_to_all", bucket_bytes=0, check="off")
    x = torch.zeros(PROCESSES, 1)

    def compute(seconds):
        for _ in range(3 * LAYERS):
            time.sleep(seconds)

    def a_step(first, within):
        """Return the seconds of a step that sleeps first, or within its layers."""
        Layer.seconds = within
        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            compute(first)
            parallel.step(x)
            if first:
                parallel.finish()
        parallel.finish()
        dist.barrier()
        return (time.perf_counter() - start) / STEPS

    a_step(0.0, 0.0)
    alone = torch.tensor([statistics.median(a_step(0.0, 0.0) for _ in range(3))])
    dist.all_reduce(alone, dist.ReduceOp.MAX)  # all processes sleep alike
    computation = COMPUTATION * float(alone)
    seconds = computation / (3 * LAYERS)
    rows = [(a_step(seconds, 0.0), a_step(0.0, seconds)) for _ in range(ROUNDS)]
    parallel.close()
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    torch.save([computation, *medians], f"{folder}/{rank}.pt")
    leave_processes()


@pytest.mark.slow
def test_averaging_hides_under_computation(tmp_path: Path):
    assert joined.run(joined.forked(), measure, tmp_path, count=PROCESSES) == [0] * PROCESSES
    computation, in_turn, overlapped = torch.load(tmp_path / "0.pt")
    # Of what can hide 65 to 75 % do, also beside other work on two cores. In one bucket after the
    # backward pass, where nothing can, it is below 20 %.
    can_hide = min(computation, in_turn - computation)
    assert in_turn - overlapped > 0.4 * can_hide, (computation, in_turn, overlapped)
