"""Small helpers: the search for the largest batch size, and what counts as a whole number."""

import numpy as np
import pytest
import torch

from repro.measure import largest_batch
from repro.measure.checks import is_whole


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 31, 100, 993, 12_345])
@pytest.mark.parametrize(("growth", "within"), [(2.0, 32), (1.125, 100)])
def test_the_limit_is_found_from_wherever_it_starts(limit, growth, within):
    starts = [{}, *({"known": n} for n in (1, 5, 90) if n <= limit)]
    starts += [{"guess": n} for n in (0, 1, 90, 5000)]
    for start in starts:
        tried = []
        largest = largest_batch(
            lambda n, t=tried: t.append(n) or n <= limit, **start, growth=growth, within=within
        )
        assert largest <= limit < largest + max(1, largest // within) + 1
        assert all(n >= 1 for n in tried) and len(tried) < 100
        assert start.get("known") not in tried  # it costs nothing again


def test_whole_numbers():
    for value in (0, -2, 10**30, np.int64(3), np.uint8(3)):
        assert is_whole(value) and is_whole(value, int(value), int(value))
        assert not is_whole(value, int(value) + 1) and not is_whole(value, None, int(value) - 1)
    for value in (True, 3.0, np.float64(3), "3", None, [3], torch.tensor(2.0)):
        assert not is_whole(value)
