import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
from scipy import optimize

from repro.microconv import Convolution, Division, Kernel, assign_workspaces

MIB = 2**20


def exhaustive(fronts, total_bytes):
    """The least sum of times within the total, exactly, over every choice; None where none fits."""
    best = None
    for choice in itertools.product(*fronts.values()):
        if sum(division.workspace_bytes for division in choice) <= total_bytes:
            time = sum(Fraction(division.time_s) for division in choice)
            best = time if best is None else min(best, time)
    return best


def check(fronts, total_bytes, relative=1e-12):
    """Compare with exhaustive search; return whether anything fitted."""
    best = exhaustive(fronts, total_bytes)
    if best is None:
        with pytest.raises(ValueError, match="do not fit"):
            assign_workspaces(fronts, total_bytes)
        return False
    chosen = assign_workspaces(fronts, total_bytes)
    assert list(chosen) == list(fronts)
    assert all(any(d is c for c in fronts[kernel]) for kernel, d in chosen.items())
    assert sum(division.workspace_bytes for division in chosen.values()) <= total_bytes
    time = sum(Fraction(division.time_s) for division in chosen.values())
    assert best <= time <= best * (1 + Fraction(relative))
    return True


def draw(rng, times, needs, kernels=4, divisions=5):
    return {
        f"kernel {k}": [
            Division(times(rng), needs(rng), [(8, f"{k}/{index}")])
            for index in range(rng.randint(1, divisions))
        ]
        for k in range(rng.randint(1, kernels))
    }


def limit_for(rng, fronts):
    """The sum of some choice, often less one byte, or anything around."""
    total = sum(rng.choice(divisions).workspace_bytes for divisions in fronts.values())
    return max(0, total + rng.choice([0, 0, -1, -1, 1, rng.randint(-5, 5)]))


