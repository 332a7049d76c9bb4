import math
import random
import re

import numpy as np
import pytest
import torch

from repro.microconv import (
    POLICIES,
    Candidate,
    Division,
    best_division,
    micro_batch_sizes,
    pareto_front,
)

SEEDS = range(400)


# Brute force: every way to write the mini-batch as a sum of candidates, in no order


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


def draw(seed, times=None, max_batch=7, ways=3):
    """A random case: gaps in the sizes, sizes above the batch, sizes without a candidate, ties."""
    rng = random.Random(seed)
    times = times or (lambda rng: rng.randint(0, 12))
    batch = rng.randint(1, max_batch)
    sizes = [size for size in range(1, batch + 4) if rng.random() < 0.7]
    rng.shuffle(sizes)
    candidates = {
        size: [
            Candidate(f"{name}", times(rng), 256 * rng.randint(0, 6))
            for name in range(rng.randint(0, ways))
        ]
        for size in sizes
    }
    limit = None if rng.random() < 0.3 else 256 * rng.randint(0, 6) + rng.choice([0, 0, 1, -1])
    return batch, candidates, None if limit is None else max(0, limit)


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except ValueError as error:
        return str(error)


def assert_consistent(division, batch, candidates):
    """A division's own figures are those of its parts, taken from the candidates."""
    assert sum(size for size, _ in division.parts) == batch
    sizes = [size for size, _ in division.parts]
    assert sizes == sorted(sizes, reverse=True)
    ways = []
    for size, algorithm in division.parts:
        (candidate,) = [way for way in candidates[size] if way.algorithm == algorithm]
        ways.append(candidate)
    assert division.time_s == math.fsum(way.time_s for way in ways)
    assert division.workspace_bytes == max(way.workspace_bytes for way in ways)


def test_whole_times_against_brute_force():
    feasible = limited = 0
    for seed in SEEDS:
        batch, candidates, limit = draw(seed)
        every = list(divisions(batch, candidates))
        within = [pair for pair in every if limit is None or pair[1] <= limit]
        best = outcome(best_division, batch, candidates, limit)
        front = outcome(pareto_front, batch, candidates, limit)
        if not within:
            assert isinstance(best, str) and front == best
            if every:
                limited += 1
                assert f"would work is {min(w for _, w in every)} bytes" in best
            continue
        feasible += 1
        assert (best.time_s, best.workspace_bytes) == min(within)
        assert [(d.time_s, d.workspace_bytes) for d in front] == desirable(within)
        for division in (best, *front):
            assert_consistent(division, batch, candidates)
    assert feasible > 160 and limited > 16


def test_real_times_against_brute_force():
    # Times in general position: no two divisions take the same time unless they are the same.
    feasible = 0
    for seed in SEEDS:
        batch, candidates, limit = draw(seed, lambda rng: rng.uniform(1e-6, 3e-5))
        within = [p for p in divisions(batch, candidates) if limit is None or p[1] <= limit]
        if not within:
            continue
        feasible += 1
        front = pareto_front(batch, candidates, limit)
        assert [d.workspace_bytes for d in front] == [w for _, w in desirable(within)]
        for division, (time, _) in zip(front, desirable(within), strict=True):
            assert division.time_s == pytest.approx(time, rel=1e-14, abs=0)
            assert_consistent(division, batch, candidates)
        assert best_division(batch, candidates, limit) == front[-1]
    assert feasible > 160


def large(seed, policy):
    """A mini-batch of tens, with algorithms whose time and workspace grow with the micro-batch."""
    rng = random.Random(seed)
    batch = rng.choice([32, 37, 60, 64])
    candidates = {
        size: [
            Candidate(name, rng.randint(4, 9) * size + fixed, size * rng.randint(1, 64) * scale)
            for name, fixed, scale in (("slow", 30, 1), ("fast", 4, 256), ("other", 16, 16))
        ]
        for size in micro_batch_sizes(batch, policy)
    }
    return batch, candidates


