"""Whole numbers are ints and numpy's within bounds, and nothing that only looks like one."""

import numpy as np
import pytest
import torch

from repro.measure.checks import is_whole


@pytest.mark.parametrize("value", [0, -2, 10**30, np.int64(3), np.uint8(3)])
def test_whole(value):
    assert is_whole(value) and is_whole(value, int(value), int(value))
    assert not is_whole(value, int(value) + 1) and not is_whole(value, None, int(value) - 1)


@pytest.mark.parametrize("value", [True, 3.0, np.float64(3), "3", None, [3], torch.tensor(2.0)])
def test_not_whole(value):
    assert not is_whole(value)
