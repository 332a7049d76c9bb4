"""Schedules: their plans by hand and on random traces, and that training by each changes no bit."""

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from test_swapper import assert_same, run
from torch import nn
from traces import budgets, chain, least_s, random_trace

from repro import outofcore
from repro.outofcore import Action, DoesNotFit, Function, Kind, SwapPlan, Trace, plan_swaps
from repro.outofcore.allocator import ChunkedAllocator, replay
from repro.outofcore.plan import requests
from repro.outofcore.planning import Name, Planner, packed_plans
from repro.outofcore.recording import Recording
from repro.outofcore.schedule import windows

OUT, RELEASE, IN = (Kind.SWAP_OUT, Kind.RELEASE, Kind.SWAP_IN)
MAKE, USE = Function("make", (), ("a",)), Function("use", ("a",), ())


def every_schedule(trace: Trace, budget: int, times, rates) -> Iterator[SwapPlan]:
    """Yield the plans of all schedulers, but of those that the budget is too small for."""
    yield outofcore.on_demand(trace, budget)
    for window in (0, budget // 3, budget, None, 10**6):
        plan = plan_swaps(trace, budget, window)
        literal = outofcore.plan_literally(trace, budget, window)
        assert plan.bytes_moved == 0 or trace.peak_bytes > budget
        assert not literal.resident  # all begins and ends on the host
        yield from (plan, literal)
    for plan in packed_plans(trace, budget, times, rates):
        assert plan.bytes_moved == 0 or trace.peak_bytes > budget
        yield plan
    fixed = partial(outofcore.fixed_distance, trace, budget)
    known = [partial(fixed, t, a) for t in (1, 6) for a in (1, 2, 5)]
    for make in (*known, lambda: outofcore.vdnn(trace, budget)):
        try:
            yield make()
        except DoesNotFit:
            continue


def test_planning_collects_no_garbage():
    trace, phases = chain(300), []
    budget = trace.peak_bytes // 2
    gc.callbacks.append(note := lambda phase, info: phases.append(phase))
    try:
        plan = plan_swaps(trace, budget)
    finally:
        gc.callbacks.remove(note)
    assert plan.bytes_moved and len(phases) <= 2 and gc.isenabled()


def test_windows_of_a_trace_without_variables():
    trace = Trace((Function("f"),), {})
    assert {plan.bytes_moved for plan in windows(trace, 10, np.ones(1))} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_traces(seed):
    """No plan breaks a rule or beats the bound; simulated it takes what its copies allow."""
    rng, rates, names = random.Random(seed), (2.0, 3.0), set()
    for _ in range(30):
        trace = random_trace(rng)
        times = [rng.random() for _ in trace.functions]
        for budget in budgets(trace, rng):
            for plan in every_schedule(trace, budget, times, rates):
                names.add(plan.scheduler)
                most = plan.verify()
                assert most <= budget
                result = plan.simulate(times, rates)
                moving = result.bytes_in / 2, result.bytes_out / 3
                assert (result.bytes_in, result.bytes_out) == (plan.bytes_in, plan.bytes_out)
                assert result.peak_bytes <= most
                least = max(result.compute_s, least_s(plan, times, rates))
                if plan.scheduler == "window":  # others copy out what is never waited for
                    least = max(least, *moving)
                assert least - 1e-9 <= result.time_s <= result.compute_s + sum(moving) + 1e-9
                assert np.all(np.diff(result.starts_s) >= -1e-9)
                assert np.allclose(result.ends_s - result.starts_s, times)
            plan = plan_swaps(trace, budget)
            assert plan.simulate(times, 1e12).stall_s == pytest.approx(0, abs=1e-8)
            assert replay(ChunkedAllocator(1), requests(plan)).peaks["requested_bytes"] <= budget
    assert len({name.split()[0] for name in names}) >= 6, names


class TestByHand:
    def test_figure_2(self):
        # forward 0, 1, 2, loss, backward 2, 1, 0 in the memory of four variables. At the loss a0,
        # which left the window first, has to make room for g3; before backward 1 (function 5), a2
        # and g3 are gone, the window of four variables reaches a0, and it comes back.
        trace = chain(3, width=10, weight=0)
        plan = plan_swaps(trace, 40, 40)
        assert plan.verify() == 40 and plan.after == (((OUT, "a0"),), (), (), (), (), (), ())
        assert plan.before == ((), (), (), ((RELEASE, "a0"),), (), ((IN, "a0"),), ())
        # A window of three reaches it only when its function is next.
        plan = plan_swaps(trace, 40, 30)
        assert plan.before == ((), (), (), ((RELEASE, "a0"),), (), (), ((IN, "a0"),))
        # To the letter every place counts: of backward 2 (g3 a2 g2) and the next (g2 a1 g1) a
        # window of four variables reaches the second g2 alone.
        plan = outofcore.plan_literally(trace, 40, 40)
        assert plan.verify() == 40
        assert plan.after[0] == ((OUT, "a0"),) and plan.before[3] == ((RELEASE, "a0"),)
        assert [f for f in range(7) if (IN, "a0") in plan.before[f]] == [6]

    def test_what_is_copied_to_the_host(self):
        """What it has not, and not what is overwritten first; to the letter each time."""
        trace = chain(6, width=10, weight=4)
        plan, literal = plan_swaps(trace, 40), outofcore.plan_literally(trace, 40)
        out = lambda plan: [name for after in plan.after for kind, name in after if kind is OUT]  # noqa: E731
        copies, all_copies = out(plan), out(literal)
        written = {name for f in trace.functions for name in f.outputs}
        weights = [name for name in copies if name.startswith("w")]
        assert copies and set(copies) <= written | {"a0"}
        assert len(weights) == len(set(weights))
        assert sum(name.startswith("w") for name in all_copies) > 6  # more than the updates
        with pytest.raises(outofcore.PlanError, match="the host's copy is right already"):
            replace(literal, copies_again=False).verify()
        functions = (MAKE, USE, Function("large", (), ("b",)), MAKE, USE)
        plan = plan_swaps(Trace(functions, {"a": 6, "b": 8}), 8)
        plan.verify()
        assert plan.bytes_moved == 0
        assert any(Action(Kind.ALLOCATE, "a") in actions for actions in plan.before)

    def test_what_is_refused(self):
        told = "smallest feasible budget is 36 bytes"
        with pytest.raises(outofcore.BudgetTooSmall, match=told) as caught:
            plan_swaps(chain(3, width=10, weight=3), 30)
        # A backward function needs g_i, a_i, w_i, g_i-1 and d_i.
        assert caught.value.needed_bytes == chain(3, width=10, weight=3).smallest_budget == 36
        assert (caught.value.function, caught.value.budget_bytes) == ("backward", 30)
        assert plan_swaps(chain(3, width=10, weight=3), 36).verify() <= 36
        for budget in (1.5, True, "8"):
            with pytest.raises(ValueError, match="whole bytes"):
                plan_swaps(chain(1), budget)
        for make in (plan_swaps, outofcore.plan_literally):
            with pytest.raises(ValueError, match="window_bytes is -1"):
                make(chain(1), 100, -1)
        for distances in ((0, 1), (1, 0)):
            with pytest.raises(ValueError, match="1 or more"):
                outofcore.fixed_distance(chain(2), 1000, *distances)

    def test_baselines(self):
        trace, weighty = chain(8), chain(8, width=10, weight=20)
        assert outofcore.on_demand(trace, trace.peak_bytes).bytes_moved == 0
        # Distances do not know the budget.
        with pytest.raises(DoesNotFit, match="the budget is 36 bytes"):
            outofcore.fixed_distance(trace, 36, 64, 1)
        with pytest.raises(DoesNotFit, match="no pair of distances"):
            outofcore.tune_fixed_distance(weighty, 70, [1.0] * len(weighty.functions), 1.0)
        with pytest.raises(DoesNotFit):  # weights stay
            outofcore.vdnn(weighty, weighty.smallest_budget)
        trace = chain(4, width=10, weight=0)
        plan = outofcore.vdnn(trace, trace.peak_bytes)  # whether or not there is room
        plan.verify()
        assert plan.after[1] == ((OUT, "a1"),) and plan.before[2][0] == (RELEASE, "a1")
        assert (IN, "a1") in plan.before[6]  # one function before backward 1


GOOD = plan_swaps(chain(3, width=10, weight=0), 40, 40)
ENDING = plan_swaps(Trace((Function("f", ("w",), ()), MAKE), {"w": 1, "a": 1}), 2)
AGAIN = plan_swaps(Trace((MAKE, MAKE), {"a": 1}), 1)
READ, WRITE = Function("read", ("w",), ()), Function("write", (), ("w",))
READS = plan_swaps(Trace((READ, READ), {"w": 1}), 1)
WRITTEN = plan_swaps(Trace((READ, READ, Function("update", ("w",), ("w",))), {"w": 1}), 1)
REPLACED = plan_swaps(Trace((READ, READ, WRITE), {"w": 1}), 1)
LEFT = plan_swaps(Trace((Function("idle"), MAKE), {"a": 1}, deaths={"a": 3}), 1)
W = frozenset("w")


def moving(plan: SwapPlan, before=(), after=(), **changes) -> SwapPlan:
    """A plan with these actions on w, each with the number of its function, and no others."""
    lists = (
        tuple(tuple(Action(kind, "w") for at, kind in made if at == n) for n in range(3))
        for made in (before, after)
    )
    before, after = (actions[: len(plan.before)] for actions in lists)
    return replace(plan, before=before, after=after, **changes)


def without(*action) -> SwapPlan:
    assert any(action in actions for actions in (*GOOD.before, *GOOD.after))
    before, after = (
        tuple(tuple(a for a in actions if a != action) for actions in lists)
        for lists in (GOOD.before, GOOD.after)
    )
    return replace(GOOD, before=before, after=after)


def having(number: int, *action) -> SwapPlan:
    before = list(GOOD.before)
    before[number] = (*before[number], Action(*action))
    return replace(GOOD, before=tuple(before))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(GOOD, budget_bytes=39), "1 more than the budget of 39"),
        (without(IN, "a0"), "uses 'a0', which is not on the device"),
        (without(OUT, "a0"), "'a0': its value is needed and the host has no right"),
        (without(RELEASE, "a0"), r"more than the budget|on the device already"),
        (having(1, IN, "a0"), "'a0': it is on the device already"),
        (having(0, OUT, "g0"), "'g0': it is not alive"),
        (having(2, OUT, "a0"), "the host's copy is right already"),
        (replace(GOOD, resident=frozenset({"a1"})), "'a1' is resident, but not alive"),
        (replace(GOOD, before=GOOD.before[1:]), "lists of actions"),
        (replace(ENDING, after=(ENDING.after[0], (Action(OUT, "w"), Action(RELEASE, "w")))),
         "'w' on the device otherwise than it started"),
        (replace(AGAIN, after=((Action(OUT, "a"),), ())), "its value is dead"),
        (moving(READS, [(1, Kind.ALLOCATE)], [(0, RELEASE)], host_valid=W),
         "'w': its value is needed, so it must be copied"),
        (moving(WRITTEN, (), [(1, OUT)], host_valid=frozenset(), outgoing=W),
         "writes 'w' while it is being copied to the host"),
        (moving(WRITTEN, host_valid=W), "'w' valid on the host otherwise than it started"),
        (moving(READS, (), [(1, OUT)], host_valid=frozenset()),
         "'w' under way to the host otherwise than it started"),
        (moving(REPLACED, [(2, IN)], [(0, OUT), (1, RELEASE)], host_valid=frozenset()),
         "'w': its value is dead: it is overwritten next"),
        (replace(READS, resident=frozenset(), host_valid=frozenset()),
         "'w' is neither on the device nor on the host"),
        (replace(LEFT, before=((Action(RELEASE, "a"),), ())),  # it may be read from outside
         "'a': its value is needed and the host has no right copy"),
        (replace(GOOD, host_valid=frozenset({"a1"})), "'a1' is host_valid, but not alive"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_found(bad, message):
    with pytest.raises(outofcore.PlanError, match=message):
        bad.verify()


class TestSimulation:
    def test_by_hand(self):
        # a0 (10 bytes) goes out after f_0, is released before f_3, and comes in before f_5 for f_6.
        # At 1 s a function and 5 bytes/s it is out from 1 to 3, in time for f_3, and in from 5 to
        # 7, when f_6 has waited for 1 s.
        result = GOOD.simulate([1.0] * 7, 5.0)
        assert result.transfers == ((OUT, "a0", 1.0, 3.0), (IN, "a0", 5.0, 7.0))
        assert result.starts_s.tolist() == [0, 1, 2, 3, 4, 5, 7]
        assert result.ends_s.tolist() == [1, 2, 3, 4, 5, 6, 8]
        assert (result.time_s, result.compute_s, result.stall_s) == (8, 7, 1)
        assert (result.bytes_in, result.bytes_out) == (10, 10)
        assert result.memory_bytes.tolist() == [20, 30, 40, 40, 40, 40, 30]
        # At half the rate to the host, f_3 waits as well, until 5; all that follows is 2 s later.
        assert GOOD.simulate([1.0] * 7, (5.0, 2.5)).time_s == 10
        copies = GOOD.simulate([0.0] * 7, 1e12, latency_s=1.0).transfers
        assert [round(t.end_s - t.start_s, 6) for t in copies] == [1.0, 1.0]
        trace = chain(3)
        whole = plan_swaps(trace, trace.peak_bytes).simulate([2.0] * len(trace.functions), 1.0)
        assert whole.time_s == whole.compute_s == 2.0 * len(trace.functions)
        assert (whole.stall_s, whole.bytes_in, whole.bytes_out) == (0, 0, 0)
        assert whole.memory_bytes.tolist() == trace.live_bytes
        assert whole.peak_bytes == trace.peak_bytes

    @pytest.mark.parametrize(
        ("times", "bandwidth", "message"),
        [
            ([1.0], 1.0, "has the shape"),
            ([-1.0] * 7, 1.0, "0 or more"),
            ([float("nan")] * 7, 1.0, "finite"),
            ([1.0] * 7, 0.0, "above 0"),
            ([1.0] * 7, (1.0, -1.0), "above 0"),
            ([1.0] * 7, (1.0, 1.0, 1.0), "pair"),
            ([1.0] * 7, [1.0, 1.0], "pair"),
            ([1.0] * 7, "fast", "above 0"),
        ],
    )
    def test_errors(self, times, bandwidth, message):
        for call in (GOOD.simulate, partial(outofcore.bound, GOOD.trace, GOOD.budget_bytes)):
            with pytest.raises(ValueError, match=message):
                call(times, bandwidth)

    @pytest.mark.parametrize(("budget", "time_s"), [(10, 3.0), (9, 4.5)])
    def test_what_ends_while_it_is_copied_takes_its_memory_until_then(self, budget, time_s):
        # a has ended as c is made.
        functions = (MAKE, Function("b", ("a",), ("b",)), Function("c", ("b",), ("c",)))
        trace, after = Trace(functions, {"a": 4, "b": 2, "c": 4}), ((Action(OUT, "a"),), (), ())
        plan = SwapPlan(trace, budget, ((),) * 3, after, frozenset(), frozenset())
        # The copy is from 1 to 3.5 s; c takes a second from 2 s on, or from then.
        assert plan.simulate([1.0, 1.0, 1.0], 1.6).time_s == pytest.approx(time_s)


class TestRunning:
    @pytest.mark.slow
    @pytest.mark.parametrize("schedule", get_args(Name))
    def test_losses_gradients_and_weights_are_bit_identical(self, schedule):
        ours = run(580_000 if schedule == "vdnn" else 430_000, model="views", schedule=schedule)
        assert_same(ours, run(None, model="views"))
        block = ours.block
        assert block.plan is not None and block.statistics.replayed >= 2
        names = {"lms": "fixed distance", "on_demand": "on demand"}
        either = ("window", "packed") if schedule == "auto" else (names.get(schedule, schedule),)
        assert block.plan.scheduler.startswith(either) and block.statistics.bytes_out > 0
        assert block.statistics.peak_bytes <= block.budget_bytes

    @pytest.mark.parametrize(
        ("change", "message"),
        [({}, "plan the given trace"), ({"budget_bytes": 36}, "more than the budget")],
    )
    def test_a_function_whose_plan_breaks_a_rule_is_refused(self, change, message):
        trace = chain(4)

        def broken(trace, budget_bytes, times, rates):
            return replace(plan_swaps(trace, trace.peak_bytes), **change)

        assert trace.smallest_budget == 36
        with pytest.raises(outofcore.PlanError, match=message):
            Planner(broken, "auto", 36, lambda: (1.0, 1.0)).plan(Recording(trace, [], [], []))

    def test_copies_take_their_bytes_time_and_change_no_bit(self):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        copies = [parameter.detach().clone() for parameter in model.parameters()]
        start = time.perf_counter()
        with outofcore.OutOfCore(80_000, device="cpu", link_bytes_per_s=4e6) as block:
            for _ in range(3):
                model(torch.ones(64, 64)).sum().backward()
                model.zero_grad()
                block.step()
            moved = block.statistics.bytes_in
        assert moved > 0 and time.perf_counter() - start >= moved / 4e6
        assert all(map(torch.equal, model.parameters(), copies))
