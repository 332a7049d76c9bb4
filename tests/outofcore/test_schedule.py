import random
from dataclasses import replace

import pytest
from traces import budgets, chain, random_trace

from repro.outofcore import (
    Action,
    BudgetTooSmall,
    DoesNotFit,
    Function,
    Kind,
    PlanError,
    SwapPlan,
    Trace,
    fixed_distance,
    on_demand,
    plan_swaps,
    swap_everything,
    tune_fixed_distance,
    tune_window,
)


class TestPlanSwaps:
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(6))
    def test_random_traces(self, seed):
        rng = random.Random(seed)
        for _ in range(60):
            trace = random_trace(rng)
            everything = None
            for budget in budgets(trace, rng):
                for window in (0, budget // 3, budget, None, 10**6):
                    plan = plan_swaps(trace, budget, window)
                    assert plan.verify() <= budget
                    if trace.peak_bytes <= budget:
                        assert plan.bytes_moved == 0
                    everything = swap_everything(trace, budget)
                    assert plan.bytes_moved <= everything.bytes_moved

    def test_figure_2_by_hand(self):
        # forward 0, 1, 2, loss, backward 2, 1, 0 in the memory of four variables. At the loss a0,
        # which left the window first, has to make room for g3; before backward 1 (function 5), a2
        # and g3 are gone, the window of four variables reaches a0, and it comes back.
        plan = plan_swaps(chain(3, width=10, weight=0), 40, 40)
        assert plan.verify() == 40
        swap_out, release, swap_in = Kind.SWAP_OUT, Kind.RELEASE, Kind.SWAP_IN
        assert plan.after == (((swap_out, "a0"),), (), (), (), (), (), ())
        assert plan.before == ((), (), (), ((release, "a0"),), (), ((swap_in, "a0"),), ())
        # A window of three reaches it only when its function is next.
        plan = plan_swaps(chain(3, width=10, weight=0), 40, 30)
        assert plan.before == ((), (), (), ((release, "a0"),), (), (), ((swap_in, "a0"),))

    def test_the_next_iteration_is_prefetched(self):
        # w0 is needed first; the large middle pushes it out, and it is back before the end.
        functions = (
            Function("first", ("w",), ("a",)),
            Function("middle", ("a",), ("b",)),
            Function("last", ("b",), ("c",)),
            Function("end", ("c",), ("d",)),
        )
        trace = Trace(functions, {"w": 6, "a": 2, "b": 8, "c": 1, "d": 1})
        plan = plan_swaps(trace, 10, 10)
        plan.verify()
        assert "w" in plan.resident
        assert Action(Kind.SWAP_IN, "w") in (*plan.before[2], *plan.before[3])

    def test_what_is_unchanged_on_the_host_is_not_copied_out(self):
        trace = chain(6, width=10, weight=4)
        plan = plan_swaps(trace, 40)
        written = {name for f in trace.functions for name in f.outputs}
        copies: dict[str, int] = {}
        for actions in plan.after:
            for kind, name in actions:
                if kind is Kind.SWAP_OUT:
                    copies[name] = copies.get(name, 0) + 1
        assert copies
        assert set(copies) <= written | {"a0"}
        assert all(copies[name] == 1 for name in copies if name.startswith("w"))

    def test_a_value_that_is_overwritten_is_not_copied(self):
        functions = (
            Function("make", (), ("a",)),
            Function("use", ("a",), ()),
            Function("large", (), ("b",)),
            Function("overwrite", (), ("a",)),
            Function("read", ("a",), ()),
        )
        plan = plan_swaps(Trace(functions, {"a": 6, "b": 8}), 8)
        plan.verify()
        assert plan.bytes_moved == 0
        assert any(Action(Kind.ALLOCATE, "a") in actions for actions in plan.before)

    def test_too_small_a_budget(self):
        trace = chain(3, width=10, weight=3)
        with pytest.raises(BudgetTooSmall) as caught:
            plan_swaps(trace, 30)
        # A backward function needs g_i, a_i, w_i, g_i-1 and d_i.
        assert caught.value.needed_bytes == trace.smallest_budget == 36
        assert caught.value.function == "backward"
        assert caught.value.budget_bytes == 30
        assert "smallest feasible budget is 36 bytes" in str(caught.value)
        assert plan_swaps(trace, 36).verify() <= 36

    @pytest.mark.parametrize("budget", [1.5, True, "8"])
    def test_a_budget_that_is_none(self, budget):
        with pytest.raises(ValueError, match="whole bytes"):
            plan_swaps(chain(1), budget)

    def test_a_negative_window(self):
        with pytest.raises(ValueError, match="window_bytes is -1"):
            plan_swaps(chain(1), 100, -1)


class TestBaselines:
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(3))
    def test_random_traces(self, seed):
        rng = random.Random(seed)
        for _ in range(40):
            trace = random_trace(rng)
            for budget in budgets(trace, rng):
                assert swap_everything(trace, budget).verify() <= budget
                assert on_demand(trace, budget).verify() <= budget
                for threshold in (1, 3, 6):
                    for ahead in (1, 2, 5):
                        try:
                            plan = fixed_distance(trace, budget, threshold, ahead)
                        except DoesNotFit:
                            continue
                        assert plan.verify() <= budget

    def test_on_demand_moves_nothing_where_all_fits(self):
        trace = chain(4)
        assert on_demand(trace, trace.peak_bytes).bytes_moved == 0
        assert swap_everything(trace, trace.peak_bytes).bytes_moved > 0

    def test_distances_do_not_know_the_budget(self):
        trace = chain(8)
        with pytest.raises(DoesNotFit, match="the budget is 36 bytes"):
            fixed_distance(trace, 36, 64, 1)
        with pytest.raises(DoesNotFit, match="no pair of distances"):
            tune_fixed_distance(trace, 36, [1.0] * len(trace.functions), 1.0, thresholds=(64,))

    @pytest.mark.parametrize("distances", [(0, 1), (1, 0)])
    def test_distances_below_1(self, distances):
        with pytest.raises(ValueError, match="1 or more"):
            fixed_distance(chain(2), 1000, *distances)

    @pytest.mark.slow
    @pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
    def test_the_window_stalls_no_longer_than_the_best_distances(self, share):
        trace = chain(24, width=40, weight=9)
        times = [need / 10 for need in trace.needs_bytes]
        budget = max(trace.smallest_budget, int(share * trace.peak_bytes))
        ours = tune_window(trace, budget, times, 12.0).simulate(times, 12.0)
        theirs = tune_fixed_distance(trace, budget, times, 12.0).simulate(times, 12.0)
        assert ours.stall_s <= theirs.stall_s + 1e-9


