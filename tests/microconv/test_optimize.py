"""WR, the desirable set and WD against brute force."""

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import optimize

from repro import microconv
from repro.microconv import Candidate, Division, assign_workspaces, best_division, micro_batch_sizes

SEEDS = range(400)


def divisions(batch, candidates):
    """Yield (time, workspace) of every division; the time as an exactly rounded sum."""
    ways = [(size, way) for size, listed in candidates.items() for way in listed]

    def extend(left, start, times, workspace):
        if left == 0:
            yield math.fsum(times), workspace
            return
        for index in range(start, len(ways)):
            size, way = ways[index]
            if size <= left:
                need = max(workspace, way.workspace_bytes)
                yield from extend(left - size, index, [*times, way.time_s], need)

    return extend(batch, 0, [], 0)


def desirable(pairs):
    """The pairs (time, workspace) that no other equals or beats in both, ascending in workspace."""
    kept = []
    for workspace, time in sorted((workspace, time) for time, workspace in set(pairs)):
        if not kept or time < kept[-1][0]:
            kept.append((time, workspace))
    return kept


def draw(seed, times=lambda rng: rng.randint(0, 12)):
    """A random case: gaps in the sizes, sizes above the batch, sizes without a candidate, ties."""
    rng = random.Random(seed)
    batch = rng.randint(1, 7)
    sizes = [size for size in range(1, batch + 4) if rng.random() < 0.7]
    rng.shuffle(sizes)
    candidates = {
        size: [Candidate(f"{n}", times(rng), 256 * rng.randint(0, 6)) for n in range(ways)]
        for size in sizes
        for ways in [rng.randint(0, 3)]
    }
    limit = None if rng.random() < 0.3 else 256 * rng.randint(0, 6) + rng.choice([0, 0, 1, -1])
    return batch, candidates, None if limit is None else max(0, limit)


def assert_consistent(division, batch, candidates):
    """A division's own figures are those of its parts, taken from the candidates."""
    sizes = [size for size, _ in division.parts]
    assert sum(sizes) == batch and sizes == sorted(sizes, reverse=True)
    ways = []
    for size, algorithm in division.parts:
        (candidate,) = [way for way in candidates[size] if way.algorithm == algorithm]
        ways.append(candidate)
    assert division.time_s == math.fsum(way.time_s for way in ways)
    assert division.workspace_bytes == max(way.workspace_bytes for way in ways)


@pytest.mark.parametrize("times", ["whole", "real"])
def test_against_brute_force(times):
    # Real times are in general position: no two divisions take as long unless they are the same.
    of = {"whole": lambda rng: rng.randint(0, 12), "real": lambda rng: rng.uniform(1e-6, 3e-5)}
    feasible = limited = 0
    for seed in SEEDS:
        batch, candidates, limit = draw(seed, of[times])
        every = list(divisions(batch, candidates))
        within = [pair for pair in every if limit is None or pair[1] <= limit]
        if not within:
            for function in (best_division, microconv.pareto_front):
                with pytest.raises(ValueError) as caught:  # noqa: PT011
                    function(batch, candidates, limit)
            if every:
                limited += 1
                assert f"would work is {min(w for _, w in every)} bytes" in str(caught.value)
            continue
        feasible += 1
        front = microconv.pareto_front(batch, candidates, limit)
        expected = desirable(within)
        assert [d.workspace_bytes for d in front] == [w for _, w in expected]
        for division, (time, _) in zip(front, expected, strict=True):
            assert division.time_s == pytest.approx(time, rel=1e-14, abs=0)
            assert_consistent(division, batch, candidates)
        assert best_division(batch, candidates, limit) == front[-1]
    assert feasible > 160 and limited > 16


def test_of_equal_divisions_the_one_with_the_largest_micro_batch():
    candidates = {size: [Candidate("a", size, 0)] for size in (1, 2, 3)}
    assert best_division(5, candidates).parts == [(3, "a"), (2, "a")]


def test_policies():
    assert microconv.POLICIES == ("all", "powerOfTwo", "undivided")
    for batch in range(1, 300):
        assert micro_batch_sizes(batch, "all") == list(range(1, batch + 1))
        powers = [size for size in range(1, batch + 1) if size & (size - 1) == 0]
        assert micro_batch_sizes(batch, "powerOfTwo") == sorted({*powers, batch})
        assert micro_batch_sizes(batch, "undivided") == [batch]
    with pytest.raises(ValueError, match="policy is 'power'; choose among all, powerOfTwo, undivi"):
        micro_batch_sizes(8, "power")


ONE = {1: [Candidate("a", 1, 0)]}


@pytest.mark.parametrize(
    ("batch", "candidates", "limit", "message"),
    [
        *((3, ways, None, "no candidate has a micro-batch of at most 3; measure at")
          for ways in ({}, {2: []}, {4: [Candidate("a", 1, 0)]})),
        (7, {4: [Candidate("a", 1, 0)], 2: [Candidate("a", 1, 0)], 1: []}, 0,
         r"sizes \[2, 4\] gives the mini-batch 7"),
        *((batch, ONE, None, "batch") for batch in (0, 1.5, True)),
        *((1, ONE, limit, f"limit_bytes is {limit!r}; give a whole number, at least 0")
          for limit in (-1, 1e6, True, "64")),
        *((4, {**ONE, n: [Candidate("a", 1, 0)]}, None, f"candidates have a micro-batch size {n};")
          for n in (0, 1.5)),
    ],
)  # fmt: skip
def test_what_has_no_division(batch, candidates, limit, message):
    for function in (best_division, microconv.pareto_front):
        with pytest.raises(ValueError, match=message):
            function(batch, candidates, limit)