@pytest.mark.parametrize("policy", POLICIES)
def test_front_and_wr_agree_at_every_limit(policy):
    for seed in range(10):
        batch, candidates = large(seed, policy)
        front = pareto_front(batch, candidates)
        workspaces, times = [d.workspace_bytes for d in front], [d.time_s for d in front]
        assert workspaces == sorted(set(workspaces))
        assert times == sorted(set(times), reverse=True)
        assert best_division(batch, candidates) == front[-1]
        needs = {way.workspace_bytes for ways in candidates.values() for way in ways}
        limits = sorted({need + extra for need in needs for extra in (-1, 0, 1)})
        for limit in random.Random(seed).sample(limits, min(25, len(limits))):
            if limit < workspaces[0]:
                with pytest.raises(ValueError, match=f"would work is {workspaces[0]} bytes"):
                    best_division(batch, candidates, limit)
                continue
            prefix = [d for d in front if d.workspace_bytes <= limit]
            assert best_division(batch, candidates, limit) == prefix[-1]
            assert pareto_front(batch, candidates, limit) == prefix


def test_equal_times_take_the_smallest_workspace():
    ways = [Candidate("a", 2, 512), Candidate("b", 2, 256), Candidate("c", 2, 1024)]
    assert best_division(3, {3: ways}) == Division(2, 256, [(3, "b")])
    assert pareto_front(3, {3: ways}) == [Division(2, 256, [(3, "b")])]
    # Divided as fast as undivided: the smaller workspace decides, then the larger parts.
    candidates = {1: [Candidate("a", 1, 256)], 2: [Candidate("a", 2, 256)]}
    assert best_division(4, candidates).parts == [(2, "a"), (2, "a")]
    candidates[4] = [Candidate("a", 4, 512)]
    assert best_division(4, candidates).parts == [(2, "a"), (2, "a")]


@pytest.mark.parametrize(
    ("batch", "times"),
    [
        (7, {2: (0.2, 3), 3: (0.5, 0), 4: (0.4, 0)}),
        (5, {1: (0.4, 0), 2: (0.1, 3), 3: (0.7, 2), 5: (0.6000000000000001, 1)}),
    ],
)
def test_sums_that_are_equal_but_for_their_order_take_the_smallest_workspace(batch, times):
    # 0.2 + 0.2 + 0.5 and 0.5 + 0.2 + 0.2 differ in the last digit; exactly rounded they are one.
    candidates = {size: [Candidate("a", *values)] for size, values in times.items()}
    best, front = best_division(batch, candidates), pareto_front(batch, candidates)
    every = list(divisions(batch, candidates))
    assert (best.time_s, best.workspace_bytes) == min(every)
    assert [(d.time_s, d.workspace_bytes) for d in front] == desirable(every)


def test_gaps_in_the_sizes():
    candidates = {3: [Candidate("a", 1, 0)], 7: [Candidate("b", 1, 0)]}
    for batch in range(1, 40):
        possible = any(7 * k <= batch and (batch - 7 * k) % 3 == 0 for k in range(6))
        if possible:
            assert sum(size for size, _ in best_division(batch, candidates).parts) == batch
        else:
            with pytest.raises(ValueError, match=str(batch)):
                best_division(batch, candidates)


def test_a_division_reads_as_runs_of_equal_parts():
    division = Division(1, 0, [(4, "a"), (4, "a"), (4, "b"), (1, "b"), (1, "b"), (1, "b")])
    assert str(division) == "2×4 a + 4 b + 3×1 b"
    candidates = {3: [Candidate("nnpack:ft8x8", 1, 0)], 1: [Candidate("torch:fft", 1, 0)]}
    assert str(best_division(7, candidates)) == "2×3 nnpack:ft8x8 + 1 torch:fft"


