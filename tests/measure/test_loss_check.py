"""Losses that chance or memory decides are not refused."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from repro.measure.batches import read_batch
from repro.measure.loss_check import LossCheck, Sample
from repro.measure.loss_parts import LossCheckError, MixedSamplesError

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")


def sample(first=3):
    groups = list(range(first)), list(range(first, 8))
    return Sample.of(read_batch(X, X[:, :1]), groups, [float(len(g)) for g in groups], True)


def check_of(loss, model=None):
    model = model or nn.Linear(3, 1)
    return LossCheck(model, list(model.modules()), loss, CPU, nullcontext)


DRAWS = {
    "torch": lambda: torch.rand(()),
    "numpy": lambda: np.random.get_bit_generator().random_raw(),
    "python": random.random,
    "none": lambda: None,
}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_random_term_that_comes_rarely_is_no_fault(draw):
    calls = []

    def loss(outputs, targets):
        calls.append(DRAWS[draw]())
        return (outputs - targets).square().mean() + (len(calls) == 3)  # in one part alone

    if draw == "none":
        with pytest.raises(LossCheckError):
            check_of(loss).loss_adds_up(sample())
    else:
        check_of(loss).loss_adds_up(sample())


def test_a_lack_of_memory_is_the_callers():
    def loss(outputs, targets):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        check_of(loss).loss_adds_up(sample())


class Compares(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize("first", [1, 2, 4, 7])
def test_groups_of_any_size_show_a_model_that_compares_samples(first):
    assert check_of(None).samples_stay_apart(sample(first))
    with pytest.raises(MixedSamplesError, match="depends on the other samples beside it"):
        check_of(None, Compares(3, 1)).samples_stay_apart(sample(first))