class TestVerify:
    """Each rule is broken by hand in a good plan, and found."""

    def good(self) -> SwapPlan:
        return plan_swaps(chain(3, width=10, weight=0), 40, 40)

    def without(self, kind: Kind, name: str) -> SwapPlan:
        plan = self.good()
        action = Action(kind, name)
        assert any(action in actions for actions in (*plan.before, *plan.after))
        before, after = (
            tuple(tuple(a for a in actions if a != action) for actions in lists)
            for lists in (plan.before, plan.after)
        )
        return replace(plan, before=before, after=after)

    def having(self, number: int, *actions: Action) -> SwapPlan:
        plan = self.good()
        before = list(plan.before)
        before[number] = (*before[number], *actions)
        return replace(plan, before=tuple(before))

    def test_the_budget(self):
        with pytest.raises(PlanError, match="1 more than the budget of 39"):
            replace(self.good(), budget_bytes=39).verify()

    def test_a_missing_swap_in(self):
        with pytest.raises(PlanError, match=r"uses 'a0', which is not on the device"):
            self.without(Kind.SWAP_IN, "a0").verify()

    def test_a_missing_swap_out(self):
        with pytest.raises(PlanError, match="'a0': its value is needed and the host has no right"):
            self.without(Kind.SWAP_OUT, "a0").verify()

    def test_a_missing_release(self):
        with pytest.raises(PlanError, match=r"more than the budget|on the device already"):
            self.without(Kind.RELEASE, "a0").verify()

    def test_a_swap_in_of_what_is_there(self):
        with pytest.raises(PlanError, match="'a0': it is on the device already"):
            self.having(1, Action(Kind.SWAP_IN, "a0")).verify()

    def test_an_action_on_the_dead(self):
        with pytest.raises(PlanError, match="'g0': it is not alive"):
            self.having(0, Action(Kind.SWAP_OUT, "g0")).verify()

    def test_a_copy_of_what_the_host_has(self):
        with pytest.raises(PlanError, match="the host's copy is right already"):
            self.having(2, Action(Kind.SWAP_OUT, "a0")).verify()

    def test_a_start_with_what_is_not_alive(self):
        plan = self.good()
        with pytest.raises(PlanError, match="'a1', resident, is not alive"):
            replace(plan, resident=frozenset({"a1"})).verify()

    def test_an_end_that_is_not_the_start(self):
        functions = (Function("f", ("w",), ()), Function("g", (), ("a",)))
        plan = plan_swaps(Trace(functions, {"w": 1, "a": 1}), 2)
        bad = replace(
            plan,
            after=(plan.after[0], (Action(Kind.SWAP_OUT, "w"), Action(Kind.RELEASE, "w"))),
        )
        with pytest.raises(PlanError, match="'w' on the device otherwise than it started"):
            bad.verify()

    def test_too_few_lists(self):
        plan = self.good()
        with pytest.raises(PlanError, match="lists of actions"):
            replace(plan, before=plan.before[1:]).verify()

    def test_a_dead_value_is_not_to_be_copied(self):
        functions = (Function("make", (), ("a",)), Function("again", (), ("a",)))
        plan = plan_swaps(Trace(functions, {"a": 1}), 1)
        bad = replace(plan, after=((Action(Kind.SWAP_OUT, "a"),), ()))
        with pytest.raises(PlanError, match="its value is dead"):
            bad.verify()