def test_policies():
    assert POLICIES == ("all", "powerOfTwo", "undivided")
    for batch in range(1, 300):
        assert micro_batch_sizes(batch, "all") == list(range(1, batch + 1))
        powers = [size for size in range(1, batch + 1) if size & (size - 1) == 0]
        assert micro_batch_sizes(batch, "powerOfTwo") == sorted({*powers, batch})
        assert micro_batch_sizes(batch, "undivided") == [batch]
    with pytest.raises(ValueError, match="unknown policy 'power'; choose all, powerOfTwo, undivi"):
        micro_batch_sizes(8, "power")
    for policy in POLICIES:
        for kind in (np.uint8, torch.tensor):
            sizes = micro_batch_sizes(kind(12), policy)
            assert sizes == micro_batch_sizes(12, policy) and {*map(type, sizes)} == {int}
        for batch in (0, 2.5):
            with pytest.raises(ValueError, match=f"batch is {batch}; it must be a whole number fr"):
                micro_batch_sizes(batch, policy)


ONE = {1: [Candidate("a", 1, 0)]}


@pytest.mark.parametrize("function", [best_division, pareto_front])
@pytest.mark.parametrize(
    ("batch", "candidates", "limit", "message"),
    [
        *((3, ways, None, r"layer7 has no candidate .* at most 3; measure at")
          for ways in ({}, {2: []}, {4: [Candidate("a", 1, 0)]})),
        (7, {4: [Candidate("a", 1, 0)], 2: [Candidate("a", 1, 0)], 1: []}, 0,
         r"sizes \[2, 4\] of layer7 gives the mini-batch 7"),
        *((batch, ONE, None, "batch") for batch in (0, 1.5, math.nan, True, "1", None)),
        *((1, ONE, limit, f"limit_bytes is {limit!r}; it must be at least 0, or None, in whole")
          for limit in (-1, 1e6, True, "64")),
        *((4, {**ONE, n: [Candidate("a", 1, 0)]}, None, f"of layer7 have a micro-batch size {n};")
          for n in (0, 1.5)),
    ],
)  # fmt: skip
def test_what_has_no_division(function, batch, candidates, limit, message):
    with pytest.raises(ValueError, match=message):
        function(batch, candidates, limit, kernel="layer7")


def test_the_smallest_limit_that_is_named_works_and_one_byte_less_does_not():
    checked = 0
    for seed in SEEDS:
        batch, candidates, _ = draw(seed)
        candidates = {
            size: [Candidate(w.algorithm, w.time_s, w.workspace_bytes + 1) for w in ways]
            for size, ways in candidates.items()
        }
        with pytest.raises(ValueError, match="conv2 forward") as caught:  # not even one byte is 0
            best_division(batch, candidates, 0, kernel="conv2 forward")
        named = re.search(r"into 0 bytes .* limit that would work is (\d+)", str(caught.value))
        if named is None:
            continue
        least = int(named[1])
        assert best_division(batch, candidates, least).workspace_bytes == least
        assert pareto_front(batch, candidates, least)[0].workspace_bytes == least
        for function in (best_division, pareto_front):
            with pytest.raises(ValueError, match=f"into {least - 1} bytes .* is {least} bytes$"):
                function(batch, candidates, least - 1)
        checked += 1
    assert checked > 200


@pytest.mark.parametrize("kind", [np.int8, torch.tensor])
def test_whole_numbers_of_any_kind(kind):
    candidates = {2: [Candidate("a", 1, 100)], 1: [Candidate("b", 1, 50)]}
    same = {kind(2): [Candidate("a", 1, kind(100))], kind(1): [Candidate("b", 1, kind(50))]}
    for function in (best_division, pareto_front):
        assert function(kind(9), same, kind(110)) == function(9, candidates, 110)


def test_impossible_times_and_workspaces():
    for time in (-1e-9, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"candidate 'fft' has time_s=.*; give finite seconds"):
            Candidate("fft", time, 0)
    for workspace in (-1, 0.5, False, "8"):
        with pytest.raises(ValueError, match="workspace_bytes of a division is"):
            Division(1.0, workspace, [])
        with pytest.raises(ValueError, match=r"candidate 'fft' has workspace_bytes=.*whole number"):
            Candidate("fft", 1.0, workspace)
