import pytest

from repro.measure import largest_batch


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 31, 100, 993, 12_345])
@pytest.mark.parametrize(("growth", "within"), [(2.0, 32), (1.125, 100)])
def test_the_limit_is_found_from_wherever_it_starts(limit, growth, within):
    starts = [{}, *({"known": n} for n in (1, 5, 90) if n <= limit)]
    starts += [{"guess": n} for n in (0, 1, 90, 5000)]
    for start in starts:
        tried = []
        fits = lambda n, t=tried: t.append(n) or n <= limit  # noqa: E731
        largest = largest_batch(fits, **start, growth=growth, within=within)
        assert largest <= limit < largest + max(1, largest // within) + 1
        assert all(n >= 1 for n in tried) and len(tried) < 100
        assert start.get("known") not in tried  # it costs nothing again
