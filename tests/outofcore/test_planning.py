"""Plans of a recorded iteration: one at once, better ones a bounded time after each iteration."""

from collections.abc import Callable

import pytest
import torch
from ooc_trainings import AMPLE
from torch import nn
from traces import chain

from repro.outofcore import BudgetTooSmall, OutOfCore, planning, tune_window
from repro.outofcore.planning import AT_ONCE_S, SHARE, Planner, make_plan
from repro.outofcore.recording import Recording

TRACE = chain(12, width=20, weight=12)
TIMES = [1.0] * len(TRACE.functions)
RECORDED = Recording(TRACE, [], TIMES, [])
BUDGET = TRACE.smallest_budget + 40
RATE = (20.0, 20.0)


class Clock:
    """Seconds that go on by so much with each plan."""

    def __init__(self, each_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for name in ("plan_swaps", "packed_plans", "windows"):
            monkeypatch.setattr(planning, name, self.slowly(getattr(planning, name), each_s))

    def slowly(self, make: Callable, each_s: float) -> Callable:
        def one_by_one(plans):
            for plan in plans:
                self.now += each_s
                yield plan

        def made(*arguments):
            plans = make(*arguments)
            if hasattr(plans, "trace"):
                self.now += each_s
                return plans
            return one_by_one(plans)

        return made


def planner(clock: Clock, schedule="auto", window="auto") -> Planner:
    return Planner(schedule, window, BUDGET, lambda: RATE, lambda: clock.now)


def time_s(plan) -> float:
    return plan.simulate(TIMES, RATE, 3e-5).time_s


class TestPauses:
    def test_the_first_is_one_plan_and_each_after_takes_its_share(self, monkeypatch):
        clock = Clock(0.2, monkeypatch)
        ours = planner(clock)
        plan = ours.plan(RECORDED)
        assert clock.now == pytest.approx(0.2)
        ours.settle(plan, RECORDED)
        pauses, tried = [], []
        for _ in range(100):
            began = clock.now
            ours.better(2.0)
            pauses.append(clock.now - began)
            tried.append(ours.tried)
            clock.now += 2.0
        assert 0.2 <= pauses[0] <= AT_ONCE_S + SHARE * 2.0
        assert max(pauses[1:]) <= 0.2 + 1e-9  # one plan
        assert sum(pauses) <= AT_ONCE_S + SHARE * 2.0 * 100
        assert tried[-1] > tried[10] > tried[0] > 0

    def test_a_plan_that_takes_longer_is_waited_for(self, monkeypatch):
        clock = Clock(5.0, monkeypatch)
        ours = planner(clock)
        ours.settle(ours.plan(RECORDED), RECORDED)
        for _ in range(89):  # twice as long as the first
            ours.better(2.0)
        assert ours.tried == 0
        ours.better(4.0)
        assert ours.tried == 2


@pytest.mark.parametrize("schedule", ["auto", "window", "packed"])
def test_all_are_tried_in_the_end(schedule, monkeypatch):
    ours = planner(Clock(0.0, monkeypatch), schedule)
    plan = first = ours.plan(RECORDED)
    ours.settle(plan, RECORDED)
    while (better := ours.better(1.0)) is not None:
        assert time_s(better) <= time_s(plan)
        plan = better
    given = TRACE, BUDGET, TIMES, RATE, 3e-5
    best = tune_window(*given) if schedule == "window" else make_plan(schedule, *given)
    assert time_s(plan) <= 1.011 * time_s(best)
    assert time_s(plan) < time_s(first) or schedule == "packed"


def test_what_is_not_to_be_tuned(monkeypatch):
    for schedule, window in (("auto", None), ("window", 60), ("paper", "auto")):
        ours = planner(Clock(0.0, monkeypatch), schedule, window)
        plan = ours.plan(RECORDED)
        assert plan.window_bytes == (60 if window == 60 else int(1.5 * BUDGET))
        ours.settle(plan, RECORDED)
        assert ours.better(100.0) is None and ours.tried == 0
    with pytest.raises(BudgetTooSmall):
        Planner("auto", "auto", 1, lambda: RATE).plan(RECORDED)


def train(budget: int | None):
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, plans = [], []
    with OutOfCore(budget or AMPLE, device="cpu") as block:
        for _ in range(8):
            images, labels = torch.randn(256, 64), torch.randint(0, 4, (256,))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            plans.append(block.plan)
    return losses, block, plans


def test_the_plan_at_hand_is_followed_until_a_better_one_is_found(monkeypatch):
    """With no time to try others the first plan stays; with some, another takes its place."""
    monkeypatch.setattr(planning, "AT_ONCE_S", 0.0)
    monkeypatch.setattr(planning, "SHARE", 0.0)
    _, block, plans = train(700_000)
    assert block.statistics.tuned == 0 and len({id(plan) for plan in plans[1:]}) == 1
    monkeypatch.setattr(planning, "SHARE", 1e6)
    losses, block, plans = train(700_000)
    assert block.statistics.tuned == block.statistics.plans == 1
    assert losses == train(None)[0]
    assert plans[0] is None and plans[1] is not plans[2] is plans[-1]
    assert plans[1].trace == plans[-1].trace and plans[-1].verify() <= 700_000
    assert block.statistics.replayed == 6  # all but the two that show what repeats
    assert block.statistics.bytes_in > 0 and block.statistics.peak_bytes <= 700_000
