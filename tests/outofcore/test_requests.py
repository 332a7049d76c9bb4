import random

from traces import budgets, chain, random_trace

from repro.outofcore import plan_swaps
from repro.outofcore.allocator import ChunkedAllocator, replay
from repro.outofcore.requests import requests


def test_what_is_asked_for_is_what_the_plan_holds():
    trace = chain(8, width=10, weight=3)
    core = replay(ChunkedAllocator(1), requests(plan_swaps(trace, trace.peak_bytes)))
    assert core.peak_requested_bytes == trace.peak_bytes
    plan = plan_swaps(trace, 50)
    swapped = replay(ChunkedAllocator(1), requests(plan, iterations=3))
    assert swapped.peak_requested_bytes == plan.verify() <= 50


def test_random_traces():
    rng = random.Random(0)
    for _ in range(50):
        trace = random_trace(rng)
        for budget in budgets(trace, rng):
            report = replay(ChunkedAllocator(1), requests(plan_swaps(trace, budget)))
            assert report.peak_requested_bytes <= budget
