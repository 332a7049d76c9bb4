"""Plans of a recorded iteration: one at once, a better one where it repeats."""

import random

import pytest
from traces import chain, random_trace

from repro import outofcore
from repro.outofcore import BudgetTooSmall, PlanError, plan_packed, planning, tune_window
from repro.outofcore.planning import Planner
from repro.outofcore.recording import Recording

TRACE = chain(12, width=20, weight=12)
TIMES = [1.0] * len(TRACE.functions)
RECORDED = Recording(TRACE, [], TIMES, [])
BUDGET = TRACE.smallest_budget + 40
RATE = (20.0, 20.0)


def planner(schedule="auto", window="auto", budget=BUDGET) -> Planner:
    return Planner(schedule, window, budget, lambda: RATE)


def time_s(plan) -> float:
    return plan.simulate(TIMES, RATE, 3e-5).time_s


@pytest.mark.parametrize("schedule", ["auto", "window", "packed"])
def test_the_best_of_all_is_found_where_there_is_time(schedule, monkeypatch):
    monkeypatch.setattr(planning, "TRYING_S", 1e6)
    ours = planner(schedule)
    first = ours.plan(RECORDED)
    plan = ours.better(first, RECORDED) or first
    given = TRACE, BUDGET, TIMES, RATE, 3e-5
    makes = {"window": (tune_window,), "packed": (plan_packed,)}
    best = min(time_s(make(*given)) for make in makes.get(schedule, (tune_window, plan_packed)))
    assert time_s(plan) <= 1.011 * best
    assert time_s(plan) < time_s(first) or schedule == "packed"


def test_what_is_not_to_be_tuned():
    for schedule, window in (("auto", None), ("window", 60), ("paper", "auto")):
        ours = planner(schedule, window)
        plan = ours.plan(RECORDED)
        assert plan.window_bytes == (60 if window == 60 else int(1.5 * BUDGET))
        assert ours.better(plan, RECORDED) is None
    with pytest.raises(BudgetTooSmall):
        planner(budget=1).plan(RECORDED)
    with pytest.raises(PlanError, match="returned None: return a SwapPlan"):
        planner(lambda *_: None).plan(RECORDED)


def test_the_smallest_variables_stay_within_the_budget(monkeypatch):
    monkeypatch.setattr(planning, "_SMALL_SHARE", 0.2)
    rng, stayed = random.Random(0), 0
    for _ in range(300):
        trace = random_trace(rng)
        budget = rng.randint(trace.smallest_budget, max(trace.smallest_budget, trace.peak_bytes))
        rest, left = planning.without_small(trace, budget)
        small = trace.accesses.keys() - rest.accesses.keys()
        assert sum(trace.sizes[name] for name in small) == budget - left <= 0.2 * budget
        one = len(trace.functions) * [1.0]
        for plan in (outofcore.plan_swaps(rest, left), plan_packed(rest, left, one, 1.0)):
            whole = planning.with_small(plan, trace, budget)
            assert whole.verify() <= budget
            moved = {name for actions in (*whole.before, *whole.after) for _, name in actions}
            assert not moved & small
            stayed += bool(moved and small)
    assert stayed > 50


def test_an_iteration_that_fits_moves_nothing():
    trace = chain(9, width=1000, weight=1)
    assert planning.without_small(trace, trace.peak_bytes) == (trace, trace.peak_bytes)