@pytest.mark.parametrize("kind", [np.int8, torch.tensor])
def test_whole_numbers_of_any_kind(kind):
    candidates = {2: [Candidate("a", 1, 100)], 1: [Candidate("b", 1, 50)]}
    same = {kind(2): [Candidate("a", 1, kind(100))], kind(1): [Candidate("b", 1, kind(50))]}
    assert best_division(kind(9), same, kind(110)) == best_division(9, candidates, 110)


def test_impossible_times_and_workspaces():
    for time in (-1e-9, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"candidate 'fft' has time_s=.*; give finite seconds"):
            Candidate("fft", time, 0)
    with pytest.raises(ValueError, match="workspace_bytes of a division is"):
        Division(1.0, 0.5, [])
    with pytest.raises(ValueError, match="workspace_bytes of candidate 'fft' is"):
        Candidate("fft", 1.0, -1)


# WD


def check(fronts, total_bytes, relative=1e-12):
    """Compare with every choice, in exact arithmetic; return whether anything fitted."""
    best = min(
        (
            sum(Fraction(division.time_s) for division in choice)
            for choice in itertools.product(*fronts.values())
            if sum(division.workspace_bytes for division in choice) <= total_bytes
        ),
        default=None,
    )
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


def draw_fronts(rng, times, needs, kernels=4, most=5):
    """Random fronts, and a total: the sum of some choice, often less one byte, or around that."""
    fronts = {
        f"kernel {k}": [
            Division(times(rng), needs(rng), [(8, f"{k}/{index}")])
            for index in range(rng.randint(1, most))
        ]
        for k in range(rng.randint(1, kernels))
    }
    total = sum(rng.choice(divisions).workspace_bytes for divisions in fronts.values())
    return fronts, max(0, total + rng.choice([0, 0, -1, -1, 1, rng.randint(-5, 5)]))


# Seconds, bytes
CASES = {
    "ties": (lambda r: r.randint(1, 4), lambda r: 256 * r.randint(0, 4)),
    "nanoseconds apart": (lambda r: 1e-4 + 1e-9 * r.randint(0, 60), lambda r: r.randint(0, 9)),
    "six magnitudes": (lambda r: 10 ** r.uniform(-6, 0), lambda r: int(10 ** r.uniform(0, 9))),
    "bytes between gibibytes": (
        lambda r: r.uniform(1e-4, 1e-2),
        lambda r: 2**30 * r.randint(0, 6) + r.randint(0, 2),
    ),
    "tebibytes": (lambda r: r.uniform(1, 9), lambda r: 2**42 + r.randint(0, 30)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_wd_against_exhaustive_search(case):
    rng = random.Random(case)
    assert sum(check(*draw_fronts(rng, *CASES[case])) for _ in range(60)) > 30


def test_differences_of_a_few_bytes_on_top_of_huge_workspaces():
    # Beside a price per byte times 2**56 bytes the times are lost to rounding: bytes must be
    # counted from each kernel's least.
    rng = random.Random(0)
    case = (lambda r: r.uniform(1e-6, 1e-4), lambda r: 2**56 + r.randint(0, 60))
    for _ in range(60):
        check(*draw_fronts(rng, *case, 6, 4), 1e-9)


@pytest.fixture
def solved(monkeypatch):
    """How often the solver ran, as a list; it is stopped after many."""
    calls, solver = [], optimize.milp

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
    assert sum(d.time_s for d in assign_workspaces(fronts, 5 * 2**30 - 1).values()) == 16.0


def test_the_total_that_is_named_works_and_one_byte_less_does_not():
    fronts = {"conv1": [Division(1.0, 700, []), Division(3.0, 300, [])]}
    fronts["conv2"] = [Division(1.0, 500, []), Division(0.5, 600, [])]
    message = (
        r"^2 kernels do not fit into 799 bytes of workspace together; the smallest limit that "
        r"would work is 800 bytes, of which kernel 'conv2' needs 500$"
    )
    with pytest.raises(ValueError, match=message):
        assign_workspaces(fronts, 799)
    assert [d.workspace_bytes for d in assign_workspaces(fronts, 800).values()] == [300, 500]
    for total in (-1, 1e6, True):
        with pytest.raises(ValueError, match=r"total_bytes is .*; give a whole number, at least 0"):
            assign_workspaces({}, total)


@pytest.mark.parametrize("solver", ["linprog", "milp"])
def test_where_the_solver_stops(solver, monkeypatch):
    ends = Division(9.0, 0, []), Division(1.0, 12, [])
    fronts = {k: [ends[0], Division(5.0 - k, 7 + k, []), ends[1]] for k in range(3)}
    stopped = optimize.OptimizeResult(x=None, message="time limit")
    monkeypatch.setattr(optimize, solver, lambda *a, **k: stopped)
    if solver == "linprog":  # a bound is missing, no more
        assert check(fronts, 21)
        return
    with pytest.raises(RuntimeError, match="the solver found no assignment: time limit"):
        assign_workspaces(fronts, 21)
