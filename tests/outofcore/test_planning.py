"""Plans of a recorded iteration: one at once, a better one where it repeats."""

import pytest
import torch
from ooc_trainings import AMPLE
from torch import nn
from traces import chain

from repro.outofcore import BudgetTooSmall, OutOfCore, plan_packed, planning, tune_window
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


def train(budget: int):
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, plans = [], []
    with OutOfCore(budget, device="cpu") as block:
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
    monkeypatch.setattr(planning, "TRYING_S", 1e6)
    losses, block, plans = train(700_000)
    assert block.statistics.tuned == block.statistics.plans == 1
    assert losses == train(AMPLE)[0]
    assert plans[0] is None and plans[1] is not plans[2] is plans[-1]
    assert plans[1].trace == plans[-1].trace and plans[-1].verify() <= 700_000
    assert block.statistics.replayed == 6  # all but the two that show what repeats
    assert block.statistics.bytes_in > 0 and block.statistics.peak_bytes <= 700_000