# Seconds, bytes
CASES = {
    "ties": (lambda r: r.randint(1, 4), lambda r: 256 * r.randint(0, 4)),
    "whole": (lambda r: r.randint(0, 50), lambda r: r.randint(0, 40)),
    "microseconds": (lambda r: 1e-6 * r.randint(1, 60), lambda r: 256 * r.randint(0, 30)),
    "nanoseconds apart": (lambda r: 1e-4 + 1e-9 * r.randint(0, 60), lambda r: r.randint(0, 9)),
    "six magnitudes": (lambda r: 10 ** r.uniform(-6, 0), lambda r: int(10 ** r.uniform(0, 9))),
    "mebibytes": (lambda r: r.uniform(1e-4, 1e-2), lambda r: MIB * r.randint(0, 400)),
    "bytes between gibibytes": (
        lambda r: r.uniform(1e-4, 1e-2),
        lambda r: 2**30 * r.randint(0, 6) + r.randint(0, 2),
    ),
    "tebibytes": (lambda r: r.uniform(1, 9), lambda r: 2**42 + r.randint(0, 30)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_against_exhaustive_search(case):
    rng = random.Random(case)
    fitted = 0
    for _ in range(60):
        fronts = draw(rng, *CASES[case])
        fitted += check(fronts, limit_for(rng, fronts))
    assert fitted > 30


def test_differences_of_a_few_bytes_on_top_of_huge_workspaces():
    # Beside a price per byte times 2**56 bytes the times are lost to rounding: bytes must be
    # counted from each kernel's least.
    rng = random.Random(0)
    for _ in range(150):
        fronts = draw(
            rng, lambda r: r.uniform(1e-6, 1e-4), lambda r: 2**56 + r.randint(0, 60), 6, 4
        )
        check(fronts, limit_for(rng, fronts), 1e-9)


@pytest.fixture
def solved(monkeypatch):
    """How often the solver ran, as a list; it is stopped after many."""
    calls = []
    solver = optimize.milp

    def counted(*arguments, **options):
        calls.append(1)
        if len(calls) > 40:
            pytest.fail("the solver runs again and again")
        return solver(*arguments, **options)

    monkeypatch.setattr(optimize, "milp", counted)
    return calls


def test_a_choice_that_only_floating_point_admits_is_excluded(solved):
    # One byte too much is less than the solver's tolerance in MiB.
    needs = (2 * 2**30 + 1, 2 * 2**30 + 2, 2 * 2**30 + 2)
    times = ((7.0, 3.0, 0.0), (9.0, 3.0, 1.0), (9.0, 4.0, 2.0))
    fronts = {
        name: [Division(a, 0, []), Division(b, need, []), Division(c, 4 * 2**30, [])]
        for name, need, (a, b, c) in zip("xyz", needs, times, strict=True)
    }
    # What real numbers would take, y and z halved and x whole, has four bytes more.
    for short in range(1, 6):
        assert check(fronts, 10 * 2**30 - short + 4)
    assert len(solved) >= 5


def test_one_byte_short_with_many_equal_kernels(solved):
    # Every choice of 5 kernels of 10 is one byte too much: they cannot be excluded one by one.
    fronts = {k: [Division(2.0, 0, []), Division(1.0, 2**30, [])] for k in range(10)}
    chosen = assign_workspaces(fronts, 5 * 2**30 - 1)
    assert sum(d.time_s for d in chosen.values()) == 16.0


def test_a_choice_that_fills_the_total_to_the_byte():
    for needs in ((2**40 + 1, 2**33 + 3, 7), (10**9 + 7, 10**12 + 39, 1), (1, 1, 1)):
        fronts = {
            index: [Division(5.0 + index, 0, []), Division(1.0, need, [])]
            for index, need in enumerate(needs)
        }
        chosen = assign_workspaces(fronts, sum(needs))
        assert [d.workspace_bytes for d in chosen.values()] == list(needs)
        chosen = assign_workspaces(fronts, sum(needs) - 1)
        assert sorted(d.time_s for d in chosen.values())[:2] == [1.0, 1.0]
        assert sum(d.time_s for d in chosen.values()) == 7.0  # the cheapest one stays behind


def nearly_linear(rng):
    """Divisions whose time falls almost alike with every byte, so that many choices are close."""
    need = rng.randint(0, 20)
    return Division((20 - need) * 50_000 + rng.randint(0, 2000), need, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [nearly_linear, lambda rng: Division(rng.randint(1, 10**6), rng.randint(0, 20), [])]
)
def test_many_kernels_against_a_dynamic_programme(make):
    rng, solved = random.Random(3), 0
    for _ in range(20):
        fronts = {k: [make(rng) for _ in range(6)] for k in range(40)}
        total = 40 * rng.choice([4, 6, 10])
        least = np.zeros(total + 1)  # by bytes given out; whole numbers
        for divisions in fronts.values():
            added = np.full((len(divisions), total + 1), math.inf)
            for row, d in zip(added, divisions, strict=True):
                row[d.workspace_bytes :] = least[: total + 1 - d.workspace_bytes] + d.time_s
            least = added.min(0)
        if math.isfinite(least[total]):
            chosen = assign_workspaces(fronts, total)
            assert sum(d.workspace_bytes for d in chosen.values()) <= total
            assert sum(d.time_s for d in chosen.values()) == least[total]
            solved += 1
    assert solved > 5


def test_kernels_are_anything_hashable():
    conv = Convolution(3, 8, 8, 4, (3, 3))
    names = [Kernel("forward", conv), ("layer", 2), None, 7, frozenset({1}), "layer"]
    front = [Division(2.0, 0, [(4, "a")]), Division(1.0, 256, [(4, "b")])]
    chosen = assign_workspaces(dict.fromkeys(names, front), 512)
    assert list(chosen) == names
    assert sorted(d.workspace_bytes for d in chosen.values()) == [0, 0, 0, 0, 256, 256]
    with pytest.raises(ValueError, match=r"\('layer', 2\)"):
        assign_workspaces({None: front, ("layer", 2): []}, 512)


def test_order_and_dominated_divisions_do_not_matter():
    good = [Division(4.0, 0, []), Division(2.0, 10, []), Division(1.0, 20, [])]
    bad = [Division(9.0, 30, []), Division(2.0, 11, []), Division(4.0, 0, []), Division(5.0, 5, [])]
    chosen = assign_workspaces({"a": [*bad, *reversed(good)], "b": [good[1], bad[0], good[0]]}, 20)
    assert sum(d.time_s for d in chosen.values()) == 4.0
    assert sum(d.workspace_bytes for d in chosen.values()) == 20


def test_nothing_zeros_and_narrow_numbers():
    assert assign_workspaces({}, 0) == {}
    fronts = {"a": [Division(0.0, 0, [])], "b": [Division(0.0, 0, []), Division(0.0, 5, [])]}
    assert [d.workspace_bytes for d in assign_workspaces(fronts, 0).values()] == [0, 0]
    front = [Division(2.0, np.int8(100), []), Division(1.0, np.int8(120), [])]
    chosen = assign_workspaces(dict.fromkeys(range(3), front), np.int16(345))
    assert sum(division.workspace_bytes for division in chosen.values()) == 340


def test_the_total_that_is_named_works_and_one_byte_less_does_not():
    fronts = {
        "conv1": [Division(1.0, 700, []), Division(3.0, 300, [])],
        "conv2": [Division(1.0, 500, []), Division(0.5, 600, [])],
    }
    message = (
        r"^2 kernels do not fit into 799 bytes of workspace together; the smallest limit that "
        r"would work is 800 bytes, of which kernel 'conv2' needs 500$"
    )
    with pytest.raises(ValueError, match=message):
        assign_workspaces(fronts, 799)
    chosen = assign_workspaces(fronts, 800)
    assert [d.workspace_bytes for d in chosen.values()] == [300, 500]
    for total in (-1, 1e6, True):
        with pytest.raises(ValueError, match=r"total_bytes is .*; it must be at least 0, in whole"):
            assign_workspaces({}, total)
