"""Schedules by name: their plans, and that training by each gives the bits of ordinary training."""

import random
import time
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn
from traces import budgets, chain, random_trace

from repro.outofcore import (
    Action,
    DoesNotFit,
    Kind,
    OutOfCore,
    PlanError,
    plan_literally,
    plan_swaps,
    vdnn,
)
from repro.outofcore.schedules import Name, make_plan

NAMES = get_args(Name)


class TestLiteral:
    @pytest.mark.parametrize("seed", range(4))
    def test_random_traces(self, seed):
        rng = random.Random(seed)
        for _ in range(60):
            trace = random_trace(rng)
            for budget in budgets(trace, rng):
                for window in (0, budget // 3, None, 10**6):
                    plan = plan_literally(trace, budget, window)
                    assert plan.verify() <= budget
                    assert not plan.resident  # all begins and ends on the host

    def test_figure_2_by_hand(self):
        # Three layers in the memory of four variables. a0 leaves after forward 0, the oldest to do
        # so, and makes room for g3 at the loss. Every place counts: of backward 2 (g3 a2 g2) and
        # the next (g2 a1 g1) a window of four variables reaches the second g2 alone.
        plan = plan_literally(chain(3, width=10, weight=0), 40, 40)
        assert plan.verify() == 40
        out, release, enter = Kind.SWAP_OUT, Kind.RELEASE, Kind.SWAP_IN
        assert plan.after[0] == (Action(out, "a0"),)
        assert plan.before[3] == (Action(release, "a0"),)
        assert [f for f in range(7) if Action(enter, "a0") in plan.before[f]] == [6]

    def test_what_the_host_has_is_copied_again(self):
        trace = chain(6, width=10, weight=4)
        plan = plan_literally(trace, 40)
        weights = sum(
            trace.sizes[a.variable]
            for after in plan.after
            for a in after
            if a.kind is Kind.SWAP_OUT and a.variable.startswith("w")
        )
        assert weights > 6 * 4  # more than the updates
        with pytest.raises(PlanError, match="the host's copy is right already"):
            replace(plan, copies_again=False).verify()

    def test_a_negative_window(self):
        with pytest.raises(ValueError, match="window_bytes is -1"):
            plan_literally(chain(1), 100, -1)


class TestVdnn:
    @pytest.mark.parametrize("seed", range(2))
    def test_random_traces(self, seed):
        rng = random.Random(seed)
        planned = 0
        for _ in range(60):
            trace = random_trace(rng)
            for budget in budgets(trace, rng):
                try:
                    plan = vdnn(trace, budget)
                except DoesNotFit:
                    continue
                assert plan.verify() <= budget
                planned += 1
        assert planned > 50

    def test_activations_go_after_their_forward_use_and_come_one_function_ahead(self):
        trace = chain(4, width=10, weight=0)
        plan = vdnn(trace, trace.peak_bytes)  # whether or not there is room
        plan.verify()
        assert plan.after[1] == (Action(Kind.SWAP_OUT, "a1"),)
        assert plan.before[2][0] == Action(Kind.RELEASE, "a1")
        # Backward 1 is function 7.
        assert Action(Kind.SWAP_IN, "a1") in plan.before[6]

    def test_weights_stay(self):
        with pytest.raises(DoesNotFit):
            vdnn(chain(8, width=10, weight=20), chain(8, width=10, weight=20).smallest_budget)


def trained(schedule, share: float):
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(5)
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(6, 8, 8, 8), torch.randint(4, (6,))
    gradients: list[torch.Tensor] = []
    budget = int(share * PEAK) if share else 1 << 40
    with OutOfCore(budget, device="cpu", schedule=schedule) as block:
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            gradients += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
    return [*gradients, *(p.detach() for p in model.parameters())], block


PEAK = 250_000


@pytest.fixture(scope="module")
def plain():
    return trained("window", 0.0)


class TestLink:
    def test_copies_take_their_bytes_time_and_change_no_bit(self):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        copies = [parameter.detach().clone() for parameter in model.parameters()]
        start = time.perf_counter()
        with OutOfCore(80_000, device="cpu", link_bytes_per_s=4e6) as block:
            for _ in range(3):
                model(torch.ones(64, 64)).sum().backward()
                model.zero_grad()
                block.step()
            moved = block.statistics.bytes_in
        assert moved > 0
        assert time.perf_counter() - start >= moved / 4e6
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copies, strict=True))

    @pytest.mark.parametrize("rate", [0, -1.0])
    def test_a_rate_that_is_none(self, rate):
        with pytest.raises(ValueError, match="link_bytes_per_s is"):
            OutOfCore(1000, device="cpu", link_bytes_per_s=rate)


class TestRunning:
    @pytest.mark.slow
    @pytest.mark.parametrize("schedule", NAMES)
    def test_gradients_and_weights_are_bit_identical(self, schedule, plain):
        assert abs(plain[1].statistics.peak_bytes / PEAK - 1) < 0.5
        share = 0.9 if schedule in ("lms", "vdnn") else 0.6
        tensors, block = trained(schedule, share)
        assert all(torch.equal(a, b) for a, b in zip(tensors, plain[0], strict=True))
        assert block.plan is not None and block.statistics.replayed >= 2
        names = {"lms": "fixed distance", "on_demand": "on demand"}
        either = ("window", "packed") if schedule == "auto" else (names.get(schedule, schedule),)
        assert block.plan.scheduler.startswith(either)
        assert block.statistics.bytes_out > 0
        assert block.statistics.peak_bytes <= block.budget_bytes

    def test_a_function_plans(self, plain):
        calls = []

        def planned_by_us(trace, budget_bytes, times, rates):
            calls.append((len(trace.functions), len(times), min(rates) > 0))
            return plan_swaps(trace, budget_bytes, 0)

        tensors, block = trained(planned_by_us, 0.6)
        assert all(torch.equal(a, b) for a, b in zip(tensors, plain[0], strict=True))
        assert block.plan.window_bytes == 0
        assert all(functions == times and rated for functions, times, rated in calls)

    def test_a_function_whose_plan_breaks_a_rule_is_refused(self):
        trace = chain(4)

        def empty(trace, budget_bytes, times, rates):
            return plan_swaps(trace, trace.peak_bytes)

        with pytest.raises(PlanError, match="plan the given trace"):
            make_plan(empty, trace, trace.smallest_budget, [1.0] * 13, (1.0, 1.0))

        def broken(trace, budget_bytes, times, rates):
            return replace(plan_swaps(trace, trace.peak_bytes), budget_bytes=budget_bytes)

        with pytest.raises(PlanError, match="more than the budget"):
            make_plan(broken, trace, trace.smallest_budget, [1.0] * 13, (1.0, 1.0))

    def test_another_name_is_refused(self):
        with pytest.raises(ValueError, match="schedule is 'best': give one of auto, window"):
            OutOfCore(1000, device="cpu", schedule="best")
